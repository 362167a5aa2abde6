"""Configurations of published models, so that a cluster can be planned without a network and without weights."""

from dataclasses import replace

from engine.model.config import DenseConfig, GenerationConfig, ModelConfig, Pooling, SpladeConfig, WordHeadConfig
from engine.model.decoder import DecoderConfig
from engine.model.families import MODELS
from engine.model.families.bert import BertConfig
from engine.model.families.gemma3 import Gemma3Config
from engine.model.families.gte import GteConfig
from engine.model.families.jina_bert import JinaBertConfig
from engine.model.families.modernbert import ModernBertConfig
from engine.model.families.nomic_bert import NomicBertConfig
from engine.model.rope import LinearScaling, Rope
from engine.text.pairs import DEFAULT_INSTRUCTION

_CLS: Pooling = "cls"
_MEAN: Pooling = "mean"


def _bert(layers: int, hidden: int, pooling: Pooling, longest: int = 512) -> ModelConfig:
    heads = {384: 12, 768: 12, 1024: 16}[hidden]
    return BertConfig(
        architecture="BertModel", vocab_size=30522, hidden_size=hidden, intermediate_size=4 * hidden,
        n_layers=layers, n_heads=heads, n_kv_heads=heads, head_dim=hidden // heads, norm_eps=1e-12,
        max_position_embeddings=512, causal=False, pooling=pooling, max_input_length=longest, type_vocab_size=2,
    )  # fmt: skip


def _distilbert(pooling: Pooling) -> ModelConfig:
    return BertConfig(
        architecture="DistilBertModel", vocab_size=30522, hidden_size=768, intermediate_size=3072, n_layers=6,
        n_heads=12, n_kv_heads=12, head_dim=64, norm_eps=1e-12, max_position_embeddings=512, causal=False, pooling=pooling,
        max_input_length=512,
    )  # fmt: skip


def _mpnet(pooling: Pooling, longest: int = 512) -> ModelConfig:
    return BertConfig(
        architecture="MPNetModel", vocab_size=30527, hidden_size=768, intermediate_size=3072, n_layers=12,
        n_heads=12, n_kv_heads=12, head_dim=64, norm_eps=1e-5, max_position_embeddings=512, causal=False, pooling=pooling,
        max_input_length=longest, first_position=2,
    )  # fmt: skip


def _roberta(
    layers: int, hidden: int, pooling: Pooling, vocab: int = 250002, positions: int = 512, longest: int | None = None
) -> ModelConfig:
    heads = {768: 12, 1024: 16}[hidden]
    return BertConfig(
        architecture="RobertaModel" if vocab == 50265 else "XLMRobertaModel", vocab_size=vocab, hidden_size=hidden,
        intermediate_size=4 * hidden, n_layers=layers, n_heads=heads, n_kv_heads=heads, head_dim=hidden // heads, norm_eps=1e-5,
        max_position_embeddings=positions, causal=False, pooling=pooling, max_input_length=longest or positions,
        type_vocab_size=1, first_position=2,
    )  # fmt: skip


def _qwen3(layers: int, hidden: int, heads: int, intermediate: int, vocab: int, positions: int) -> ModelConfig:
    return DecoderConfig(
        architecture="Qwen3ForCausalLM", vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate,
        n_layers=layers, n_heads=heads, n_kv_heads=8, head_dim=128, norm_eps=1e-6,
        max_position_embeddings=positions, causal=True, pooling="last_token", max_input_length=positions, rope=Rope(1e6),
        qk_norm=True,
    )  # fmt: skip


def _qwen3_generator(layers: int, hidden: int, heads: int, intermediate: int, tied: bool) -> ModelConfig:
    body = _qwen3(layers, hidden, heads, intermediate, 151936, 40960)
    return replace(body, generation=GenerationConfig(tied=tied))


def _smollm2() -> ModelConfig:
    return DecoderConfig(
        architecture="LlamaForCausalLM", vocab_size=49152, hidden_size=576, intermediate_size=1536, n_layers=30, n_heads=9,
        n_kv_heads=3, head_dim=64, norm_eps=1e-5, max_position_embeddings=8192, causal=True, pooling="last_token",
        max_input_length=8192, rope=Rope(1e5), generation=GenerationConfig(tied=True),
    )  # fmt: skip


def _modernbert(layers: int, hidden: int, intermediate: int, pooling: Pooling) -> ModelConfig:
    return ModernBertConfig(
        architecture="ModernBertModel", vocab_size=50368, hidden_size=hidden, intermediate_size=intermediate,
        n_layers=layers, n_heads=hidden // 64, n_kv_heads=hidden // 64, head_dim=64, norm_eps=1e-5,
        max_position_embeddings=8192, causal=False, pooling=pooling, max_input_length=8192,
        window=64, local_layers=tuple(index for index in range(layers) if index % 3),
        global_rope=Rope(160_000.0), local_rope=Rope(10_000.0),
    )  # fmt: skip


