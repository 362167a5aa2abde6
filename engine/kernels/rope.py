"""Per-head RMSNorm of Q and K and rotary embedding, in place on the fused QKV buffer."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.launch import Kernel, half, runs_on

# Heads one thread works on: enough loads in flight, few enough registers.
_PER_THREAD = 4


def norm_rope(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, table: Tensor, bounds: Tensor, eps: float, n_heads: int) -> None:
    """Normalise and rotate the Q and K heads of `qkv` where they lie; V is not touched.

    Args:
        qkv: [T, H + 2 K, D], contiguous; `n_heads` is H.
        q_weight, k_weight: [D], of the two norms.
        table: [positions, D / 2, 2] fp32, cos and sin.
        bounds: [T, 2] int32, the sequence each token belongs to.
    """
    num_tokens, heads, head_dim = qkv.shape
    if not runs_on(qkv) or head_dim not in (32, 64, 128, 256):
        return reference.norm_rope(qkv, q_weight, k_weight, table, bounds, eps, n_heads)
    kv_heads = (heads - n_heads) // 2
    kernel = _kernel(head_dim, n_heads, kv_heads, qkv.dtype, qkv.device)
    kernel(num_tokens, qkv, q_weight, k_weight, table, bounds, np.float32(eps))


@cache
def _kernel(head_dim: int, heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device) -> Kernel:
    defines = rope_defines(head_dim, heads, kv_heads, dtype)
    return Kernel("rope", "norm_rope", defines, device, defines["THREADS"])


def rope_defines(head_dim: int, heads: int, kv_heads: int, dtype: torch.dtype) -> dict[str, int]:
    slots = -(-(heads + kv_heads) // _PER_THREAD)
    threads = -(-slots * head_dim // 8 // 32) * 32
    return {
        "HEAD_DIM": head_dim,
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "PER_THREAD": _PER_THREAD,
        "THREADS": threads,
        "HALF": half(dtype),
    }
