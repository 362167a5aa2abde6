"""Every family against transformers on tiny random checkpoints, in fp32: hidden states and pooled vectors."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_generators import SCALED_ROPE

from engine import Engine
from engine.model.families.mpnet import distance_buckets
from engine.options import EmbedOptions

CHECKPOINTS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "bert": ("bert", False, {}),
    "bert sharded": ("bert", True, {}),
    "roberta": ("roberta", False, {}),
    "roberta sharded": ("roberta", True, {"type_vocab_size": 1}),
    "roberta with masked-LM head": ("roberta_lm", False, {}),
    "roberta other padding token": ("roberta", False, {"pad_token_id": 4, "max_position_embeddings": 133}),
    "camembert with masked-LM head": ("camembert", False, {}),
    "xlm-roberta": ("xlm_roberta", False, {}),
    "distilbert": ("distilbert", False, {}),
    "distilbert sharded": ("distilbert", True, {}),
    "distilbert with masked-LM head": ("distilbert_lm", False, {"sinusoidal_pos_embds": True}),
    "mpnet": ("mpnet", False, {}),
    "mpnet sharded": ("mpnet", True, {}),
    "mpnet with masked-LM head": ("mpnet_lm", False, {}),
    "deberta": ("deberta", False, {}),
    "deberta sharded": ("deberta", True, {}),
    "deberta every distance a bucket": ("deberta", False, {"position_buckets": 256, "max_position_embeddings": 160}),
    "deberta shorter reach": ("deberta", False, {"max_relative_positions": 48, "pos_att_type": "c2p|p2c"}),
    "deberta with masked-LM head": ("deberta_lm", False, {"legacy": False}),
    "deberta with old masked-LM head": ("deberta_lm", False, {"legacy": True}),
    "qwen3 base model": ("qwen3", False, {}),
    "qwen3 tied": ("qwen3_lm", False, {"tie_word_embeddings": True}),
    "qwen3 untied": ("qwen3_lm", False, {"tie_word_embeddings": False}),
    "qwen3 sharded": ("qwen3_lm", True, {"tie_word_embeddings": False}),
    "qwen3 no grouping": ("qwen3", False, {"num_key_value_heads": 4}),
    "qwen3 one kv head": ("qwen3", False, {"num_key_value_heads": 1}),
    "qwen3 other theta": ("qwen3", False, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "modernbert": ("modernbert", False, {}),
    "modernbert masked lm": ("modernbert_lm", False, {}),
    "modernbert sharded": ("modernbert_lm", True, {}),
    "modernbert biases": ("modernbert", False, {"norm_bias": True, "attention_bias": True, "mlp_bias": True}),
    "modernbert local first": ("modernbert", False, {"layer_types": [*["sliding_attention"] * 3, "full_attention"]}),
    "nomic": ("nomic_bert", False, {}),
    "nomic masked lm": ("nomic_bert_lm", False, {}),
    "nomic sharded": ("nomic_bert_lm", True, {}),
    "nomic other theta": ("nomic_bert", False, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "nomic authors' gelu": ("nomic_bert_authors", False, {}),
    "nomic authors' swiglu": ("nomic_bert_authors", False, {"activation_function": "swiglu", "qkv_proj_bias": False}),
    "nomic authors' geglu": ("nomic_bert_authors", False, {"activation_function": "geglu", "mlp_fc2_bias": False}),
    "nomic no up bias, no types": ("nomic_bert_authors", False, {"mlp_fc1_bias": False, "type_vocab_size": 0}),
    "nomic experts": ("nomic_bert_moe", False, {}),
    "nomic experts sharded": ("nomic_bert_moe", True, {}),
    "nomic one expert of three": ("nomic_bert_moe", False, {"num_experts": 3, "moe_top_k": 1}),
    "gte": ("gte", False, {}),
    "gte no types": ("gte", False, {"type_vocab_size": 0}),
    "gte masked lm": ("gte_lm", False, {}),
    "gte sharded": ("gte_lm", True, {}),
    "gte linear": ("gte", False, {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}}),
    "gte ntk": ("gte_ntk", False, {}),
    "jina": ("jina_bert", False, {}),
    "jina sharded": ("jina_bert", True, {}),
    "jina six heads": ("jina_bert", False, {"hidden_size": 96, "num_attention_heads": 6}),
    "jina code": ("jina_bert_code", False, {}),
    "modernbert local last": (
        "modernbert",
        False,
        {"local_attention": 5, "layer_types": ["full_attention", "sliding_attention"] * 2},
    ),
    "qwen3 upper layers local": ("qwen3", False, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen2 base model": ("qwen2", False, {}),
    "qwen2 tied": ("qwen2_lm", False, {"tie_word_embeddings": True}),
    "qwen2 sharded": ("qwen2_lm", True, {"tie_word_embeddings": False}),
    "qwen2 no grouping": ("qwen2", False, {"num_key_value_heads": 4}),
    "qwen2 wide heads": ("qwen2", False, {"head_dim": 32}),
    "qwen2 bidirectional": ("qwen2", False, {"is_causal": False}),
    "qwen2 bidirectional, no grouping": ("qwen2", False, {"is_causal": False, "num_key_value_heads": 4}),
    "qwen2 local": (
        "qwen2",
        False,
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "num_hidden_layers": 4,
        },
    ),
    "qwen2 local, bidirectional": (
        "qwen2",
        False,
        {"is_causal": False, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "mistral whole": ("mistral", False, {"sliding_window": None}),
    "mistral tied": ("mistral_lm", False, {"sliding_window": None, "tie_word_embeddings": True}),
    "mistral sharded": ("mistral_lm", True, {"tie_word_embeddings": False}),
    "mistral window": ("mistral", False, {"sliding_window": 9}),
    "mistral window of one": ("mistral", False, {"sliding_window": 1}),
    "mistral window, bidirectional": ("mistral", False, {"sliding_window": 9, "is_causal": False}),
    "gemma3": ("gemma3", False, {}),
    "gemma3 sharded": ("gemma3_lm", True, {}),
    "gemma3 untied": ("gemma3_lm", False, {"tie_word_embeddings": False}),
    "gemma3 bidirectional": ("gemma3", False, {"use_bidirectional_attention": True}),
    "gemma3 bidirectional, odd window": ("gemma3", False, {"use_bidirectional_attention": True, "sliding_window": 7}),
    "gemma3 bidirectional, no grouping": ("gemma3", False, {"use_bidirectional_attention": True, "num_key_value_heads": 4}),
    "gemma3 all layers whole": ("gemma3", False, {"layer_types": ["full_attention"] * 4}),
    "gemma3 other bases": (
        "gemma3",
        False,
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
            }
        },
    ),
    "gemma3 other scale": ("gemma3", False, {"query_pre_attn_scalar": 7}),
    "llama": ("llama", False, {}),
    "llama llama3": ("llama", False, {"rope_parameters": SCALED_ROPE | {"rope_type": "llama3"}}),
    "qwen3 yarn": ("qwen3", False, {"rope_parameters": SCALED_ROPE | {"rope_type": "yarn"}}),
    "gemma3 linear": ("gemma3", False, {"rope_parameters": {"full_attention": SCALED_ROPE | {"rope_type": "linear"}}}),
    "llama no grouping": ("llama_lm", True, {"num_key_value_heads": None, "head_dim": None}),
}
LENGTHS = [1, 7, 64, 2, 33, 7, 128, 15]


def sequences(lengths: list[int] = LENGTHS) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(5, 300, size=length).astype(np.int32) for length in lengths]


@pytest.fixture(params=CHECKPOINTS.values(), ids=CHECKPOINTS.keys(), scope="module")
def folder(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> Path:
    kind, sharded, config = request.param
    made = tiny(kind, sharded, **config)
    assert (made / "model.safetensors.index.json").exists() == sharded
    return made


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=DEVICES, scope="module")
def engine(folder: Path, request: pytest.FixtureRequest) -> Engine:
    return Engine.load(folder, dtype="float32", device=request.param)


@lru_cache(maxsize=2)  # two dtypes of one folder: all tests of a folder run before those of the next
def transformers_model(folder: Path, dtype: torch.dtype, device: str = "cpu") -> Any:
    model = transformers.AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval().to(device)


def reference(folder: Path, ids: np.ndarray) -> torch.Tensor:
    """transformers' hidden states of one sequence alone, without padding."""
    model = transformers_model(folder, torch.float32)
    with torch.inference_mode():
        hidden: torch.Tensor = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state
    return hidden[0]


