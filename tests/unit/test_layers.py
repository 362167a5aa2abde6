"""Layers against their specification: the fused CPU paths equal plain torch for all lengths and strides."""

import math
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from closeness import assert_as_close_as_torch
from torch.nn import functional as F

from engine.heads.pool import Pool
from engine.kernels import quantize_weight, reference
from engine.kernels.reference import attention, rope_table
from engine.model.config import Pooling
from engine.model.families.jina_bert import alibi_slopes, symmetric_alibi
from engine.model.layers import attention as attention_layer
from engine.model.layers.attention import Attention
from engine.model.layers.linear import CudaLinear, DecodingLinear, Linear, OneDnnLinear, PlainLinear
from engine.model.layers.moe import Experts
from engine.model.layers.norm import LayerNorm, Residual, RMSNorm
from engine.options import EmbedOptions
from engine.run.batch import PackedBatch
from engine.run.pack import BatchPacker
from engine.run.prefixes import Layout
from engine.sequences import Sequences

# Runs in a process of its own, because oneDNN reads its limits at the process's first operator.
_PASSES = """
import ctypes, torch
from engine.model.layers.linear import Linear, OneDnnLinear

class Allocated(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks used free keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Allocated
layer = Linear.of(torch.ones(64, 64))
assert type(layer) is OneDnnLinear
for num_tokens in range(1, 1201):
    layer(torch.ones(num_tokens, 64))
    if num_tokens in (600, 1200):
        print(libc.mallinfo2().used)
"""


ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
RAGGED = [1, 31, 32, 33, 64, 7, 7, 100]


def batch_of(lengths: list[int]) -> PackedBatch:
    return BatchPacker("mean", 8, None).pack([np.zeros(length, dtype=np.int32) for length in lengths])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 77])
@pytest.mark.parametrize(
    ("bias", "gelu", "residual"), [(True, False, False), (True, True, False), (True, False, True), (False, False, True)]
)
def test_linear(dtype: torch.dtype, rows: int, bias: bool, gelu: bool, residual: bool) -> None:
    torch.manual_seed(0)
    wide = torch.randn(rows, 128).to(dtype)
    x = wide[:, :64]  # rows are not contiguous
    weight, b, r = torch.randn(48, 64).to(dtype) / 8, torch.randn(48).to(dtype), torch.randn(rows, 48).to(dtype)
    around, before = (b if bias else None, gelu), r.clone()
    ours, low = Linear.of(weight, *around), PlainLinear(weight, *around)
    exact = PlainLinear(weight.double(), b.double() if bias else None, gelu)
    if residual:
        found, rough, true = (layer.add_to(r.to(x.dtype), x) for layer, x in ((ours, x), (low, x), (exact, x.double())))
        assert_as_close_as_torch(found.added(), rough.added(), true.added())
    else:
        assert_as_close_as_torch(ours(x), low(x), exact(x.double()))
    assert torch.equal(r, before)


