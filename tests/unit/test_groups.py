"""Models that no node holds: their stages on several nodes in the plan, the rates, the refusals, and the Serve config."""

import json
from dataclasses import replace

import pytest
import torch
from test_pipelines import CPU, EIGHT_B, EMBEDDING_8B, ONE, RTX_4090, RTX_5080, TWO, planned, text_of

from cluster import plan_report
from cluster.catalogue import CATALOGUE
from cluster.generation import pipeline_decode_tokens_per_s
from cluster.models_file import ModelsFile
from cluster.nodes import GIB, Card, Node
from cluster.plan import Plan
from cluster.serve_config import serve_config
from loadtests.report import RESULTS

OTHER = replace(ONE, name="other")
LARGE = Node("large", "amd64", 64 * GIB, 8, (RTX_4090,))
FIFTEEN_GIB: dict[str, object] = EIGHT_B | {"context": 2048}


def test_a_model_that_no_node_holds_takes_cards_of_several() -> None:
    plan = planned((ONE, OTHER), EIGHT_B)
    (chosen,), (pool,) = plan.assigned, plan.pools
    assert not plan.unplaced
    assert chosen.members == ("one:0", "other:0")
    assert chosen.why == "2 stages on 2 nodes, because no node holds it"
    assert chosen.needs_bytes + chosen.more_cache_bytes <= chosen.capacity == 2 * ONE.usable_bytes
    assert (pool.num_stages, pool.devices, pool.bundles) == (2, (), (ONE.class_name,) * 2)
    told = text_of(plan)
    assert "2 stages, one:0 layers 0 to " in told
    assert "other:0 layers " in told
    assert "of it on the network at network_gbit_s: 1" in told
    assert "have run only on one host" in told
    assert {use.node: use.booked for use in plan_report.cpu_uses(plan)} == {"one": 0.5, "other": 0.5}
    assert plan_report.as_data(plan)["replicas"][0]["members"] == ("one:0", "other:0")
    assert list(plan_report.as_text(plan))


def test_a_small_model_takes_cards_of_several_nodes_only_if_asked() -> None:
    small: dict[str, object] = {"model": "Qwen/Qwen3-0.6B", "context": 512}
    assert [each.members for each in planned((ONE, OTHER), small).assigned] == [()]
    (chosen,) = planned((ONE, OTHER), small | {"pipeline": 2}).assigned
    assert (chosen.members, chosen.why) == (("one:0", "other:0"), "2 stages on 2 nodes, because no node holds its 2 stages")
    (unplaced,) = planned((ONE, OTHER), small | {"pipeline": 3}).unplaced
    assert unplaced.why.startswith("no node holds its 3 stages (rtx-5080-16g-amd64 has 1 on a node, but pipeline is 3), and ")


def test_the_first_stage_has_the_head_so_it_gets_fewer_layers() -> None:
    plan = planned((ONE, OTHER), FIFTEEN_GIB)
    pipeline = plan.pipeline_on("m0", plan.pools[0].bundles and plan.placement.replicas[0].slot.node_class)
    assert pipeline is not None
    assert len(pipeline.layers[0]) < len(pipeline.layers[1])
    assert all(needs <= ONE.usable_bytes for needs in pipeline.needs_bytes)


@pytest.mark.parametrize("nodes", [(ONE, OTHER, TWO), (ONE, OTHER, LARGE)])
def test_a_node_that_holds_the_model_alone_gets_it(nodes: tuple[Node, ...]) -> None:
    (chosen,) = planned(nodes, EIGHT_B).assigned
    assert not chosen.members
    assert chosen.node == nodes[-1].name
    (chosen,) = planned(nodes, EIGHT_B | {"not_nodes": [nodes[-1].name]}).assigned  # it may not run where it would fit
    assert chosen.members == ("one:0", "other:0")


def test_unlike_cards_and_the_largest_ones_first() -> None:
    plan = planned((ONE, OTHER, LARGE), {"model": "Qwen/Qwen3-14B", "context": 2048})
    (chosen,) = plan.assigned
    assert chosen.members == ("large:0", "one:0")
    others = planned((ONE, OTHER, LARGE), {"model": "Qwen/Qwen3-14B", "context": 2048, "not_nodes": ["large"]})
    assert [each.model for each in others.unplaced] == ["m0"]


@pytest.mark.parametrize("counts", [(2, 1), (1, 2)])
def test_nodes_of_one_class_may_have_different_numbers_of_cards(counts: tuple[int, int]) -> None:
    nodes = tuple(Node(name, "amd64", 64 * GIB, 8, (RTX_4090,) * count) for name, count in zip("ab", counts, strict=True))
    plan = planned(nodes, {"model": "Qwen/Qwen3-14B", "context": 16384, "streams": 8})
    (chosen,) = plan.assigned
    assert set(chosen.members) == {f"{node.name}:{index}" for node in nodes for index in range(len(node.cards))}
    (why,) = planned(nodes, {"model": "Qwen/Qwen3-32B", "context": 2048}).unplaced
    assert "over 3 cards" in why.why