def test_hidden_states_equal_transformers_for_a_ragged_batch(folder: Path, engine: Engine) -> None:
    batch = sequences()
    hidden = engine.forward(engine.packer.pack(batch, device=engine.device)).cpu()
    rows = hidden.split([len(ids) for ids in batch])
    for ids, ours in zip(batch, rows, strict=True):
        torch.testing.assert_close(ours, reference(folder, ids), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("company", ["alone", "equal lengths", "ragged"])
def test_pooled_vector_does_not_depend_on_its_company(folder: Path, engine: Engine, company: str) -> None:
    """Equal lengths are the case in which TEI loses the causal mask (TEI#882)."""
    batch = {"alone": sequences([33]), "equal lengths": sequences([33] * 4), "ragged": sequences([33, 1, 90, 5])}[company]
    row = 0 if engine.config.pooling == "cls" else -1
    expected = reference(folder, batch[0])[row]
    whole = [EmbedOptions(normalize=False)] * len(batch)
    ours = torch.from_numpy(engine.launch(batch, whole).wait().vectors[0])
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_bf16_error_is_that_of_transformers_in_bf16(folder: Path, device: str) -> None:
    """Our error against fp32 is at most 1.5 times the error of transformers in bf16 on the same inputs."""
    engine = Engine.load(folder, dtype="bfloat16", device=device)
    model = transformers_model(folder, torch.bfloat16, device)
    ours = theirs = 0.0
    for ids in sequences([33, 64, 15, 100]):
        exact = reference(folder, ids)
        with torch.inference_mode():
            low = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None].to(device)).last_hidden_state[0].float().cpu()
        ours += (engine.forward(engine.packer.pack([ids], device=engine.device)).float().cpu() - exact).square().sum().item()
        theirs += (low - exact).square().sum().item()
    assert ours**0.5 <= 1.5 * theirs**0.5


def test_bidirectional_qwen3_follows_the_checkpoint(tiny: Callable[..., Path]) -> None:
    causal = Engine.load(tiny("qwen3"), dtype="float32", device="cpu")
    both = Engine.load(tiny("qwen3", use_bidirectional_attention=True), dtype="float32", device="cpu")
    assert causal.config.causal
    assert not both.config.causal
    first, other_end = sequences([20])[0], sequences([20])[0]
    other_end[-1] = 299 if first[-1] != 299 else 298
    # The first token sees the last token only without the causal mask.
    assert torch.equal(*(causal.forward(causal.packer.pack([ids]))[0] for ids in (first, other_end)))
    assert not torch.allclose(*(both.forward(both.packer.pack([ids]))[0] for ids in (first, other_end)))


def test_buckets_of_distances_are_those_of_mpnet_and_none_begins_past_the_table() -> None:
    distances = torch.arange(-511, 512)
    buckets = distance_buckets(distances)
    assert torch.equal(buckets, transformers.models.mpnet.modeling_mpnet.MPNetEncoder.relative_position_bucket(distances))
    assert torch.equal(buckets, distance_buckets(distances.clamp(-128, 128)))
