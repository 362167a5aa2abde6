"""The specification of our kernels, compared with an implementation that computes one token and one head at a time."""

import math

import pytest
import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.linear import interleaved, linear_swiglu
from engine.kernels.tiles import paged_tiles

LENGTHS = (1, 5, 2, 19, 1, 8)
STARTS = [sum(LENGTHS[:index]) for index in range(len(LENGTHS))]
TOKENS = [(start, place) for start, length in zip(STARTS, LENGTHS, strict=True) for place in range(length)]
EPS = 1e-6


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def positions() -> Tensor:
    return torch.tensor([place for _, place in TOKENS], dtype=torch.int32)


@pytest.mark.parametrize("window", [None, 0, 3, 100])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("lengths", [LENGTHS, (sum(LENGTHS),)], ids=["many", "one"])
def test_attention(lengths: tuple[int, ...], heads: tuple[int, int], causal: bool, window: int | None) -> None:
    total, (n_heads, n_kv_heads), head_dim = sum(lengths), heads, 8
    qkv = torch.randn(total, n_heads + 2 * n_kv_heads, head_dim, dtype=torch.float64)
    q, k, v = qkv.split((n_heads, n_kv_heads, n_kv_heads), dim=1)
    at, text = torch.arange(total), torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    distance = at[:, None] - at[None, :]
    seen = text[:, None] == text[None, :]
    if causal:
        seen &= distance >= 0
    if window is not None:
        seen &= distance.abs() <= window
    expected = torch.empty_like(q)
    for head in range(n_heads):
        kv_head = head // (n_heads // n_kv_heads)
        scores = q[:, head] @ k[:, kv_head].T / math.sqrt(head_dim)
        expected[:, head] = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v[:, kv_head]
    out = reference.attention(q, k, v, lengths, causal, window)
    assert out.is_contiguous()
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_attention_behind_a_prefix_is_that_of_the_whole_text(heads: tuple[int, int], window: int | None) -> None:
    (n_heads, n_kv_heads), head_dim = heads, 8
    qkv = torch.randn(26, n_heads + 2 * n_kv_heads, head_dim, dtype=torch.float64)
    split = (n_heads, n_kv_heads, n_kv_heads)
    lengths, prefixes = (3, 5, 1, 4, 6, 7), [(0, 0), (0, 0), (3, 8), (3, 8), (0, 0), (3, 8)]
    out = reference.attention(*qkv.split(split, dim=1), lengths, True, window, prefixes=prefixes)
    ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
    for length, end, prefix in zip(lengths, ends, prefixes, strict=True):
        whole = torch.cat((qkv[slice(*prefix)], qkv[end - length : end]))
        expected = reference.attention(*whole.split(split, dim=1), (len(whole),), True, window)
        torch.testing.assert_close(out[end - length : end], expected[-length:])


@pytest.mark.parametrize("window", [None, 0, 3, 100])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_paged_attention_is_that_of_the_whole_sequences(heads: tuple[int, int], window: int | None) -> None:
    """The queries are the last tokens of each sequence, in tiles of at most 4 tokens. A page has 4 tokens."""
    qkv = torch.randn(sum(LENGTHS), heads[0] + 2 * heads[1], 8, dtype=torch.float64)
    q, k, v = qkv.split((heads[0], heads[1], heads[1]), dim=1)
    chunks = [min(length, 6) for length in LENGTHS]
    cache, pages, offsets = torch.full((2, 100, heads[1], 8), math.nan, dtype=torch.float64), [], []
    free = torch.randperm(25).tolist()
    for start, length in zip(STARTS, LENGTHS, strict=True):
        offsets.append(len(pages))
        for place in range(length):
            if place % 4 == 0:
                pages.append(free.pop())
            cache[:, pages[-1] * 4 + place % 4] = torch.stack((k[start + place], v[start + place]))
    rows = torch.cat([torch.arange(s + n - c, s + n) for s, n, c in zip(STARTS, LENGTHS, chunks, strict=True)])
    tiles = paged_tiles(chunks, [n - c for n, c in zip(LENGTHS, chunks, strict=True)], offsets, 0, 4)
    found = reference.paged_attention(q[rows], cache, torch.from_numpy(tiles), torch.tensor(pages), 4, window)
    torch.testing.assert_close(found, reference.attention(q, k, v, LENGTHS, True, window)[rows])


