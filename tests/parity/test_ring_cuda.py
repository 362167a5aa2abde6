"""A model in two processes on GPUs gives the tokens and vectors of one GPU. A process that dies ends the engine."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_pipeline_cuda import GREEDY, KINDS, LENGTHS, check_under_load, ids
from test_ring_processes import check_a_fault
from tiny_generators import assert_likely, folder_without_pooling, prompts

from engine import Engine
from engine.run.kv_cache import PAGE_SIZE
from engine.run.ring_pipeline import RingPipeline
from engine.run.ring_streams import RingStreams
from loadtests.later_stages import spawned

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

# Two processes may share a GPU.
LATER = "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"


@contextmanager
def ring(folder: Path, dtype: Any, *devices: str, **options: Any) -> Iterator[Engine]:
    """`devices`: of the later stages."""
    with spawned(*devices) as later:
        engine = Engine.load(folder, dtype=dtype, device="cuda:0", later=later, **options)
        try:
            yield engine
        finally:
            engine.close()


def of_kind(tiny: Callable[..., Path], path: Path, kind: str) -> Path:
    shape = {"tie_word_embeddings": False, "max_position_embeddings": 2048, "num_hidden_layers": 4} | KINDS[kind]
    return folder_without_pooling(tiny, f"{kind}_lm", path / "model", **shape)


def test_greedy_tokens_in_fp32_are_those_of_one_gpu(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder, cache_tokens = of_kind(tiny, tmp_path, "qwen3"), 200 * PAGE_SIZE
    alone = Engine.load(folder, dtype="float32", device="cuda:0", cache_tokens=cache_tokens)
    expected = ids(alone.generate(prompts(LENGTHS), GREEDY))
    with ring(folder, "float32", LATER, cache_tokens=cache_tokens, max_batch_tokens=300) as engine:
        assert isinstance(engine.runner, RingPipeline)
        assert ids(engine.generate(prompts(LENGTHS), GREEDY)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_in_16_bits_follow_the_model(tiny: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    """Chunks and whole prompts, and 64 streams at once."""
    given = prompts(LENGTHS)
    folder, options = of_kind(tiny, tmp_path, kind), {"cache_tokens": 200 * PAGE_SIZE, "pooling": "last_token"}
    alone = Engine.load(folder, dtype="bfloat16", device="cuda:0", **options)  # type: ignore[arg-type]
    with ring(folder, "bfloat16", LATER, **options) as engine:
        assert isinstance(engine.runner, RingStreams)
        for _ in range(2):
            assert_likely(alone, given, ids(engine.generate(given, GREEDY)), GREEDY.max_tokens)
        check_under_load(engine, engine.runner.graphs.wait)
    with ring(folder, "bfloat16", LATER, max_batch_tokens=300, **options) as engine:
        assert_likely(alone, given, ids(engine.generate(given, GREEDY)), GREEDY.max_tokens)


def test_vectors_in_16_bits_are_those_of_one_gpu(tiny: Callable[..., Path]) -> None:
    folder = tiny("qwen3", num_hidden_layers=4, head_dim=128)
    alone = Engine.load(folder, dtype="bfloat16", device="cuda:0").embed(prompts(LENGTHS))
    with ring(folder, "bfloat16", LATER) as engine:
        vectors = engine.embed(prompts(LENGTHS))
    assert (np.sum(alone * vectors, axis=1) > 0.999).all()


def test_a_process_that_dies_ends_the_engine(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """The GPU of the first stage waits for the dead process. Every stream gets an error, and nothing hangs."""
    folder = of_kind(tiny, tmp_path, "qwen3")
    with spawned(LATER) as later:
        engine = Engine.load(folder, dtype="bfloat16", device="cuda:0", cache_tokens=200 * PAGE_SIZE, later=later)
        check_a_fault(engine, later[0], 1500, signal.SIGKILL, 5.0)
