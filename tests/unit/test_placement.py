"""Placement: properties that hold for all clusters, and single cases."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.models_file import ModelEntry, ModelsFile
from cluster.nodes import CARD_RESERVE, GIB, Card, Node
from cluster.placement import EXACT_SLOTS, Demand, Placement, Slot, place
from cluster.plan import Assigned, Plan

CLASSES = ("big", "mid", "cpu")
NODES = tuple(f"n{index}" for index in range(5))
quick = settings(deadline=None, max_examples=150)
Instance = tuple[list[Demand], list[Slot]]


@st.composite
def clusters(draw: st.DrawFn, most_nodes: int = 5) -> list[Slot]:
    slots: list[Slot] = []
    capacity = {name: draw(st.integers(4, 20)) for name in CLASSES}
    for node in NODES[: draw(st.integers(1, most_nodes))]:
        kind = draw(st.sampled_from(CLASSES))
        cards = 1 if kind == "cpu" else draw(st.integers(1, 2))
        places = draw(st.integers(1, 3)) if kind == "cpu" else None
        slots += [Slot(node, index, kind, capacity[kind], places) for index in range(cards)]
    return slots


@st.composite
def demands(draw: st.DrawFn, most_models: int = 4) -> list[Demand]:
    made = []
    for index in range(draw(st.integers(1, most_models))):
        kinds = draw(st.sets(st.sampled_from(CLASSES), min_size=1))
        least = draw(st.integers(0, 3))
        made.append(
            Demand(
                f"m{index}",
                {kind: draw(st.integers(1, 12)) for kind in sorted(kinds)},
                {kind: float(draw(st.integers(1, 5))) for kind in sorted(kinds)},
                least,
                max(1, least + draw(st.integers(0, 3))),
                draw(st.none() | st.frozensets(st.sampled_from(NODES), min_size=1, max_size=3)),
                draw(st.frozensets(st.sampled_from(NODES), max_size=2)),
            )
        )
    return made


instances = st.tuples(demands(), clusters())


def served(placement: Placement, required: bool | None = True) -> Counter[str]:
    return Counter(each.model for each in placement.replicas if required is None or each.required == required)


def value(placement: Placement) -> tuple[int, int]:
    """The number of served models, then of replicas. Only required replicas count."""
    counts = served(placement)
    return len(counts), counts.total()


@pytest.mark.slow
@quick
@given(instances)
def test_no_card_is_over_its_bytes_or_its_places(instance: Instance) -> None:
    wanted, slots = instance
    needs = {demand.model: demand.bytes_on for demand in wanted}
    used: Counter[Slot] = Counter()
    count: Counter[Slot] = Counter()
    for each in place(wanted, slots).replicas:
        used[each.slot] += needs[each.model][each.slot.node_class]
        count[each.slot] += 1
    assert set(used) <= set(slots)
    assert all(used[slot] <= slot.capacity for slot in slots)
    assert all(count[slot] <= slot.places for slot in slots if slot.places is not None)


@pytest.mark.slow
@quick
@given(instances)
def test_counts_keep_to_min_and_max_and_what_is_missing_is_said(instance: Instance) -> None:
    wanted, slots = instance
    placement = place(wanted, slots)
    required, everything = served(placement), served(placement, None)
    for demand in wanted:
        assert required[demand.model] == demand.min_replicas - placement.missing.get(demand.model, 0)
        assert everything[demand.model] <= demand.max_replicas
    assert all(count > 0 for count in placement.missing.values())


@pytest.mark.slow
@quick
@given(instances)
def test_pins_exclusions_and_classes_are_obeyed(instance: Instance) -> None:
    wanted, slots = instance
    by_model = {demand.model: demand for demand in wanted}
    for each in place(wanted, slots).replicas:
        demand = by_model[each.model]
        assert demand.nodes is None or each.slot.node in demand.nodes
        assert each.slot.node not in demand.not_nodes
        assert each.slot.node_class in demand.bytes_on


@pytest.mark.slow
@quick
@given(instances, st.randoms(use_true_random=False))
def test_the_order_of_the_input_changes_nothing(instance: Instance, rng: random.Random) -> None:
    wanted, slots = instance
    first = place(wanted, slots)
    rng.shuffle(wanted)
    rng.shuffle(slots)
    assert place(wanted, slots) == first


@pytest.mark.slow
@quick
@given(instances, clusters(most_nodes=1))
def test_another_node_never_places_less(instance: Instance, more: list[Slot]) -> None:
    wanted, slots = instance
    capacity = {slot.node_class: slot.capacity for slot in slots}
    added = [Slot("z", each.index, each.node_class, capacity.get(each.node_class, each.capacity), each.places) for each in more]
    before, after = place(wanted, slots), place(wanted, [*slots, *added])
    if before.proven and after.proven:
        assert value(after) >= value(before)


def tight(seed: int) -> Instance:
    """Few cards, and models that want about all of their memory, so that each place matters."""
    rng = random.Random(seed)
    capacity = {name: rng.randint(6, 12) for name in CLASSES}
    kinds = rng.choices(CLASSES, weights=(5, 3, 1), k=rng.randint(2, 4))
    nodes = [f"n{index // 2}" if rng.random() < 0.3 else f"n{index}" for index in range(len(kinds))]
    slots = [
        Slot(node, index, kind, capacity[kind], rng.randint(1, 2) if kind == "cpu" else None)
        for index, (node, kind) in enumerate(zip(nodes, kinds, strict=True))
    ]
    wanted = []
    for index in range(rng.randint(3, 5)):
        size, least = rng.randint(2, 6), rng.randint(1, 3)
        needs = {kind: max(1, size + rng.choice((0, 0, -1, 1))) for kind in CLASSES if rng.random() < 0.85}
        pinned = frozenset(rng.choices(nodes, k=2)) if rng.random() < 0.2 else None
        kept_off = frozenset(rng.choices(nodes, k=1)) if rng.random() < 0.2 else frozenset()
        rates = {kind: rng.uniform(1, 2) for kind in needs}
        wanted.append(Demand(f"m{index}", needs, rates, least, least + rng.randint(0, 1), pinned, kept_off))
    return wanted, slots


@pytest.mark.slow
def test_what_is_called_proven_is_what_trying_everything_finds() -> None:
    searched = 0
    for seed in range(120):
        wanted, slots = tight(seed)
        placement = place(wanted, slots)
        assert placement.proven
        assert value(placement) == best_by_trying_everything(wanted, slots), seed
        searched += placement.method == "exact"
    assert searched > 55


def with_few_cpus(slots: Sequence[Slot], rng: random.Random) -> list[Slot]:
    """The same nodes, but some have CPUs for only a few replicas on all their cards together."""
    limits = {slot.node: rng.choice((None, 0, 1, 2, 3)) for slot in slots}
    return [replace(slot, node_places=limits[slot.node]) for slot in slots]


@pytest.mark.slow
def test_cpus_of_a_node_are_shared_by_its_cards_and_the_search_knows() -> None:
    bound = 0
    for seed in range(150):
        wanted, slots = tight(seed)
        few = with_few_cpus(slots, random.Random(seed))
        placement = place(wanted, few)
        assert placement.proven
        assert value(placement) == best_by_trying_everything(wanted, few), seed
        on_node = Counter(each.slot.node for each in placement.replicas)
        assert all(slot.node_places is None or on_node[slot.node] <= slot.node_places for slot in few)
        bound += value(placement) < value(place(wanted, slots))
    assert bound > 50, "the CPUs matter"


def test_what_is_missing_fits_nowhere_however_short_the_search() -> None:
    cut_between = [(841, 8), (957, 12), (1321, 14)]  # (seed, steps) that stop a search after an improvement, before its end
    for seed, steps in [*((seed, 1 + seed % 40) for seed in range(200)), *cut_between]:
        wanted, slots = tight(seed)
        placement = place(wanted, slots, steps)
        room = {slot: slot.capacity for slot in slots}
        count = Counter(each.slot for each in placement.replicas)
        by_model = {demand.model: demand for demand in wanted}
        for each in placement.replicas:
            room[each.slot] -= by_model[each.model].bytes_on[each.slot.node_class]
        for model in placement.missing:
            fitting = [
                slot for slot in slots if may(by_model[model], slot) and by_model[model].bytes_on[slot.node_class] <= room[slot]
            ]
            assert all(slot.places is not None and count[slot] >= slot.places for slot in fitting), seed
        assert all(left >= 0 for left in room.values())


def best_by_trying_everything(wanted: Sequence[Demand], slots: Sequence[Slot]) -> tuple[int, int]:
    """The best value over all numbers of replicas of each model on each card."""
    nodes = sorted({slot.node for slot in slots})
    node_of = [nodes.index(slot.node) for slot in slots]
    limit_of = {slot.node: 99 if slot.node_places is None else slot.node_places for slot in slots}
    limits = tuple((0, limit_of[node]) for node in nodes)
    # Free memory and places of each card, then the places of each node, then the models and replicas so far.
    states = {(tuple((slot.capacity, slot.places or 99) for slot in slots) + limits, 0, 0)}
    for demand in wanted:
        numbers = [range(demand.min_replicas + 1 if may(demand, slot) else 1) for slot in slots]
        ways = [counts for counts in product(*numbers) if sum(counts) <= demand.min_replicas]
        needs = [demand.bytes_on.get(slot.node_class, 0) for slot in slots] + [0] * len(nodes)
        states = {
            (after, models + any(counts), replicas + sum(counts))
            for room, models, replicas in states
            for counts in ways
            if (after := room_after(room, (*counts, *on_nodes(counts, node_of, len(nodes))), needs)) is not None
        }
    return max((models, replicas) for _, models, replicas in states)


def on_nodes(counts: Sequence[int], node_of: Sequence[int], num_nodes: int) -> list[int]:
    return [sum(count for count, node in zip(counts, node_of, strict=True) if node == each) for each in range(num_nodes)]


Room = tuple[tuple[int, int], ...]


def room_after(room: Room, counts: Sequence[int], needs: Sequence[int]) -> Room | None:
    left = tuple((free - n * size, places - n) for (free, places), n, size in zip(room, counts, needs, strict=True))
    return left if all(free >= 0 and places >= 0 for free, places in left) else None


def may(demand: Demand, slot: Slot) -> bool:
    pinned_elsewhere = demand.nodes is not None and slot.node not in demand.nodes
    return slot.node_class in demand.bytes_on and not pinned_elsewhere and slot.node not in demand.not_nodes


@pytest.mark.slow
@quick
@given(instances)
def test_room_to_grow_is_on_a_card_without_that_model(instance: Instance) -> None:
    wanted, slots = instance
    replicas = place(wanted, slots).replicas
    on = Counter((each.model, each.slot) for each in replicas)
    for each in replicas:
        if not each.required and not each.slot.shared_out:
            assert on[each.model, each.slot] == 1


@pytest.mark.slow
@quick
@given(instances)
def test_replicas_are_spread_over_the_nodes_that_have_room(instance: Instance) -> None:
    """No required replica could move to a node that has two fewer of its model."""
    wanted, slots = instance
    placement = place(wanted, slots)
    required = [each for each in placement.replicas if each.required]
    needs = {demand.model: demand.bytes_on for demand in wanted}
    used: Counter[Slot] = Counter()
    count = Counter(each.slot for each in required)
    for each in required:
        used[each.slot] += needs[each.model][each.slot.node_class]
    for demand in wanted:
        on_node = Counter(each.slot.node for each in required if each.model == demand.model)
        for slot in slots:
            fits = may(demand, slot) and demand.bytes_on[slot.node_class] + used[slot] <= slot.capacity
            if fits and (slot.places is None or count[slot] < slot.places):
                assert on_node[slot.node] >= max(on_node.values(), default=0) - 1


@given(st.integers(1, 4), st.integers(0, 2), st.integers(1, 3))
@settings(deadline=None, max_examples=30)
def test_on_equal_nodes_no_two_replicas_share_one(replicas: int, more_nodes: int, others: int) -> None:
    slots = [Slot(f"n{index}", 0, "big", 10) for index in range(replicas + more_nodes)]
    small = [Demand(f"s{index}", {"big": 2}, {"big": 9.0}) for index in range(others)]
    placement = place([*small, Demand("m", {"big": 4}, {"big": 1.0}, replicas, replicas)], slots)
    nodes = [each.slot.node for each in placement.replicas if each.model == "m"]
    assert len(nodes) == len(set(nodes)) == replicas


def test_the_search_finds_what_the_quick_way_misses() -> None:
    """Largest first puts each 5 on its own card and leaves one 3 without a place. Only 5 + 5 and 4 + 3 + 3 fill both cards."""
    sizes = {"a": 5, "b": 5, "c": 4, "d": 3, "e": 3}
    slots = [Slot("x", 0, "one", 10), Slot("y", 0, "one", 10)]
    placement = place([Demand(name, {"one": size}, {"one": 1.0}) for name, size in sizes.items()], slots)
    assert placement.missing == {}
    assert placement.proven
    assert placement.method == "exact"


def test_what_the_search_has_found_is_spread_over_nodes_too() -> None:
    """The search takes the first card with room, here for both replicas of m."""
    sizes = {"a": 5, "b": 5, "c": 4, "d": 3, "e": 3}
    slots = [Slot(node, 0, "one" if node in "xy" else "two", 10) for node in "pqxy"]
    wanted = [Demand(name, {"one": size}, {"one": 1.0}) for name, size in sizes.items()]
    placement = place([*wanted, Demand("m", {"two": 3}, {"two": 1.0}, 2, 2)], slots)
    assert (placement.method, placement.missing) == ("exact", {})
    assert sorted(each.slot.node for each in placement.replicas if each.model == "m") == ["p", "q"]


def test_a_search_too_long_says_that_it_proves_nothing_and_leaves_no_room() -> None:
    sizes = [17 + (index * 7) % 5 for index in range(12)]
    wanted = [Demand(f"m{index}", {"one": size}, {"one": 1.0}) for index, size in enumerate(sizes)]
    slots = [Slot(f"n{index}", 0, "one", 35 + index) for index in range(5)]
    short = place(wanted, slots, steps=3)
    assert short.missing
    assert (short.method, short.proven) == ("exact", False)
    assert place(wanted, slots).proven
    many = [Slot(f"n{index:02}", 0, "one", 20) for index in range(EXACT_SLOTS + 1)]
    large = place([Demand("m", {"one": 21}, {"one": 1.0})], many)
    assert (large.method, large.proven, large.missing) == ("greedy", False, {"m": 1})


def test_every_model_gets_one_replica_before_any_gets_two() -> None:
    slots = [Slot("n0", 0, "one", 10)]
    first, second = Demand("a", {"one": 4}, {"one": 1.0}, 2, 2), Demand("b", {"one": 4}, {"one": 1.0}, 2, 2)
    for steps in (1, 1000):
        placement = place([first, second], slots, steps)
        assert served(placement) == {"a": 1, "b": 1}
        assert placement.missing == {"a": 1, "b": 1}


def test_a_model_scaled_to_zero_has_a_card_to_wake_on_before_others_grow() -> None:
    slots = [Slot("n0", 0, "one", 9), Slot("n1", 0, "one", 4)]
    asleep = Demand("z", {"one": 4}, {"one": 1.0}, 0, 1)
    placement = place([Demand("a", {"one": 4}, {"one": 1.0}, 1, 2), Demand("b", {"one": 4}, {"one": 1.0}, 1, 2), asleep], slots)
    assert served(placement, required=False) == {"z": 1}
    assert placement.missing == {}


def test_a_model_scaled_to_zero_keeps_its_card_when_another_is_missing() -> None:
    slots = [Slot("n0", 0, "one", 9)]
    placement = place([Demand("huge", {"one": 10}, {"one": 1.0}), Demand("z", {"one": 4}, {"one": 1.0}, 0, 1)], slots)
    assert placement.missing == {"huge": 1}
    assert served(placement, None) == {"z": 1}


# The tests below use real models and cards.

QWEN_4B, QWEN_06B = "Qwen/Qwen3-Embedding-4B", "Qwen/Qwen3-Embedding-0.6B"
SPARK = Node("spark", "arm64", 119 * GIB, 20, (Card("NVIDIA GB10", 119 * GIB, unified=True),))


def rtx_5080(total_bytes: int = int(15.9 * GIB), name: str = "pc1") -> Node:
    return Node(name, "amd64", 64 * GIB, 8, (Card("NVIDIA GeForce RTX 5080", total_bytes),))


def entry(name: str, model: str, **more: object) -> ModelEntry:
    return ModelEntry.model_validate({"name": name, "model": model} | more)


def planned(nodes: Sequence[Node], *entries: ModelEntry) -> Plan:
    return Plan(ModelsFile(models=entries), nodes)


def places(found: Iterable[Assigned]) -> list[tuple[str, str, bool]]:
    return sorted((each.model, each.node, each.required) for each in found)


@pytest.mark.parametrize("others", [(), (rtx_5080(name="pc2"), rtx_5080(name="pc3"))])
def test_8b_in_bf16_goes_to_the_gb10_and_never_to_16_gb(others: tuple[Node, ...]) -> None:
    nodes = (rtx_5080(), *others, SPARK)
    plan = planned(nodes, entry("pro", "Qwen/Qwen3-Embedding-8B", dtype="bf16", min_replicas=1, max_replicas=4))
    assert places(plan.assigned) == [("pro", "spark", True)]
    assert plan.unplaced == ()
    alone = planned(nodes[:-1], entry("pro", "Qwen/Qwen3-Embedding-8B", dtype="bf16", pipeline=1))
    assert alone.assigned == ()
    assert alone.placement.missing == {"pro": 1}
    assert alone.placement.proven


def pair(total_bytes: int) -> Plan:
    short = {"max_input_tokens": 4096, "max_batch_tokens": 4096}
    return planned([rtx_5080(total_bytes)], entry("small", QWEN_06B, **short), entry("middle", QWEN_4B, **short))


def test_two_models_share_a_card_to_the_byte() -> None:
    plan = pair(40 * GIB)
    total = sum(each.needs_bytes for each in plan.assigned) + CARD_RESERVE
    assert total < 16 * GIB, "a 5080 holds both"
    assert places(pair(total).assigned) == [("middle", "pc1", True), ("small", "pc1", True)]
    short = pair(total - 1)
    assert sum(short.placement.missing.values()) == 1
    assert short.placement.proven


def test_min_is_required_and_max_is_room_to_grow() -> None:
    nodes = [rtx_5080(name=f"pc{index}") for index in range(5)]
    plan = planned(nodes, entry("lite", QWEN_06B, min_replicas=2, max_replicas=4))
    assert [each.required for each in plan.assigned] == [True, True, False, False]
    assert len({each.node for each in plan.assigned}) == 4
    (pool,) = plan.pools
    assert (pool.min_replicas, pool.max_replicas, pool.max_per_node) == (2, 4, 1)


def test_scaled_to_zero_it_has_a_place_and_needs_none() -> None:
    plan = planned([rtx_5080()], entry("lite", QWEN_06B, min_replicas=0))
    assert places(plan.assigned) == [("lite", "pc1", False)]
    assert (plan.pools[0].min_replicas, plan.pools[0].max_replicas) == (0, 1)
    assert plan.unplaced == ()


@pytest.mark.parametrize("cards", [1, 3])
def test_one_replica_of_each_model_a_card_as_room_to_grow(cards: int) -> None:
    node = Node("h", "amd64", 64 * GIB, 64, (Card("NVIDIA H200", 140 * GIB),) * cards)
    plan = planned([node], entry("m", QWEN_06B, min_replicas=1, max_replicas=10))
    assert sorted(each.card for each in plan.assigned if each.card is not None) == list(range(cards))
