"""Ray chooses nodes and cards again: which plans it could spoil, and which nodes the config leaves it for them."""

from dataclasses import replace
from typing import Any

import pytest
from stub_hub import stub_hub
from test_pipelines import CPU, EIGHT_B, ONE, planned, text_of

from cluster.nodes import GIB, Card, Node
from cluster.plan import Plan
from cluster.ray_choice import WHOLE, Share, may_overfill, may_strand
from cluster.serve_config import serve_config

hub = pytest.fixture(stub_hub)
L40S = Card("NVIDIA L40S", 48 * GIB)
N0, N1, N2 = (Node(name, "amd64", 64 * GIB, 64, (L40S,)) for name in ("n0", "n1", "n2"))
# They fill two cards with a large and a middle replica each, and one with the others.
FULL: tuple[dict[str, Any], ...] = (
    {"model": "Qwen/Qwen3-8B", "cache_tokens": 40_960, "min_replicas": 2},
    {"model": "Qwen/Qwen3-Embedding-8B", "min_replicas": 2},
    {"model": "Qwen/Qwen3-8B", "cache_tokens": 8_192},
    {"model": "Qwen/Qwen3-Embedding-4B", "min_replicas": 2},
)


def shares(*pools: tuple[int, int, int | None], nodes: int, only: tuple[tuple[int, ...], ...] = ()) -> list[Share]:
    """Pools of (share, required replicas, the most on a node)."""
    may = only or (tuple(range(nodes)),) * len(pools)
    return [Share(share, count, count, most, frozenset(each)) for (share, count, most), each in zip(pools, may, strict=True)]


THREE_CARDS = ((5649, 2, 1), (4714, 1, 1), (3991, 2, 1), (2432, 2, 2))


@pytest.mark.parametrize(
    ("pools", "cards", "expected"),
    [
        # A real Ray left a replica of the next two without a card in 5 of 6, and in 7 of 8 deployments.
        (shares(*THREE_CARDS, nodes=3), [1, 1, 1], True),
        (shares((5500, 1, 2), (4500, 2, 2), (3000, 1, 2), (2500, 1, 2), nodes=1), [2], True),
        # In 6 of 6 deployments all replicas of this one had a card.
        (shares(*THREE_CARDS, nodes=3, only=((0, 1), (2,), (0, 1), (2,))), [1, 1, 1], False),
        (shares((6000, 2, 1), (4000, 2, 1), nodes=2), [1, 1], False),
        (shares((6000, 1, 1), (4500, 2, 2), nodes=2), [1, 1], True),
        (shares((20_000, 1, 1), (5000, 2, 2), nodes=1), [3], False),
        (shares((20_000, 1, 1), (6000, 2, 2), nodes=1), [4], False),
        (shares((20_000, 1, 1), (6000, 2, 2), nodes=1), [3], True),
        (shares((20_000, 1, 1), (5000, 1, 1), nodes=2), [2, 1], True),
        (shares((WHOLE, 2, None), (5000, 1, 1), nodes=3), [1, 1, 1], False),
        (shares((WHOLE, 2, None), (5000, 2, 1), nodes=3), [1, 1, 1], True),
        (shares((6000, 60, 1), (5000, 60, 1), nodes=60), [1] * 60, True),
        (shares((6000, 600, 1), (5000, 600, 1), nodes=600), [1] * 600, False),  # too large for a simulation
    ],
)
def test_what_ray_may_spoil(pools: list[Share], cards: list[int], expected: bool) -> None:
    assert may_strand(pools, cards) is expected


def test_replicas_for_autoscaling_may_have_to_wait_but_not_the_start_of_a_model_that_sleeps() -> None:
    everywhere = frozenset((0, 1))
    required, growing, last = (Share(size, count, 1, 1, everywhere) for size, count in ((4000, 1), (5500, 0), (6100, 0)))
    assert not may_strand([required, growing, last], [1, 1])
    assert may_strand([required, growing, replace(last, sleeps=True)], [1, 1])
    assert not may_strand([required, growing, replace(last, sleeps=True)], [2, 2])
    assert not may_strand([replace(required, replicas=2, nodes=frozenset((0,)))], [1])


