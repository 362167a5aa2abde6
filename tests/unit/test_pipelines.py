"""Pipelines in the plan of a cluster: memory by stage, different cards of one node, their placement, and refusals."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from cluster import plan_report
from cluster.cache_shares import finds_room
from cluster.catalogue import CATALOGUE
from cluster.files import ClusterError
from cluster.generation import (
    decode_tokens_per_s,
    pipeline_decode_tokens_per_s,
    pipeline_prefill_tokens_per_s,
    prefill_tokens_per_s,
)
from cluster.models_file import ModelsFile
from cluster.nodes import GIB, Card, Node, checked
from cluster.pipelines import arrange
from cluster.placement import Demand, Slot
from cluster.plan import Plan
from cluster.serve_config import serve_config
from cluster.throughput import card_speed, tokens_per_s
from engine.cut import cut
from engine.errors import ModelError
from engine.hub import EMBEDDED_GENERATOR
from engine.model.footprint import footprint
from engine.run.stages import bytes_beside_passes, sizes_of

BF16 = torch.bfloat16
RTX_5080, RTX_4090 = Card("NVIDIA GeForce RTX 5080", int(15.9 * GIB)), Card("NVIDIA GeForce RTX 4090", 24 * GIB)
ONE = Node("one", "amd64", 64 * GIB, 8, (RTX_5080,))
TWO = Node("two", "amd64", 64 * GIB, 8, (RTX_5080,) * 2)
MIXED = Node("mixed", "amd64", 64 * GIB, 8, (RTX_5080, RTX_4090))
CPU = Node("old", "amd64", 64 * GIB, 4)
EIGHT_B: dict[str, object] = {"model": f"Qwen/Qwen3-8B@{'0' * 40}"}
EMBEDDING_8B: dict[str, object] = {"model": f"Qwen/Qwen3-Embedding-8B@{'0' * 40}"}
FOURTEEN_B: dict[str, object] = {"model": "Qwen/Qwen3-14B", "context": 2048}


def planned(nodes: tuple[Node, ...], *entries: dict[str, object]) -> Plan:
    named = [{"name": f"m{index}"} | each for index, each in enumerate(entries)]
    return Plan(ModelsFile.model_validate({"models": named, "gateways": len(nodes)}), nodes)


def text_of(plan: Plan) -> str:
    return "\n".join((*plan_report.summary(plan), *plan_report.notes(plan), *(str(each) for each in plan.unplaced)))


def test_a_model_that_no_card_holds_takes_two_cards_of_a_node() -> None:
    plan = planned((ONE, TWO), EIGHT_B)
    (chosen,) = plan.assigned
    assert (chosen.node, chosen.card, chosen.more_cards, chosen.why) == ("two", 0, (1,), "2 cards, because no card holds it")
    (pool,) = plan.pools
    assert (pool.num_gpus, pool.num_stages, pool.devices) == (2.0, 2, ("cuda:0", "cuda:1"))
    engine = serve_config(plan)["applications"][0]
    assert engine["deployments"][0]["ray_actor_options"]["num_gpus"] == 2.0
    assert engine["args"]["spec"]["devices"] == ["cuda:0", "cuda:1"]
    assert "m0.rtx-5080-16g-amd64: 2 cards of one node, layers 0 to" in text_of(plan)
    assert [(use.card, use.more_cards) for use in plan_report.card_uses(plan)] == [(0, ()), (0, (1,))]


def test_each_stage_needs_what_the_engine_counts_for_it() -> None:
    plan = planned((TWO,), EIGHT_B)
    pipeline, (pool,) = plan.pipeline_on("m0", TWO.class_name), plan.pools
    assert pipeline is not None
    config, least, given = replace(plan.shapes["m0"], max_input_length=8192), 4 * 8192, pool.cache_tokens
    assert given is not None
    whole, sizes = footprint(config, BF16, "gpu", cache_tokens=0), sizes_of(config, BF16, on_gpu=True)
    beside = bytes_beside_passes(config, BF16, 2, None)
    first, last = pipeline.layers
    assert (first.start, first.stop, last.stop) == (0, last.start, config.n_layers)
    cache = sizes.cache_bytes * least
    fixed = whole.of_passes + whole.context + beside
    needs = [
        sum(sizes.layer_bytes[part.start : part.stop]) + len(part) * cache + end + fixed
        for part, end in zip(pipeline.layers, (sizes.words_bytes, sizes.head_bytes), strict=True)
    ]
    assert list(pipeline.needs_bytes) == needs
    # The memory left on the fuller card becomes cache. The engine's own cut fits with this cache, not with twice as much.
    assert given > least
    devices = pipeline.cards._devices
    assert cut(sizes, devices, given)
    with pytest.raises(ModelError, match="does not fit"):
        cut(sizes, devices, 2 * given)
    assert planned((TWO,), EIGHT_B | {"cache_tokens": 8192}).pools[0].cache_tokens == 8192


def test_unlike_cards_are_cut_by_their_memory() -> None:
    plan = planned((MIXED,), FOURTEEN_B)
    assert (MIXED.class_name, MIXED.usable_bytes) == ("rtx-5080-16g.rtx-4090-24g-amd64", ONE.usable_bytes)
    (chosen,), pipeline = plan.assigned, plan.pipeline_on("m0", MIXED.class_name)
    assert pipeline is not None
    small, large = pipeline.needs_bytes
    assert small <= MIXED.with_card(0).usable_bytes < large <= MIXED.with_card(1).usable_bytes
    assert (
        chosen.needs_bytes + chosen.more_cache_bytes
        <= chosen.capacity
        == sum(MIXED.with_card(index).usable_bytes for index in (0, 1))
    )
    swapped = replace(MIXED, cards=MIXED.cards[::-1])
    again = planned((swapped,), FOURTEEN_B).pipeline_on("m0", swapped.class_name)
    assert again is not None
    assert len(again.layers[0]) > len(again.layers[1])


def test_a_model_on_one_card_counts_unlike_cards_as_the_smallest() -> None:
    plan = planned((MIXED,), {"model": "Qwen/Qwen3-4B", "pipeline": 1}, {"model": "Qwen/Qwen3-8B", "pipeline": 1})
    assert [each.model for each in plan.unplaced] == ["m1"]
    assert {each.capacity for each in plan.assigned} == {ONE.usable_bytes}
    assert "each card counts as the smallest one" in text_of(plan)


@pytest.mark.parametrize("name", ["NVIDIA H100 MIG 1g.10gb", "NVIDIA H100 MIG 3g.40gb"])
def test_mig_slices_are_no_pipeline(name: str) -> None:
    slices = Node("mig", "amd64", 64 * GIB, 8, (Card(name, 10 * GIB),) * 2)
    assert plan_is_refused(planned((slices,), {"model": "Qwen/Qwen3-4B", "pipeline": 2}), "has 1 on a node, but pipeline is 2")
    with pytest.raises(ClusterError, match=r"different kinds.*CUDA_VISIBLE_DEVICES"):
        checked(replace(slices, cards=(slices.cards[0], RTX_5080)))


def plan_is_refused(plan: Plan, why: str) -> bool:
    (unplaced,) = plan.unplaced
    return unplaced.count == 1 and why in unplaced.why and not plan.assigned


def test_what_does_not_fit_is_refused_with_numbers_and_ways_out() -> None:
    large = planned((MIXED,), {"model": "Qwen/Qwen3-32B"})
    assert plan_is_refused(
        large, "over 2 cards of one node: the model does not fit on these devices in this order: of its 64 layers"
    )
    asked = planned((ONE,), {"model": "Qwen/Qwen3-4B", "pipeline": 2})
    assert plan_is_refused(asked, "rtx-5080-16g-amd64 has 1 on a node, but pipeline is 2")
    assert asked.unplaced[0].ways_out[0] == "pipeline: 1"
    assert asked.unplaced[0].ways_out[-1].startswith("another node with 2 cards of ")
    longer = planned((TWO,), EIGHT_B | {"context": 40_960, "pipeline": 2})
    assert any(way.startswith("context: ") for way in longer.unplaced[0].ways_out)
    one = planned((TWO,), EIGHT_B | {"pipeline": 1})
    assert "pipeline: 2" in one.unplaced[0].ways_out


def test_a_pipeline_takes_whole_cards_and_others_get_the_rest() -> None:
    four = replace(TWO, name="four", cards=(RTX_5080,) * 4)
    plan = planned((four,), EIGHT_B | {"max_replicas": 2}, {"model": "Qwen/Qwen3-0.6B"}, {"model": "BAAI/bge-m3"})
    assert not plan.unplaced
    cards = {each.model: {each.card, *each.more_cards} for each in plan.assigned if each.required}
    assert cards["m0"] == {0, 1}
    assert not cards["m0"] & (cards["m1"] | cards["m2"])
    full = planned((TWO,), EIGHT_B, {"model": "BAAI/bge-m3"})
    assert [each.model for each in full.unplaced] == ["m1"]
    twice = planned((TWO,), EIGHT_B | {"min_replicas": 2})
    assert "needs 2 whole cards of one node, but no node has 2 empty cards" in twice.unplaced[0].why


def test_a_pipeline_grows_into_cards_that_others_leave() -> None:
    slots = [Slot("n", index, "c", 10, None, 8) for index in range(5)]
    pair = Demand("pair", {"c": 20}, {"c": 1.0}, 1, 3, cards_on={"c": 2})
    single = Demand("single", {"c": 5}, {"c": 1.0})
    placement, left = arrange([single, pair], slots)
    found = [(each.model, each.slot.index, each.slot.more, each.required) for each in placement.replicas]
    assert found == [("pair", 0, (1,), True), ("single", 2, (), True), ("pair", 3, (4,), False)]
    assert [(slot.index, slot.more, slot.capacity) for slot in left] == [(0, (1,), 20), (2, (), 10), (3, (4,), 20)]
    none, kept = arrange([pair], slots[:1])
    assert (none.replicas, none.missing, kept) == ((), {"pair": 1}, slots[:1])


def test_a_sleeping_pipeline_gets_cards_before_replicas_for_autoscaling() -> None:
    slots = [Slot(node, index, "c", 10) for node, index in (("a", 0), ("a", 1), ("b", 0))]
    pair = Demand("pair", {"c": 20}, {"c": 1.0}, 0, 1, cards_on={"c": 2})
    single = Demand("single", {"c": 5}, {"c": 1.0}, 1, 3)
    placement, left = arrange([single, pair], slots)
    found = [(each.model, each.slot.node, each.slot.more, each.required) for each in placement.replicas]
    assert found == [("pair", "a", (1,), False), ("single", "b", (), True)]
    assert [(slot.node, slot.index, slot.more) for slot in left] == [("a", 0, (1,)), ("b", 0, ())]
    # A required replica keeps its card.
    few, _ = arrange([single, pair], slots[:2])
    assert {each.model for each in few.replicas} == {"single"}
    assert not few.missing


@pytest.mark.parametrize("speeds", [{"c": 1.0, "d": 1.0}, {"c": 2.0, "d": 1.0}])
@pytest.mark.parametrize("pins", [(frozenset("a"), frozenset[str]()), (None, frozenset("b"))])
def test_a_pipeline_leaves_another_one_its_only_node(
    speeds: dict[str, float], pins: tuple[frozenset[str] | None, frozenset[str]]
) -> None:
    slots = [Slot(node, index, node_class, 10) for node, node_class in (("a", "c"), ("b", "d")) for index in (0, 1)]
    large = Demand("large", {"c": 20, "d": 20}, speeds, cards_on={"c": 2, "d": 2})
    pinned = Demand("pinned", {"c": 18, "d": 18}, speeds, 1, 1, *pins, cards_on={"c": 2, "d": 2})
    placement, _ = arrange([large, pinned], slots)
    assert {each.model: each.slot.node for each in placement.replicas} == {"large": "b", "pinned": "a"}


@pytest.mark.parametrize(
    ("least", "most", "found"),
    [
        (0, 1, [("a", (1,), False)]),
        (1, 2, [("a", (1,), True), ("b", (1,), False)]),
        (1, 9, [("a", (1,), True), ("b", (1,), False), ("old", (), False), ("old", (), False)]),
        (3, 9, [("a", (1,), True), ("b", (1,), True), ("old", (), True), ("old", (), False)]),
    ],
)
def test_a_pipeline_grows_onto_cpus_last(least: int, most: int, found: list[tuple[str, tuple[int, ...], bool]]) -> None:
    slots = [Slot(node, index, "c", 10) for node in "ab" for index in (0, 1)] + [Slot("old", 0, "cpu", 45, 4)]
    pair = Demand("pair", {"c": 20, "cpu": 20}, {"c": 1.0, "cpu": 0.1}, least, most, cards_on={"c": 2})
    placement, left = arrange([pair], slots)
    assert [(each.slot.node, each.slot.more, each.required) for each in placement.replicas] == found
    assert slots[-1] in left


def test_a_sleeping_pipeline_without_cards_starts_on_cpus_before_others_grow_there() -> None:
    slots = [Slot("a", 0, "c", 10), Slot("a", 1, "c", 10), Slot("old", 0, "cpu", 40, 4)]
    pair = Demand("pair", {"c": 20, "cpu": 20}, {"c": 1.0, "cpu": 0.1}, 0, cards_on={"c": 2})
    single = Demand("single", {"c": 6}, {"c": 1.0}, 2, 2)
    small = Demand("small", {"cpu": 15}, {"cpu": 1.0}, 1, 2)
    placement, _ = arrange([single, pair, small], slots)
    found = {(each.model, each.slot.node): each.required for each in placement.replicas}
    assert found == {("single", "a"): True, ("pair", "old"): False, ("small", "old"): True}


def test_a_card_without_the_dtype_does_not_count_as_one_that_holds_the_model() -> None:
    """A T4 lacks bfloat16. float16 on it would be slower than bfloat16 on two cards of another node."""
    t4 = Node("t4", "amd64", 64 * GIB, 8, (Card("NVIDIA T4", 48 * GIB),))
    plan = planned((t4, replace(TWO, cards=(replace(RTX_5080, total_bytes=20 * GIB),) * 2)), EIGHT_B | {"max_replicas": 3})
    assert plan.dtypes["m0"] == "bfloat16"
    assert [(each.node, each.more_cards) for each in plan.assigned] == [("two", (1,))]


def test_a_pipeline_counts_among_the_replicas_of_a_node() -> None:
    slots = [Slot("n", index, "c", 10, None, 2) for index in range(4)]
    pair, single = Demand("pair", {"c": 20}, {"c": 1.0}, cards_on={"c": 2}), Demand("single", {"c": 5}, {"c": 1.0}, 2, 2)
    placement, _ = arrange([pair, single], slots)
    assert Counter(each.model for each in placement.replicas) == {"pair": 1, "single": 1}
    assert placement.missing == {"single": 1}
    assert not placement.proven


def test_ray_finds_whole_cards_for_a_pipeline_first() -> None:
    assert finds_room([(20_000, 1, 1), (5_000, 2, 2)], [3])
    assert not finds_room([(20_000, 2, 2)], [3])
    assert finds_room([(20_000, 2, 1)], [2, 2])


def test_stages_decode_as_fast_as_the_slowest_one() -> None:
    config, node = CATALOGUE["Qwen/Qwen3-8B"], TWO.with_card(0)
    even = (range(18), range(18, 36))

    def decode(layers: tuple[range, ...], streams: int, nodes: tuple[Node, ...] = (node, node)) -> float:
        return pipeline_decode_tokens_per_s(config, BF16, nodes, layers, streams, 1000)

    alone = decode_tokens_per_s(config, BF16, node, 1, 1000)
    assert decode(even, 1) == pytest.approx(alone, rel=0.01)  # a single stream passes one stage after the other
    # Two groups read all weights twice, each on two cards. This halves the times of keys and values, and of products where the
    # weights do not hide them.
    assert 1.15 < decode(even, 64) / decode_tokens_per_s(config, BF16, node, 64, 1000) < 1.5
    assert decode(even, 320) / decode_tokens_per_s(config, BF16, node, 320, 1000) > 1.6
    assert decode((range(23), range(23, 36)), 64) < 0.9 * decode(even, 64)
    # One group: the stages take turns.
    assert decode((range(34), range(34, 36)), 64) == pytest.approx(decode_tokens_per_s(config, BF16, node, 64, 1000), rel=0.02)
    fast = replace(node, cards=(Card("NVIDIA H100", 80 * GIB),))
    assert decode((range(8), range(8, 36)), 64, (node, fast)) > decode(even, 64, (node, fast))
    prefill = pipeline_prefill_tokens_per_s(config, BF16, (node, node), even, 1000)
    assert prefill == pytest.approx(2 * prefill_tokens_per_s(config, BF16, node, 1000))


def test_a_pipeline_on_cpus_is_only_by_wish() -> None:
    small: dict[str, object] = {"model": EMBEDDED_GENERATOR, "dtype": "float32"}
    plan, plain = planned((CPU,), small | {"pipeline": 2}), planned((CPU,), small)
    assert [each.pools[0].devices for each in (plan, plain)] == [("cpu", "cpu"), ()]
    assert plan.pools[0].num_gpus == 0
    assert plan.assigned[0].needs_bytes > plain.assigned[0].needs_bytes
    assert serve_config(plan)["applications"][0]["args"]["spec"]["devices"] == ["cpu", "cpu"]


def test_only_decoders_have_a_pipeline() -> None:
    with pytest.raises(ClusterError, match="m0 has pipeline: 2, but XLMRobertaModel runs on one device, only decoders run on"):
        planned((TWO,), {"model": "BAAI/bge-m3", "pipeline": 2})


def test_an_embedding_model_that_no_card_holds_takes_two_cards_of_a_node() -> None:
    plan = planned((ONE, TWO), EMBEDDING_8B)
    (chosen,), (pool,), pipeline = plan.assigned, plan.pools, plan.pipeline_on("m0", TWO.class_name)
    assert pipeline is not None
    assert (chosen.node, chosen.card, chosen.more_cards, chosen.why) == ("two", 0, (1,), "2 cards, because no card holds it")
    assert (pool.num_gpus, pool.devices, pool.cache_tokens) == (2.0, ("cuda:0", "cuda:1"), None)
    assert serve_config(plan)["applications"][0]["args"]["spec"]["devices"] == ["cuda:0", "cuda:1"]
    assert "m0.rtx-5080-16g-amd64: 2 cards of one node, layers 0 to 17 with " in text_of(plan)
    # The plan counts the engine's bytes for each stage, and no cache.
    config = plan.shapes["m0"]
    whole, sizes = footprint(config, BF16, "gpu"), sizes_of(config, BF16, on_gpu=True)
    fixed = whole.of_passes + whole.context + bytes_beside_passes(config, BF16, 2, None)
    assert list(pipeline.needs_bytes) == [
        sum(sizes.layer_bytes[part.start : part.stop]) + end + fixed
        for part, end in zip(pipeline.layers, (sizes.words_bytes, sizes.head_bytes), strict=True)
    ]
    assert chosen.needs_bytes == sum(pipeline.needs_bytes)
    assert max(pipeline.needs_bytes) <= ONE.usable_bytes < whole.total
    # Two passes are computed at the same time.
    alone = tokens_per_s(config, BF16, TWO.with_card(0)).tokens_per_s
    assert pool.tokens_per_s == pytest.approx(2 * alone)


def test_an_embedding_model_is_cut_by_the_cards_products() -> None:
    """By the plan's table the RTX 4090 multiplies 1.5 times as fast as the RTX 5080, and copies 1.05 times as fast."""
    plan = planned((MIXED,), EMBEDDING_8B | {"pipeline": 2})
    pipeline = plan.pipeline_on("m0", MIXED.class_name)
    assert pipeline is not None
    small, large = map(len, pipeline.layers)
    speeds = [card_speed(card.name).gemm for card in MIXED.cards]
    assert small + large == plan.shapes["m0"].n_layers
    assert small / large == pytest.approx(speeds[0] / speeds[1], rel=0.15)


