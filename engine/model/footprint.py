"""Memory: how much a model will take, asked before anything is loaded; and a GPU as a good neighbour, who refuses what
cannot fit and stays within what was taken at start.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from engine.devices import compute_dtype
from engine.errors import ModelError
from engine.heads.classifier import Head
from engine.heads.splade import CHUNK_BYTES, Splade, most_splade_seqs, splade_width
from engine.model.config import ModelConfig, WordHeadConfig
from engine.model.families import family_of
from engine.model.weights import ShapeCounter

# What a loaded engine may still take: CUDA graphs made later, and the allocator's rounding.
_GROWTH_BYTES = 512 << 20
# Beside the weights there must be room for the smallest token budget.
_LEAST_WORKSPACE_BYTES = 256 << 20


# Whose memory it is: a card's own, the host's lent to a GPU, or the host's.
MemoryKind = Literal["gpu", "unified", "cpu"]

# Budgets are found at warm-up up to this one. CUDA graphs are made up to as many tokens where that takes no more than so many
# bytes, as the 0.6B's does: larger models take long enough to compute that the host keeps up without.
MOST_BATCH_TOKENS = 16384
MOST_GRAPH_TOKENS = MOST_BATCH_TOKENS
# What a graph gives is kept beside their memory: vectors of so many sequences, and so many values besides.
MOST_GRAPH_SEQS = 4096
MOST_GRAPH_VALUES = 2 << 20
_GRAPH_BYTES = 384 << 20
_SHORT_BATCH_TOKENS = 4096  # any model's
# Measured on an H200 beside what torch reports, for engines of 0.2 to 17 GiB (docs/decisions/009); but captures' workspaces,
# half of cuBLAS's, are by torch's rule.
_CUBLAS_BYTES = 4 * (32 << 20)  # its workspaces: for passes and captures, in the threads that warm up and serve
_ROUNDING_BYTES = 110 << 20  # torch takes memory in steps of 20 MiB, for each stream and for the graphs
_CONTEXT_BYTES = 850 << 20  # CUDA's context, the libraries' kernels and ours; smaller chips take less
_HOST_BYTES = 1200 << 20  # a process with torch and Ray, before the weights
# Without memory that grows in place, what a pass leaves between its blocks is a third of the workspace.
_FRAGMENTED = 1.35
# In 8 bits what a layer makes is of sizes that do not fill each other's gaps: 1.23 in e4m3 for the 8B, 1.29 for the 4B.
_GAPS_IN_8_BITS = 1.3


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that one replica takes. `workspace_per_token` is the part of a pass, `workspace` that of the largest one."""

    weights: int
    workspace: int
    graphs: int
    overhead: int
    context: int
    workspace_per_token: int

    @property
    def reserved(self) -> int:
        """What torch will report as reserved, at most; the context is not torch's."""
        return self.weights + self.workspace + self.graphs + self.overhead

    @property
    def total(self) -> int:
        return self.reserved + self.context


def footprint(
    config: ModelConfig,
    dtype: torch.dtype,
    kind: MemoryKind,
    max_batch_tokens: int | None = None,
    weight_bytes: int | None = None,
) -> Footprint:
    """What a replica of this model will take, from its shape alone: mostly an upper bound (docs/decisions/009).

    Args:
        dtype: one of 8 bits is that of the layers' matrices.
        max_batch_tokens: None for a budget found at warm-up; at most MOST_BATCH_TOKENS then.
        weight_bytes: what the checkpoint's headers say, in what the model computes in; None computes it.
    """
    longest = max(max_batch_tokens or MOST_BATCH_TOKENS, config.max_input_length)
    family, wide, per_token = family_of(config), compute_dtype(dtype), _bytes_per_token(config, dtype)
    vectors = _splade_bytes(config, wide, longest)
    weights = num_parameters(config) * wide.itemsize if weight_bytes is None else weight_bytes
    weights += family.table_bytes(config) + head_parameters(config) * (4 - wide.itemsize)  # a head is in fp32
    weights -= saved_bytes(config, dtype)
    workspace = longest * per_token + vectors
    if kind == "cpu":
        return Footprint(weights, int(workspace * _FRAGMENTED), 0, 0, _HOST_BYTES, per_token)
    if kind == "unified":
        workspace = int(workspace * _FRAGMENTED)
    graph_tokens = min(max_batch_tokens or MOST_BATCH_TOKENS, most_graph_tokens(config, dtype))
    graphs = graph_tokens * per_token + 4 * MOST_GRAPH_VALUES
    # SPLADE's vectors are among the values, so that they are few: the pool holds logits, and those vectors in both dtypes.
    graphs += _SPLADE_GRAPH_BYTES if vectors else 4 * min(graph_tokens, MOST_GRAPH_SEQS) * config.embedding_size
    return Footprint(weights, workspace, graphs, _CUBLAS_BYTES + _ROUNDING_BYTES, _CONTEXT_BYTES, per_token)


