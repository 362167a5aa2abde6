"""The pipeline of GPUs for texts to embed, without a GPU: CUDA streams, events and links are stubs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_cuda_runner import CPU, Capturer, Torch
from test_cuda_streams import NoContext
from tiny_generators import prompts

from engine import Engine
from engine.errors import DeviceLost
from engine.options import EmbedOptions
from engine.run import cuda, cuda_embedding, cuda_pipeline, stage_layers, tune
from engine.run.cuda_embedding import EmbeddingPipeline, EmbeddingStage
from engine.run.runner import CpuRunner
from engine.schedule.queue import MOST_SEQS

SEQUENCES = [np.array(ids, np.int32) for ids in prompts((1, 200, 128, 7))]


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Torch()
    made.cuda.device = made.cuda.stream = NoContext  # type: ignore[attr-defined]
    for module in (cuda, cuda_pipeline, cuda_embedding, stage_layers, tune):
        monkeypatch.setattr(module, "torch", made)
    monkeypatch.setattr(cuda, "Capturer", Capturer)
    for module in (cuda_pipeline, stage_layers):
        monkeypatch.setattr(module, "used_in", lambda tensor, stream: None)


@pytest.fixture
def staged(tiny: Callable[..., Path]) -> Callable[[int], tuple[EmbeddingPipeline, Engine]]:
    """The pipeline, and an engine that has the same stages on the CPU."""

    def make(count: int) -> tuple[EmbeddingPipeline, Engine]:
        engine = Engine.load(tiny("qwen3", num_hidden_layers=4), dtype="float32", devices=["cpu"] * count)
        assert isinstance(engine.runner, CpuRunner)
        return EmbeddingPipeline(engine.runner._earlier, engine.network, engine.packer, [CPU] * count), engine

    return make


@pytest.mark.parametrize("count", [2, 3])
def test_passes_give_the_vectors_and_tokens_of_the_stages(
    staged: Callable[[int], tuple[EmbeddingPipeline, Engine]], count: int
) -> None:
    ours, engine = staged(count)
    assert ours.num_stages == count
    assert ours.passes_in_flight == count + 1
    options = [EmbedOptions(dimensions=8 * (1 + row)) for row in range(len(SEQUENCES))]
    for outputs in ((), ("tokens",)):
        flights = [ours.launch(SEQUENCES[:most], options[:most], outputs) for most in (4, 2)]  # type: ignore[arg-type]
        for most, flight in zip((4, 2), flights, strict=True):
            mine, theirs = flight.wait(), engine.launch(SEQUENCES[:most], options[:most], outputs).wait()  # type: ignore[arg-type]
            np.testing.assert_allclose(mine.vectors, theirs.vectors, atol=1e-6)
            for name in outputs:
                for row in range(most):
                    np.testing.assert_allclose(mine.ragged[name][row], theirs.ragged[name][row], atol=1e-5)  # type: ignore[index]


def test_tuning_finds_a_budget_and_no_graphs(staged: Callable[[int], tuple[EmbeddingPipeline, Engine]]) -> None:
    ours, engine = staged(2)
    assert tune.tune(ours, engine.config, torch.float32, 512, MOST_SEQS) == 512
    assert ours.max_graph_tokens == 0
    assert len(ours.graphs) == 0


def test_a_gpu_of_an_earlier_stage_that_is_lost_is_found(
    staged: Callable[[int], tuple[EmbeddingPipeline, Engine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _ = staged(2)
    ours._devices = first, _ = torch.device("cuda", 0), torch.device("cuda", 1)

    def synchronize(device: torch.device) -> None:
        if device == first:
            raise RuntimeError("an illegal memory access")

    def broken(*_: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(cuda.torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(EmbeddingStage, "run", broken)
    with pytest.raises(DeviceLost, match="can no longer be used"):
        ours.launch(SEQUENCES)
