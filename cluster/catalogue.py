"""Shapes of published models, so that a cluster can be planned with no network and no weights."""

from dataclasses import replace

from engine.model_config import DenseConfig, ModelConfig, Pooling
from engine.models.bert import BertConfig
from engine.models.decoder import DecoderConfig
from engine.models.gemma3 import Gemma3Config

_CLS: Pooling = "cls"
_MEAN: Pooling = "mean"


def _bert(layers: int, hidden: int, pooling: Pooling, longest: int = 512) -> ModelConfig:
    heads = {384: 12, 768: 12, 1024: 16}[hidden]
    return BertConfig(
        architecture="BertModel", vocab_size=30522, hidden_size=hidden, intermediate_size=4 * hidden,
        n_layers=layers, n_heads=heads, n_kv_heads=heads, head_dim=hidden // heads, norm_eps=1e-12,
        max_position_embeddings=512, causal=False, pooling=pooling, max_input_length=longest, type_vocab_size=2,
    )  # fmt: skip


def _qwen3(layers: int, hidden: int, heads: int, intermediate: int, vocab: int, positions: int) -> ModelConfig:
    return DecoderConfig(
        architecture="Qwen3ForCausalLM", vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate,
        n_layers=layers, n_heads=heads, n_kv_heads=8, head_dim=128, norm_eps=1e-6,
        max_position_embeddings=positions, causal=True, pooling="last_token", max_input_length=positions, rope_theta=1e6,
        qk_norm=True,
    )  # fmt: skip


def _qwen2(layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int) -> ModelConfig:
    return DecoderConfig(
        architecture="Qwen2ForCausalLM", vocab_size=151646, hidden_size=hidden, intermediate_size=intermediate,
        n_layers=layers, n_heads=heads, n_kv_heads=kv_heads, head_dim=128, norm_eps=1e-6, max_position_embeddings=131072,
        causal=False, pooling="last_token", max_input_length=32768, rope_theta=1e6, qkv_bias=True,
    )  # fmt: skip


def _mistral_7b() -> ModelConfig:
    return DecoderConfig(
        architecture="MistralModel", vocab_size=32000, hidden_size=4096, intermediate_size=14336,
        n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, norm_eps=1e-5, max_position_embeddings=32768,
        causal=True, pooling="last_token", max_input_length=4096, rope_theta=1e4, window=4095, local_layers=tuple(range(32)),
    )  # fmt: skip


def _embeddinggemma() -> ModelConfig:
    return Gemma3Config(
        architecture="Gemma3TextModel", vocab_size=262144, hidden_size=768, intermediate_size=1152,
        n_layers=24, n_heads=3, n_kv_heads=1, head_dim=256, norm_eps=1e-6, max_position_embeddings=2048, causal=False,
        pooling="mean", max_input_length=2048, rope_theta=1e6, local_rope_theta=1e4, query_pre_attn_scalar=256, qk_norm=True,
        window=256, local_layers=tuple(layer for layer in range(24) if (layer + 1) % 6),
        dense=(_dense("2_Dense", 768, 3072, bias=False), _dense("3_Dense", 3072, 768, bias=False)),
    )  # fmt: skip


def _dense(folder: str, in_features: int, out_features: int, bias: bool = True) -> DenseConfig:
    return DenseConfig(folder, in_features, out_features, bias, "Identity")


CATALOGUE: dict[str, ModelConfig] = {
    "Qwen/Qwen3-Embedding-0.6B": _qwen3(28, 1024, 16, 3072, 151669, 32768),
    "Qwen/Qwen3-Embedding-4B": _qwen3(36, 2560, 32, 9728, 151665, 40960),
    "Qwen/Qwen3-Embedding-8B": _qwen3(36, 4096, 32, 12288, 151665, 40960),
    "Qwen/Qwen3-Reranker-0.6B": _qwen3(28, 1024, 16, 3072, 151669, 40960),
    "Qwen/Qwen3-Reranker-4B": _qwen3(36, 2560, 32, 9728, 151669, 40960),
    "Qwen/Qwen3-Reranker-8B": _qwen3(36, 4096, 32, 12288, 151669, 40960),
    "BAAI/bge-small-en-v1.5": _bert(12, 384, _CLS),
    "BAAI/bge-base-en-v1.5": _bert(12, 768, _CLS),
    "BAAI/bge-large-en-v1.5": _bert(24, 1024, _CLS),
    "intfloat/e5-small-v2": _bert(12, 384, _MEAN),
    "intfloat/e5-base-v2": _bert(12, 768, _MEAN),
    "intfloat/e5-large-v2": _bert(24, 1024, _MEAN),
    "thenlper/gte-small": _bert(12, 384, _MEAN),
    "thenlper/gte-base": _bert(12, 768, _MEAN),
    "thenlper/gte-large": _bert(24, 1024, _MEAN),
    "sentence-transformers/all-MiniLM-L6-v2": _bert(6, 384, _MEAN, longest=256),
    "sentence-transformers/all-MiniLM-L12-v2": _bert(12, 384, _MEAN, longest=128),
    "Alibaba-NLP/gte-Qwen2-1.5B-instruct": _qwen2(28, 1536, 12, 2, 8960),
    "Alibaba-NLP/gte-Qwen2-7B-instruct": _qwen2(28, 3584, 28, 4, 18944),
    "NovaSearch/stella_en_1.5B_v5": replace(
        _qwen2(28, 1536, 12, 2, 8960),
        pooling="mean",
        max_input_length=512,
        dense=(_dense("2_Dense_1024", 1536, 1024),),
    ),
    "intfloat/e5-mistral-7b-instruct": _mistral_7b(),
    "Salesforce/SFR-Embedding-Mistral": _mistral_7b(),
    "Linq-AI-Research/Linq-Embed-Mistral": _mistral_7b(),
    "google/embeddinggemma-300m": _embeddinggemma(),
    "sentence-transformers/LaBSE": replace(
        _bert(12, 768, _CLS, longest=256),
        vocab_size=501153,
        dense=(DenseConfig("2_Dense", 768, 768, bias=True, activation="Tanh"),),
    ),
}


def known_model(model: str) -> ModelConfig | None:
    """The shape of a published model, by its Hub id or the last part of it, in any case."""
    name = hub_id(model)
    return CATALOGUE[name] if name else None


def hub_id(model: str) -> str | None:
    """The Hub id of a published model, by it or the last part of it, in any case."""
    wanted = model.lower()
    return next((name for name in CATALOGUE if wanted in (name.lower(), name.lower().rsplit("/", 1)[1])), None)
