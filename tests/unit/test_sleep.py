"""Sleeping: the tensors in blocks, their return, and a lack of memory. Stand-ins take the place of a GPU's memory."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_generators import folder_without_pooling

from engine import Engine
from engine.engine import sleeper_of
from engine.errors import BackendError
from engine.load import Loaded
from engine.options import SamplingOptions
from engine.run.kv_cache import PAGE_SIZE
from engine.run.runner import CpuRunner
from engine.run.sleep import Sleeper, tensors_of

CPU = torch.device("cpu")


class StandIn:
    """A block of a GPU's memory, on the CPU. Its content is NaN after its memory was given back."""

    room = 1 << 40  # the bytes that are left for blocks

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = self.size = num_bytes
        self.device, self.mapped = device, False
        self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        self.map()

    @property
    def bytes(self) -> torch.Tensor:
        assert self.mapped
        return self._memory

    def map(self) -> None:
        assert not self.mapped
        if StandIn.room < self.size:
            raise BackendError("cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY")
        StandIn.room -= self.size
        self.mapped = True

    def unmap(self) -> None:
        assert self.mapped
        StandIn.room += self.size
        self.mapped = False
        self._memory.fill_(255)


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "room", 1 << 40)


def test_tensors_come_back_with_their_views() -> None:
    sleeper = Sleeper(StandIn, least_bytes=64)
    table, alone, small = torch.randn(6, 8), torch.randn(9, 4).bfloat16().t(), torch.randn(3)
    rows, copies = table[2:4], [each.clone() for each in (table, table[2:4], alone, small)]
    sleeper.adopt([table, rows, alone, small])
    assert table.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
    assert sleeper.weight_bytes == sleeper.held_bytes(CPU) == table.nbytes + alone.untyped_storage().nbytes()
    cache = sleeper.empty((2, 4), torch.float32, CPU)
    for _ in range(2):
        assert sleeper.sleep()
        assert sleeper.asleep
        assert sleeper.held_bytes(CPU) == 0
        assert table.isnan().all()
        sleeper.wake()
        assert not sleeper.asleep
        assert sleeper.held_bytes(CPU) == sleeper.weight_bytes + cache.nbytes
        for ours, copy in zip((table, rows, alone, small), copies, strict=True):
            assert torch.equal(ours, copy)
            assert ours.stride() == copy.stride()


def test_without_room_on_the_host_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper, weight = Sleeper(StandIn, least_bytes=1), torch.ones(8)
    sleeper.adopt([weight])
    monkeypatch.setattr("engine.run.sleep.psutil.virtual_memory", lambda: SimpleNamespace(available=1 << 30))
    assert not sleeper.sleep()
    assert not sleeper.asleep
    assert torch.equal(weight, torch.ones(8))


def test_without_room_on_the_gpu_it_sleeps_on() -> None:
    sleeper, weights = Sleeper(StandIn, least_bytes=1), [torch.full((8,), float(index)) for index in range(3)]
    sleeper.adopt(weights)
    assert sleeper.sleep()
    room = StandIn.room = 2 * 32
    with pytest.raises(BackendError, match="OUT_OF_MEMORY"):
        sleeper.wake()
    assert sleeper.asleep
    assert room == StandIn.room
    StandIn.room = 1 << 20
    sleeper.wake()
    assert [float(each[0]) for each in weights] == [0.0, 1.0, 2.0]


def test_tensors_are_found_wherever_an_object_holds_them() -> None:
    class Slotted:
        __slots__ = ("weight",)

        def __init__(self, weight: torch.Tensor) -> None:
            self.weight = weight

        def product(self) -> torch.Tensor:
            return self.weight

    tensors = [torch.zeros(1) for _ in range(5)]
    closed_over = tensors[4]
    held = {"a": [Slotted(tensors[0])], "b": (tensors[1], SimpleNamespace(c=tensors[2])), "d": Slotted(tensors[3]).product}
    found = tensors_of(held, lambda: closed_over, held)
    assert sorted(map(id, found)) == sorted(map(id, tensors))


def sleepy(engine: Engine) -> Engine:
    """The engine with its weights in blocks, as `Engine.load(sleeps=True)` keeps them on a GPU."""
    sleeper = Sleeper(StandIn, least_bytes=1)
    with torch.inference_mode():
        sleeper.adopt(each for each in tensors_of(engine.network) if not each.is_mkldnn)  # only CPUs have such tensors
    engine._sleeper = sleeper
    return engine


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_an_engine_wakes_up_for_a_pass(tiny: Callable[..., Path], family: str) -> None:
    engine = sleepy(Engine.load(tiny(family), dtype="float32", device="cpu"))
    texts = [[5, 6, 7], [8, 9]]
    expected = engine.embed(texts)
    assert engine.sleep()
    assert engine.asleep
    assert engine.sleep(), "a second call finds it asleep"
    np.testing.assert_array_equal(engine.embed(texts), expected)
    assert not engine.asleep


def test_a_generating_engine_forgets_its_cache(tiny: Callable[..., Path], tmp_path: Path) -> None:
    engine = Engine.load(
        folder_without_pooling(tiny, "qwen3_lm", tmp_path / "model"), dtype="float32", device="cpu", cache_tokens=8 * PAGE_SIZE
    )
    assert isinstance(engine.runner, CpuRunner)
    sleepy(engine)
    prompt, greedy = list(range(10, 10 + PAGE_SIZE + 20)), SamplingOptions(max_tokens=8, temperature=0.0)
    expected = engine.generate([prompt], greedy)[0]
    assert engine.generate([prompt], greedy)[0].num_cached_tokens == PAGE_SIZE
    assert engine.sleep()
    again = engine.generate([prompt], greedy)[0]
    assert again.num_cached_tokens == 0
    assert [token.id for token in again.tokens] == [token.id for token in expected.tokens]


@pytest.mark.parametrize("room", [1 << 30, 20_000])
def test_an_engine_whose_weights_cannot_move_computes_all_the_same(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    engine = Engine.load(tiny("bert"), dtype="float32", device="cpu")
    expected = engine.embed([[5, 6, 7]])
    parts = Loaded(engine.tokenizer, engine.network, engine.packer)
    monkeypatch.setattr(StandIn, "room", room)
    monkeypatch.setattr("engine.engine.Sleeper", lambda: Sleeper(StandIn, least_bytes=1))
    monkeypatch.setattr("engine.engine.is_integrated", lambda device: False)
    monkeypatch.setattr("engine.engine.tensors_of", lambda *roots: [each for each in tensors_of(*roots) if not each.is_mkldnn])
    with torch.inference_mode():
        sleeper = sleeper_of(parts, [torch.device("cuda", 0)])
    assert (sleeper is None) == (room < 1 << 30)
    assert StandIn.room < room, "some weights have moved"
    np.testing.assert_array_equal(engine.embed([[5, 6, 7]]), expected)


def test_an_engine_on_a_cpu_does_not_sleep(tiny: Callable[..., Path]) -> None:
    engine = Engine.load(tiny("bert"), dtype="float32", device="cpu", sleeps=True)
    assert not engine.sleep()
    assert not engine.asleep
    parts = Loaded(engine.tokenizer, engine.network, engine.packer)
    assert sleeper_of(parts, [CPU]) is None
