"""Chooses the next token of each row from its logits, on the device: temperature, min-p, top-k, top-p and the draw.

`engine/heads/sampler.py` is the specification of the options. Before this step it adds masks, biases and penalties to the logits.
"""

from functools import cache

import torch
from torch import Tensor

from engine.draws import NUM_CHOICES
from engine.errors import BackendError
from engine.kernels import reference
from engine.kernels.launch import Kernel, half, num_sms, runs_on

GROUP = 256  # tokens whose sums the first kernel writes (csrc/sample.cu)
MOST_CANDIDATES = 4096  # at least the number of groups of a row
_MOST_TOKENS = 1 << 19  # with fewer tokens no sum of the kernels overflows
_SUM_THREADS, _DRAW_THREADS = 256, 512
UNROLL = 4  # groups that a warp loads at once if there are enough rows to fill the device


def sample(logits: Tensor, choices: Tensor, last: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Chooses a token for each row. The same row gets the same token in any batch.

    Temperature 0 takes the likeliest token, with the lowest id if several are equal. Otherwise min-p, then top-k, then top-p keep
    some tokens. In the order of their ids they divide [0, 1) by their probabilities, and the row's random number selects one.

    Args:
        logits: [B, V] fp32, bf16 or fp16, contiguous rows, V below 2^19. Masked tokens have -inf.
        choices: [B, 8] int32, from `choices_of`.
        last: [num_slots] int32; last[slot] becomes the row's token. Two rows may not have the same slot.
        out: [B, 4] int32.
    Returns: `out`, with four numbers for each row: the token id; 1, or 0 if a logit is NaN or +inf or all are -inf (then the
        token is 0); the bits of the token's fp32 log-probability at temperature 1, or 0 if it is not wanted; 0.
    Raises: BackendError for shapes that do not fit.
    """
    num_rows, vocab_size = logits.shape
    if choices.shape != (num_rows, NUM_CHOICES):
        raise BackendError(
            f"choices of shape {tuple(choices.shape)} do not fit {num_rows} rows; they need [{num_rows}, {NUM_CHOICES}]"
        )
    if not 0 < vocab_size < _MOST_TOKENS:
        raise BackendError(f"rows of {vocab_size} logits cannot be sampled; a row has 1 to {_MOST_TOKENS - 1}")
    if out is None:
        out = torch.empty(num_rows, 4, dtype=torch.int32, device=logits.device)
    if not (runs_on(logits) or (logits.is_cuda and logits.dtype == torch.float32)):
        return reference.sample(logits, choices, last, out)
    groups = -(-vocab_size // GROUP)
    sums = torch.empty(num_rows, 3, groups, dtype=torch.float32, device=logits.device)
    stride = logits.stride(0)
    bytes_apart = (logits.data_ptr(), stride * logits.element_size(), vocab_size * logits.element_size())
    vector = all(each % 16 == 0 for each in bytes_apart)
    warps = _SUM_THREADS // 32
    unroll = UNROLL if num_rows * groups >= 2 * num_sms(logits.device) * warps * UNROLL else 1
    sum_kernel = _kernel("sample_sums", logits.dtype, vector, unroll, logits.device)
    sum_kernel((-(-groups // (warps * unroll)), num_rows), logits, choices, sums, vocab_size, stride)
    draw_kernel = _kernel("sample_draw", logits.dtype, vector, unroll, logits.device)
    num_slots = 0 if last is None else len(last)
    draw_kernel(num_rows, logits, choices, sums, last, out, vocab_size, stride, num_slots)
    return out


@cache
def _kernel(entry: str, dtype: torch.dtype, vector: bool, unroll: int, device: torch.device) -> Kernel:
    threads = _SUM_THREADS if entry == "sample_sums" else _DRAW_THREADS
    return Kernel("sample", entry, sample_defines(dtype, vector, unroll), device, threads)


def sample_defines(dtype: torch.dtype, vector: bool, unroll: int) -> dict[str, int]:
    return {
        "FP32": int(dtype == torch.float32),
        "VECTOR": int(vector),
        "UNROLL": unroll,
        "SUM_THREADS": _SUM_THREADS,
        "DRAW_THREADS": _DRAW_THREADS,
        "MOST_CANDIDATES": MOST_CANDIDATES,
        "HALF": half(dtype),
    }