def test_an_embedding_model_that_two_cards_do_not_hold_is_refused_with_numbers() -> None:
    small = replace(TWO, cards=(replace(RTX_5080, total_bytes=8 * GIB),) * 2)
    plan = planned((small,), EMBEDDING_8B)
    assert plan_is_refused(
        plan, "over 2 cards of one node: the model does not fit on these devices in this order: of its 36 layers"
    )
    forbidden = planned((TWO,), EMBEDDING_8B | {"pipeline": 1})
    assert not forbidden.assigned
    assert "pipeline: 2" in forbidden.unplaced[0].ways_out


@pytest.mark.parametrize("sizes", [(24.4, 23.6), (23.6, 24.4)])
def test_a_stage_fits_on_the_smallest_of_the_equal_cards(sizes: tuple[float, float]) -> None:
    node = Node("a", "amd64", 64 * GIB, 8, tuple(replace(RTX_4090, total_bytes=int(size * GIB)) for size in sizes))
    plan = planned((node,), {"model": "Qwen/Qwen3-14B", "context": 8192, "streams": 1})
    pipeline = plan.pipeline_on("m0", node.class_name)
    assert pipeline is not None
    assert all(needs <= node.usable_bytes for needs in pipeline.cards.needs(plan.pools[0].cache_tokens or 0))


def test_a_stage_fits_on_the_smallest_card_at_its_place_in_a_class() -> None:
    def mixed(name: str, *sizes: float) -> Node:
        cards = zip((RTX_4090, RTX_5080), sizes, strict=True)
        return Node(name, "amd64", 64 * GIB, 8, tuple(replace(card, total_bytes=int(size * GIB)) for card, size in cards))

    nodes = mixed("a", 24.4, 15.6), mixed("b", 23.6, 16.2)
    plan = planned(nodes, {"model": "Qwen/Qwen3-14B", "context": 4096, "streams": 1, "nodes": ["b"]})
    pipeline = plan.pipeline_on("m0", nodes[0].class_name)
    assert pipeline is not None
    for card, needs in zip(nodes[1].cards, pipeline.cards.needs(plan.pools[0].cache_tokens or 0), strict=True):
        assert needs <= card.total_bytes - nodes[1].reserved