def test_groups_of_a_model_may_be_of_different_classes() -> None:
    nodes = [LARGE, replace(LARGE, name="larger")]
    nodes += [Node(name, "amd64", 64 * GIB, 8, (Card("NVIDIA L4", 22 * GIB),)) for name in "ab"]
    plan = planned(tuple(nodes), {"model": "Qwen/Qwen3-14B", "context": 2048, "streams": 1, "min_replicas": 2})
    assert [each.members for each in plan.assigned] == [("large:0", "larger:0"), ("a:0", "b:0")]
    assert len(plan.pools) == 2
    assert "large:0 layers" in text_of(plan)
    assert "a:0 layers" in text_of(plan)


def test_a_group_is_no_node_for_other_models() -> None:
    small = {"model": "BAAI/bge-m3"}
    (unplaced,) = planned(
        (LARGE, replace(LARGE, name="larger"), CPU), {"model": "Qwen/Qwen3-14B", "context": 2048}, small
    ).unplaced
    assert "whole cards" not in unplaced.why
    assert not any("max_batch_tokens" in way for way in unplaced.ways_out)


def test_the_config_has_a_bundle_for_each_stage() -> None:
    application = serve_config(planned((ONE, LARGE), EMBEDDING_8B | {"pipeline": 2}))["applications"][0]
    (engine,) = application["deployments"]
    assert application["args"]["stages"] == 2
    assert "devices" not in application["args"]["spec"]
    assert engine["placement_group_bundles"] == [{"CPU": 0.5, "GPU": 1.0}] * 2
    selectors = [each["emberforge-class"] for each in engine["placement_group_bundle_label_selector"]]
    assert selectors == [LARGE.class_name, ONE.class_name]
    assert engine["placement_group_strategy"] == "PACK"
    assert "max_replicas_per_node" not in engine
    assert engine["ray_actor_options"] == {"num_cpus": 0.5, "num_gpus": 1.0}


def test_every_stage_finds_a_node_by_its_labels() -> None:
    """Ray cannot choose among the different cards of a node, and the node's class names all of them."""
    mixed = Node("mixed", "amd64", 64 * GIB, 8, (RTX_4090, RTX_4090, RTX_5080))
    large = [replace(LARGE, name=f"large{index}") for index in range(4)]
    model: dict[str, object] = {"model": f"Qwen/Qwen3-32B@{'0' * 40}", "context": 2048, "streams": 1}
    assert planned((mixed, *large[:3]), model).placement.missing
    plan = planned((mixed, *large), model)
    (chosen,) = plan.assigned
    assert chosen.members == tuple(f"{node.name}:0" for node in large)
    (engine,) = serve_config(plan)["applications"][0]["deployments"]
    labels = {node.class_name for node in plan.nodes}
    assert {each["emberforge-class"] for each in engine["placement_group_bundle_label_selector"]} <= labels


def test_the_cards_of_a_group_are_no_longer_free() -> None:
    plan = planned((ONE, OTHER), EIGHT_B, {"model": "BAAI/bge-m3"})
    assert [each.model for each in plan.unplaced] == ["m1"]
    third = planned((ONE, OTHER, replace(ONE, name="third")), EIGHT_B, {"model": "BAAI/bge-m3", "nodes": ["one"]})
    assert {each.model: each.members or each.node for each in third.assigned} == {"m0": ("other:0", "third:0"), "m1": "one"}


def test_a_group_takes_one_card_of_the_nodes_of_other_models_if_the_rest_does_not_hold_it() -> None:
    """Two cards of 16 GB do not hold the model. The small model needs one of the two large cards."""
    large = Node("large2", "amd64", 64 * GIB, 8, (RTX_4090,))
    model: dict[str, object] = {"model": "Qwen/Qwen3-14B", "context": 2048, "streams": 1, "pipeline": 2}
    plan = planned((ONE, OTHER, LARGE, large), model, {"model": "BAAI/bge-base-en-v1.5", "nodes": ["large", "large2"]})
    assert {each.model: each.members or each.node for each in plan.assigned} == {"m0": ("one:0", "large:0"), "m1": "large2"}


def test_ways_out_may_use_the_cards_of_a_models_own_group() -> None:
    """Two of three cards hold a replica. In 8 bits each card holds one."""
    nodes = tuple(replace(LARGE, name=name) for name in ("a", "b", "c"))
    entry: dict[str, object] = {"model": "Qwen/Qwen3-14B", "context": 2048, "streams": 1, "min_replicas": 2}
    (unplaced,) = planned(nodes, entry).unplaced
    assert {"dtype: float8", "min_replicas: 1"} <= {*unplaced.ways_out}
    for change in ({"dtype": "float8"}, {"min_replicas": 1}):
        assert not planned(nodes, entry | change).placement.missing