def selectors(plan: Plan) -> dict[str, str | None]:
    """The nodes by model to which the config binds its replicas."""
    deployments = [each["deployments"][0] for each in serve_config(plan)["applications"]]
    engines = [each for each in deployments if each["name"] == "Engine"]
    labels = [each["ray_actor_options"].get("label_selector") or {} for each in engines]
    return {pool.model: each.get("emberforge-node") for pool, each in zip(plan.pools, labels, strict=True)}


@pytest.mark.usefixtures("hub")
def test_replicas_stay_on_the_nodes_of_a_plan_that_ray_may_spoil() -> None:
    plan = planned((N0, N1, N2), *FULL)
    assert not plan.placement.missing
    assert plan.ray_room.bound == {N0.class_name}
    nodes = {model: sorted({each.node for each in plan.assigned if each.model == model}) for model in plan.entries}
    assert selectors(plan) == {model: f"in({','.join(on)})" for model, on in nodes.items()}
    assert f"{N0.class_name}: replicas stay on the nodes of the plan" in text_of(plan)
    more = planned((N0, N1, N2, *(replace(N2, name=f"n{index}") for index in range(3, 8))), *FULL)
    assert not more.ray_room.bound
    assert set(selectors(more).values()) == {None}


def test_a_plan_on_one_node_that_ray_may_spoil_is_warned_of() -> None:
    """Two cards hold replicas of 41, 31, 31 and 25 %, and of 41 and 25 %, but not in every order."""
    two = replace(N0, cards=(L40S,) * 2)
    models: list[dict[str, Any]] = [
        {"model": "Qwen/Qwen3-Embedding-8B", "min_replicas": 2},
        {"model": "Qwen/Qwen3-4B", "cache_tokens": 33_000, "min_replicas": 2},
        {"model": "Qwen/Qwen3-Embedding-4B", "min_replicas": 2},
    ]
    plan = planned((two,), *models)
    assert not plan.placement.missing
    assert plan.ray_room.at_risk == {two.class_name: ("m0", "m1", "m2")}
    assert f"warning: {two.class_name}: Ray chooses where replicas start" in text_of(plan)
    assert not planned((replace(two, cards=(L40S,) * 4),), *models).ray_room.at_risk


def test_ray_does_not_fill_a_host_with_the_models_of_two() -> None:
    assert may_overfill(shares((6000, 1, 1), (5000, 1, 1), nodes=2), 2)
    assert not may_overfill(shares((6000, 1, 1), (4000, 1, 1), nodes=2), 2)
    assert not may_overfill(shares((6000, 1, 1), (5000, 1, 1), nodes=2, only=((0,), (1,))), 2)
    old = replace(CPU, name="older")
    large: dict[str, Any] = {"model": "Qwen/Qwen3-Embedding-8B", "dtype": "float32"}
    plan = planned((CPU, old), large, large)
    assert not plan.placement.missing
    assert sorted(pool.nodes for pool in plan.pools) == [(CPU.name,), (old.name,)]
    assert not any(pool.nodes for pool in planned((CPU, old), large).pools)


@pytest.mark.usefixtures("hub")
def test_stages_on_several_nodes_stay_on_the_nodes_of_a_plan_too() -> None:
    nodes = tuple(replace(ONE, name=f"n{index}") for index in range(3))
    small: dict[str, Any] = {"model": "BAAI/bge-m3"}
    assert not planned(nodes, EIGHT_B, small).ray_room.bound
    plan = planned(nodes, EIGHT_B, small | {"max_replicas": 2}, small | {"min_replicas": 1})
    assert plan.ray_room.bound == {ONE.class_name}
    (group,) = (pool for pool in plan.pools if pool.bundles)
    assert group.nodes == tuple(sorted(plan.machines(next(each.node for each in plan.assigned if each.members))))
    engine = next(each for each in serve_config(plan)["applications"] if each["name"] == group.name)["deployments"][0]
    bound = [each["emberforge-node"] for each in engine["placement_group_bundle_label_selector"]]
    assert bound == [f"in({','.join(group.nodes)})"] * 2