@pytest.mark.parametrize("norm", [True, False])
def test_rope(norm: bool) -> None:
    n_heads, n_kv_heads, head_dim, theta = 5, 2, 8, 100.0
    qkv = torch.randn(sum(LENGTHS), n_heads + 2 * n_kv_heads, head_dim)
    q_weight, k_weight = torch.randn(2, head_dim)
    expected = qkv.clone()
    for token, (_, place) in enumerate(TOKENS):
        for head in range(n_heads + n_kv_heads):
            x = qkv[token, head]
            if norm:
                x = x / (x.square().mean() + EPS).sqrt() * (q_weight if head < n_heads else k_weight)
            for i in range(head_dim // 2):
                angle = place / theta ** (2 * i / head_dim)
                pair = complex(x[i], x[i + head_dim // 2]) * complex(math.cos(angle), math.sin(angle))
                expected[token, head, i], expected[token, head, i + head_dim // 2] = pair.real, pair.imag
    table = reference.rope_table(head_dim, theta, max(LENGTHS), torch.device("cpu"))
    if norm:
        reference.norm_rope(qkv, q_weight, k_weight, table, positions(), EPS, n_heads)
    else:
        reference.rope(qkv, table, positions(), n_heads)
    torch.testing.assert_close(qkv, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("padding", [0, 3, sum(LENGTHS)])
def test_rope_store_writes_the_rows_of_the_tokens_that_have_a_slot(padding: int, norm: bool) -> None:
    num_tokens, n_heads, n_kv_heads, head_dim, size = sum(LENGTHS), 5, 2, 8, 50
    qkv = torch.randn(num_tokens, n_heads + 2 * n_kv_heads, head_dim)
    weights = torch.randn(head_dim), torch.randn(head_dim)
    cache = torch.randn(2, size, n_kv_heads, head_dim)
    slots = torch.randperm(size)[:num_tokens].int()
    slots[num_tokens - padding :] = -1
    table = reference.rope_table(head_dim, 100.0, max(LENGTHS), torch.device("cpu"))
    rotated, expected = qkv.clone(), cache.clone()
    if norm:
        reference.norm_rope(rotated, *weights, table, positions(), EPS, n_heads)
    else:
        reference.rope(rotated, table, positions(), n_heads)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[0, slot] = rotated[token, n_heads : n_heads + n_kv_heads]
            expected[1, slot] = qkv[token, n_heads + n_kv_heads :]
    reference.rope_store(qkv, table, positions(), n_heads, cache, slots, (*weights, EPS) if norm else None)
    assert torch.equal(cache, expected)
    assert torch.equal(qkv, rotated)


def test_rope_turns_each_tensor_by_its_own_table_and_positions() -> None:
    """The reference keeps the angles of the latest positions for the next layer."""
    tables = [reference.rope_table(8, theta, 32, torch.device("cpu")) for theta in (1e4, 1e2)]
    kept = [positions(), positions() + 1]
    found = []
    for at in (*kept, kept[0]):
        for table in (*tables, tables[0]):
            for dtype in (torch.float64, torch.bfloat16):
                qkv = torch.ones(len(at), 3, 8, dtype=dtype)
                reference.rope(qkv, table, at, 1)
                cos, sin = table[at.long()].to(dtype).unbind(-1)
                found.append(torch.equal(qkv[:, 0], torch.cat((cos - sin, cos + sin), dim=1)))
                assert torch.equal(qkv[:, 2], torch.ones(len(at), 8, dtype=dtype))
    assert all(found)


def test_swiglu_of_columns_in_turn() -> None:
    x, gate_up = torch.randn(5, 7), torch.randn(2 * 24, 7)
    expected = reference.swiglu(x @ gate_up.t())
    torch.testing.assert_close(reference.swiglu(x @ interleaved(gate_up).t(), interleaved=True), expected)
    torch.testing.assert_close(linear_swiglu(x, interleaved(gate_up)), expected)


@pytest.mark.parametrize("tanh", [True, False])
def test_geglu(tanh: bool) -> None:
    gate, up = torch.randn(2, 5, 8).double()
    if tanh:
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        expected = up * gate / 2 * (1 + torch.tanh(inner))
    else:
        expected = up * gate / 2 * (1 + torch.erf(gate / math.sqrt(2)))
    torch.testing.assert_close(reference.geglu(torch.cat((gate, up), dim=1), tanh), expected)


def test_rms_norm_adds_to_the_residual_in_place() -> None:
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    total = x + residual
    out = reference.rms_norm(x, weight, EPS, residual)
    torch.testing.assert_close(out, torch.stack([y / math.sqrt(y.square().mean() + EPS) * weight for y in total]))
    assert torch.equal(residual, total)


def test_layer_norm_adds_bias_and_residual_first() -> None:
    x, residual = torch.randn(2, 3, 8)
    bias, weight, shift = torch.randn(3, 8)
    expected = [(y - y.mean()) / math.sqrt(y.var(correction=0) + EPS) * weight + shift for y in x + bias + residual]
    torch.testing.assert_close(reference.layer_norm(x, weight, shift, EPS, bias, residual), torch.stack(expected))


def test_embed_adds_the_row_of_each_position() -> None:
    words, table = torch.randn(20, 8), torch.randn(max(LENGTHS), 8)
    token_ids = torch.randint(20, (sum(LENGTHS),), dtype=torch.int32)
    expected = [words[token] + table[place] for token, (_, place) in zip(token_ids.tolist(), TOKENS, strict=True)]
    assert torch.equal(reference.embed(token_ids, positions(), words, table), torch.stack(expected))


def test_embed_takes_an_id_below_0_from_the_last_tokens() -> None:
    words, last = torch.randn(20, 8), torch.tensor([7, 19, 3], dtype=torch.int32)
    token_ids = torch.tensor([4, -1, -3, 0, -2], dtype=torch.int32)
    ours = reference.embed(token_ids, torch.zeros_like(token_ids), words, last=last)
    assert torch.equal(ours, words[[4, 7, 3, 0, 19]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pool_mean(dtype: torch.dtype) -> None:
    hidden = torch.randn(sum(LENGTHS), 8).to(dtype)
    cu_seqlens = torch.tensor([*STARTS, sum(LENGTHS)], dtype=torch.int32)
    expected = [sum(hidden[start : start + n].float()) / n for start, n in zip(STARTS, LENGTHS, strict=True)]
    pooled = reference.pool_mean(hidden, cu_seqlens)
    assert pooled.dtype == torch.float32
    torch.testing.assert_close(pooled, torch.stack(expected))


def test_pool_finish() -> None:
    inf, nan = math.inf, math.nan
    rows = [  # pooled, dimensions, normalize -> vector
        ([3, 4, 12], 3, 1, [3 / 13, 4 / 13, 12 / 13]),
        ([3, 4, 12], 2, 1, [0.6, 0.8, 0]),
        ([3, 4, 12], 2, 0, [3, 4, 0]),
        ([-5, nan, inf], 1, 1, [-1, 0, 0]),
        ([0, 0, 7], 2, 1, [0, 0, 0]),
        ([3, nan, 4], 2, 0, [nan] * 3),
        ([3, 4, -inf], 3, 0, [nan] * 3),
    ]
    pooled, dimensions, normalize, vectors = zip(*rows, strict=True)
    sizes, flags = torch.tensor(dimensions, dtype=torch.int32), torch.tensor(normalize, dtype=torch.int32)
    out = reference.pool_finish(torch.tensor(pooled), sizes, flags)
    torch.testing.assert_close(out, torch.tensor(vectors), equal_nan=True)
