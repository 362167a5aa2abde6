"""Every operation in plain torch. Tests compare our kernels with it; CPUs and float32 run it."""

import math
from collections.abc import Sequence
from itertools import pairwise, repeat

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.codes import E4M3_DIVISOR, Form
from engine.kernels.cache8 import Cache8


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """RMSNorm. Rounds the normalised value to x's dtype before the product with the weight, as in transformers' Qwen3RMSNorm."""
    if residual is not None:
        x = residual.add_(x)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def reorder(x: Tensor, order: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """x [T, C], order [C] int32 -> x[:, order], normalised first if there is a norm [C]."""
    return (x if norm is None else rms_norm(x, norm, eps)).index_select(1, order)


def embed_packed(token_ids: Tensor, records: Tensor, form: Form, dtype: torch.dtype, last: Tensor | None = None) -> Tensor:
    """`embed_packed` of `Packed.records`."""
    if last is not None:
        token_ids = torch.where(token_ids < 0, last[(-1 - token_ids).clamp(min=0)], token_ids)
    strips, strip_of = torch.unique(token_ids // 16, return_inverse=True)  # a record holds 16 rows
    return unpack(records[strips], form, dtype)[strip_of * 16 + token_ids % 16]


def layer_norm(
    x: Tensor, weight: Tensor, shift: Tensor, eps: float, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    if bias is not None:
        x = x + bias
    if residual is not None:
        x = x + residual
    return F.layer_norm(x, weight.shape, weight, shift, eps)


def rope_table(
    head_dim: int,
    theta: float,
    positions: int,
    device: torch.device,
    divisors: Sequence[float] = (1.0,),
    factor: float = 1.0,
) -> Tensor:
    """Returns cos and sin of the angles of each position, [positions, D / 2, 2] fp32, multiplied by `factor`.

    `divisors` divide the D / 2 frequencies. Angles are fp32. bf16 holds whole numbers exactly only up to 256, so distant
    positions would share an angle.
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    frequencies = 1.0 / theta**exponents / torch.tensor(divisors, device=device, dtype=torch.float32)
    angles = torch.outer(torch.arange(positions, device=device, dtype=torch.float32), frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=-1).mul_(factor)


def norm_rope(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, table: Tensor, positions: Tensor, eps: float, n_heads: int
) -> None:
    """`norm_rope`. Source: `apply_rotary_pos_emb` of transformers' Qwen3, which also rounds cos and sin to the dtype of `qkv`."""
    kv_heads = (qkv.shape[1] - n_heads) // 2
    for heads, weight in ((qkv[:, :n_heads], q_weight), (qkv[:, n_heads : n_heads + kv_heads], k_weight)):
        heads.copy_(rms_norm(heads, weight, eps))
    rope(qkv, table, positions, n_heads)


def rope(qkv: Tensor, table: Tensor, positions: Tensor, n_heads: int) -> None:
    cos, sin = _angles(table, positions, qkv.dtype)
    heads = qkv[:, : (qkv.shape[1] + n_heads) // 2]
    halves = heads.view(*heads.shape[:2], 2, -1)
    swapped = halves.flip(2).view(heads.shape)  # the second half before the first
    heads.mul_(cos).add_(swapped.mul_(sin))  # in place, for the memory of long texts


def rope_store(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    n_heads: int,
    cache: Tensor | Cache8,
    slots: Tensor,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> None:
    """`rope_store`. Here K is rotated in place, too."""
    if norms is None:
        rope(qkv, table, positions, n_heads)
    else:
        norm_rope(qkv, norms[0], norms[1], table, positions, norms[2], n_heads)
    new = qkv[:, n_heads:].view(len(qkv), 2, *cache.shape[2:]).transpose(0, 1)  # [2, T, K, D]
    rows = slots.long()
    parts = cache.parts(new) if isinstance(cache, Cache8) else [(cache, new)]
    if qkv.is_cuda:
        # Neither the host nor a shape may depend on the slots. So a token without a slot writes the same values as the token with
        # the largest slot. If no token has a slot, row 0 is written unchanged.
        stands_for = torch.where(rows >= 0, torch.arange(len(rows), device=rows.device), rows.argmax())
        kept, rows = (rows >= 0).any(), rows[stands_for].clamp(min=0)
        parts = [(part, torch.where(kept, what[:, stands_for], part[:, rows])) for part, what in parts]
    elif int(slots.min()) < 0:
        parts = [(part, what[:, rows >= 0]) for part, what in parts]
        rows = rows[rows >= 0]
    for part, what in parts:
        part.index_copy_(1, rows, what)


# On a CPU, the last angles of each table. All layers of a pass rotate by the same angles, and each pass has a new tensor of
# positions. On a GPU this is not done, because a CUDA graph writes new positions into the same tensor.
_last_angles: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
_MOST_TABLES = 4


def _angles(table: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each token's cos, and its sin with the sign for the swapped halves of a head: [T, 1, D] each."""
    last = _last_angles.get(id(table))
    if last is not None and last[0] is table and last[1] is positions and last[2].dtype == dtype:
        return last[2:]
    cos, sin = table[positions].to(dtype).unsqueeze(1).unbind(-1)  # [T, 1, D / 2] each
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    if not positions.is_cuda:
        if len(_last_angles) == _MOST_TABLES:
            _last_angles.clear()
        _last_angles[id(table)] = (table, positions, cos, sin)
    return cos, sin


def linear(x: Tensor, weight: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    return F.linear(x if norm is None else rms_norm(x, norm, eps), weight)


def quantize(
    x: Tensor, dtype: torch.dtype, block: int = 0, norm: Tensor | None = None, eps: float = 0.0, gated: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns (values, scale): rows in 8 bits, and each row's divisor. A row's largest value becomes the largest of `dtype`.

    Args:
        block: number of neighbouring columns that the Hadamard matrix rotates first; 0 for no rotation.
        norm: the weight of an RMSNorm that comes first.
        gated: SwiGLU of interleaved columns comes first.
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
    """Rounds to e4m3. Values beyond its range become its largest value. Values that are not finite become NaN."""
    most = torch.finfo(torch.float8_e4m3fn).max
    return x if x.dtype == torch.float8_e4m3fn else (x + 0 * x).clamp(-most, most).to(torch.float8_e4m3fn)


def hadamard(size: int, device: torch.device) -> Tensor:
    """Returns an orthogonal matrix, its own inverse, [size, size] fp32, by Sylvester's construction. `size` is a power of 2."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1))) / 2**0.5
    return matrix


# The values of the codes 0 to 15 in e2m1: the highest bit is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def values_of_floats(codes: Tensor, bits: int) -> Tensor:
    """Codes of 4 bits, in e2m1, or of 8 bits, in e4m3 -> fp32. The latter are divided by E4M3_DIVISOR (csrc/codes.cuh)."""
    if bits == 8:
        return codes.to(torch.uint8).view(torch.float8_e4m3fn).float() / E4M3_DIVISOR
    return torch.tensor(E2M1, device=codes.device)[codes.int()]


_E2M1_LARGEST, _E4M3_LARGEST = 6.0, 448.0
_E2M1_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between the codes 0 to 7
_LEAST_LARGEST = 1e-30  # of a row in NVFP4, so that the reciprocal of its scale is finite


def quantize_nvfp4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds the rows of x [M, K] to NVFP4. A row's largest value becomes 6 * 448.

    Returns: codes in e2m1, [M, K] uint8; the scale of each 16 columns, [M, K / 16] e4m3; the scale of each row, [M] fp32. A value
        is the product of all three. All results of a row with a value that is not finite are not finite.
    """
    groups = x.float().view(len(x), -1, 16)
    largest = groups.abs().amax(2)
    most = largest.amax(1)
    row_scale = torch.where(most > 0, most.clamp(min=_LEAST_LARGEST), most) * (1 / (_E2M1_LARGEST * _E4M3_LARGEST))
    factor = torch.where(row_scale > 0, row_scale.reciprocal(), 0.0)[:, None]
    scales = to_e4m3(largest * factor * (1 / _E2M1_LARGEST))
    inverse = torch.where(scales.float() > 0, factor / scales.float(), 0.0)
    values = groups * inverse[:, :, None]
    sizes = values.abs()
    codes = torch.zeros_like(values, dtype=torch.uint8)
    for number, middle in enumerate(_E2M1_MIDDLES):  # in the middle, the even code wins
        codes += sizes > middle if number % 2 == 0 else sizes >= middle
    return (codes | values.signbit().to(torch.uint8) << 3).flatten(1), scales, row_scale


def linear_nvfp4(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in fp32, with x rounded to NVFP4. `weight`: [N, K] fp32."""
    codes, scales, row_scale = quantize_nvfp4(x)
    values = torch.tensor(E2M1, device=x.device)[codes.int()].view(len(x), -1, 16) * scales.float()[:, :, None]
    return F.linear(values.flatten(1) * row_scale[:, None], weight)


def unpack(records: Tensor, form: Form, dtype: torch.dtype) -> Tensor:
    """Returns the matrix [N, K] of `Packed.records` (csrc/codes.cuh describes them). fp32 values are rounded once."""
    strips, chunks, _ = records.shape
    width = form.chunk
    row = torch.arange(16 * strips, device=records.device)[:, None]
    column = torch.arange(width * chunks, device=records.device)
    record, inside = records.view(strips * chunks, -1), column % width
    of = row // 16 * chunks + column // width  # [N, K]
    lane, pair = row % 8 * 4 + column % 8 // 2, column % 64 // 16 * 4 + column % 16 // 8 * 2 + row % 16 // 8

    def plane(start: int, bits: int) -> Tensor:
        """These bits of all codes. `start`: their first word in a record."""
        pairs = 16 // bits  # of a word
        words = record[of, start + (inside // 64 * 32 + lane) * bits + pair // pairs]
        return words >> bits * (pair % pairs) + 16 * (column % 2) & (1 << bits) - 1

    codes = plane(0, 4)
    if form.bits > 4:
        codes = codes | plane(2 * width, form.bits - 4) << 4
    places = (row % 8 * (width // form.group) + inside // form.group) * (2 if form.beside is None else 4) + row % 16 // 8
    places = places + width * form.bits  # a chunk's codes are 2 * width * bits bytes
    numbers = record.view(torch.int16)
    scales = numbers.view(torch.float16)[of, places].float()
    if form.beside == "mins":
        return (codes.float() * scales + numbers.view(torch.float16)[of, places + 2].float()).to(dtype)
    if form.is_float:
        return (values_of_floats(codes, form.bits) * scales).to(dtype)
    zeros: Tensor | int = numbers[of, places + 2] if form.beside == "zeros" else 1 << form.bits - 1
    codes = codes ^ 128 if form.bits == 8 else codes
    return ((codes - zeros).float() * scales).to(dtype)


def linear8(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, block_scale: Tensor | None = None) -> Tensor:
    """x_scale [M], weight_scale [N] and block_scale are as in `Quantized`. Returns: bf16."""
    wide = weight.float() if block_scale is None else scaled_blocks(weight, block_scale)
    return (F.linear(x.float(), wide) * x_scale[:, None] * weight_scale).to(torch.bfloat16)


def scaled_blocks(values: Tensor, block_scale: Tensor) -> Tensor:
    """values [N, K] times the scales [K / 128, N / 8] of blocks of 8 rows and 128 columns -> fp32."""
    return values.float() * block_scale.t().repeat_interleave(8, 0).repeat_interleave(128, 1)


def swiglu(gate_up: Tensor, interleaved: bool = False) -> Tensor:
    if interleaved:
        gate_up = gate_up.view(len(gate_up), -1, 2, 8).transpose(1, 2).flatten(1)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def geglu(gate_up: Tensor, tanh: bool) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh" if tanh else "none").mul_(up)


def gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def embed(
    token_ids: Tensor, positions: Tensor, words: Tensor, position_table: Tensor | None = None, last: Tensor | None = None
) -> Tensor:
    if last is not None:
        token_ids = torch.where(token_ids < 0, last[(-1 - token_ids).clamp(min=0)], token_ids)
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
    """softmax(q k^T / sqrt(D)) v within each sequence, one sequence after another.

    Args:
        q: [T, H, D]; k, v: [T, K, D] with H a multiple of K (grouped queries). Any strides.
        causal: a token sees itself and the tokens before it. Otherwise it sees the whole sequence.
        window: a token sees no token further away than this.
        bias: [H, 2 R + 1]. Column R + d is added to the scaled score of a key d tokens after the query; d is limited to -R .. R.
        prefixes: for each sequence, the rows [first, end) of the shared prefix before it. () without prefixes.
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


def cached_attention(
    q: Tensor,
    lengths: Sequence[int],
    cache: Tensor | Cache8,
    starts: Sequence[int],
    pages: Sequence[Sequence[int]],
    page_size: int,
    window: int | None,
) -> Tensor:
    """Causal attention of a batch of streams. The cache has the keys and values of all their tokens, also those of `q`.

    Args:
        q, lengths, window: as in `attention`.
        cache: [2, rows, K, D], the keys and the values of one layer, of q's dtype or in 8 bits.
        starts: for each stream, the number of its tokens before this batch.
        pages: for each stream, its pages. Page p is the rows [p * page_size, (p + 1) * page_size) of the cache.
    Returns: [T, H, D], contiguous.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if len(lengths) > 1 else None
    first = 0
    for length, start, of_stream in zip(lengths, starts, pages, strict=True):
        rows = slice(first, first := first + length)
        oldest = 0 if window is None else max(0, start - window)  # no query sees a key before this one
        keys, values = _from_pages(cache, of_stream, page_size, oldest, start + length, q.dtype)
        mixed = _one_sequence(q[rows], keys, values, True, window, None)
        if out is None:
            return mixed.contiguous()
        out[rows] = mixed
    assert out is not None, "a batch has sequences"
    return out


def attention_decode(q: Tensor, cache: Tensor | Cache8, items: Tensor, pages: Tensor, out: Tensor) -> Tensor:
    """Attention of one token of each sequence over the pages of a cache. All parts of a sequence are computed at once.

    Args:
        q: [B, H, D]; cache: [2, S, K, D], of q's dtype or in 8 bits.
        items: [n, 8], from `attention_decode.decode_items`; pages: [m]. A page is 128 slots.
        out: [B, H, D]. Rows without an item are not written.
    Returns: `out`.
    """
    slots: dict[int, list[Tensor]] = {}
    for row, page_at, first, end, *_ in items.tolist():
        if first < end:
            keys = torch.arange(first, end, device=q.device)
            slots.setdefault(row, []).append(pages[page_at + keys // 128].long() * 128 + keys % 128)
    for row, parts in slots.items():
        mine = torch.cat(parts)
        keys, values = cache.rows(mine, q.dtype) if isinstance(cache, Cache8) else cache.index_select(1, mine)
        out[row] = _one_query(q[row : row + 1], keys, values)[0].to(out.dtype)
    return out


def paged_attention(
    q: Tensor,
    cache: Tensor | Cache8,
    tiles: Tensor,
    pages: Tensor,
    page_size: int,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As the docstring of `kernels.paged_attention` describes. Without `out`, rows without a tile are NaN."""
    out = torch.full(q.shape, math.nan, dtype=q.dtype, device=q.device) if out is None else out
    lists = pages.tolist()
    for first, end, offset, shift in tiles.tolist():
        if first < end:
            oldest = 0 if window is None else max(0, first + shift - window)  # no row of the tile sees a key before this one
            keys, values = _from_pages(cache, lists[offset:], page_size, oldest, end + shift, q.dtype)
            out[first:end] = _one_sequence(q[first:end], keys, values, True, window, None)
    return out


def _from_pages(
    cache: Tensor | Cache8, pages: Sequence[int], page_size: int, start: int, stop: int, dtype: torch.dtype
) -> Tensor:
    """The keys and values of a stream's tokens [start, stop): [2, stop - start, K, D]. A view if the pages are consecutive.

    `dtype`: the dtype for the values of a cache in 8 bits.
    """
    first, last = start // page_size, -(-stop // page_size)
    needed = pages[first:last]
    offset = start - first * page_size
    if isinstance(cache, Cache8):
        at = torch.arange(offset, offset + stop - start, device=cache.values.device)
        tables = torch.tensor(needed, device=at.device)
        return cache.rows(tables[at // page_size] * page_size + at % page_size, dtype)
    if needed[-1] - needed[0] == len(needed) - 1 and all(b - a == 1 for a, b in pairwise(needed)):
        row = needed[0] * page_size + offset
        return cache[:, row : row + stop - start]
    paged = cache.view(2, -1, page_size, *cache.shape[2:]).index_select(1, torch.tensor(needed, device=cache.device))
    return paged.flatten(1, 2)[:, offset : offset + stop - start]


def _one_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one token that sees all keys. [1, H, D], [L, K, D] -> [1, H, D]

    The query heads of a group become queries of their key head. On a CPU this takes a third of the time of `enable_gqa`.
    """
    grouped = q.reshape(1, k.shape[1], -1, k.shape[2])  # [1, K, H / K, D]
    keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (k, v))  # [1, K, L, D]
    return F.scaled_dot_product_attention(grouped, keys, values).reshape(q.shape)


def _one_sequence(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, bias: Tensor | None) -> Tensor:
    """[L, H, D] -> [L, H, D]. If k and v have more tokens, q belongs to the last L of them."""
    if causal and len(q) == 1 and bias is None:
        return _one_query(q, k if window is None else k[-window - 1 :], v if window is None else v[-window - 1 :])
    grouped, first = q.shape[1] != k.shape[1], len(k) - len(q)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, L, D]
    if window is None and bias is None and not first:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)[0].transpose(0, 1)
    table = bias_by_distance(k.shape[2], causal, window, bias, q.dtype, q.device)
    out = q.new_empty(q.shape[2], q.shape[1], v.shape[3])  # [L, H, D]
    near = window if q.device.type == "cpu" else None  # on a GPU many launches take longer than unneeded keys
    for queries, keys in query_blocks(first, k.shape[2], causal, near, BLOCK_BYTES // (len(table) * q.itemsize)):
        mask = bias_by_key(table, queries, keys).flip(1).unsqueeze(0)  # [1, 1 or H, queries, keys]
        rows = slice(queries.start - first, queries.stop - first)
        mixed = F.scaled_dot_product_attention(q[:, :, rows], k[:, :, keys], v[:, :, keys], attn_mask=mask, enable_gqa=grouped)
        out[rows] = mixed[0].transpose(0, 1)
    return out


# Attention on a CPU takes at most this much for scores, and at most this much for a mask.
BLOCK_BYTES = 8 << 20
# Queries in a block if a window leaves keys unread. With fewer queries, products are small. With more, each query's row has more
# keys that the query does not see.
_LOCAL_QUERIES = 128
# Blocks of keys begin and end at multiples of this number: torch's bf16 softmax is half as fast on other row lengths.
ALIGNED_KEYS = 32


def query_blocks(first: int, length: int, causal: bool, window: int | None, most_scores: int) -> list[tuple[slice, slice]]:
    """The queries [first, length) of a sequence in blocks, and for each block the keys that its queries see.

    A block has at most `most_scores` pairs of query and key, or one query.
    """
    most, most_keys, reach = length - first, length, length
    if window is not None:
        near = max(_LOCAL_QUERIES, window)
        if near + 2 * (window + ALIGNED_KEYS) < length:
            most, most_keys, reach = min(most, near), near + 2 * (window + ALIGNED_KEYS), window
    if most * most_keys > most_scores:
        most = max(1, most_scores // most_keys)
        most = max(most // ALIGNED_KEYS * ALIGNED_KEYS, min(most, ALIGNED_KEYS))
    blocks = []
    for start in range(first, length, most):
        stop = min(start + most, length)
        end = stop if causal else stop + reach
        keys = slice(max(0, start - reach) // ALIGNED_KEYS * ALIGNED_KEYS, min(length, -(-end // ALIGNED_KEYS) * ALIGNED_KEYS))
        blocks.append((slice(start, stop), keys))
    return blocks


def bias_by_distance(
    length: int, causal: bool, window: int | None, bias: Tensor | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The number to add to a scaled score, by the distance from query to key. -inf if the query does not see the key.

    Returns: [1 or H, 2 L - 1]; column L - 1 + d is for a key d tokens after the query.
    """
    distances = torch.arange(1 - length, length, device=device)
    if bias is None:
        table = torch.zeros(1, len(distances), device=device)
    else:
        reach = bias.shape[1] // 2
        table = bias[:, distances.clamp(-reach, reach) + reach]
    reach = length if window is None else window
    hidden = (distances > (0 if causal else reach)) | (distances < -reach)
    return table.masked_fill(hidden, -math.inf).to(dtype)


def bias_by_key(table: Tensor, queries: slice, keys: slice) -> Tensor:
    """A view of `table` (`bias_by_distance`) by query and key, with the last query first: [1 or H, queries, keys].

    The queries are in reverse order, because then neighbouring rows of the view begin one column further right: a stride of 1.
    """
    num_keys = keys.stop - keys.start
    nearest = keys.start - (queries.stop - 1) + table.shape[1] // 2  # the first key, seen from the last query
    return table[:, nearest : nearest + queries.stop - queries.start + num_keys - 1].unfold(1, num_keys, 1)


def pool_mean(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The mean of each sequence. Source: `Pooling(pooling_mode="mean")` of sentence-transformers."""
    return torch.segment_reduce(hidden.float(), "mean", offsets=cu_seqlens.long(), unsafe=True)


def pool_max(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The maximum of each sequence. Source: `Pooling(pooling_mode="max")` of sentence-transformers."""
    return torch.segment_reduce(hidden.float(), "max", offsets=cu_seqlens.long(), unsafe=True)


def pool_weighted_mean(hidden: Tensor, cu_seqlens: Tensor, positions: Tensor) -> Tensor:
    """A token's weight is its position plus 1. Source: `Pooling(pooling_mode="weightedmean")` of sentence-transformers."""
    mean = pool_mean(hidden.float() * (positions + 1).unsqueeze(1), cu_seqlens)
    return mean * (2 / (cu_seqlens.diff() + 1)).unsqueeze(1)  # the weights of n tokens add up to n (n + 1) / 2, not to n


def pool_finish(pooled: Tensor, dimensions: Tensor, normalize: Tensor) -> Tensor:
    columns = torch.arange(pooled.shape[1], device=pooled.device)
    kept = columns < dimensions.unsqueeze(1)
    out = torch.where(kept, pooled.float(), 0.0)
    finite = torch.isfinite(out).all(dim=1, keepdim=True)
    out = torch.where(normalize.bool().unsqueeze(1), F.normalize(out, dim=-1, eps=1e-12), out)
    return torch.where(finite, out, torch.nan)


def sample(logits: Tensor, choices: Tensor, last: Tensor | None, out: Tensor) -> Tensor:
    """Sorts all tokens of all rows. `engine/heads/sampler.py` is faster on a CPU."""
    temperature, top_p, min_p = (choices[:, i : i + 1].view(torch.float32).double() for i in range(3))  # [B, 1] each
    top_k, low, high, slots, wanted = (choices[:, i : i + 1].long() for i in range(3, 8))
    uniform = (high & 0xFFFFFFFF).double() * 2.0**-32 + (low & 0xFFFFFFFF).double() * 2.0**-64
    wide = logits.float()
    finite = ~wide.log_softmax(1).isnan().any(1, keepdim=True)
    wide = wide.where(finite, 0)
    log_probs = wide.log_softmax(1)
    likeliest = wide.argmax(1, keepdim=True)
    scaled = (wide - wide.gather(1, likeliest)) / temperature.where(temperature > 0, 1).float()
    probs = scaled.softmax(1)
    sorted_probs = probs.sort(1, descending=True).values
    least = (min_p * sorted_probs[:, :1]).float().clamp(min=2.0**-149)
    kth = sorted_probs.gather(1, (top_k - 1).clamp(0, probs.shape[1] - 1))
    least = torch.where((top_k > 0) & (top_k < probs.shape[1]), kth.maximum(least), least)
    sums = sorted_probs.double().where(sorted_probs >= least, 0).cumsum(1)
    index = torch.searchsorted(sums, top_p * sums[:, -1:]).clamp(max=probs.shape[1] - 1)
    least = torch.where(top_p < 1, sorted_probs.gather(1, index).maximum(least), least)
    sums = probs.double().where(probs >= least, 0).cumsum(1)
    drawn = torch.searchsorted(sums, uniform * sums[:, -1:], right=True)
    drawn = drawn.minimum(torch.searchsorted(sums, sums[:, -1:].contiguous()))  # rounding may pass the end
    token_ids = torch.where(temperature > 0, drawn, likeliest).where(finite, 0)
    out[:, :2] = torch.cat((token_ids, finite), 1)
    out[:, 2] = log_probs.gather(1, token_ids).where(finite & (wanted > 0), 0).view(torch.int32)[:, 0]
    out[:, 3] = 0
    if last is not None:
        kept = slots[:, 0] >= 0
        last[slots[kept, 0]] = out[kept, 0]
    return out
