"""The division of layers among devices by memory and time, compared with a search through all divisions."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cut import (
    Device,
    Model,
    cut,
    cut_with_cache,
    num_groups,
    seconds_by_bytes,
    seconds_by_layer,
    stage_bytes,
    stage_seconds,
)
from engine.errors import ModelError

_GIB = 1 << 30


def all_cuts(n_layers: int, num_stages: int) -> list[list[range]]:
    bounds = [(0, *inner, n_layers) for inner in combinations(range(1, n_layers), num_stages - 1)]
    return [[range(first, stop) for first, stop in pairwise(each)] for each in bounds]


def fits(model: Model, devices: list[Device], stages: list[range], cache_tokens: int) -> bool:
    return all(
        stage_bytes(model, devices, index, layers, cache_tokens) <= devices[index].free_bytes
        for index, layers in enumerate(stages)
    )


def seconds(model: Model, devices: list[Device], stages: list[range]) -> list[float]:
    return [stage_seconds(model, devices, index, layers) for index, layers in enumerate(stages)]


sizes = st.integers(0, 50)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Model, list[Device], int]:
    layers = draw(st.lists(st.integers(1, 20), min_size=1, max_size=8))
    model = Model(tuple(layers), draw(sizes), draw(sizes), draw(st.integers(1, 3)), draw(st.booleans()))

    def device(index: int) -> Device:
        layer_s = draw(st.lists(st.integers(1, 9), min_size=len(layers), max_size=len(layers)).map(tuple))
        return Device(f"d{index}", draw(st.integers(0, 200)), draw(st.integers(0, 10)), layer_s, draw(st.integers(0, 9)))

    return model, [device(index) for index in range(draw(st.integers(1, 4)))], draw(st.integers(0, 8))


@given(problems())
def test_the_cut_is_the_best_of_all_that_fit(problem: tuple[Model, list[Device], int]) -> None:
    model, devices, tokens = problem
    possible = [each for each in all_cuts(len(model.layer_bytes), len(devices)) if fits(model, devices, each, tokens)]
    if len(devices) > len(model.layer_bytes) or not possible:
        with pytest.raises(ModelError):
            cut(model, devices, tokens)
        return
    found = cut(model, devices, tokens)
    assert found in possible
    slowest = min(max(seconds(model, devices, each)) for each in possible)
    assert max(seconds(model, devices, found)) == slowest
    quickest = min(sum(seconds(model, devices, each)) for each in possible if max(seconds(model, devices, each)) == slowest)
    assert sum(seconds(model, devices, found)) == pytest.approx(quickest)


@given(problems(), st.integers(1, 8))
def test_what_is_left_is_cache(problem: tuple[Model, list[Device], int], page_size: int) -> None:
    model, devices, most = problem
    most = page_size * (most + 1)
    try:
        stages, tokens = cut_with_cache(model, devices, most, page_size)
    except ModelError:
        with pytest.raises(ModelError):
            cut(model, devices, page_size)
        return
    assert tokens % page_size == 0
    assert page_size <= tokens <= most
    assert fits(model, devices, stages, tokens)
    assert tokens == most or not fits(model, devices, stages, tokens + page_size)


def test_equal_devices_share_the_layers_and_the_head_counts() -> None:
    model = Model((_GIB,) * 40, 2 * _GIB, 4 * _GIB, 1000)
    alike = [Device(f"cuda:{index}", 80 * _GIB, _GIB, *seconds_by_bytes(model, 1e12)) for index in range(2)]
    assert [len(each) for each in cut(model, alike, 1000)] == [22, 18]


def test_measured_seconds_decide_where_the_memory_allows_it() -> None:
    """One card computes a layer three times as fast as the other. On each card the head takes as long as 4 or 6 layers."""
    model = Model((_GIB,) * 40, 2 * _GIB, 4 * _GIB, 1000)
    slow = Device("slow", 80 * _GIB, _GIB, *seconds_by_layer(model, 3e-3, 2 * _GIB, 9e-3))
    fast = Device("fast", 80 * _GIB, _GIB, *seconds_by_layer(model, 1e-3, 2 * _GIB, 2e-3))
    assert slow.layer_s == (1.5e-3,) * 40  # half as many bytes as the measured layer
    assert [len(each) for each in cut(model, [slow, fast], 1000)] == [11, 29]
    assert [len(each) for each in cut(model, [fast, slow], 1000)] == [35, 5]


def test_a_small_card_gets_what_it_holds() -> None:
    model = Model((_GIB,) * 40, 2 * _GIB, 4 * _GIB, 1000)
    devices = [Device(name, free * _GIB, _GIB, (1.0,) * 40, 4.0) for name, free in (("cuda:0", 12), ("cuda:1", 80))]
    assert [len(each) for each in cut(model, devices, 1000)] == [8, 32]


def test_the_refusal_has_the_numbers() -> None:
    model = Model((_GIB,) * 40, 2 * _GIB, 4 * _GIB, 1000)
    devices = [Device(name, free * _GIB, _GIB, (1.0,) * 40, 4.0) for name, free in (("cuda:0", 12), ("cuda:1", 16))]
    with pytest.raises(
        ModelError, match=r"of its 40 layers cuda:0 with 12\.0 GiB free holds 8, cuda:1 with 16\.0 GiB free holds 10"
    ):
        cut(model, devices, 1000)
    with pytest.raises(ModelError, match="has 1 layers, too few for 2 devices"):
        cut(Model((1,), 0, 0, 1), devices, 0)


@pytest.mark.parametrize(
    ("layers", "groups"),
    [
        ((20, 20), 2),
        ((27, 13), 2),
        ((29, 11), 1),  # two groups would take the first stage 1.45 times as long as one group takes both
        ((38, 2), 1),
        ((14, 13, 13), 3),
        ((22, 9, 9), 2),
        ((36, 2, 2), 1),
    ],
)
def test_as_many_groups_as_stages_unless_one_stage_takes_most_of_the_time(layers: tuple[int, ...], groups: int) -> None:
    assert num_groups([1e-4 * each for each in layers]) == groups
