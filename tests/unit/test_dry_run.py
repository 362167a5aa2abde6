"""Dry runs: several kernels are compiled at once, and the thread of the dry run launches none."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.catalogue import CATALOGUE
from engine.errors import ModelError
from engine.kernels import compile as compiling
from engine.kernels import launch as module
from engine.kernels.launch import Kernel, dry_run
from engine.kernels.norm import norm_defines
from engine.measure.random_engine import random_engine
from engine.options import SamplingOptions

DEFINES = norm_defines(64, torch.bfloat16, False, False, 0)


@dataclass
class FakeCode:
    loads: int = 0

    def get_kernel(self, entry: str) -> str:
        self.loads += 1
        return entry


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were launched. No test needs a GPU."""
    kernels: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(module, "arch_of", lambda device: "sm_90")
    monkeypatch.setattr(module, "is_compiled", lambda *_: True)
    monkeypatch.setattr(module, "LaunchConfig", lambda **_: None)
    monkeypatch.setattr(module, "_stream", lambda handle: None)
    monkeypatch.setattr(module, "launch", lambda stream, config, kernel, *values: kernels.append(kernel))
    return kernels


def kernel() -> Kernel:
    return Kernel("norm", "add_norm", DEFINES, torch.device("cuda", 0), 32)


def call(made: Kernel) -> None:
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    made(1, x, None, None, x[0], None, x, 2, np.float32(1e-6))


def test_kernels_are_compiled_at_once_and_not_launched(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    meet, code = threading.Barrier(2), FakeCode()

    def compile_kernel(*_: Any) -> FakeCode:
        meet.wait(10)  # a thread alone would break the barrier
        return code

    monkeypatch.setattr(module, "compile_kernel", compile_kernel)
    with dry_run():
        both = kernel(), kernel()
        for each in both:
            call(each)
        assert not launched
        other = threading.Thread(target=call, args=(both[0],))  # as an engine that already serves
        other.start()
        other.join(10)
        assert launched == ["add_norm"]
    for _ in range(2):
        for each in both:
            call(each)
    assert launched == ["add_norm"] * 5
    assert code.loads == 2


def test_a_kernel_that_does_not_compile_fails_where_it_is_launched(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_kernel(*_: Any) -> FakeCode:
        raise ModelError("kernel norm.cu does not compile")

    monkeypatch.setattr(module, "compile_kernel", compile_kernel)
    with dry_run():
        made = kernel()
        call(made)
    with pytest.raises(ModelError, match="does not compile"):
        call(made)
    with pytest.raises(ModelError, match="does not compile"):
        kernel()


def test_a_dry_run_tells_whether_the_cache_has_all_kernels(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cached = iter([True, False, True])
    monkeypatch.setattr(module, "is_compiled", lambda *_: next(cached))
    monkeypatch.setattr(module, "compile_kernel", lambda *_: FakeCode())
    with dry_run() as found:
        compiles = [(kernel(), found.compiles)[1] for _ in range(3)]
    assert compiles == [False, True, True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("name", "width"), [("Qwen/Qwen3-0.6B", 1152), ("Qwen/Qwen3-Embedding-0.6B", 1408)])
def test_a_model_compiles_its_kernels_in_the_dry_run(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model has a width of its own, so this process has no kernel of it before."""
    threads: list[str] = []

    def compile_kernel(*kernel: Any) -> Any:
        threads.append(threading.current_thread().name)
        return compiling.compile_kernel(*kernel)

    monkeypatch.setattr(module, "compile_kernel", compile_kernel)
    monkeypatch.setattr(module, "is_compiled", lambda *_: False)
    config = replace(CATALOGUE[name], n_layers=2, hidden_size=width, intermediate_size=2176)
    if config.generation is None:
        engine = random_engine(config)
        for length in (1, 9, 40, 300):
            engine.embed([np.arange(length, dtype=np.int32)] * 3)
    else:
        engine = random_engine(config, cache_tokens=1 << 14)
        for count in (1, 3, 20, 90):
            engine.generate([np.arange(5, dtype=np.int32)] * count, SamplingOptions(max_tokens=4))
    assert len(threads) > 5
    assert {each.rpartition("_")[0] for each in threads} == {"engine-compiler"}


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("EMBERFORGE_KERNEL_CACHE", str(tmp_path))
    compiling._cache.cache_clear()
    yield tmp_path
    compiling._cache.cache_clear()


def test_a_kernel_is_in_the_cache_after_it_was_compiled(cache_folder: Path) -> None:
    assert not compiling.is_compiled("norm", DEFINES, "sm_90")
    compiling.compile_kernel("norm", DEFINES, "sm_90")
    assert compiling.is_compiled("norm", DEFINES, "sm_90")
    assert not compiling.is_compiled("norm", DEFINES, "sm_80")
    assert not compiling.is_compiled("norm", {**DEFINES, "MORE": 1}, "sm_90")
