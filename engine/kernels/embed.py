"""Embedding gather."""

from functools import cache

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.launch import Kernel, half, runs_on

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


@cache
def _kernel(width: int, positions: bool, dtype: torch.dtype, device: torch.device, last: bool = False) -> Kernel:
    return Kernel("embed", "embed", embed_defines(width, positions, dtype, last), device, THREADS)


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
