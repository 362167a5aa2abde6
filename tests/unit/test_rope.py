"""The frequencies of scaled RoPE are those of transformers."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.kernels.reference import rope_table
from engine.model.keys import Keys
from engine.model.rope import OF_DECODERS, Rope, YarnScaling, divisors, longest, read_rope

_LLAMA_3_1 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# What published files have: Llama 3.1, Llama 3.2, Gemma 3 4B, Qwen3 and Qwen2.5 for long texts, YaRN with all of its keys.
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "Llama 3.1": (128, _LLAMA_3_1 | {"rope_theta": 5e5, "original_max_position_embeddings": 8192}),
    "Llama 3.2": (64, _LLAMA_3_1 | {"rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 8192}),
    "linear": (256, {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}),
    "old spelling": (128, {"type": "linear", "rope_theta": 1e4, "factor": 2.5}),
    "yarn": (128, {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}),
    "yarn, no positions": (64, {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1.5}),
    "yarn, small factor": (64, {"rope_type": "yarn", "rope_theta": 1e4, "factor": 0.5}),
    "yarn, one dimension": (64, {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 2, "beta_slow": 2,
                                 "truncate": False}),
    "yarn, all keys": (96, {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096,
                            "beta_fast": 16, "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.707, "truncate": False}),
    "yarn, attention": (128, {"rope_type": "yarn", "rope_theta": 1e5, "factor": 8.0, "attention_factor": 0.9}),
}  # fmt: skip


def read(rope: dict[str, Any], **keys: Any) -> Rope:
    values = {"rope_parameters": rope, "max_position_embeddings": 2048} | keys
    return read_rope(Keys(Path("config.json"), values), scalings=OF_DECODERS)


@pytest.mark.parametrize("name", KINDS)
def test_frequencies_and_factor(name: str) -> None:
    head_dim, rope = KINDS[name]
    kind = rope.get("rope_type", rope.get("type"))
    theirs = SimpleNamespace(
        rope_parameters={"original_max_position_embeddings": 2048} | rope,
        max_position_embeddings=2048,
        head_dim=head_dim,
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        standardize_rope_params=lambda: None,
    )
    expected, factor = ROPE_INIT_FUNCTIONS[str(kind)](theirs, torch.device("cpu"))  # type: ignore[arg-type]
    ours = read(rope)
    plain = 1 / ours.theta ** (torch.arange(0, head_dim, 2) / head_dim)
    torch.testing.assert_close(plain / torch.tensor(divisors(head_dim, ours)), expected, rtol=1e-6, atol=0)
    attention = ours.scaling.attention if isinstance(ours.scaling, YarnScaling) else 1.0
    assert attention == pytest.approx(factor, rel=1e-12)
    assert (plain != expected).any(), "the scaling has an effect"


def test_the_table_has_the_scaled_angles() -> None:
    plain = rope_table(8, 100.0, 5, torch.device("cpu"))
    table = rope_table(8, 100.0, 5, torch.device("cpu"), (1.0, 2.0, 1.0, 4.0), 3.0)
    torch.testing.assert_close(table[:, [0, 2]], 3 * plain[:, [0, 2]])
    torch.testing.assert_close(table[4, 1], 3 * plain[2, 1])
    torch.testing.assert_close(table[4, 3], 3 * plain[1, 3])


def test_yarn_extends_the_positions() -> None:
    """Qwen3's file keeps 40,960 positions when its README's YaRN is added. vLLM takes the product, too."""
    yarn = read(KINDS["yarn"][1], max_position_embeddings=40960)
    assert longest(yarn, 40960) == 131072
    assert longest(yarn, 262144) == 262144
    for name in ("Llama 3.1", "linear"):
        assert longest(read(KINDS[name][1]), 40960) == 40960


def test_the_models_own_key_comes_before_the_one_of_rope() -> None:
    """As in transformers."""
    scaling = read(KINDS["yarn"][1], original_max_position_embeddings=1024).scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.positions == 1024
    assert scaling.attention == pytest.approx(0.1 * math.log(4) + 1)