@pytest.mark.parametrize("rows", [1, 4, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_that_decodes(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    weight, b = torch.randn(48, 64).bfloat16() / 8, torch.randn(48).bfloat16() if bias else None
    x, r = torch.randn(rows, 64).bfloat16(), torch.randn(rows, 48).bfloat16()
    ours, low = Linear.of(weight, b, decodes=True), PlainLinear(weight, b)
    exact = PlainLinear(weight.double(), None if b is None else b.double())
    assert_as_close_as_torch(ours(x), low(x), exact(x.double()))
    found, rough, true = (layer.add_to(r.to(x.dtype, copy=True), x) for layer, x in ((ours, x), (low, x), (exact, x.double())))
    assert_as_close_as_torch(found.added(), rough.added(), true.added())


def test_only_a_weight_that_fits_float16_gets_a_copy_in_it() -> None:
    weight = torch.randn(48, 64).bfloat16()
    if not isinstance(Linear.of(weight, decodes=True), DecodingLinear):
        pytest.skip("this CPU has no oneDNN in bf16, or no FBGEMM")
    for other in (weight.float(), weight * 65536):
        assert type(Linear.of(other, decodes=True)) is OneDnnLinear
    assert type(Linear.of(weight)) is OneDnnLinear


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc how much memory is allocated")
def test_passes_of_ever_new_sizes_take_no_more_memory() -> None:
    if type(Linear.of(torch.ones(64, 64))) is not OneDnnLinear:
        pytest.skip("torch has no oneDNN here")
    limits = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    environment = {name: value for name, value in os.environ.items() if name not in limits}
    said = subprocess.run([sys.executable, "-c", _PASSES], env=environment, cwd=ROOT, capture_output=True, check=True, text=True)
    early, late = map(int, said.stdout.split())
    assert late - early < 20 << 20  # without limits the growth is 110 MiB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 16, 17])
def test_rms_norm_of_few_rows_and_of_many(dtype: torch.dtype, rows: int) -> None:
    """The inputs' mean is far from 0. A norm that subtracted the mean would give other values."""
    torch.manual_seed(0)
    x, weight = (torch.randn(rows, 64) + 3).to(dtype), torch.rand(64).to(dtype)
    exact = reference.rms_norm(x.double(), weight.double(), 1e-6)
    assert_as_close_as_torch(RMSNorm(weight, 1e-6)(x), reference.rms_norm(x, weight, 1e-6), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_gpus_linear_is_the_specification(dtype: torch.dtype, bias: bool, gelu: bool) -> None:
    """Runs on a CPU, where the kernels use their reference code."""
    torch.manual_seed(0)
    x, weight, r = torch.randn(9, 64).to(dtype), torch.randn(48, 64).to(dtype) / 8, torch.randn(9, 48).to(dtype)
    around = (torch.randn(48).to(dtype) if bias else None, gelu)
    norm, close = RMSNorm(torch.rand(64).to(dtype), 1e-6), {"rtol": 2e-2, "atol": 4e-2} if dtype != torch.float32 else {}
    ours, plain = CudaLinear(weight, *around), PlainLinear(weight, *around)
    torch.testing.assert_close(ours(x), plain(x), **close)
    torch.testing.assert_close(ours.normed(Residual(x), norm), plain(norm(x)), **close)
    if not gelu:
        torch.testing.assert_close(ours.add_to(r.clone(), x).added(), r + plain(x), **close)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_in_8_bits_adds_what_is_pending_before_the_norm_and_leaves_its_own_product(
    dtype: torch.dtype, bias: bool
) -> None:
    torch.manual_seed(0)
    x, pending, r = (torch.randn(9, width).bfloat16() for width in (64, 64, 48))
    weight, b = torch.randn(48, 64).bfloat16() / 8, torch.randn(48).bfloat16() if bias else None
    norm = RMSNorm(torch.rand(64).bfloat16(), 1e-6)
    ours, plain = Linear.of(quantize_weight(weight, dtype), b), PlainLinear(weight, b)
    stream, expected = Residual(x.clone(), pending), plain(norm(x + pending))
    found = ours.normed(stream, norm)
    assert torch.equal(stream.value, x + pending)
    assert (found - expected).norm() < 0.05 * expected.norm()
    left = ours.add_to(r.clone(), x)
    assert left.pending is not None
    assert torch.equal(left.value, r)
    assert (left.added() - r - plain(x)).norm() < 0.05 * plain(x).norm()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("layer", [False, True])
def test_a_norm_adds_what_is_pending(layer: bool, pending: bool, bias: bool) -> None:
    torch.manual_seed(0)
    stream = Residual(torch.randn(9, 64), torch.randn(9, 64) if pending else None, torch.randn(64) if bias and layer else None)
    norm = LayerNorm(torch.rand(64), torch.rand(64), 1e-6) if layer else RMSNorm(torch.rand(64), 1e-6)
    expected = norm(Residual(stream.value.clone(), stream.pending, stream.bias).added())
    torch.testing.assert_close(norm.of_sum(stream), expected)


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: list[int],
    causal: bool,
    window: int | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition of attention: one softmax for each query, in the inputs' dtype."""
    out = torch.empty_like(q)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        scores = torch.einsum("qhd,khd->hqk", q[rows], k[rows]) / math.sqrt(q.shape[2])
        if causal:
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        for query in range(length):
            for key in range(length):
                if bias is not None:
                    reach = bias.shape[1] // 2
                    scores[:, query, key] += bias[:, max(-reach, min(reach, key - query)) + reach].to(scores.dtype)
                if window is not None and abs(query - key) > window:
                    scores[:, query, key] = -math.inf
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[rows])
        start += length
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [RAGGED, [1], [5], [200], [16, 16, 16], [40, 40, 40]])
def test_encoder_attention(dtype: torch.dtype, lengths: list[int]) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(sum(lengths), 3, 4, 32).to(dtype)
    ours = Attention(batch_of(lengths), (4, 4), causal=False)(qkv.flatten(1, 2))
    assert isinstance(ours, torch.Tensor)
    assert ours.is_contiguous()
    low, exact = (dense(*x.unbind(1), lengths, causal=False).flatten(1) for x in (qkv, qkv.double()))
    assert_as_close_as_torch(ours, low, exact)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 0, 9, 40])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("causal", "heads"), [(False, (4, 4)), (True, (4, 4)), (False, (4, 2))])
