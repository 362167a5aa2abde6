"""Sequences that share the computation of a prefix get the same vectors as alone, in fp32 on the CPU."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import BackendError, Engine
from engine.loop import EngineLoop
from engine.options import EmbedOptions, TokenIds
from engine.run.batch import PackedBatch
from engine.schedule.request import Request

ABLE: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_lm": {"num_key_value_heads": 1},
    "qwen2": {},
    "llama": {},
    "mistral": {},
    "mistral no window": {"sliding_window": None},
    "mistral window past the longest input": {"sliding_window": 256},
}
UNABLE: dict[str, dict[str, Any]] = {
    "bert": {},
    "gemma3": {},
    "mistral": {"sliding_window": 255},
    "qwen2 local": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3 bidirectional": {"use_bidirectional_attention": True},
}


@pytest.fixture(params=ABLE, scope="module")
def engine(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> Engine:
    return Engine.load(tiny(request.param.split()[0], **ABLE[request.param]), dtype="float32", device="cpu")


def texts() -> list[TokenIds]:
    """Texts of two groups in random order. Some add one token to a prefix, one equals a prefix, and others have no prefix."""
    rng = np.random.default_rng(0)

    def ids(length: int) -> TokenIds:
        return rng.integers(8, 300, size=length).astype(np.int32)

    long, short = ids(70), ids(17)
    found = [np.concatenate((long, ids(length))) for length in (1, 30, 7, 64, 1, 2)] + [long]
    found += [np.concatenate((short, ids(length))) for length in (5, 1, 90)] + [ids(length) for length in (1, 16, 40, 3)]
    return [found[index] for index in rng.permutation(len(found))]


@pytest.fixture
def computed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each pass in the test."""
    forward, passes = engine.model.forward, list[int]()

    def counting(batch: PackedBatch, *more: Any) -> torch.Tensor:
        passes.append(batch.num_tokens)
        return forward(batch, *more)

    monkeypatch.setattr(engine.model, "forward", counting)
    return passes


def alone(engine: Engine, batch: list[TokenIds]) -> np.ndarray:
    return np.concatenate([engine.launch([ids]).wait().vectors for ids in batch])


def test_one_pass(engine: Engine, computed: list[int]) -> None:
    batch = texts()
    expected = alone(engine, batch)
    options = [EmbedOptions(), EmbedOptions(dimensions=8)] * (len(batch) // 2)
    np.testing.assert_allclose(engine.launch(batch).wait().vectors, expected, atol=2e-6)
    assert computed[-1] == sum(map(len, batch)) - 6 * 69 - 2 * 17
    np.testing.assert_allclose(engine.launch(batch, options).wait().vectors[::2], expected[::2], atol=2e-6)
    output = engine.launch(batch, outputs=("tokens",)).wait()
    assert computed[-1] == sum(map(len, batch))
    assert [len(output.ragged["tokens"][row]) for row in range(len(batch))] == [len(ids) for ids in batch]
    np.testing.assert_allclose(output.vectors, expected, atol=2e-6)


def test_through_embed_and_the_loop(engine: Engine, computed: list[int]) -> None:
    batch = texts()
    expected = alone(engine, batch)
    computed.clear()
    np.testing.assert_allclose(engine.embed([ids.tolist() for ids in batch]), expected, atol=2e-6)
    assert sum(computed) < sum(map(len, batch))
    loop = EngineLoop(engine, 300)
    jobs = [
        Request(batch[:5], EmbedOptions()),
        Request(batch[5:6], EmbedOptions(dimensions=8)),
        Request(batch[6:], EmbedOptions()),
    ]
    loop.submit(jobs)
    found = [job.future.result(10).vectors for job in jobs]
    loop.stop()
    np.testing.assert_allclose(np.concatenate((found[0], found[2])), np.delete(expected, 5, axis=0), atol=2e-6)
    np.testing.assert_allclose(found[1][0], expected[5, :8] / np.linalg.norm(expected[5, :8]), atol=2e-6)


@pytest.mark.parametrize("kind", UNABLE)
def test_who_cannot_share_does_not(tiny: Callable[..., Path], kind: str) -> None:
    engine = Engine.load(tiny(kind.split()[0], **UNABLE[kind]), dtype="float32", device="cpu")
    batch = [ids[:120] for ids in texts()]
    assert not engine.packer.layout(batch, whole=False).prefixes
    np.testing.assert_allclose(engine.launch(batch).wait().vectors, alone(engine, batch), atol=2e-6)


@pytest.mark.parametrize("in_prefix", [True, False])
def test_a_text_gone_to_nan_fails_alone_or_with_those_that_begin_with_it(tiny: Callable[..., Path], in_prefix: bool) -> None:
    engine = Engine.load(tiny("qwen3"), dtype="float32", device="cpu")
    with torch.inference_mode():
        engine.model.words[7] = torch.nan
    prefix = np.arange(100, 180, dtype=np.int32)
    prefix[50] = 7 if in_prefix else 8
    group = [np.concatenate((prefix, np.full(3, last, dtype=np.int32))) for last in (9, 7, 10)]
    loner = np.arange(20, 40, dtype=np.int32)
    assert engine.packer.layout([*group, loner], whole=False).prefixes
    loop = EngineLoop(engine, engine.max_batch_tokens)
    jobs = [Request([ids], EmbedOptions()) for ids in (*group, loner)]
    loop.submit(jobs)
    for job, ids in zip(jobs, [*group, loner], strict=True):
        if 7 in ids:
            with pytest.raises(BackendError, match="not finite"):
                job.future.result(10)
        else:
            expected = alone(engine, [ids])
            np.testing.assert_allclose(job.future.result(10).vectors, expected, atol=2e-6)
    loop.stop()


def test_sharing_is_the_packers_to_decide(engine: Engine, computed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.runner, "packer", replace(engine.packer, shares_prefixes=False))
    batch = texts()
    engine.launch(batch)
    assert computed == [sum(map(len, batch))]
