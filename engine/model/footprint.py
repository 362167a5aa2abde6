"""Computes the memory that a model will take, from its shape alone and before anything is loaded."""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from engine.codes import MOST_BITS, PART_VALUES, Form
from engine.devices import INT4, compute_dtype, is_8_bits
from engine.heads.classifier import Head
from engine.heads.splade import CHUNK_BYTES, Splade, most_splade_seqs, splade_width
from engine.model.config import MOST_BATCH_TOKENS as MOST_BATCH_TOKENS
from engine.model.config import ModelConfig, WordHeadConfig
from engine.model.families import family_of
from engine.model.layers.attention import attention_bytes
from engine.model.quantized.kept import FORM, bytes_of_codes, forms_of, has_e4m3, in_codes
from engine.model.quantized.scheme import Gguf
from engine.model.weights import ShapeCounter
from engine.run.kv_cache import bytes_per_token, most_default_tokens, whole_pages

# The kind of a device's memory: a card's own, the host's as used by an integrated GPU, or the host's.
MemoryKind = Literal["gpu", "unified", "cpu"]

# CUDA graphs are captured for batches up to this size. The limit is lower if such a pass takes more than _GRAPH_BYTES (the 0.6B's
# largest graph fits). Larger models compute so long that the host keeps up without graphs.
MOST_GRAPH_TOKENS = MOST_BATCH_TOKENS
_GRAPH_BYTES = 384 << 20
_SHORT_BATCH_TOKENS = 4096  # every model gets graphs up to this size
# A graph's results are kept beside its memory: vectors of at most MOST_GRAPH_SEQS sequences, and MOST_GRAPH_VALUES other values.
MOST_GRAPH_SEQS = 4096
MOST_GRAPH_VALUES = 2 << 20
# Long prompts are cut into chunks. So the largest pass of a generation model has its token budget, for any context.
MOST_STREAM_TOKENS = 8192
_VALUES_OF_A_SCALE = 8 * 128  # of `Quantized.block_scale`
# The most streams of one pass, each with a row of logits: 256 streams with one token, and 64 prompts.
MOST_STREAMS = 320
# Blocks of decode attention write partial results, which are combined afterwards. For each item and each query head of the item's
# key head, they are the weighted sum of the values, the sum of the weights, and the largest score, in fp32.
_MOST_DECODE_ITEMS = 4096
# Measured on an H200 as the difference from torch's report, for engines of 0.2 to 17 GiB (docs/decisions/009). Half of cuBLAS's
# workspaces are for captures; their size follows from torch's rule.
_CUBLAS_BYTES = 4 * (32 << 20)  # cuBLAS's workspaces, for passes and for captures, in the threads that warm up and serve
_ROUNDING_BYTES = 110 << 20  # torch allocates in steps of 20 MiB, for each stream and for the graphs
_CONTEXT_BYTES = 850 << 20  # CUDA's context and all kernels; smaller chips need less
HOST_BYTES = 1200 << 20  # a process with torch and Ray, before the weights
# If the allocator cannot grow blocks in place, the gaps between blocks add a third to the workspace.
_FRAGMENTED = 1.35
# In 8 bits a layer's tensors do not fill each other's gaps. The factor was 1.23 in e4m3 for the 8B and 1.29 for the 4B.
_GAPS_IN_8_BITS = 1.3


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes that one replica takes. `workspace` is for its largest pass. Each token of a pass adds `workspace_per_token`.

    `cache` is the KV cache of a generation model.
    """

    weights: int
    workspace: int
    graphs: int
    overhead: int
    context: int
    workspace_per_token: int
    cache: int = 0

    @property
    def of_passes(self) -> int:
        """torch's bytes besides weights and cache."""
        return self.workspace + self.graphs + self.overhead

    @property
    def reserved(self) -> int:
        """The most bytes that torch reports as reserved. torch does not count the context."""
        return self.weights + self.of_passes + self.cache

    @property
    def total(self) -> int:
        return self.reserved + self.context