def _nomic_bert(positions: int) -> NomicBertConfig:
    return NomicBertConfig(
        architecture="NomicBertModel", vocab_size=30528, hidden_size=768, intermediate_size=3072,
        n_layers=12, n_heads=12, n_kv_heads=12, head_dim=64, norm_eps=1e-12,
        max_position_embeddings=positions, causal=False, pooling=_MEAN, max_input_length=positions,
        rope=Rope(1000.0), type_vocab_size=2, activation="swiglu", has_experts=(False,) * 12,
    )  # fmt: skip


def _nomic_bert_experts() -> ModelConfig:
    return replace(
        _nomic_bert(2048), vocab_size=250048, norm_eps=1e-5, max_input_length=512, rope=Rope(10_000.0), type_vocab_size=1,
        activation="gelu", has_experts=(False, True) * 6, num_experts=8, top_k=2, qkv_bias=True, up_bias=True, down_bias=True,
    )  # fmt: skip


def _gte(
    layers: int, hidden: int, vocab: int, types: int, theta: float, ntk: float, architecture: str = "NewModel"
) -> ModelConfig:
    return GteConfig(
        architecture=architecture, vocab_size=vocab, hidden_size=hidden, intermediate_size=4 * hidden,
        n_layers=layers, n_heads=hidden // 64, n_kv_heads=hidden // 64, head_dim=64, norm_eps=1e-12,
        max_position_embeddings=8192, causal=False, pooling=_CLS, max_input_length=8192,
        rope=Rope(theta * ntk, LinearScaling(ntk ** (2 / 64))), type_vocab_size=types,
    )  # fmt: skip


def _jina_bert(layers: int, hidden: int) -> ModelConfig:
    return JinaBertConfig(
        architecture="JinaBertForMaskedLM", vocab_size=30528, hidden_size=hidden, intermediate_size=4 * hidden,
        n_layers=layers, n_heads=hidden // 64, n_kv_heads=hidden // 64, head_dim=64, norm_eps=1e-12,
        max_position_embeddings=8192, causal=False, pooling=_MEAN, max_input_length=8192, type_vocab_size=2,
    )  # fmt: skip


def _qwen2(layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int) -> ModelConfig:
    return DecoderConfig(
        architecture="Qwen2ForCausalLM", vocab_size=151646, hidden_size=hidden, intermediate_size=intermediate,
        n_layers=layers, n_heads=heads, n_kv_heads=kv_heads, head_dim=128, norm_eps=1e-6, max_position_embeddings=131072,
        causal=False, pooling="last_token", max_input_length=32768, rope=Rope(1e6), qkv_bias=True,
    )  # fmt: skip


def _mistral_7b() -> ModelConfig:
    return DecoderConfig(
        architecture="MistralModel", vocab_size=32000, hidden_size=4096, intermediate_size=14336,
        n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, norm_eps=1e-5, max_position_embeddings=32768,
        causal=True, pooling="last_token", max_input_length=4096, rope=Rope(1e4), window=4095, local_layers=tuple(range(32)),
    )  # fmt: skip


def _embeddinggemma() -> ModelConfig:
    return Gemma3Config(
        architecture="Gemma3TextModel", vocab_size=262144, hidden_size=768, intermediate_size=1152,
        n_layers=24, n_heads=3, n_kv_heads=1, head_dim=256, norm_eps=1e-6, max_position_embeddings=2048, causal=False,
        pooling="mean", max_input_length=2048, rope=Rope(1e6), local_rope=Rope(1e4), query_pre_attn_scalar=256, qk_norm=True,
        window=256, local_layers=tuple(layer for layer in range(24) if (layer + 1) % 6),
        dense=(_dense("2_Dense", 768, 3072, bias=False), _dense("3_Dense", 3072, 768, bias=False)),
    )  # fmt: skip


def _head(config: ModelConfig, architecture: str) -> ModelConfig:
    """The body with a classification head that has one label."""
    head = MODELS[architecture].head
    return replace(config, architecture=architecture, labels=("LABEL_0",), head=head, pooling=head.pooling)


def _qwen3_reranker(layers: int, hidden: int, heads: int, intermediate: int, tied: bool) -> ModelConfig:
    head = WordHeadConfig(tied=tied, yes=9693, no=2152)
    body = _qwen3(layers, hidden, heads, intermediate, 151669, 40960)
    return replace(body, labels=("LABEL_0",), head=head, instruction=DEFAULT_INSTRUCTION)


def _dense(folder: str, in_features: int, out_features: int, bias: bool = True) -> DenseConfig:
    return DenseConfig(folder, in_features, out_features, bias, "Identity")