@pytest.mark.parametrize("lengths", [[40, 3, 64], [20]])
def test_windows_and_biases_by_distance(
    lengths: list[int], causal: bool, heads: tuple[int, int], biased: bool, window: int | None
) -> None:
    torch.manual_seed(0)
    bias = torch.randn(4, 2 * 30 + 1) if biased else None  # some distances lie beyond the bias's reach
    qkv = torch.randn(sum(lengths), heads[0] + 2 * heads[1], 16)
    ours = Attention(batch_of(lengths), heads, causal, window, bias)(qkv)
    exact = dense(*qkv.double().split((heads[0], heads[1], heads[1]), dim=1), lengths, causal, window, bias).flatten(1)
    torch.testing.assert_close(ours, exact.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("causal", "heads"), [(False, (4, 4)), (True, (4, 4)), (False, (4, 2))])
@pytest.mark.parametrize("block_bytes", [1 << 12, 1 << 16])
def test_attention_in_blocks_is_that_of_the_whole(
    dtype: torch.dtype,
    window: int | None,
    biased: bool,
    causal: bool,
    heads: tuple[int, int],
    block_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The blocks divide the queries, the heads and the sequences."""
    torch.manual_seed(0)
    lengths = [133, 40, 3, 130, 40, 330]
    bias = torch.randn(4, 2 * 30 + 1) if biased else None
    qkv = torch.randn(sum(lengths), heads[0] + 2 * heads[1], 16).to(dtype)
    how = (batch_of(lengths), heads, causal, window, bias)
    low, exact = Attention(*how)(qkv), Attention(*how)(qkv.double())
    monkeypatch.setattr(reference, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(attention_layer, "BLOCK_BYTES", block_bytes)
    ours = Attention(*how)(qkv)
    assert isinstance(low, torch.Tensor)
    assert isinstance(exact, torch.Tensor)
    assert isinstance(ours, torch.Tensor)
    assert_as_close_as_torch(ours, low, exact)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 0, 64, 300])
@pytest.mark.parametrize(("first", "length"), [(0, 1), (0, 321), (0, 1000), (700, 1000)])
@pytest.mark.parametrize("most", [1, 1000, 100_000])
def test_blocks_of_queries_hold_each_query_once_and_every_key_it_sees(
    first: int, length: int, window: int | None, causal: bool, most: int
) -> None:
    blocks = reference.query_blocks(first, length, causal, window, most)
    assert [query for queries, _ in blocks for query in range(queries.start, queries.stop)] == list(range(first, length))
    for queries, keys in blocks:
        reach = length if window is None else window
        assert 0 <= keys.start <= max(0, queries.start - reach)
        assert min(length, queries.stop if causal else queries.stop + reach) <= keys.stop <= length
        num_queries, num_keys = queries.stop - queries.start, keys.stop - keys.start
        assert num_queries * num_keys <= most or num_queries == 1


def test_a_window_leaves_far_keys_unread() -> None:
    pairs = sum((q.stop - q.start) * (k.stop - k.start) for q, k in reference.query_blocks(0, 8192, False, 64, 1 << 22))
    assert pairs < 8192 * 320


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [RAGGED, [1], [33]])
def test_attention(kv_heads: int, causal: bool, lengths: list[int]) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(sum(lengths), 4 + 2 * kv_heads, 16).split((4, kv_heads, kv_heads), dim=1)
    ours = attention(q, k, v, tuple(lengths), causal)
    exact = dense(q.double(), k.double(), v.double(), lengths, causal)
    torch.testing.assert_close(ours, exact.float(), rtol=1e-5, atol=1e-5)


def test_rotary_angles_keep_far_positions_apart() -> None:
    angles = rope_table(8, 10_000.0, 302, CPU)
    assert not torch.equal(angles[300], angles[301])
    torch.testing.assert_close(angles.square().sum(-1), torch.ones(302, 4))
    assert angles[0].tolist() == [[1, 0]] * 4


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ("mean", [2, 3]), ("cls", [1, 2]), ("last_token", [3, 4]), ("max", [3, 4]),
        ("mean_sqrt_len", [4 / 2**0.5, 6 / 2**0.5]), ("weighted_mean", [7 / 3, 10 / 3]),
    ],
)  # fmt: skip
def test_pool(pooling: Pooling, expected: list[float]) -> None:
    hidden = torch.tensor([[1.0, 2.0], [3.0, 4.0], [10.0, 20.0]])
    sequences = [np.zeros(2, dtype=np.int32), np.zeros(1, dtype=np.int32)]
    packed = BatchPacker(pooling, 2, None).pack(sequences, [EmbedOptions(normalize=False)] * 2)
    vectors = Pool(pooling)(hidden, packed)
    torch.testing.assert_close(vectors, torch.tensor([expected, [10.0, 20.0]]))


@pytest.mark.parametrize("lengths", [(3, 1, 5), (3, 3, 3, 3, 3)], ids=["ragged", "as many places as tokens"])
@pytest.mark.parametrize("pooling", [each for each in get_args(Pooling) if each != "splade"])
def test_room_in_a_batch_does_not_reach_the_vectors(pooling: Pooling, lengths: tuple[int, ...]) -> None:
    """As in a CUDA graph, the batch has tokens without a sequence, and sequences without tokens."""
    packer = BatchPacker(pooling, 8, None)
    sequences = [np.zeros(length, dtype=np.int32) for length in lengths]
    shape, tiles = packer.shape(Layout(Sequences.of(sequences)), graphs=True)
    buffer = np.full(shape.size, 99, dtype=np.int32)
    packer.fill(buffer, shape, Layout(Sequences.of(sequences)), tiles)
    hidden = torch.randn(16, 8)
    roomy = Pool(pooling)(hidden, shape.view(torch.from_numpy(buffer)))
    assert torch.equal(roomy[: len(lengths)], Pool(pooling)(hidden[: sum(lengths)], packer.pack(sequences)))


def test_vectors_are_cut_before_they_are_normalised() -> None:
    packed = BatchPacker("cls", 3, None).pack([np.zeros(1, dtype=np.int32)], [EmbedOptions(dimensions=2)])
    vectors = Pool("cls")(torch.tensor([[3.0, 4.0, 12.0]]), packed)
    torch.testing.assert_close(vectors, torch.tensor([[0.6, 0.8, 0.0]]))


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_every_expert_on_every_token_and_the_chosen_alone_are_the_same(top_k: int) -> None:
    torch.manual_seed(0)
    x, router, bias = torch.randn(9, 16), torch.randn(5, 16), torch.randn(16)
    ups, downs = torch.randn(5, 24, 16), torch.randn(5, 16, 24)
    layers = [(Linear.of(up, gelu=True), Linear.of(down)) for up, down in zip(ups, downs, strict=True)]
    experts = Experts(Linear.of(router), layers, bias, top_k)
    expected = x + bias
    for row, token in enumerate(x):
        gates = (router @ token).softmax(-1)
        for expert in gates.argsort(descending=True)[:top_k]:
            expected[row] += gates[expert] * (downs[expert] @ F.gelu(ups[expert] @ token))
    gates = experts.gates(x)
    assert (gates > 0).sum(1).tolist() == [top_k] * 9
    for ours in (experts.all_of_them(x, gates), experts.only_the_chosen(x, gates), experts(x)):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_alibis_slopes_are_those_of_the_paper() -> None:
    assert alibi_slopes(8) == [2.0**-power for power in range(1, 9)]
    assert alibi_slopes(12) == alibi_slopes(8) + [2.0**-power for power in (0.5, 1.5, 2.5, 3.5)]
    bias = symmetric_alibi(12, 4, CPU)
    torch.testing.assert_close(bias[0], torch.tensor([-1.5, -1.0, -0.5, 0.0, -0.5, -1.0, -1.5]))
    assert bias.shape == (12, 7)