def footprint(
    config: ModelConfig,
    dtype: torch.dtype,
    kind: MemoryKind,
    max_batch_tokens: int | None = None,
    weight_bytes: int | None = None,
    cache_tokens: int | None = None,
) -> Footprint:
    """The bytes that a replica of this model will take. They are an upper bound with few exceptions (docs/decisions/009).

    Args:
        dtype: a dtype of 4 or 8 bits applies to the layers' matrices.
        max_batch_tokens: None if warm-up chooses the budget. Then it is at most MOST_BATCH_TOKENS, or MOST_STREAM_TOKENS for a
            generation model.
        weight_bytes: the size by the checkpoint's headers, in the model's compute dtype. None: it is computed from the shape.
        cache_tokens: the tokens of a generation model's cache. None counts the largest default cache. A card with less memory
            gets a smaller cache by default, so a caller that divides a card should give a number.
    """
    generates = config.generation is not None
    longest = max(max_batch_tokens or MOST_BATCH_TOKENS, config.max_input_length)
    if generates:
        longest = max_batch_tokens or MOST_STREAM_TOKENS
    family, wide, per_token = family_of(config), compute_dtype(dtype), _bytes_per_token(config, dtype)
    vectors = _splade_bytes(config, wide, longest)
    weights = num_parameters(config) * wide.itemsize if weight_bytes is None else weight_bytes
    weights += family.table_bytes(config) + head_parameters(config) * (4 - wide.itemsize)  # a head is in fp32
    weights -= bytes_saved(config, dtype, kind != "cpu")
    unpacked = _most_unpacked(config, dtype, kind != "cpu") * wide.itemsize
    workspace = longest * per_token + vectors + unpacked
    cache = 0
    if generates:
        rows = min(longest, MOST_STREAMS)
        workspace += _choosing_bytes(config, wide, rows) + _decode_attention_bytes(config)
        cache = bytes_per_token(config, wide) * whole_pages(most_default_tokens(config) if cache_tokens is None else cache_tokens)
    if kind == "cpu":
        weights += _decoding_bytes(config, dtype)
        workspace += attention_bytes(config.max_input_length, config.head_dim, wide.itemsize)
        return Footprint(weights, int(workspace * _FRAGMENTED), 0, 0, HOST_BYTES, per_token, cache)
    if kind == "unified":
        workspace = int(workspace * _FRAGMENTED)
    overhead = _CUBLAS_BYTES + _ROUNDING_BYTES
    if generates:
        graphs = rows * (per_token + config.vocab_size * (wide.itemsize + 4)) + _decode_attention_bytes(config) + unpacked
        return Footprint(weights, workspace, graphs, overhead, _CONTEXT_BYTES, per_token, cache)
    graph_tokens = min(max_batch_tokens or MOST_BATCH_TOKENS, most_graph_tokens(config, dtype))
    graphs = graph_tokens * per_token + 4 * MOST_GRAPH_VALUES + unpacked
    # SPLADE's vectors count as other values, so graphs keep few of them. The pool holds logits, and the vectors in both dtypes.
    graphs += _SPLADE_GRAPH_BYTES if vectors else 4 * min(graph_tokens, MOST_GRAPH_SEQS) * config.embedding_size
    return Footprint(weights, workspace, graphs, overhead, _CONTEXT_BYTES, per_token)


