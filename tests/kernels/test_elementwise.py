"""The kernels around attention and matrix products against fp64: no worse than torch in 16 bits, and no value is unwritten."""

import pytest
import torch
from closeness import assert_as_close_as_torch
from helpers import CODES, DEVICE, DTYPES, EPS, RAGGED, cu_seqlens_of, poisoned, positions_of, rms_norm_exact
from torch import Tensor
from torch.nn import functional as F

from engine import kernels
from engine.kernels import reference
from engine.kernels.cache8 import Cache8, rounded, widened
from engine.kernels.reorder import reorder

pytestmark = pytest.mark.gpu

in_16_bits = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
widths = pytest.mark.parametrize("width", [40, 384, 768, 1024, 2560, 4096])
row_counts = pytest.mark.parametrize("num_rows", [1, 3, 127, 129, 1000])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def normal(*shape: int, dtype: torch.dtype, mean: float = 0.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) + mean).to(dtype)


@in_16_bits
@widths
@row_counts
def test_rms_norm(num_rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = normal(num_rows, width, dtype=dtype), normal(width, dtype=dtype, mean=1)
    with poisoned():
        ours = kernels.rms_norm(x, weight, EPS)
    assert_as_close_as_torch(ours, reference.rms_norm(x, weight, EPS), rms_norm_exact(x, weight))


@in_16_bits
@widths
@row_counts
def test_rms_norm_adds_to_the_residual_in_place(num_rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual, weight = (normal(n, width, dtype=dtype) for n in (num_rows, num_rows, 1))
    weight, before = weight[0], (x.clone(), residual.clone())
    low = reference.rms_norm(x, weight, EPS, residual.clone())
    exact = rms_norm_exact(x.double() + residual.double(), weight)
    with poisoned():
        ours = kernels.rms_norm(x, weight, EPS, residual)
    assert_as_close_as_torch(ours, low, exact)
    assert torch.equal(residual, before[0] + before[1])
    assert torch.equal(x, before[0])


@in_16_bits
@widths
@row_counts
@pytest.mark.parametrize(("with_bias", "with_residual"), [(False, False), (True, False), (False, True), (True, True)])
def test_layer_norm(num_rows: int, width: int, dtype: torch.dtype, with_bias: bool, with_residual: bool) -> None:
    x, weight, shift = normal(num_rows, width, dtype=dtype), normal(width, dtype=dtype, mean=1), normal(width, dtype=dtype)
    bias = normal(width, dtype=dtype) if with_bias else None
    residual = normal(num_rows, width, dtype=dtype) if with_residual else None
    given = [tensor for tensor in (x, bias, residual) if tensor is not None]
    before = [tensor.clone() for tensor in given]
    with poisoned():
        ours = kernels.layer_norm(x, weight, shift, EPS, bias, residual)
    low = reference.layer_norm(x, weight, shift, EPS, bias, residual)
    exact = F.layer_norm(sum(tensor.double() for tensor in given), (width,), weight.double(), shift.double(), EPS)
    assert_as_close_as_torch(ours, low, exact)
    assert all(map(torch.equal, given, before))


@in_16_bits
@pytest.mark.parametrize("width", [40, 384, 2560])
def test_layer_norm_far_from_zero(width: int, dtype: torch.dtype) -> None:
    """With these values the formula E[y^2] - mean^2 would lose the variance."""
    x = normal(129, width, dtype=dtype, mean=200)
    weight, shift = normal(width, dtype=dtype, mean=1), normal(width, dtype=dtype)
    exact = F.layer_norm(x.double(), (width,), weight.double(), shift.double(), EPS)
    assert_as_close_as_torch(kernels.layer_norm(x, weight, shift, EPS), reference.layer_norm(x, weight, shift, EPS), exact)


@in_16_bits
@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (7, 1), (14, 2), (3, 3), (16, 8), (32, 8), (40, 8)])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no norm"])
def test_rope(norm: bool, head_dim: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    check_rope(RAGGED, head_dim, heads, dtype, norm)


@in_16_bits
def test_rope_at_far_positions(dtype: torch.dtype) -> None:
    check_rope((5, 30001, 2), 64, (2, 1), dtype, norm=True)


def check_rope(lengths: tuple[int, ...], head_dim: int, heads: tuple[int, int], dtype: torch.dtype, norm: bool) -> None:
    n_heads, rotated = heads[0], sum(heads)
    qkv = normal(sum(lengths), rotated + heads[1], head_dim, dtype=dtype)
    weights = [normal(head_dim, dtype=dtype, mean=1) for _ in range(2)]
    table, positions = reference.rope_table(head_dim, 1e6, max(lengths), DEVICE), positions_of(lengths)

    each = torch.stack([weights[int(head >= n_heads)] for head in range(rotated)])  # [H + K, D]
    cos, sin = table.double()[positions].unsqueeze(1).unbind(-1)  # [T, 1, D / 2]
    before = rms_norm_exact(qkv[:, :rotated], each) if norm else qkv[:, :rotated].double()
    first, second = before.chunk(2, dim=-1)
    exact = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    ours, low = qkv.clone(), qkv.clone()
    if norm:
        reference.norm_rope(low, *weights, table, positions, EPS, n_heads)
        kernels.norm_rope(ours, *weights, table, positions, EPS, n_heads)
    else:
        reference.rope(low, table, positions, n_heads)
        kernels.rope(ours, table, positions, n_heads)
    assert_as_close_as_torch(ours[:, :rotated], low[:, :rotated], exact)
    assert torch.equal(ours[:, rotated:], qkv[:, rotated:])


@in_16_bits
@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (3, 3), (16, 8), (40, 8)])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no norm"])
@pytest.mark.parametrize("stored", ["all", "some", "none"])
def test_rope_store(stored: str, norm: bool, head_dim: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    """The cache gets the values of `rope`. Rows without a token stay unchanged. For head dimension 80 the reference runs."""
    n_heads, n_kv_heads = heads
    num_tokens, rotated = sum(RAGGED), sum(heads)
    size = 6 * 128
    qkv, cache = (
        normal(num_tokens, rotated + n_kv_heads, head_dim, dtype=dtype),
        normal(2, size, n_kv_heads, head_dim, dtype=dtype),
    )
    qkv[3, rotated:] = torch.nan  # V is copied, even NaN and infinity
    qkv[4, rotated:] = torch.inf
    weights = [normal(head_dim, dtype=dtype, mean=1) for _ in range(2)]
    table, positions = reference.rope_table(head_dim, 1e6, max(RAGGED), DEVICE), positions_of(RAGGED)
    slots = torch.randperm(size, device=DEVICE)[:num_tokens].int()
    if stored != "all":
        slots[:: 3 if stored == "some" else 1] = -1
    ours, expected, before = qkv.clone(), qkv.clone(), cache.clone()
    if norm:
        kernels.norm_rope(expected, *weights, table, positions, EPS, n_heads)
    else:
        kernels.rope(expected, table, positions, n_heads)
    kernels.rope_store(ours, table, positions, n_heads, cache, slots, (*weights, EPS) if norm else None)
    has_slot = slots >= 0
    rows = slots[has_slot].long()
    assert_rotated(cache[0, rows], expected[has_slot, n_heads:rotated])
    assert_rotated(ours[:, :n_heads], expected[:, :n_heads])
    assert_rotated(ours[~has_slot, n_heads:rotated], expected[~has_slot, n_heads:rotated])
    assert torch.equal(ours[:, rotated:].view(torch.int16), qkv[:, rotated:].view(torch.int16))
    before[0, rows], before[1, rows] = cache[0, rows], qkv[has_slot, rotated:]
    assert torch.equal(cache.view(torch.int16), before.view(torch.int16))


@CODES
@in_16_bits
@pytest.mark.parametrize("heads", [(7, 1), (40, 8)])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no norm"])
def test_rope_store_in_8_bits(norm: bool, head_dim: int, heads: tuple[int, int], dtype: torch.dtype, codes: torch.dtype) -> None:
    """V of any magnitude equals the reference bit by bit. K equals the kernel in 16 bits within a step of the codes."""
    n_heads, n_kv_heads = heads
    num_tokens, rotated, size = sum(RAGGED), sum(heads), 6 * 128
    qkv = normal(num_tokens, rotated + n_kv_heads, head_dim, dtype=dtype)
    sizes = torch.exp2(torch.randint(-20, 12, (num_tokens, n_kv_heads), device=DEVICE)).unsqueeze(-1)
    qkv[:, rotated:] *= sizes.to(dtype)
    qkv[:, rotated:, ::3] *= 2**-7  # subnormal numbers of e4m3
    qkv[3, rotated:, 1], qkv[4, rotated:, 0], qkv[5, rotated:] = torch.nan, -torch.inf, 0
    weights = [normal(head_dim, dtype=dtype, mean=1) for _ in range(2)]
    table, positions = reference.rope_table(head_dim, 1e6, max(RAGGED), DEVICE), positions_of(RAGGED)
    slots = torch.randperm(size, device=DEVICE)[:num_tokens].int()
    slots[::3] = -1
    cache, wide = (
        Cache8.empty((2, size, n_kv_heads, head_dim), codes, DEVICE),
        torch.zeros(2, size, n_kv_heads, head_dim, dtype=dtype, device=DEVICE),
    )
    cache.values.view(torch.uint8).fill_(7)
    cache.scales.fill_(9)
    norms = (*weights, EPS) if norm else None
    copy = qkv.clone()
    kernels.rope_store(copy, table, positions, n_heads, wide, slots, norms)
    ours = qkv.clone()
    kernels.rope_store(ours, table, positions, n_heads, cache, slots, norms)
    assert_rotated(ours[:, :n_heads], copy[:, :n_heads])
    assert_rotated(ours[::3, n_heads:rotated], copy[::3, n_heads:rotated])
    assert torch.equal(ours[:, rotated:].view(torch.int16), qkv[:, rotated:].view(torch.int16))
    rows = slots[slots >= 0].long()
    expected, scales = rounded(wide[:, rows], codes)
    assert torch.equal(cache.values.view(torch.uint8)[1, rows], expected[1].view(torch.uint8))
    assert torch.equal(cache.scales[1][:, rows].T, scales[1])
    keys = widened(cache.values[0, rows], cache.scales[0][:, rows].T, torch.float32)
    most = wide[0, rows].float().abs().amax(-1, keepdim=True)
    assert ((keys - wide[0, rows].float()).abs() <= 0.07 * wide[0, rows].float().abs() + 2**-7 * most).all()
    others = torch.ones(size, dtype=torch.bool, device=DEVICE).index_fill(0, rows, False)
    assert (cache.values.view(torch.uint8)[:, others] == 7).all()
    assert (cache.scales[:, :, others] == 9).all()


def assert_rotated(ours: Tensor, expected: Tensor) -> None:
    """Results of two variants of a kernel may differ by one rounding."""
    torch.testing.assert_close(ours.float(), expected.float(), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("head_dim", [80, 128])
def test_rope_store_in_a_graph_takes_the_slots_of_each_replay(head_dim: int) -> None:
    qkv, table = normal(3, 4, head_dim, dtype=torch.bfloat16), reference.rope_table(head_dim, 1e6, 9, DEVICE)
    cache = torch.zeros(2, 128, 1, head_dim, dtype=torch.bfloat16, device=DEVICE)
    positions, slots = torch.zeros(3, dtype=torch.int32, device=DEVICE), torch.full((3,), -1, dtype=torch.int32, device=DEVICE)
    kernels.rope_store(qkv, table, positions, 2, cache, slots)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.rope_store(qkv, table, positions, 2, cache, slots)
    assert not cache.any()
    slots.copy_(torch.tensor([127, -1, 5]))
    graph.replay()
    assert cache[1].any(-1).flatten().nonzero().flatten().tolist() == [5, 127]
    assert torch.equal(cache[1, [127, 5]], qkv[[0, 2], 3:])


def test_rope_store_beyond_four_gigabytes() -> None:
    qkv, table = normal(1, 24, 256, dtype=torch.bfloat16), reference.rope_table(256, 1e6, 9, DEVICE)
    cache = torch.empty(2, 1 << 20, 8, 256, dtype=torch.bfloat16, device=DEVICE)  # 8 GiB
    cache[:, -1] = 0
    slots = torch.tensor([(1 << 20) - 1], dtype=torch.int32, device=DEVICE)
    kernels.rope_store(qkv, table, torch.zeros_like(slots), 8, cache, slots)
    assert torch.equal(cache[:, -1].flatten(0, 1), qkv[0, 8:])


@in_16_bits
@widths
@row_counts
def test_swiglu_of_columns_in_turn(num_rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = normal(num_rows, 2 * width, dtype=dtype)
    in_turn = gate_up.view(num_rows, 2, -1, 8).transpose(1, 2).flatten(1)
    assert torch.equal(kernels.swiglu(in_turn, interleaved=True), kernels.swiglu(gate_up))


@in_16_bits
@widths
@row_counts
@pytest.mark.parametrize("largest", [3, 80])
@pytest.mark.parametrize("kind", ["swiglu", "geglu", "geglu tanh"])
def test_gated(kind: str, num_rows: int, width: int, dtype: torch.dtype, largest: float) -> None:
    gate_up = normal(num_rows, 2 * width, dtype=dtype)
    gate_up[:, :width].uniform_(-largest, largest)
    gate_up[0, :2] = torch.tensor([-largest, largest])
    gate, up = gate_up.double().chunk(2, dim=-1)
    tanh = kind == "geglu tanh"
    activated = gate * torch.sigmoid(gate) if kind == "swiglu" else F.gelu(gate, approximate="tanh" if tanh else "none")
    with poisoned():
        ours = kernels.swiglu(gate_up) if kind == "swiglu" else kernels.geglu(gate_up, tanh)
    low = reference.swiglu(gate_up) if kind == "swiglu" else reference.geglu(gate_up, tanh)
    assert_as_close_as_torch(ours, low, activated * up)


@in_16_bits
@widths
@row_counts
def test_gelu_in_place(num_rows: int, width: int, dtype: torch.dtype) -> None:
    x, bias = normal(num_rows, width, dtype=dtype), normal(width, dtype=dtype)
    low, exact = reference.gelu(x, bias), F.gelu(x.double() + bias.double())
    assert kernels.gelu(x, bias) is x
    assert_as_close_as_torch(x, low, exact)


@in_16_bits
@pytest.mark.parametrize(("first", "last"), [(-10, -3), (-3, -1), (-1, 0), (-0.01, 0.01), (0, 1), (1, 10), (-200, 200)])
def test_gelu_stretch_by_stretch(first: float, last: float, dtype: torch.dtype) -> None:
    """Each range has its own test, because the rounding of large values would hide errors near zero."""
    x = torch.linspace(first, last, 1000 * 384, device=DEVICE).to(dtype).view(1000, 384)
    bias = torch.zeros(384, dtype=dtype, device=DEVICE)
    low, exact = reference.gelu(x, bias), F.gelu(x.double())
    assert_as_close_as_torch(kernels.gelu(x, bias), low, exact)


@in_16_bits
@widths
@pytest.mark.parametrize("with_positions", [False, True])
@pytest.mark.parametrize("lengths", [(1,), (3,), (129, 127), RAGGED], ids=str)
def test_embed(lengths: tuple[int, ...], with_positions: bool, width: int, dtype: torch.dtype) -> None:
    words = normal(500, width, dtype=dtype)
    table = normal(max(lengths), width, dtype=dtype) if with_positions else None
    token_ids, positions = torch.randint(500, (sum(lengths),), dtype=torch.int32, device=DEVICE), positions_of(lengths)
    token_ids[-1] = 499
    with poisoned():
        ours = kernels.embed(token_ids, positions, words, table)
    assert torch.equal(ours, reference.embed(token_ids, positions, words, table))


@in_16_bits
@widths
def test_embed_takes_an_id_below_0_from_the_last_tokens(width: int, dtype: torch.dtype) -> None:
    words, last = normal(500, width, dtype=dtype), torch.tensor([7, 499, 600, -3], dtype=torch.int32, device=DEVICE)
    token_ids = torch.tensor([4, -1, -2, 498, -3, -4, 500, -9, -(2**31)], dtype=torch.int32, device=DEVICE)
    ours = kernels.embed(token_ids, torch.zeros_like(token_ids), words, last=last)
    assert torch.equal(ours, words[[4, 7, 499, 498, 499, 0, 499, 0, 0]])  # an id beyond `last` takes its last entry


def test_embed_never_reads_outside_of_the_table() -> None:
    table = normal(3 * 500, 384, dtype=torch.bfloat16)
    words = table[500:1000]
    token_ids = torch.tensor([-1, 500, 7, -(2**31), 2**31 - 1, 499], dtype=torch.int32, device=DEVICE)
    ours = kernels.embed(token_ids, torch.zeros_like(token_ids), words)
    assert torch.equal(ours, words[[0, 499, 7, 0, 499, 499]])


@pytest.mark.parametrize("width", [64, 1024, 5120, 12288, 17408, 40960])
@pytest.mark.parametrize("num_rows", [1, 700])
@in_16_bits
def test_reorder(num_rows: int, width: int, dtype: torch.dtype) -> None:
    """Columns are moved, also those of a part of wider rows, and also after a norm."""
    x, order = torch.randn(num_rows, width + 8, device=DEVICE).to(dtype)[:, 8:], torch.randperm(width, device=DEVICE)
    weight = (1 + torch.randn(width, device=DEVICE) / 4).to(dtype)
    with poisoned():
        found, normed = reorder(x, order.int()), reorder(x, order.int(), weight, EPS)
    assert torch.equal(found, x[:, order])
    assert_as_close_as_torch(normed, reference.rms_norm(x, weight, EPS)[:, order], rms_norm_exact(x, weight)[:, order])


@in_16_bits
@widths
@pytest.mark.parametrize("lengths", [(1,), (3,), (129, 127), (1000,), RAGGED], ids=str)
def test_pool_mean(lengths: tuple[int, ...], width: int, dtype: torch.dtype) -> None:
    hidden, cu_seqlens = normal(sum(lengths), width, dtype=dtype, mean=1), cu_seqlens_of(lengths)
    exact = torch.stack([text.double().mean(0) for text in hidden.split(lengths)])
    padded = torch.cat((cu_seqlens, cu_seqlens[-1:].expand(2)))  # two empty padding sequences
    with poisoned():
        ours = kernels.pool_mean(hidden, padded)
    assert_as_close_as_torch(ours[:-2], reference.pool_mean(hidden, cu_seqlens), exact)
    assert ours[-2:].isnan().all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=["bf16", "fp16", "fp32"])
@widths
@row_counts
def test_pool_finish(num_rows: int, width: int, dtype: torch.dtype) -> None:
    pooled = normal(num_rows, width, dtype=dtype)
    pooled[-1] = 0  # cannot be normalised
    row = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    dimensions = torch.tensor([1, 7, 33, width // 2, width], dtype=torch.int32, device=DEVICE)[(row + 4) % 5]
    normalize = (row + 1) % 2
    exact = torch.where(torch.arange(width, device=DEVICE) < dimensions.unsqueeze(1), pooled.double(), 0.0)
    exact = torch.where(normalize.bool().unsqueeze(1), F.normalize(exact, dim=-1), exact)
    with poisoned():
        ours = kernels.pool_finish(pooled, dimensions, normalize)
    assert_as_close_as_torch(ours, reference.pool_finish(pooled, dimensions, normalize), exact)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_pool_finish_makes_a_row_nan_that_would_keep_a_value_not_finite(value: float, dtype: torch.dtype) -> None:
    """The value is in the last column kept, the first column cut, or the row's first or last. Rows are normalised or not."""
    places = [(599, False), (600, True), (0, False), (1023, True)] * 2  # column of the value, whether the result is finite
    pooled = normal(len(places), 1024, dtype=dtype)
    for row, (column, _) in enumerate(places):
        pooled[row, column] = value
    dimensions = torch.full((len(places),), 600, dtype=torch.int32, device=DEVICE)
    normalize = torch.tensor([0] * 4 + [1] * 4, dtype=torch.int32, device=DEVICE)
    with poisoned():
        out = kernels.pool_finish(pooled, dimensions, normalize)
    assert out.isfinite().all(dim=1).tolist() == [fine for _, fine in places]
    assert out.isnan().all(dim=1).tolist() == [not fine for _, fine in places]
    low = reference.pool_finish(pooled, dimensions, normalize)
    torch.testing.assert_close(out, low, rtol=1e-6, atol=1e-6, equal_nan=True)