def test_each_required_replica_has_its_own_cards() -> None:
    nodes = tuple(replace(ONE, name=f"n{index}") for index in range(5))
    plan = planned(nodes, EIGHT_B | {"min_replicas": 2})
    assert [each.members for each in plan.assigned] == [("n0:0", "n1:0"), ("n2:0", "n3:0")]
    assert [(pool.min_replicas, pool.max_replicas) for pool in plan.pools] == [(2, 2)]
    three = planned(nodes, EIGHT_B | {"min_replicas": 3})
    assert [(each.model, each.count) for each in three.unplaced] == [("m0", 1)]


def test_a_slow_network_counts() -> None:
    def rates(gbit_s: float) -> tuple[float, float]:
        entry = EIGHT_B | {"name": "m0", "context": 1024, "streams": 16}
        plan = Plan(ModelsFile.model_validate({"models": [entry], "network_gbit_s": gbit_s}), (ONE, OTHER))
        (rate,) = plan.generation_rates("m0").values()
        return rate.decode, rate.prefill

    slow, fast = rates(0.1), rates(100)
    assert slow[0] < fast[0]
    # A token's hidden states have 4,096 values of 2 bytes.
    assert slow[1] == pytest.approx(0.1e9 / 8 / 8192)


def test_what_several_nodes_cannot_hold_is_refused_with_numbers() -> None:
    plan = planned((ONE, OTHER), {"model": "Qwen/Qwen3-32B"})
    (unplaced,) = plan.unplaced
    assert "no node holds it" in unplaced.why
    assert "over 2 cards: the model does not fit on these devices in this order: of its 64 layers" in unplaced.why
    one = planned((ONE, OTHER), EIGHT_B | {"pipeline": 1})
    assert len(one.unplaced) == 1
    three = planned((ONE, OTHER), EIGHT_B | {"pipeline": 3})
    assert "2 cards are free there" in three.unplaced[0].why


def test_hosts_without_cards_form_groups_too() -> None:
    small = replace(CPU, ram_bytes=14 * GIB)
    nodes = tuple(replace(small, name=f"cpu{index}") for index in range(3))
    plan = planned(nodes, EIGHT_B | {"context": 512, "streams": 1, "dtype": "bfloat16"})
    (chosen,), (pool,) = plan.assigned, plan.pools
    assert chosen.members == tuple(f"{node.name}:cpu" for node in nodes)
    assert (pool.num_gpus, pool.num_threads, pool.bundles) == (0.0, small.num_cpus, (small.class_name,) * 3)
    (engine,) = serve_config(plan)["applications"][0]["deployments"]
    assert engine["placement_group_strategy"] == "STRICT_SPREAD"
    assert list(plan_report.as_text(plan))


def test_rates_of_a_ring_are_near_the_measured_ones() -> None:
    card = Node("host", "amd64", 256 * GIB, 16, (Card("NVIDIA H200", 140 * GIB),))
    layers, fast = (range(17), range(17, 36)), 30.0  # Gbit/s between two processes of one host, for 1.3 MB
    rows = json.loads((RESULTS / "ring.json").read_text())["tables"]["Tokens/s"]
    decode = [row for row in rows if row["streams"].isdecimal()]
    assert len(decode) == 8
    for row in decode:
        config, streams = CATALOGUE[f"Qwen/{row['model']}"], int(row["streams"])
        rate = pipeline_decode_tokens_per_s(config, torch.bfloat16, (card, card), layers, streams, 208, fast)
        assert 1 / 1.1 < rate / row["two processes, tokens/s"] < 1.1


def test_the_stages_of_a_group_take_memory_of_their_hosts() -> None:
    """Node b has memory for one stage and another process, but at first not also for the weights of a model that sleeps."""
    large, small = {"model": "Qwen/Qwen3-32B", "context": 2048}, {"model": "Qwen/Qwen3-Embedding-0.6B", "min_replicas": 0}
    for ram_gib, sleeping in ((7, []), (8, ["m1"])):
        a, b = (Node(name, "amd64", ram_gib * GIB, 8, (RTX_4090,) * 3) for name in ("a", "b"))
        plan = planned((a, b), large, small)
        assert [each.members or each.node for each in plan.assigned] == [("a:0", "a:1", "a:2", "b:0"), "b"]
        assert [pool.model for pool in plan.pools if pool.sleeps] == sleeping


def test_loading_stages_on_a_host_too_small_is_warned_of() -> None:
    plan = planned((replace(ONE, ram_bytes=6 * GIB), OTHER), EIGHT_B)
    assert "loading the replicas of one may take 6.2 GiB of the host's memory, but it has 6.0 GiB" in text_of(plan)
    assert "loading the replicas of other" not in text_of(plan)
