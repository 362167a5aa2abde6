"""Rotary embedding of Q and K, in place on the fused QKV buffer, and the per-head RMSNorm that some models put before it."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.launch import Kernel, half, runs_on

# Heads one thread works on: enough loads in flight, few enough registers.
_PER_THREAD = 4


def norm_rope(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, table: Tensor, positions: Tensor, eps: float, n_heads: int
) -> None:
    """Normalises and rotates the Q and K heads of `qkv` in place. V stays as it is.

    Args:
        qkv: [T, H + 2 K, D], contiguous; `n_heads` is H.
        q_weight, k_weight: [D], the weights of the two norms.
        table: [max_position_embeddings, D / 2, 2] fp32, cos and sin.
        positions: [T] int32, each token's row of `table`.
    """
    if not _takes(qkv):
        return reference.norm_rope(qkv, q_weight, k_weight, table, positions, eps, n_heads)
    _kernel(qkv, n_heads, norm=True)(len(qkv), qkv, q_weight, k_weight, table, positions, np.float32(eps))


def rope(qkv: Tensor, table: Tensor, positions: Tensor, n_heads: int) -> None:
    """Does what `norm_rope` does, without the norms."""
    if not _takes(qkv):
        return reference.rope(qkv, table, positions, n_heads)
    _kernel(qkv, n_heads, norm=False)(len(qkv), qkv, None, None, table, positions, np.float32(0))


def _takes(qkv: Tensor) -> bool:
    return runs_on(qkv) and qkv.shape[2] in (32, 64, 128, 256)


def _kernel(qkv: Tensor, n_heads: int, norm: bool) -> Kernel:
    _, heads, head_dim = qkv.shape
    return _made(head_dim, n_heads, (heads - n_heads) // 2, norm, qkv.dtype, qkv.device)


@cache
def _made(head_dim: int, heads: int, kv_heads: int, norm: bool, dtype: torch.dtype, device: torch.device) -> Kernel:
    defines = rope_defines(head_dim, heads, kv_heads, norm, dtype)
    return Kernel("rope", "rope", defines, device, defines["THREADS"])


def rope_defines(head_dim: int, heads: int, kv_heads: int, norm: bool, dtype: torch.dtype) -> dict[str, int]:
    slots = -(-(heads + kv_heads) // _PER_THREAD)
    threads = -(-slots * head_dim // 8 // 32) * 32
    return {
        "HEAD_DIM": head_dim,
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "PER_THREAD": _PER_THREAD,
        "THREADS": threads,
        "NORM": int(norm),
        "HALF": half(dtype),
    }
