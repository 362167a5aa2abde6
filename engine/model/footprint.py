"""How much memory a model will take, computed from its shape alone, before anything is loaded."""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from engine.devices import INT4, compute_dtype, is_8_bits
from engine.heads.classifier import Head
from engine.heads.splade import CHUNK_BYTES, Splade, most_splade_seqs, splade_width
from engine.model.config import MOST_BATCH_TOKENS as MOST_BATCH_TOKENS
from engine.model.config import ModelConfig, WordHeadConfig
from engine.model.families import family_of
from engine.model.layers.attention import attention_bytes
from engine.model.quantized.four_bits import GROUP, bytes_in_four_bits, in_four_bits
from engine.model.weights import ShapeCounter
from engine.run.kv_cache import bytes_per_token, most_default_tokens, whole_pages

# A card's own memory, the host's memory lent to a GPU, or the host's memory.
MemoryKind = Literal["gpu", "unified", "cpu"]

# CUDA graphs are captured for batches up to this size, or up to the size whose pass takes _GRAPH_BYTES, if that is smaller (the
# 0.6B's largest graph fits). Larger models compute for so long that the host keeps up without graphs.
MOST_GRAPH_TOKENS = MOST_BATCH_TOKENS
_GRAPH_BYTES = 384 << 20
_SHORT_BATCH_TOKENS = 4096  # every model gets graphs up to this size
# Graphs keep their results beside their own memory: vectors of at most this many sequences, and at most this many other values.
MOST_GRAPH_SEQS = 4096
MOST_GRAPH_VALUES = 2 << 20
# Long prompts are cut into chunks, so the largest pass of a model that generates has its token budget, whatever the context.
MOST_STREAM_TOKENS = 8192
# Streams of one pass, each with a row of logits: 256 with one token, and 64 prompts beside.
MOST_STREAMS = 320
# What blocks of decode attention leave to be combined: in fp32, for each item and each query head of the item's key head, the
# weighted sum of the values, the sum of the weights, and the largest score.
_MOST_DECODE_ITEMS = 4096
# Measured on an H200 as the difference to torch's report, for engines of 0.2 to 17 GiB (docs/decisions/009). The half of
# cuBLAS's workspaces that captures use follows from torch's rule.
_CUBLAS_BYTES = 4 * (32 << 20)  # cuBLAS's workspaces, for passes and for captures, in the threads that warm up and serve
_ROUNDING_BYTES = 110 << 20  # torch allocates in steps of 20 MiB, for each stream and for the graphs
_CONTEXT_BYTES = 850 << 20  # CUDA's context and all kernels; smaller chips take less
HOST_BYTES = 1200 << 20  # a process with torch and Ray, before the weights
# Where the allocator cannot grow blocks in place, the gaps between them take a third of the workspace more.
_FRAGMENTED = 1.35
# In 8 bits a layer's tensors have sizes that do not fill each other's gaps: 1.23 in e4m3 for the 8B, 1.29 for the 4B.
_GAPS_IN_8_BITS = 1.3


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that one replica takes. `workspace` is for its largest pass; each token of a pass adds `workspace_per_token`.

    `cache` is of the keys and values of a model that generates.
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
        """What torch takes besides weights and cache."""
        return self.workspace + self.graphs + self.overhead

    @property
    def reserved(self) -> int:
        """At most this much will torch report as reserved. torch does not count the context."""
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
    """The bytes that a replica of this model will take: an upper bound, with few exceptions (docs/decisions/009).

    Args:
        dtype: a dtype of 4 or 8 bits applies to the layers' matrices.
        max_batch_tokens: None for a budget that warm-up finds; it is at most MOST_BATCH_TOKENS, or MOST_STREAM_TOKENS of a model
            that generates.
        weight_bytes: the size by the checkpoint's headers, in the dtype that the model computes in; None computes it.
        cache_tokens: of the cache of a model that generates. None counts the most that the engine's default takes; a card with
            less memory gets a smaller cache by default, so whoever divides a card should say a number.
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
    has_four_bits = _in_four_bits(config, dtype, kind != "cpu")[0] > 0
    unpacked = _shapes(config).most_quantized * wide.itemsize if has_four_bits else 0
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
    # SPLADE's vectors count as other values, so there are few. The pool holds logits, and the vectors in both dtypes.
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
    """How much smaller the layers' matrices are in 4 or 8 bits than in `compute_dtype`; 0 if they are not in 4 or 8 bits."""
    shapes, wide = _shapes(config), compute_dtype(dtype).itemsize
    if is_8_bits(dtype):
        return shapes.num_quantized * (wide - 1) - 4 * shapes.num_scales
    values, num_bytes = _in_four_bits(config, dtype, on_gpu)
    return values * wide - num_bytes


