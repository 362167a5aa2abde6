"""Engines with random weights and the measurement of their rates, on the CPU with tiny shapes."""

from dataclasses import replace

import numpy as np
import pytest

from cluster.catalogue import CATALOGUE
from engine.errors import ModelError
from engine.measure.engine_rates import Clock, Streaming, embed_tokens_per_s, mixed_lengths
from engine.measure.random_engine import random_engine
from engine.options import SamplingOptions

BERT = replace(
    CATALOGUE["BAAI/bge-base-en-v1.5"], hidden_size=64, intermediate_size=96, n_layers=2, n_heads=4, n_kv_heads=4, head_dim=16
)
QWEN3 = replace(
    CATALOGUE["Qwen/Qwen3-0.6B"], vocab_size=2000, hidden_size=64, intermediate_size=96, n_layers=2, n_heads=4, n_kv_heads=2,
    head_dim=16, max_position_embeddings=512, max_input_length=512,
)  # fmt: skip


def test_a_random_encoder_embeds() -> None:
    engine = random_engine(BERT, "cpu")
    vectors = engine.embed([[5, 6, 7], [8]])
    assert vectors.shape == (2, 64)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 1], abs=1e-3)
    assert np.abs(vectors[0] - vectors[1]).max() > 0.01
    assert embed_tokens_per_s(engine, 512, 0.1) > 0


def test_a_random_model_decodes_and_gives_first_tokens() -> None:
    streaming = Streaming(random_engine(QWEN3, "cpu", cache_tokens=2048))
    try:
        assert len(streaming.decode(3, 20, 12, warm_tokens=2)) >= 8
        assert len(streaming.first_token(64, 2)) == 2
        assert len(streaming.first_token(64, 2, rest_s=0.01)) == 2
        first, other = streaming.prompts(1, 64)[0], streaming.prompts(1, 64, others=True)[0]
        assert first[0] != other[0], "the second prompts are not in the cache"
    finally:
        streaming.stop()


def test_a_random_model_on_several_devices_generates() -> None:
    engine = random_engine(QWEN3, cache_tokens=2048, devices=["cpu", "cpu"])
    assert [list(stage.config.layers) for stage in engine.stages] == [[0], [1]]
    assert len(engine.generate([[5, 6, 7]], SamplingOptions(max_tokens=4, temperature=0.0))[0].tokens) == 4


def test_a_step_counts_if_all_streams_got_a_token_twice_in_a_row() -> None:
    clock = Clock()
    for count, time in zip((1, 3, 6, 9, 10), (0.0, 1.0, 3.0, 6.0, 10.0), strict=True):
        clock.counts.append(count)
        clock.times.append(time)
    assert clock.steps(3) == [3.0]


def test_mixed_lengths_are_of_so_many_tokens() -> None:
    lengths = mixed_lengths(10_000, 0, 300)
    assert sum(lengths) == 10_000
    assert max(lengths) == 300
    assert lengths == mixed_lengths(10_000, 0, 300)


def test_a_model_with_a_head_is_refused() -> None:
    with pytest.raises(ModelError, match="with a head of its own"):
        random_engine(CATALOGUE["BAAI/bge-reranker-base"], "cpu")
