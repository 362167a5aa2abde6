"""An embedding model, cut into stages on two GPUs or into two stages on one GPU, gives the vectors of one GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_generators import prompts

from engine import Engine
from engine.loop import EngineLoop
from engine.options import EmbedOptions
from engine.run.cuda_embedding import EmbeddingPipeline
from engine.schedule.request import Request

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DEVICES = ("cuda:0", "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0")
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2},
    "mistral": {"head_dim": 64, "sliding_window": 200},
    "gemma3": {"head_dim": 128, "sliding_window": 20},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vectors_are_those_of_one_gpu(tiny: Callable[..., Path], kind: str, dtype: Any) -> None:
    """Several passes run at once. If a pass overwrote hidden states too early, the vectors would be wrong."""
    folder = tiny(kind, max_position_embeddings=2048, num_hidden_layers=4, **KINDS[kind])
    sequences = [np.array(each, np.int32) for each in prompts([20 + 7 * index for index in range(64)])]
    expected = Engine.load(folder, dtype="float32", devices=DEVICES[:1]).embed(sequences)
    for order in (DEVICES, DEVICES[::-1]):
        engine = Engine.load(folder, dtype=dtype, devices=order, max_batch_tokens=600)
        assert isinstance(engine.runner, EmbeddingPipeline)
        loop = EngineLoop(engine, engine.max_batch_tokens)
        try:
            requests = [Request(sequences, EmbedOptions()) for _ in range(8)]
            loop.submit(requests)
            for request in requests:
                vectors = request.future.result(60).vectors
                assert (vectors * expected).sum(1).min() > (0.9999 if dtype == "float32" else 0.99)
        finally:
            loop.stop()
