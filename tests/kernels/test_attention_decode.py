"""Attention of decode steps over the paged cache against the reference in fp64, for all heads, lengths, pages and parts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from closeness import assert_as_close_as_torch
from helpers import CODES, DEVICE, DTYPES, EIGHT_BITS, HOPPER, cache8_of, poisoned
from torch import Tensor

from engine import kernels
from engine.kernels import reference
from engine.kernels.attention_decode import PAGE, DecodeShape, DecodeWorkspace, decode_items, most_items
from engine.kernels.cache8 import Cache8

pytestmark = pytest.mark.gpu

LENGTHS = (1, 127, 128, 129, 1000, 17, 2, 300)
# One tile of an mma holds up to 8 query heads of a key head, two tiles hold up to 16. More heads need several blocks. With
# D 256, more than 8 heads need several blocks.
HEADS = [
    *((128, group) for group in (1, 2, 3, 4, 5, 7, 8, 16)),
    *((32, 1), (32, 16), (64, 7), (64, 16), (96, 8), (96, 16), (256, 3), (256, 8)),
    *((64, 71), (128, 24), (256, 16)),
]
CLUSTERS = (1, 8) if HOPPER else (1,)


@dataclass(frozen=True)
class Step:
    """A decode step: B rows and their cache, with NaN in all places that no row may read."""

    q: Tensor  # [B, H, D], a part of wider rows
    cache: Tensor
    pages: Tensor
    lengths: Sequence[int]
    offsets: Sequence[int]
    window: int | None
    codes: Cache8 | None = None  # the 8-bit codes, if `cache` holds their values

    def items(self, num_blocks: int) -> Tensor:
        """The work items, with padding among them and after them."""
        items = torch.from_numpy(decode_items(self.lengths, self.offsets, self.cache.shape[2], num_blocks, self.window))
        return torch.cat((items, torch.zeros(3, 8, dtype=torch.int32))).to(DEVICE)

    def workspace(self, num_blocks: int) -> DecodeWorkspace:
        most = most_items(len(self.lengths), self.cache.shape[2], num_blocks) + 3
        with poisoned():
            return DecodeWorkspace.create(most, *self.q.shape[1:], DEVICE)

    def expected(self, items: Tensor, dtype: torch.dtype) -> Tensor:
        """The reference in this dtype. Rows without an item are NaN."""
        out = torch.full(self.q.shape, math.nan, dtype=dtype, device=DEVICE)
        return reference.attention_decode(self.q.to(dtype), self.cache.to(dtype), items, self.pages, out)


def step(
    head_dim: int,
    group: int,
    lengths: Sequence[int] = LENGTHS,
    window: int | None = None,
    n_kv_heads: int = 2,
    dtype: torch.dtype = torch.bfloat16,
) -> Step:
    torch.manual_seed(0)
    counts = [-(-length // PAGE) for length in lengths]
    offsets = (np.cumsum(counts) - counts + 3).tolist()
    unused = 1 << 30
    pages = torch.cat((torch.full((3,), unused), torch.randperm(sum(counts) + 2)[: sum(counts)])).int()
    n_heads, num_slots = n_kv_heads * group, (sum(counts) + 2) * PAGE
    cache = torch.full((2, num_slots, n_kv_heads, head_dim), math.nan, dtype=dtype)
    for length, offset in zip(lengths, offsets, strict=True):
        keys = torch.arange(0 if window is None else max(0, length - 1 - window), length)
        slots = pages[offset + keys // PAGE].long() * PAGE + keys % PAGE
        cache[:, slots] = torch.randn(2, len(keys), n_kv_heads, head_dim).to(dtype)
    wide = torch.full((len(lengths), n_heads + 2 * n_kv_heads, head_dim), math.nan, dtype=dtype)
    wide[:, :n_heads] = (2 * torch.randn(len(lengths), n_heads, head_dim)).to(dtype)
    return Step(wide.to(DEVICE)[:, :n_heads], cache.to(DEVICE), pages.to(DEVICE), lengths, offsets, window)


def in_8_bits(made: Step, codes: torch.dtype) -> Step:
    """The same step with a cache in 8 bits. Each token and head has values of another magnitude."""
    sizes = torch.exp2(torch.randint(-9, 2, made.cache.shape[:3], device=DEVICE)).unsqueeze(-1)
    cache8, cache = cache8_of(made.cache * sizes.to(made.cache.dtype), codes)
    return replace(made, cache=cache, codes=cache8)


def settled(items: Tensor) -> Tensor:
    """The same items, for sequences whose keys before the last one were stored by an earlier pass."""
    items = items.clone()
    items[:, 7] = items[:, 5] > 0
    return items


def ours(
    made: Step,
    items: Tensor,
    workspace: DecodeWorkspace,
    dtype: torch.dtype | None = None,
    shape: DecodeShape | None = None,
    cluster: int = 1,
) -> Tensor:
    with poisoned():
        cache = made.codes or made.cache
        out = kernels.attention_decode(made.q, cache, items, made.pages, workspace, dtype, cluster=cluster, shape=shape)
    assert not workspace.counters.any()
    return out


def check(made: Step, *num_blocks: int, shape: DecodeShape | None = None, cluster: int = 1) -> list[int]:
    """Compares with the reference for each number of blocks. Returns the largest number of parts of a sequence for each."""
    items = made.items(1)
    low, exact = (made.expected(items, dtype) for dtype in (made.q.dtype, torch.float64))
    positive = replace(made, cache=torch.stack((made.cache[0], made.cache[1].abs())))
    # p, the sum of p, and the result are rounded to 16 bits. All other values are fp32.
    allowed = 1.25 * torch.finfo(low.dtype).eps / 2 * (positive.expected(items, torch.float64) + 2 * exact.abs()) + 1e-6
    parts = []
    for blocks in num_blocks:
        items, workspace = made.items(blocks), made.workspace(blocks)
        out = ours(made, items, workspace, None, shape, cluster)
        assert out.is_contiguous()
        assert_as_close_as_torch(out, low, exact)
        assert ((out.double() - exact).abs() <= allowed).all()
        assert torch.equal(ours(made, items, workspace, None, shape, cluster), out), "the same bits, whichever block is last"
        assert torch.equal(ours(made, settled(items), workspace, None, shape, cluster), out)
        parts.append(int(items[:, 5].max()))
    return parts


@pytest.mark.parametrize(("head_dim", "group"), HEADS)
def test_one_part_and_many(head_dim: int, group: int) -> None:
    assert check(step(head_dim, group), 1, 16, 1000) == [1, 3, 8]


@pytest.mark.parametrize(
    ("head_dim", "group"), [(128, 1), (128, 4), (128, 7), (128, 16), (128, 24), (32, 16), (64, 7), (96, 8), (256, 3), (256, 8)]
)
@CODES
def test_keys_and_values_in_8_bits(head_dim: int, group: int, codes: torch.dtype) -> None:
    assert check(in_8_bits(step(head_dim, group), codes), 1, 16, 1000) == [1, 3, 8]


@CODES
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 15, 16, 100, 128, 700])
def test_windows_of_a_cache_in_8_bits(window: int, dtype: torch.dtype, codes: torch.dtype) -> None:
    check(in_8_bits(step(64, 7, window=window, dtype=dtype), codes), 1, 1000)
    check(in_8_bits(step(128, 4, (5000, 1, 3000), window=window, dtype=dtype, n_kv_heads=8), codes), 1, 100)


@CODES
def test_every_length_around_a_group_of_keys_in_8_bits(codes: torch.dtype) -> None:
    for first in range(1, 200, 20):
        check(in_8_bits(step(128, 2, range(first, first + 20)), codes), 1)


@pytest.mark.parametrize(("head_dim", "group"), [(64, 16), (128, 2)])
def test_fp16(head_dim: int, group: int) -> None:
    check(step(head_dim, group, dtype=torch.float16), 1, 1000)


@pytest.mark.parametrize("window", [0, 1, 15, 16, 100, 127, 128, 200, 700, 2000])
def test_windows(window: int) -> None:
    check(step(64, 7, window=window), 1, 1000)


@pytest.mark.parametrize("n_kv_heads", [1, 8])
def test_long_sequences_in_parts_of_many_pages(n_kv_heads: int) -> None:
    check(step(128, 2, (5000, 1, 3000), n_kv_heads=n_kv_heads), 1, 17, 100, 264, 1000)


def test_every_length_around_a_group_of_keys() -> None:
    """A group has 16 keys for each warp, and 64 for the block."""
    for first in range(1, 200, 20):
        check(step(128, 2, range(first, first + 20)), 1)


@pytest.mark.parametrize("shape", [DecodeShape(4, 2), DecodeShape(2, 6), DecodeShape(1, 4), DecodeShape(4, 3, 8)])
def test_other_shapes(shape: DecodeShape) -> None:
    check(step(128, 16), 1, 1000, shape=shape)


@pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")
@pytest.mark.parametrize("cluster", [2, 8])
@pytest.mark.parametrize(("head_dim", "group"), [(128, 1), (128, 5), (128, 24), (32, 1), (64, 7), (256, 3), (96, 16)])
def test_clusters(head_dim: int, group: int, cluster: int) -> None:
    """The warps of a block have a group of keys, several, or none. Some blocks have none."""
    check(step(head_dim, group), 1, cluster=cluster)
    check(step(head_dim, group, (5000, 1, 3000), window=700), 1, cluster=cluster)
    for first in (60, 186, 1020):
        check(step(head_dim, group, range(first, first + 14)), 1, cluster=cluster)


@pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")
@CODES
@pytest.mark.parametrize("cluster", [2, 8])
def test_clusters_in_8_bits(cluster: int, codes: torch.dtype) -> None:
    for head_dim, group in ((128, 4), (64, 7), (256, 8)):
        check(in_8_bits(step(head_dim, group), codes), 1, cluster=cluster)
    check(in_8_bits(step(128, 2, range(186, 206)), codes), 1, cluster=cluster)


@pytest.mark.parametrize("group", [7, 16])
def test_scores_that_grow_and_fall(group: int) -> None:
    """The running maximum rises rarely, only in the first group, or in every group. In some parts all weights vanish."""
    for slope in (-0.5, 0.01, 0.5, 5.0):
        made = step(64, group, (1000, 400, 129))
        made.q.fill_(1.0)
        for length, offset in zip(made.lengths, made.offsets, strict=True):
            keys = torch.arange(length, device=DEVICE)
            slots = made.pages[offset + keys // PAGE].long() * PAGE + keys % PAGE
            made.cache[0, slots] = (slope * keys / 8).to(made.cache.dtype)[:, None, None]
        check(made, 1, 1000)


def test_rows_of_no_item_are_not_written() -> None:
    made = step(128, 2, (5, 0, 300, 0))
    items, workspace = made.items(1000), made.workspace(1000)
    expected = ours(made, items, workspace)
    buffer = torch.full_like(expected, 7.0)
    later = items.cpu()
    later[:, 6] += (later[:, 3] > 0).int()  # the index of a sequence's first item, which now follows a padding item
    later = torch.cat((torch.zeros(1, 8, dtype=torch.int32), later[:-1])).to(DEVICE)
    out = kernels.attention_decode(made.q, made.cache, later, made.pages, workspace, out=buffer)
    assert out is buffer
    assert (out[[1, 3]] == 7).all()
    assert torch.equal(out[[0, 2]], expected[[0, 2]])
    buffer.fill_(7.0)
    for padding in (0, 5):
        nothing = torch.zeros(padding, 8, dtype=torch.int32, device=DEVICE)
        torch.cuda.synchronize()
        assert (kernels.attention_decode(made.q, made.cache, nothing, made.pages, workspace, out=buffer) == 7).all()
    assert not workspace.counters.any()


@CODES
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_in_8_bits_reaches_the_rows_that_see_it_alone(dtype: torch.dtype, codes: torch.dtype) -> None:
    made = in_8_bits(step(128, 2, (5, 300, 700), dtype=dtype), codes)
    assert made.codes is not None
    items, workspace = made.items(1000), made.workspace(1000)
    before = ours(made, items, workspace)
    slot = int(made.pages[made.offsets[1] + 1]) * PAGE + 3
    for kind in (0, 1):
        kept = made.codes.scales[kind, :, slot].clone(), made.codes.values[kind, slot].clone()
        made.codes.scales[kind, :, slot], made.codes.values.view(torch.uint8)[kind, slot] = 255, 0
        out = ours(made, items, workspace)
        made.codes.scales[kind, :, slot], made.codes.values[kind, slot] = kept
        assert torch.equal(out[[0, 2]], before[[0, 2]])
        assert not out[1].isfinite().any()


def test_what_is_not_finite_reaches_the_rows_that_see_it_alone() -> None:
    made = step(128, 2, (5, 300, 700))
    items, workspace = made.items(1000), made.workspace(1000)
    before = ours(made, items, workspace)
    slot = int(made.pages[made.offsets[1] + 1]) * PAGE + 3
    for kind in (0, 1):
        for value in (math.nan, math.inf):
            kept = made.cache[kind, slot].clone()
            made.cache[kind, slot] = value
            out = ours(made, items, workspace)
            made.cache[kind, slot] = kept
            assert torch.equal(out[[0, 2]], before[[0, 2]])
            assert not out[1].isfinite().all(dim=-1).any()


@pytest.mark.skipif(torch.float8_e4m3fn not in EIGHT_BITS, reason="this GPU has no e4m3")
@pytest.mark.parametrize(("head_dim", "group"), [(32, 16), (128, 5), (256, 8)])
def test_results_in_e4m3(head_dim: int, group: int) -> None:
    """A result is within half a step of the same kernel's result in 16 bits. A step is an eighth of a power of two."""
    made = step(head_dim, group)
    made.cache[1] *= 60.0
    for num_blocks in (1, 1000):
        items, workspace = made.items(num_blocks), made.workspace(num_blocks)
        wide = ours(made, items, workspace).double()
        found = ours(made, items, workspace, torch.float8_e4m3fn)
        assert (found.dtype, found.shape, found.is_contiguous()) == (torch.float8_e4m3fn, wide.shape, True)
        size = torch.exp2(wide.abs().clamp(min=2**-6).log2().floor() - 3)
        assert ((found.double() - wide.clamp(-448, 448)).abs() <= 0.5 * size + 2**-8 * wide.abs()).all()


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_after_the_other_in_a_graph(dtype: torch.dtype, cluster: int) -> None:
    """Replays the graph with other lengths and pages. Each kernel begins while the previous one runs, and reads its results."""
    steps = [step(128, 2, lengths, dtype=dtype) for lengths in ((900, 130, 1), (5, 300, 640))]
    num_blocks, num_layers = 16 if cluster == 1 else 1, 12
    workspace = steps[0].workspace(num_blocks)
    items = torch.zeros(len(workspace.counters), 8, dtype=torch.int32, device=DEVICE)
    pages = torch.zeros(max(len(each.pages) for each in steps), dtype=torch.int32, device=DEVICE)
    q, most_slots = torch.empty_like(steps[0].q), max(each.cache.shape[1] for each in steps)
    cache = torch.zeros(2, most_slots, *steps[0].cache.shape[2:], dtype=dtype, device=DEVICE)

    def run() -> Tensor:
        x = q
        for _ in range(num_layers):
            x = kernels.attention_decode(x, cache, items, pages, workspace, cluster=cluster)
        return x

    def fill(made: Step) -> None:
        its_items = made.items(num_blocks)
        items.zero_()[: len(its_items)] = its_items
        pages[: len(made.pages)] = made.pages
        q.copy_(made.q)
        cache.zero_()[:, : made.cache.shape[1]] = made.cache
        torch.cuda.synchronize()

    fill(steps[0])
    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for made in steps * 5:
        fill(made)
        graph.replay()
        x = q
        for _ in range(num_layers):  # without overlap
            x = kernels.attention_decode(x, cache, items, pages, workspace, cluster=cluster)
            torch.cuda.synchronize()
        assert torch.equal(y, x)
        assert not workspace.counters.any()


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("lengths", [(1,), (16,), (17,), (129,), (192,), (193,), (900,)])
def test_the_last_key_of_a_settled_sequence_comes_from_the_kernel_before(lengths: tuple[int], cluster: int) -> None:
    """Each kernel of a graph writes its result over the last value, which the next one reads."""
    made, num_blocks, num_layers = step(128, 1, lengths), 16 if cluster == 1 else 1, 12
    items, workspace = settled(made.items(num_blocks)), made.workspace(num_blocks)
    key = lengths[0] - 1
    slot = int(made.pages[made.offsets[0] + key // PAGE]) * PAGE + key % PAGE
    before, last = made.cache[1, slot].clone(), made.cache[1, slot : slot + 1]

    def run(wait: bool) -> Tensor:
        for _ in range(num_layers):
            kernels.attention_decode(made.q, made.cache, items, made.pages, workspace, out=last, cluster=cluster)
            if wait:
                torch.cuda.synchronize()
        return last

    expected = run(wait=True).clone()
    last.copy_(before)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(wait=False)
    for _ in range(20):
        last.copy_(before)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(last, expected)