CATALOGUE: dict[str, ModelConfig] = {
    "Qwen/Qwen3-Embedding-0.6B": _qwen3(28, 1024, 16, 3072, 151669, 32768),
    "Qwen/Qwen3-Embedding-4B": _qwen3(36, 2560, 32, 9728, 151665, 40960),
    "Qwen/Qwen3-Embedding-8B": _qwen3(36, 4096, 32, 12288, 151665, 40960),
    "Qwen/Qwen3-Reranker-0.6B": _qwen3_reranker(28, 1024, 16, 3072, tied=True),
    "Qwen/Qwen3-Reranker-4B": _qwen3_reranker(36, 2560, 32, 9728, tied=True),
    "Qwen/Qwen3-Reranker-8B": _qwen3_reranker(36, 4096, 32, 12288, tied=False),
    "Qwen/Qwen3-0.6B": _qwen3_generator(28, 1024, 16, 3072, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3_generator(28, 2048, 16, 6144, tied=True),
    "Qwen/Qwen3-4B": _qwen3_generator(36, 2560, 32, 9728, tied=True),
    "Qwen/Qwen3-8B": _qwen3_generator(36, 4096, 32, 12288, tied=False),
    "Qwen/Qwen3-14B": _qwen3_generator(40, 5120, 40, 17408, tied=False),
    "Qwen/Qwen3-32B": _qwen3_generator(64, 5120, 64, 25600, tied=False),
    "HuggingFaceTB/SmolLM2-135M-Instruct": _smollm2(),
    "BAAI/bge-reranker-base": _head(_roberta(12, 768, _CLS), "XLMRobertaForSequenceClassification"),
    "BAAI/bge-reranker-large": _head(_roberta(24, 1024, _CLS), "XLMRobertaForSequenceClassification"),
    "BAAI/bge-reranker-v2-m3": _head(_roberta(24, 1024, _CLS, positions=8192), "XLMRobertaForSequenceClassification"),
    "cross-encoder/ms-marco-MiniLM-L-6-v2": _head(_bert(6, 384, _CLS), "BertForSequenceClassification"),
    "Alibaba-NLP/gte-multilingual-reranker-base": _head(
        _gte(12, 768, 250048, types=1, theta=20_000, ntk=8), "NewForSequenceClassification"
    ),
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
    "BAAI/bge-m3": replace(_roberta(24, 1024, _CLS, positions=8192), lexical=True, colbert_size=1024),
    "naver/splade-v3": replace(_bert(12, 768, "splade"), architecture="BertForMaskedLM", splade=SpladeConfig(tied=True)),
    "Snowflake/snowflake-arctic-embed-l-v2.0": _roberta(24, 1024, _CLS, positions=8192),
    "intfloat/multilingual-e5-base": _roberta(12, 768, _MEAN),
    "intfloat/multilingual-e5-large": _roberta(24, 1024, _MEAN),
    "intfloat/multilingual-e5-large-instruct": _roberta(24, 1024, _MEAN),
    "sentence-transformers/paraphrase-multilingual-mpnet-base-v2": _roberta(12, 768, _MEAN, longest=128),
    "sentence-transformers/all-distilroberta-v1": _roberta(6, 768, _MEAN, vocab=50265),
    "sentence-transformers/all-roberta-large-v1": _roberta(24, 1024, _MEAN, vocab=50265, longest=256),
    "sentence-transformers/multi-qa-distilbert-cos-v1": _distilbert(_MEAN),
    "sentence-transformers/msmarco-distilbert-base-tas-b": _distilbert(_CLS),
    "sentence-transformers/all-mpnet-base-v2": _mpnet(_MEAN, longest=384),
    "sentence-transformers/multi-qa-mpnet-base-dot-v1": _mpnet(_CLS),
    "sentence-transformers/multi-qa-mpnet-base-cos-v1": _mpnet(_MEAN),
    "Alibaba-NLP/gte-base-en-v1.5": _gte(12, 768, 30528, types=0, theta=500_000, ntk=2),
    "Alibaba-NLP/gte-large-en-v1.5": _gte(24, 1024, 30528, types=2, theta=160_000, ntk=2),
    "Alibaba-NLP/gte-multilingual-base": _gte(12, 768, 250048, types=1, theta=20_000, ntk=8),
    "Snowflake/snowflake-arctic-embed-m-v2.0": _gte(12, 768, 250048, types=1, theta=160_000, ntk=1, architecture="GteModel"),
    "jinaai/jina-embeddings-v2-small-en": _jina_bert(4, 512),
    "jinaai/jina-embeddings-v2-base-en": _jina_bert(12, 768),
    "nomic-ai/nomic-embed-text-v1": _nomic_bert(2048),
    "nomic-ai/nomic-embed-text-v1.5": _nomic_bert(8192),
    "nomic-ai/nomic-embed-text-v2-moe": _nomic_bert_experts(),
    "nomic-ai/modernbert-embed-base": _modernbert(22, 768, 1152, _MEAN),
    "Alibaba-NLP/gte-modernbert-base": _modernbert(22, 768, 1152, _CLS),
    "lightonai/modernbert-embed-large": _modernbert(28, 1024, 2624, _MEAN),
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
    """The configuration of a published model; None for a model outside the catalogue.

    Args:
        model: the Hub id or the last part of the Hub id, in upper or lower case.
    """
    name = hub_id(model)
    return CATALOGUE[name] if name else None


def hub_id(model: str) -> str | None:
    """The full Hub id of a published model; None for a model outside the catalogue. `model` is as in `known_model`."""
    wanted = model.lower()
    return next((name for name in CATALOGUE if wanted in (name.lower(), name.lower().rsplit("/", 1)[1])), None)