def _in_four_bits(config: ModelConfig, dtype: torch.dtype, on_gpu: bool) -> tuple[int, int]:
    """Of the layers' matrices: the values that are in 4 bits once they are loaded, and the bytes of these."""
    all_values, values, num_bytes = num_quantized(config), 0, 0
    if on_gpu and keeps_four_bits(config, dtype):
        values, num_bytes = in_four_bits(config.quantization, all_values, config.layers)
    if on_gpu and dtype == INT4:  # what does not stay in 4 bits is rounded to 4 bits
        num_bytes += bytes_in_four_bits(all_values - values, GROUP, False)
        values = all_values
    return values, num_bytes


def keeps_four_bits(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether a GPU keeps matrices in 4 bits that the checkpoint has so: of a model that generates, whose passes have a few rows.

    Not in float16, the dtype of GPUs that lack the kernel's instructions.
    """
    return config.generation is not None and dtype in (torch.bfloat16, INT4)


def _decoding_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the copies that a CPU keeps to decode: of the matrices in fp16, and of the words, which are the head as well."""
    if config.generation is None:
        return 0
    words = config.vocab_size * config.hidden_size * dtype.itemsize if config.has_end else 0
    return words + (2 * body_parameters(config) + words if dtype == torch.bfloat16 else 0)


def _choosing_bytes(config: ModelConfig, dtype: torch.dtype, rows: int) -> int:
    """Bytes of some rows' logits while tokens are chosen by them: as the head gives them, and in fp32 the logits, the logits with
    masks and penalties, and the log-probabilities."""
    return rows * config.vocab_size * (dtype.itemsize + 3 * 4)


def _decode_attention_bytes(config: ModelConfig) -> int:
    return 4 * _MOST_DECODE_ITEMS * (config.n_heads // config.n_kv_heads) * (config.head_dim + 2)


def _pooling_values(config: ModelConfig) -> int:
    """Values that a text of one token holds while dense layers or a head make its result.

    Dense layers hold the hidden state, its mean (fp32), and their inputs and outputs. A head holds the hidden state, the pooled
    vector, and its own inputs and outputs (fp32). Without them pooling holds less than the layers do.
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

# Upper bound on a token's bytes in a packed batch: ids, positions, bounds, attention tiles and options, all int32. A batch of
# one-token sequences needs the most.
_INDEX_BYTES = 48


def num_parameters(config: ModelConfig) -> int:
    """Parameters of the tensors that the engine loads. It loads no needless tensor, and no head but that of a classifier or of a
    model that generates. Where a model is in parts, the last one has a copy of a tied head."""
    token_rows = config.lexical + (config.colbert_size or 0)
    loaded = _shapes(config).num_parameters
    if config.has_end:
        loaded += dense_parameters(config) + head_parameters(config)
    if config.generation is not None and config.has_end and not (config.generation.tied and config.has_words):
        loaded += config.vocab_size * config.hidden_size
    return loaded + token_rows * (config.hidden_size + 1)


def dense_parameters(config: ModelConfig) -> int:
    """Parameters of the layers after pooling. They multiply one vector a text."""
    return sum(each.num_parameters for each in config.dense)


def head_parameters(config: ModelConfig) -> int:
    """Parameters of a classifier's head. It multiplies one vector a text."""
    if config.head is None:
        return 0
    if isinstance(config.head, WordHeadConfig):  # the head is the difference of two rows
        return config.hidden_size
    shapes = ShapeCounter()
    Head.load(config, config.head, shapes)
    return shapes.num_parameters


def body_parameters(config: ModelConfig) -> int:
    """Parameters of the linear layers, which multiply every token."""
    return _shapes(config).num_multiplied


def num_quantized(config: ModelConfig) -> int:
    """Values of the layers' matrices, which may be in 4 or 8 bits."""
    return _shapes(config).num_quantized


@cache
def _shapes(config: ModelConfig) -> ShapeCounter:
    shapes = ShapeCounter()
    family = family_of(config)
    network = family(config, shapes)
    if config.splade is not None and family.masked_lm is not None:
        Splade(config, shapes, family.masked_lm, network.words)
        shapes.num_multiplied += config.splade.tied * config.vocab_size * config.hidden_size  # the tied table is a layer, too
    return shapes
