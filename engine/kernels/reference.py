"""Every operation in plain torch: the specification our kernels are tested against, and the path of CPUs and float32."""

import math
from collections.abc import Sequence
from itertools import repeat

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """The normalised value is rounded to x's dtype before it meets the weight, as in transformers' Qwen3RMSNorm."""
    if residual is not None:
        x = residual.add_(x)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def layer_norm(
    x: Tensor, weight: Tensor, shift: Tensor, eps: float, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    if bias is not None:
        x = x + bias
    if residual is not None:
        x = x + residual
    return F.layer_norm(x, weight.shape, weight, shift, eps)


def rope_table(head_dim: int, theta: float, positions: int, device: torch.device, scale: float = 1.0) -> Tensor:
    """cos and sin of every position's angles, [positions, D / 2, 2] fp32; all angles are divided by `scale`.

    Angles in fp32: bf16 holds whole numbers exactly only up to 256, so far positions would share an angle.
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(positions, device=device, dtype=torch.float32), 1.0 / theta**exponents / scale)
    return torch.stack((angles.cos(), angles.sin()), dim=-1)


def norm_rope(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, table: Tensor, positions: Tensor, eps: float, n_heads: int
) -> None:
    """Source: `apply_rotary_pos_emb` of transformers' Qwen3, cos and sin rounded to the dtype of `qkv` as there."""
    kv_heads = (qkv.shape[1] - n_heads) // 2
    for heads, weight in ((qkv[:, :n_heads], q_weight), (qkv[:, n_heads : n_heads + kv_heads], k_weight)):
        heads.copy_(rms_norm(heads, weight, eps))
    rope(qkv, table, positions, n_heads)


def rope(qkv: Tensor, table: Tensor, positions: Tensor, n_heads: int) -> None:
    kv_heads = (qkv.shape[1] - n_heads) // 2
    angles = table[positions].to(qkv.dtype).unsqueeze(1)  # [T, 1, D / 2, 2]
    cos, sin = (torch.cat((part, part), dim=-1) for part in angles.unbind(-1))  # [T, 1, D]
    heads = qkv[:, : n_heads + kv_heads]
    first, second = heads.chunk(2, dim=-1)
    heads.copy_(heads * cos + torch.cat((-second, first), dim=-1) * sin)


def linear(x: Tensor, weight: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    return F.linear(x if norm is None else rms_norm(x, norm, eps), weight)


def quantize(
    x: Tensor, dtype: torch.dtype, block: int = 0, norm: Tensor | None = None, eps: float = 0.0, gated: bool = False
) -> tuple[Tensor, Tensor]:
    """(values, scale): rows in 8 bits, the largest of each as large as `dtype` goes, and what they were divided by.

    Args:
        block: so many neighbouring columns are rotated among each other first, by the Hadamard matrix; 0: none.
        norm, gated: of an RMSNorm, or SwiGLU of interleaved columns, before.
    """
    if norm is not None:
        x = rms_norm(x, norm, eps)
    wide = swiglu(x.float(), interleaved=True) if gated else x.float()
    if block:
        wide = (wide.view(len(wide), -1, block) @ hadamard(block, x.device)).flatten(1)
    is_whole = dtype == torch.int8
    most = 127.0 if is_whole else torch.finfo(dtype).max
    scale = wide.abs().amax(dim=1) / most
    values = wide / torch.where(scale > 0, scale, 1.0)[:, None]
    return (values.round() if is_whole else values.clamp(-most, most)).to(dtype), scale


def to_e4m3(x: Tensor) -> Tensor:
    """What is larger than e4m3's largest becomes that, what is not finite NaN."""
    most = torch.finfo(torch.float8_e4m3fn).max
    return x if x.dtype == torch.float8_e4m3fn else (x + 0 * x).clamp(-most, most).to(torch.float8_e4m3fn)


def hadamard(size: int, device: torch.device) -> Tensor:
    """Orthogonal and its own inverse, [size, size] fp32; size is a power of 2. Sylvester's construction."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1))) / 2**0.5
    return matrix


def linear8(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    return (F.linear(x.float(), weight.float()) * x_scale[:, None] * weight_scale).to(torch.bfloat16)


def swiglu(gate_up: Tensor, interleaved: bool = False) -> Tensor:
    if interleaved:
        gate_up = gate_up.view(len(gate_up), -1, 2, 8).transpose(1, 2).flatten(1)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def geglu(gate_up: Tensor, tanh: bool) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh" if tanh else "none") * up


def gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def embed(token_ids: Tensor, positions: Tensor, words: Tensor, position_table: Tensor | None = None) -> Tensor:
    hidden = F.embedding(token_ids, words)
    return hidden if position_table is None else hidden + F.embedding(positions, position_table)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    causal: bool,
    window: int | None = None,
    bias: Tensor | None = None,
    prefixes: Sequence[tuple[int, int]] = (),
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v within each sequence, one sequence after the other.

    Args:
        q: [T, H, D]; k, v: [T, K, D] with H a multiple of K (grouped queries). Any strides.
        causal: a token sees itself and what is before it; else the whole sequence.
        window: it sees no token further away than this.
        bias: [H, 2 R + 1], added to the scaled score of a key d tokens after the query: column R + d, at most R either way.
        prefixes: where prefixes are shared, of each sequence the rows [first, end) that lie before it.
    Returns: [T, H, D], contiguous.
    """
    if len(lengths) == 1:
        return _one_sequence(q, k, v, causal, window, bias).contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    start = 0
    for length, prefix in zip(lengths, prefixes or repeat((0, 0)), strict=False):
        rows = slice(start, start := start + length)
        keys, values = k[rows], v[rows]
        if prefix[1] > prefix[0]:
            keys, values = (torch.cat((x[slice(*prefix)], x[rows])) for x in (k, v))
        out[rows] = _one_sequence(q[rows], keys, values, causal, window, bias)
    return out


def _one_sequence(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, bias: Tensor | None) -> Tensor:
    """[L, H, D] -> [L, H, D]; k and v may be longer, q then being of the last tokens."""
    mask = None
    if window is not None or bias is not None or len(q) < len(k):
        mask = q.new_zeros(1) if bias is None else distance_bias(bias, len(k))[:, -len(q) :].to(q.dtype)  # [H, L, keys]
        mask = mask.masked_fill(~visible(len(k), causal, window, q.device)[-len(q) :], -math.inf)
        causal = False
    grouped = q.shape[1] != k.shape[1]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, L, D]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
    return out[0].transpose(0, 1)


def visible(length: int, causal: bool, window: int | None, device: torch.device) -> Tensor:
    """Which keys (columns) a query (row) sees, [L, L]."""
    at = torch.arange(length, device=device)
    distance = at[:, None] - at[None, :]
    window = length if window is None else window
    return (distance <= window) & (distance >= (0 if causal else -window))


def distance_bias(bias: Tensor, length: int) -> Tensor:
    """[H, 2 R + 1], by distance -> [H, L, L], by query and key."""
    reach = bias.shape[1] // 2
    at = torch.arange(length, device=bias.device)
    return bias[:, (at[None, :] - at[:, None]).clamp(-reach, reach) + reach]


def pool_mean(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Source: `Pooling(pooling_mode="mean")` of sentence-transformers."""
    return torch.segment_reduce(hidden.float(), "mean", offsets=cu_seqlens.long(), unsafe=True)


def pool_max(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Source: `Pooling(pooling_mode="max")` of sentence-transformers."""
    return torch.segment_reduce(hidden.float(), "max", offsets=cu_seqlens.long(), unsafe=True)


def pool_weighted_mean(hidden: Tensor, cu_seqlens: Tensor, positions: Tensor) -> Tensor:
    """A token's weight is its position plus 1. Source: `Pooling(pooling_mode="weightedmean")` of sentence-transformers."""
    mean = pool_mean(hidden.float() * (positions + 1).unsqueeze(1), cu_seqlens)
    return mean * (2 / (cu_seqlens.diff() + 1)).unsqueeze(1)  # n tokens weigh n (n + 1) / 2, not n


def pool_finish(pooled: Tensor, dimensions: Tensor, normalize: Tensor) -> Tensor:
    columns = torch.arange(pooled.shape[1], device=pooled.device)
    kept = columns < dimensions.unsqueeze(1)
    out = torch.where(kept, pooled.float(), 0.0)
    finite = torch.isfinite(out).all(dim=1, keepdim=True)
    out = torch.where(normalize.bool().unsqueeze(1), F.normalize(out, dim=-1, eps=1e-12), out)
    return torch.where(finite, out, torch.nan)
