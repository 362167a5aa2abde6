"""A model that embeds or scores, cut into stages on several devices, gives the results of one device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_rerankers import PAIRS, RAW, reranker
from tiny_generators import prompts

from engine import Engine, ModelError
from engine.loop import EngineLoop
from engine.options import EmbedOptions, EncodeOptions
from engine.schedule.request import Request

LENGTHS = (3, 150, 1, 127, 200, 40)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen2": ("qwen2", {}),
    "mistral with a window": ("mistral", {"sliding_window": 9}),
    "gemma3": ("gemma3", {}),
    "a classifier": ("qwen3_classifier", {"num_labels": 3, "pad_token_id": 0}),
}

__all__ = ["reranker"]


def load(folder: Path, count: int) -> Engine:
    return Engine.load(folder, dtype="float32", devices=["cpu"] * count)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, 3])
def test_vectors_are_those_of_one_device(tiny: Callable[..., Path], kind: str, count: int) -> None:
    name, config = KINDS[kind]
    folder = tiny(name, num_hidden_layers=4, **config)
    alone, engine = load(folder, 1), load(folder, count)
    assert engine.num_stages == count
    np.testing.assert_allclose(engine.embed(prompts(LENGTHS)), alone.embed(prompts(LENGTHS)), atol=2e-6)


def test_scores_are_those_of_one_device(reranker: Path) -> None:
    """The head has two rows of the word embeddings, which are in the first stage, or two rows of a separate matrix."""
    alone, engine = load(reranker, 1), load(reranker, 2)
    pairs = alone.tokenizer.encode_pairs(PAIRS, EncodeOptions())
    expected, scores = (each.launch(pairs, [RAW] * len(pairs)).wait().vectors for each in (alone, engine))
    np.testing.assert_allclose(scores, expected, atol=1e-5)


def test_requests_through_the_loop(tiny: Callable[..., Path]) -> None:
    folder = tiny("qwen3", num_hidden_layers=4)
    expected = load(folder, 1).embed(prompts(LENGTHS))
    engine = load(folder, 2)
    loop = EngineLoop(engine, 256)
    try:
        requests = [Request([np.array(ids, np.int32) for ids in prompts(LENGTHS)], EmbedOptions()) for _ in range(4)]
        loop.submit(requests)
        for request in requests:
            np.testing.assert_allclose(request.future.result(60).vectors, expected, atol=2e-6)
    finally:
        loop.stop()


def test_an_encoder_is_refused(tiny: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match="BertModel runs on one device, only decoders run on several; give one device"):
        load(tiny("bert"), 2)
