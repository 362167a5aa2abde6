"""Rotary embedding of Q and K, in place on the fused QKV buffer. Some models have an RMSNorm of each head before it.

`rope_store` also writes K and V to the KV cache of a stream.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from engine.errors import BackendError
from engine.kernels import reference
from engine.kernels.cache8 import Cache8, macro
from engine.kernels.launch import Kernel, half, runs_on

# Heads of one thread. More heads need too many registers. Fewer heads have too few loads in flight.
_PER_THREAD = 4


Norms = tuple[Tensor, Tensor, float]  # the weights of Q's and of K's norm, [D] each, and eps


def norm_rope(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, table: Tensor, positions: Tensor, eps: float, n_heads: int
) -> None:
    """Normalises and rotates the Q and K heads of `qkv` in place. V does not change.

    Args:
        qkv: [T, H + 2 K, D], contiguous; `n_heads` is H.
        q_weight, k_weight: [D], the weights of the two norms.
        table: [max_position_embeddings, D / 2, 2] fp32, cos and sin.
        positions: [T] int32, each token's row of `table`.
    """
    if not _takes(qkv):
        return reference.norm_rope(qkv, q_weight, k_weight, table, positions, eps, n_heads)
    _kernel(qkv, n_heads, True, False)(len(qkv), qkv, q_weight, k_weight, table, positions, None, None, None, 0, np.float32(eps))


def rope(qkv: Tensor, table: Tensor, positions: Tensor, n_heads: int) -> None:
    """The same as `norm_rope`, without the norms."""
    if not _takes(qkv):
        return reference.rope(qkv, table, positions, n_heads)
    _kernel(qkv, n_heads, False, False)(len(qkv), qkv, None, None, table, positions, None, None, None, 0, np.float32(0))


def rope_store(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    n_heads: int,
    cache: Tensor | Cache8,
    slots: Tensor,
    norms: Norms | None = None,
) -> None:
    """The same as `rope`, or as `norm_rope` with `norms`. Also copies K and V of each token to the KV cache.

    Q is rotated in place. Afterwards K of `qkv` is undefined for tokens with a slot, and rotated for other tokens. V stays.

    Args:
        cache: [2, S, K, D], contiguous, dtype of `qkv`: keys, then values. A `Cache8` gets them rounded to 8 bits.
        slots: [T] int32, the token's row of the cache, below S. Negative: the token is not stored.
    Raises: BackendError if the cache does not fit `qkv`.
    """
    _, heads, head_dim = qkv.shape
    kv_heads = (heads - n_heads) // 2
    if cache.shape[0] != 2 or cache.shape[2:] != (kv_heads, head_dim):
        raise BackendError(
            f"a cache of shape {tuple(cache.shape)} does not fit {kv_heads} key heads of {head_dim}; "
            f"it needs [2, rows, {kv_heads}, {head_dim}]"
        )
    if not _takes(qkv):
        return reference.rope_store(qkv, table, positions, n_heads, cache, slots, norms)
    q_weight, k_weight, eps = norms or (None, None, 0.0)
    kernel = _kernel(qkv, n_heads, norms is not None, True, macro(cache))
    values, scales = (cache.values, cache.scales) if isinstance(cache, Cache8) else (cache, None)
    kernel(len(qkv), qkv, q_weight, k_weight, table, positions, values, scales, slots, cache.shape[1], np.float32(eps))


def _takes(qkv: Tensor) -> bool:
    return runs_on(qkv) and qkv.shape[2] in (32, 64, 128, 256)


def _kernel(qkv: Tensor, n_heads: int, norm: bool, store: bool, kv8: int = 0) -> Kernel:
    _, heads, head_dim = qkv.shape
    return _made(head_dim, n_heads, (heads - n_heads) // 2, norm, qkv.dtype, qkv.device, store, kv8)


@cache
def _made(
    head_dim: int,
    heads: int,
    kv_heads: int,
    norm: bool,
    dtype: torch.dtype,
    device: torch.device,
    store: bool,
    kv8: int,
) -> Kernel:
    defines = rope_defines(head_dim, heads, kv_heads, norm, dtype, store, kv8)
    return Kernel("rope", "rope", defines, device, defines["THREADS"])


def rope_defines(
    head_dim: int,
    heads: int,
    kv_heads: int,
    norm: bool,
    dtype: torch.dtype,
    store: bool = False,
    kv8: int = 0,
) -> dict[str, int]:
    """The macros of the kernel. `kv8`: from `cache8.macro`."""
    slots = -(-(heads + (1 + store) * kv_heads) // _PER_THREAD)
    threads = -(-slots * head_dim // 8 // 32) * 32
    return {
        "HEAD_DIM": head_dim,
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "PER_THREAD": _PER_THREAD,
        "THREADS": threads,
        "NORM": int(norm),
        "STORE": int(store),
        "KV8": kv8,
        "HALF": half(dtype),
    }
