"""Embedding gather, from a table in 16 bits or in codes."""

from functools import cache

import torch
from torch import Tensor

from engine.codes import Form
from engine.kernels import reference
from engine.kernels.launch import Kernel, half, runs_in, runs_on
from engine.kernels.packed import Packed

THREADS, PER_THREAD = 256, 4


def embed(
    token_ids: Tensor, positions: Tensor, words: Tensor, position_table: Tensor | None = None, last: Tensor | None = None
) -> Tensor:
    """Returns words[token_ids], plus position_table[positions] if there is a position table.

    Args:
        token_ids, positions: [T] int32. On a GPU, an id outside of `words` gives the nearest row. On a CPU it is an error.
        last: [num_slots] int32, the last token of each stream. An id below 0 stands for an entry: the token is last[-1 - id]. So
            a step can be launched before the tokens of the step before are on the host.
        words: [vocab_size, C]; position_table: [max_position_embeddings, C].
    Returns: [T, C], dtype of `words`.
    """
    if not runs_on(words):
        return reference.embed(token_ids, positions, words, position_table, last)
    num_tokens, width = len(token_ids), words.shape[1]
    out = torch.empty(num_tokens, width, dtype=words.dtype, device=words.device)
    kernel = _kernel(width, position_table is not None, words.dtype, words.device, last is not None)
    grid = -(-(-(-num_tokens // PER_THREAD) * width) // (8 * THREADS))
    num_last = 0 if last is None else len(last)
    kernel(grid, token_ids, positions, words, position_table, last, out, num_tokens, len(words), num_last)
    return out


def embed_packed(token_ids: Tensor, words: Packed, dtype: torch.dtype, last: Tensor | None = None) -> Tensor:
    """Returns the rows `token_ids` of `words`, each value rounded once.

    Args:
        token_ids, last: as in `embed`.
        dtype: of the result.
    Returns: [T, C].
    """
    assert words.order is None, "words keep the order of their columns"
    if not runs_in(words.records.device, dtype):
        return reference.embed_packed(token_ids, words.records, words.form, dtype, last)
    out = torch.empty(len(token_ids), words.k, dtype=dtype, device=words.records.device)
    kernel = _packed_kernel(words.form, dtype, words.records.device, last is not None)
    grid = -(-len(token_ids) * words.k // (16 * THREADS))
    kernel(grid, token_ids, words.records, last, out, len(token_ids), len(words), words.k, 0 if last is None else len(last))
    return out


@cache
def _kernel(width: int, positions: bool, dtype: torch.dtype, device: torch.device, last: bool = False) -> Kernel:
    return Kernel("embed", "embed", embed_defines(width, positions, dtype, last), device, THREADS)


@cache
def _packed_kernel(form: Form, dtype: torch.dtype, device: torch.device, last: bool) -> Kernel:
    return Kernel("embed_packed", "embed_packed", embed_packed_defines(form, dtype, last), device, THREADS)


def embed_packed_defines(form: Form, dtype: torch.dtype, last: bool) -> dict[str, int]:
    return {**form.defines, "LAST": int(last), "THREADS": THREADS, "HALF": half(dtype)}


def embed_defines(width: int, positions: bool, dtype: torch.dtype, last: bool = False) -> dict[str, int]:
    assert width % 8 == 0, "rows are read eight values at a time"
    return {
        "C": width,
        "POSITIONS": int(positions),
        "LAST": int(last),
        "THREADS": THREADS,
        "PER_THREAD": PER_THREAD,
        "HALF": half(dtype),
    }