def most_graph_tokens(config: ModelConfig, dtype: torch.dtype) -> int:
    """Tokens of the largest CUDA graph that the footprint counts."""
    per_token = _bytes_per_token(config, compute_dtype(dtype))
    return max(_SHORT_BATCH_TOKENS, min(MOST_GRAPH_TOKENS, _GRAPH_BYTES // per_token))


def _bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that a pass holds for each of its tokens at its peak."""
    wide = compute_dtype(dtype)
    per_token = wide.itemsize * max(family_of(config).peak_values(config), _pooling_values(config)) + _INDEX_BYTES
    return int(per_token * _GAPS_IN_8_BITS) if is_8_bits(dtype) else per_token


def bytes_saved(config: ModelConfig, dtype: torch.dtype, on_gpu: bool) -> int:
    """The bytes that codes, or 4 or 8 bits, save in the layers' matrices and the words, compared to `compute_dtype`."""
    saved, wide = layer_bytes_saved(config, dtype, on_gpu), config.vocab_size * config.hidden_size * compute_dtype(dtype).itemsize
    if config.has_words:
        saved += wide - word_bytes(config, dtype, on_gpu)
    if _has_own_head(config):
        saved += wide - language_head_bytes(config, dtype, on_gpu)
    return saved


def layer_bytes_saved(config: ModelConfig, dtype: torch.dtype, on_gpu: bool) -> int:
    """The same as `bytes_saved`, without the word embeddings and the head."""
    shapes, wide = _shapes(config), compute_dtype(dtype).itemsize
    if is_8_bits(dtype):
        scales = shapes.num_scales + (shapes.num_quantized // _VALUES_OF_A_SCALE if keeps_e4m3(config, dtype) else 0)
        return shapes.num_quantized * (wide - 1) - 4 * scales
    values, num_bytes = codes_of(config, dtype, on_gpu)
    return values * wide - num_bytes


def codes_of(config: ModelConfig, dtype: torch.dtype, on_gpu: bool) -> tuple[int, int]:
    """The number of values of the layers' matrices that are in codes after loading, and their bytes."""
    if not on_gpu:
        return 0, 0
    values, num_bytes = kept_in_codes(config, dtype)
    if dtype == INT4:  # the other matrices are rounded to 4 bits
        # If a checkpoint leaves out layers, it is unknown here which of the others keep the checkpoint's codes of 4 bits.
        theirs = [
            form for form in forms_of(config.quantization, _shapes(config).columns) if form.bits <= most_bits_kept(config, dtype)
        ]
        num_bytes += max(bytes_of_codes(num_quantized(config) - values, form) for form in (FORM, *theirs))
        values = num_quantized(config)
    return values, num_bytes


def kept_in_codes(config: ModelConfig, dtype: torch.dtype) -> tuple[int, int]:
    """The number of values of the layers' matrices that a GPU keeps in the checkpoint's codes, and their bytes."""
    most_bits, shapes = most_bits_kept(config, dtype), _shapes(config)
    if not most_bits:
        return 0, 0
    return in_codes(config.quantization, shapes.num_quantized, shapes.columns, config.layers, most_bits)


def word_bytes(config: ModelConfig, dtype: torch.dtype, on_gpu: bool) -> int:
    """The bytes of the word embeddings."""
    kept = _kept_words(config, dtype, on_gpu)
    return _table_bytes(config, dtype, None if kept is None else kept.words)


def language_head_form(config: ModelConfig, dtype: torch.dtype, on_gpu: bool) -> Form | None:
    """The form in which the head's matrix stays in its codes. None: it is in `compute_dtype`."""
    kept = _kept_words(config, dtype, on_gpu)
    if kept is None or config.generation is None:
        return None
    return kept.words if config.generation.tied else kept.head


def language_head_bytes(config: ModelConfig, dtype: torch.dtype, on_gpu: bool) -> int:
    """The bytes of the head's matrix, which may be the word embeddings."""
    return _table_bytes(config, dtype, language_head_form(config, dtype, on_gpu))


def _kept_words(config: ModelConfig, dtype: torch.dtype, on_gpu: bool) -> Gguf | None:
    """The checkpoint whose words stay in their codes. int4 does not round words, so codes of any number of bits stay."""
    return config.quantization if isinstance(config.quantization, Gguf) and on_gpu and most_bits_kept(config, dtype) else None


def _table_bytes(config: ModelConfig, dtype: torch.dtype, form: Form | None) -> int:
    """The bytes of a matrix with a row for each word. `form`: of its codes, None if it is in `compute_dtype`."""
    values = config.vocab_size * config.hidden_size
    return values * compute_dtype(dtype).itemsize if form is None else bytes_of_codes(values, form)


def _most_unpacked(config: ModelConfig, dtype: torch.dtype, on_gpu: bool) -> int:
    """The most values in codes that a pass writes out in 16 bits at a time."""
    in_layers = _shapes(config).most_quantized if codes_of(config, dtype, on_gpu)[0] else 0
    has_head = config.has_end and language_head_form(config, dtype, on_gpu) is not None
    return max(in_layers, PART_VALUES if has_head else 0)


def most_bits_kept(config: ModelConfig, dtype: torch.dtype) -> int:
    """The most bits of codes that a GPU keeps in the layers. 0: it dequantises all matrices.

    Generation models keep codes, because their passes often have few rows. int4 rounds codes of more than 4 bits. No codes are
    kept in float16, which is the dtype of GPUs without the kernel's instructions.
    """
    if config.generation is None:
        return 0
    return {torch.bfloat16: MOST_BITS, INT4: 4}.get(dtype, 0)


def keeps_e4m3(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether Hopper keeps matrices of a checkpoint in e4m3 as they are in `dtype`, if their shapes and scales allow it."""
    return config.generation is not None and dtype == torch.float8_e4m3fn and has_e4m3(config.quantization)


def _decoding_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of a CPU's additional copies for decode: the matrices in fp16, and the table of words, which is also the head."""
    if config.generation is None:
        return 0
    words = config.vocab_size * config.hidden_size * dtype.itemsize if config.has_end else 0
    return words + (2 * body_parameters(config) + words if dtype == torch.bfloat16 else 0)


def _choosing_bytes(config: ModelConfig, dtype: torch.dtype, rows: int) -> int:
    """Bytes of the logits of `rows` rows while tokens are chosen.

    They are the head's logits, and in fp32 the logits, the logits with masks and penalties, and the log-probabilities.
    """
    return rows * config.vocab_size * (dtype.itemsize + 3 * 4)


def _decode_attention_bytes(config: ModelConfig) -> int:
    return 4 * _MOST_DECODE_ITEMS * (config.n_heads // config.n_kv_heads) * (config.head_dim + 2)


def _pooling_values(config: ModelConfig) -> int:
    """The number of values that a text of one token needs while dense layers or a head compute its result.

    Dense layers need the hidden state, its mean (fp32), and their inputs and outputs. A head needs the hidden state, the pooled
    vector, and its own inputs and outputs (fp32). Without them pooling needs less than the layers do.
    """
    if config.head is not None:
        return 10 * config.hidden_size
    if not config.dense:
        return 0
    widest = max(each.in_features + each.out_features for each in config.dense)
    return 3 * config.hidden_size + widest + 2 * config.embedding_size


def _splade_bytes(config: ModelConfig, dtype: torch.dtype, num_tokens: int) -> int:
    """Bytes of some tokens' logits, and of vectors as wide as the vocabulary, in the model's dtype and in fp32."""
    if config.splade is None:
        return 0
    num_seqs = min(num_tokens, most_splade_seqs(config.vocab_size))
    return CHUNK_BYTES + num_seqs * splade_width(config.vocab_size) * (dtype.itemsize + 4)


_SPLADE_GRAPH_BYTES = CHUNK_BYTES + 6 * MOST_GRAPH_VALUES

# The most bytes of a token in a packed batch: ids, positions, bounds, attention tiles and options, all int32. A batch whose
# sequences have one token needs the most.
_INDEX_BYTES = 48


def num_parameters(config: ModelConfig) -> int:
    """The number of parameters that the engine loads.

    It loads no needless tensor, and only the heads of classifiers and generation models. If a model is in parts, the last part
    has a copy of a tied head.
    """
    token_rows = config.lexical + (config.colbert_size or 0)
    loaded = _shapes(config).num_parameters
    if config.has_end:
        loaded += dense_parameters(config) + head_parameters(config)
    if _has_own_head(config):
        loaded += config.vocab_size * config.hidden_size
    return loaded + token_rows * (config.hidden_size + 1)


def _has_own_head(config: ModelConfig) -> bool:
    """Whether a model, or a part of a model, has a matrix of the head beside the word embeddings."""
    return config.generation is not None and config.has_end and not (config.generation.tied and config.has_words)


def dense_parameters(config: ModelConfig) -> int:
    """The number of parameters of the layers after pooling. They are used once for each text."""
    return sum(each.num_parameters for each in config.dense)


def head_parameters(config: ModelConfig) -> int:
    """The number of parameters of a classifier's head. They are used once for each text."""
    if config.head is None:
        return 0
    if isinstance(config.head, WordHeadConfig):  # the head is the difference of two rows
        return config.hidden_size
    shapes = ShapeCounter()
    Head.load(config, config.head, shapes)
    return shapes.num_parameters


def body_parameters(config: ModelConfig) -> int:
    """The number of parameters of the linear layers. They are used for every token."""
    return _shapes(config).num_multiplied


def num_quantized(config: ModelConfig) -> int:
    """The number of values of the layers' matrices, which may be in 4 or 8 bits."""
    return _shapes(config).num_quantized


@cache
def _shapes(config: ModelConfig) -> ShapeCounter:
    shapes = ShapeCounter()
    family = family_of(config)
    network = family(config, shapes)
    if config.splade is not None and family.masked_lm is not None:
        assert isinstance(network.words, Tensor), "a counter gives tensors"
        Splade(config, shapes, family.masked_lm, network.words)
        shapes.num_multiplied += config.splade.tied * config.vocab_size * config.hidden_size  # the tied table is a layer, too
    return shapes