def most_graph_tokens(config: ModelConfig, dtype: torch.dtype) -> int:
    """Tokens of the largest CUDA graph that a replica has memory for."""
    per_token = _bytes_per_token(config, compute_dtype(dtype))
    return max(_SHORT_BATCH_TOKENS, min(MOST_GRAPH_TOKENS, _GRAPH_BYTES // per_token))


def _bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """What a pass holds at its peak for each of its tokens."""
    wide = compute_dtype(dtype)
    per_token = wide.itemsize * max(family_of(config).peak_values(config), _pooling_values(config)) + _INDEX_BYTES
    return per_token if dtype == wide else int(per_token * _GAPS_IN_8_BITS)


def saved_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """What the layers' matrices take less in that dtype than in what the model computes in."""
    if dtype.itemsize > 1:
        return 0
    shapes = _shapes(config)
    return shapes.num_quantized * (compute_dtype(dtype).itemsize - 1) - 4 * shapes.num_scales


def _pooling_values(config: ModelConfig) -> int:
    """What a text of one token holds while dense layers make its vector: hidden state, mean (fp32), the layers' in- and outputs.

    A head holds the hidden state, what is pooled of it, and in fp32 its own in- and outputs. Without either it is less than
    a pass takes.
    """
    if config.head is not None:
        return 10 * config.hidden_size
    if not config.dense:
        return 0
    widest = max(each.in_features + each.out_features for each in config.dense)
    return 3 * config.hidden_size + widest + 2 * config.embedding_size


def _splade_bytes(config: ModelConfig, dtype: torch.dtype, num_tokens: int) -> int:
    """Logits of some tokens, and vectors as wide as the vocabulary: in the model's dtype, then in fp32 beside that."""
    if config.splade is None:
        return 0
    num_seqs = min(num_tokens, most_splade_seqs(config.vocab_size))
    return CHUNK_BYTES + num_seqs * splade_width(config.vocab_size) * (dtype.itemsize + 4)


_SPLADE_GRAPH_BYTES = CHUNK_BYTES + 6 * MOST_GRAPH_VALUES

# Upper bound on a token's bytes in a packed batch: ids, positions, bounds, attention tiles and options, all int32. A batch of
# one-token sequences needs the most.
_INDEX_BYTES = 48


def num_parameters(config: ModelConfig) -> int:
    """Of the tensors that the engine loads; other heads than a classifier's, and what else is needless, not counted."""
    token_rows = config.lexical + (config.colbert_size or 0)
    loaded = _shapes(config).num_parameters + dense_parameters(config) + head_parameters(config)
    return loaded + token_rows * (config.hidden_size + 1)


def dense_parameters(config: ModelConfig) -> int:
    """Of the layers after pooling: a vector is multiplied with them, not each token."""
    return sum(each.num_parameters for each in config.dense)


def head_parameters(config: ModelConfig) -> int:
    """Of a classifier's head: as of the dense layers, each text is multiplied with them."""
    if config.head is None:
        return 0
    if isinstance(config.head, WordHeadConfig):  # the difference of two rows
        return config.hidden_size
    shapes = ShapeCounter()
    Head.load(config, config.head, shapes)
    return shapes.num_parameters


def body_parameters(config: ModelConfig) -> int:
    """Of the linear layers: each token is multiplied with every one of them."""
    return _shapes(config).num_multiplied


@cache
def _shapes(config: ModelConfig) -> ShapeCounter:
    shapes = ShapeCounter()
    family = family_of(config)
    network = family(config, shapes)
    if config.splade is not None and family.masked_lm is not None:
        Splade(config, shapes, family.masked_lm, network.words)
        shapes.num_multiplied += config.splade.tied * config.vocab_size * config.hidden_size  # a table and a layer at once
    return shapes


def grow_in_place(device: torch.device) -> None:
    """Let torch's memory grow in place, not by a block of each size asked for.

    A pass then takes what it needs; in blocks it was 1.0 GiB more for the 4B's longest input, a third. Not on GPUs that
    share the host's memory, where it has led to errors of the driver (dgx-spark-playbooks#97), and not over the head of
    whoever configures torch's allocator through the environment.
    """
    chosen = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    if not chosen and not torch.cuda.get_device_properties(device).is_integrated:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def check_fits(weight_bytes: int, device: torch.device, model: str) -> None:
    """Raises: ModelError naming the numbers, before anything is copied."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    if weight_bytes + _LEAST_WORKSPACE_BYTES > free:
        raise ModelError(
            f"{model} has {weight_bytes / 2**30:.1f} GiB of weights in this dtype, {device} has {free / 2**30:.1f} of "
            f"{total / 2**30:.1f} GiB free; free some, take another GPU, or a smaller dtype or model"
        )


@contextmanager
def reservation(device: torch.device) -> Iterator[None]:
    """Load inside; afterwards this process cannot take more of the GPU than it then holds and a small growth.

    A load runs the largest batch, so what it needs is held by then. Whatever else shares the card can count on the rest:
    a batch that would reach into it fails as out of memory here, and is split, instead of failing there.
    """
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    yield
    total = torch.cuda.get_device_properties(device).total_memory
    held = torch.cuda.memory_reserved(device) + _GROWTH_BYTES
    torch.cuda.set_per_process_memory_fraction(min(1.0, held / total), device)
