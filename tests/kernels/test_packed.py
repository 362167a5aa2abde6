"""x W^T for W in 4 to 8 bits, with the operations around it, against the dequantised W in fp64."""

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from closeness import assert_as_close_as_torch
from helpers import DEVICE, DTYPES, EPS, HOPPER_ONLY, poisoned, rms_norm_exact
from torch import Tensor
from torch.nn import functional as F

from engine.codes import Form
from engine.kernels import (
    embed_packed,
    linear_packed,
    linear_packed_add,
    linear_packed_in_parts,
    linear_packed_swiglu,
    reference,
)
from engine.kernels.few_rows import FewRowsShape, box_of, few_rows, few_rows_shape
from engine.kernels.few_rows import padded as few_padded
from engine.kernels.gemm_hopper import FollowedBy
from engine.kernels.gemm_skinny import SkinnyShape, gemm_skinny, skinny_shape
from engine.kernels.gemm_skinny import padded as skinny_padded
from engine.kernels.launch import num_sms, shared_bytes_of
from engine.kernels.linear import interleaved
from engine.kernels.packed import Packed
from engine.kernels.packed_rows import PackedShape, packed_rows, packed_shape, padded, unpack
from engine.kernels.packed_tiles import TiledShape, packed_tiles, tiled_shape_of
from engine.model.quantized.kept import packed
from engine.model.quantized.layout import Codes

pytestmark = pytest.mark.gpu

MANY = PackedShape(1, 16, 1, 1, 2), PackedShape(1, 1, 16, 2, 3), PackedShape(3, 8, 2, 1, 4), PackedShape(5, 4, 4, 2, 2)
# W's sizes: one strip, a size that is not a multiple of a tile, many turns, and sizes of models.
SIZES = [(16, 128), (112, 384), (960, 640), (8208, 256), (1024, 3072), (4096, 4096)]
IN_4_BITS = [Form(128), Form(128, beside="zeros"), Form(128, beside="mins"), Form(64), Form(32), Form(32, beside="zeros"),
             Form(32, beside="mins")]  # fmt: skip
OTHERS = [Form(16), Form(16, is_float=True), Form(32, is_float=True), Form(32, 5), Form(32, 5, "mins"), Form(64, 5, "zeros"),
          Form(16, 6), Form(128, 6), Form(32, 6, "zeros"), Form(32, 8), Form(16, 8), Form(128, 8), Form(128, 8, is_float=True),
          Form(64, 8, is_float=True)]  # fmt: skip
forms = pytest.mark.parametrize("form", [*IN_4_BITS, *OTHERS], ids=str)


def matrix(n: int, k: int, form: Form) -> tuple[Packed, Tensor]:
    """W, and its values in fp64."""
    torch.manual_seed(n + k + form.group)
    most = 1 << form.bits
    codes = torch.randint(0, most, (n, k), device=DEVICE, dtype=torch.uint8)
    if form.is_float and form.bits == 8:
        codes[codes & 127 == 127] = 0  # no numbers
    scales = ((torch.rand(n, k // form.group, device=DEVICE) + 0.1) * 16 / most / k**0.5).half()
    zeros = mins = None
    if form.beside == "zeros":
        zeros = torch.randint(most // 4, 3 * most // 4, scales.shape, device=DEVICE, dtype=torch.uint8)
    if form.beside == "mins":
        mins = (-scales.float() * most * (0.25 + 0.5 * torch.rand_like(scales))).half()
    found = Codes(codes, scales, form.bits, zeros, mins, form.is_float)
    return packed(found), found.dequantized(torch.float64)


def shape_of(weight: Packed, m: int) -> PackedShape:
    limits = num_sms(DEVICE), shared_bytes_of(DEVICE)
    shape = packed_shape(len(weight), weight.k, padded(m), weight.form, *limits)
    assert shape is not None, "every model's matrices have one"
    return shape


def fits(shape: PackedShape, m: int, weight: Packed) -> bool:
    return shape.shared_bytes(weight.k, padded(m), weight.form) <= shared_bytes_of(DEVICE)


def check(
    m: int,
    weight: Packed,
    w: Tensor,
    shape: PackedShape | FewRowsShape | TiledShape | SkinnyShape,
    dtype: torch.dtype,
    follows: FollowedBy,
    normed: bool,
) -> None:
    (n, k) = w.shape
    torch.manual_seed(m)
    x, residual = (3 * torch.randn(m, k, device=DEVICE)).to(dtype), torch.randn(m, n, device=DEVICE).to(dtype)
    norm = (1 + torch.randn(k, device=DEVICE) / 4).to(dtype)

    def expected(x: Tensor, w: Tensor, residual: Tensor, norm: Tensor) -> Tensor:
        if normed:
            x = reference.rms_norm(x, norm, EPS) if x.dtype == dtype else rms_norm_exact(x, norm)
        y = F.linear(x, w)
        return y + residual if follows == "residual" else reference.swiglu(y, interleaved=True) if follows == "swiglu" else y

    low, exact = expected(x, w.to(dtype), residual, norm), expected(*(each.double() for each in (x, w, residual, norm)))
    given = residual if follows == "residual" else None, norm if normed else None, EPS
    with poisoned():
        if isinstance(shape, TiledShape):
            y = packed_tiles(x, weight, shape, follows, given[0])
        elif isinstance(shape, SkinnyShape):
            given_x = x if norm is None or not normed else reference.rms_norm(x, norm, EPS)
            y = gemm_skinny(given_x, weight, shape, follows, given[0])
        elif isinstance(shape, FewRowsShape):
            y = few_rows(x, weight, shape, follows, *given)
        else:
            y = packed_rows(x, weight, shape, follows, *given)
    assert_as_close_as_torch(y, low, exact)
    assert not weight.counters.any(), "the next launch needs zeros"


@forms
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_unpacked(n: int, k: int, form: Form, dtype: torch.dtype) -> None:
    weight, w = matrix(n, k, form)
    with poisoned():
        found = unpack(weight, dtype)
    assert torch.equal(found, w.float().to(dtype))


@forms
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups(form: Form, dtype: torch.dtype) -> None:
    weight, w = matrix(112, 384, form)
    for m in (1, 8, 16):
        check(m, weight, w, shape_of(weight, m), dtype, "nothing", False)


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_rows(n: int, k: int) -> None:
    weight, w = matrix(n, k, Form(128))
    for m in range(1, 17):
        check(m, weight, w, shape_of(weight, m), torch.bfloat16, "nothing", False)


@pytest.mark.parametrize("shape", MANY)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("follows", ["nothing", "residual", "swiglu"])
@pytest.mark.parametrize("form", [Form(128), Form(32, 5, "mins")], ids=str)
def test_what_lies_around(follows: FollowedBy, normed: bool, shape: PackedShape, form: Form) -> None:
    for n, k in SIZES:
        weight, w = matrix(n, k, form)
        for m in (1, 7, 13):
            if fits(shape, m, weight):
                check(m, weight, w, shape, torch.bfloat16, follows, normed)


@pytest.mark.parametrize("form", [Form(16, 6), Form(32, beside="mins"), Form(32, 8), Form(32)], ids=str)
@pytest.mark.parametrize(("n", "k"), [(304, 256), (32784, 512)])
def test_in_parts(monkeypatch: pytest.MonkeyPatch, n: int, k: int, form: Form) -> None:
    """For many rows a head is written out in parts. The last part has fewer rows than the others."""
    module = import_module("engine.kernels.linear_packed")
    monkeypatch.setattr(module, "PART_VALUES", 5 * 16 * 512)
    written = []

    def noted(part: Packed, dtype: torch.dtype) -> Tensor:
        written.append(len(part))
        return unpack(part, dtype)

    monkeypatch.setattr(module, "unpacked", noted)
    weight, w = matrix(n, k, form)
    for m in (1, 9, 64, 65, 128, 129, 256, 257, 513, 600):
        torch.manual_seed(m)
        x = torch.randn(m, k, device=DEVICE).bfloat16()
        with poisoned():
            y = linear_packed_in_parts(x, weight)
        assert_as_close_as_torch(y, F.linear(x, w.bfloat16()), F.linear(x.double(), w))
    assert not weight.counters.any()
    assert set(written) == ({160, 144} if n == 304 else {80, 64})


@forms
@pytest.mark.parametrize("dtype", DTYPES)
def test_embed_packed(form: Form, dtype: torch.dtype) -> None:
    """Rows of the table are gathered exactly, also the last tokens of streams. An id outside gives the nearest row."""
    for n, k in ((16, 128), (304, 2560), (8208, 256)):
        weight, _ = matrix(n, k, form)
        table = unpack(weight, dtype)
        ids = torch.randint(0, n, (70,), device=DEVICE, dtype=torch.int32)
        ids[:4], ids[60:63] = torch.arange(4), torch.tensor([-1, -3, -2])
        last = torch.randint(0, n, (3,), device=DEVICE, dtype=torch.int32)
        for m in (1, 3, 70):
            with poisoned():
                got = embed_packed(ids[-m:], weight, dtype, last)
            given = torch.where(ids < 0, last[(-1 - ids).clamp(min=0)], ids)
            assert torch.equal(got, table[given[-m:]]), (n, k, m)
        outside = torch.tensor([n, 1 << 30, -1], device=DEVICE, dtype=torch.int32)
        assert torch.equal(embed_packed(outside, weight, dtype), table[[n - 1, n - 1, 0]])


FEW = [  # W's sizes and shapes of the kernel: one turn or many, a ring that holds all stages or is reused
    (64, 256, FewRowsShape(1, 32, 2)),
    (240, 512, FewRowsShape(4, 80, 1)),
    (96, 1536, FewRowsShape(2, 96, 3)),
    (24576, 512, FewRowsShape(2, 32, 2)),
    (4096, 1024, None),
    (1024, 3072, None),
]


@HOPPER_ONLY[1]
@pytest.mark.parametrize("form", [Form(128), Form(128, beside="zeros"), Form(64), Form(64, beside="zeros")], ids=str)
@pytest.mark.parametrize(("follows", "normed"), [("residual", False), ("swiglu", True), ("nothing", True)])
def test_few_rows_on_hopper(follows: FollowedBy, normed: bool, form: Form) -> None:
    for n, k, shape in FEW:
        weight, w = matrix(n, k, form)
        for m in (1, 13, 32):
            own = shape or few_rows_shape(n, k, few_padded(m), normed, num_sms(DEVICE), box_of(form))
            assert own is not None, "the kernel takes the models' shapes"
            check(m, weight, w, own, torch.bfloat16, follows, normed)


# W's sizes: a tile that is not full; several blocks for a tile; a block with whole tiles and parts of tiles; half a step of K.
TILED = [(112, 384), (1024, 3072), (17040, 256), (960, 576)]


@forms
def test_tiled(form: Form) -> None:
    check_tiled(form, (9, 64, 128), "residual")


@pytest.mark.parametrize("form", [Form(128), Form(32, 5, "mins")], ids=str)
@pytest.mark.parametrize("follows", ["nothing", "swiglu"])
def test_what_follows_tiles(follows: FollowedBy, form: Form) -> None:
    check_tiled(form, (64,), follows)


def check_tiled(form: Form, rows: Sequence[int], follows: FollowedBy) -> None:
    for n, k in TILED:
        if k % form.chunk == 0:
            weight, w = matrix(n, k, form)
            for m in rows:
                if (shape := tiled_shape_of(m, weight)) is not None:
                    check(m, weight, w, shape, torch.bfloat16, follows, False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiled_models(dtype: torch.dtype) -> None:
    for n, k in ((4096, 4096), (24576, 1024)):
        weight, w = matrix(n, k, Form(128, beside="zeros"))
        for m in (17, 63):
            shape = tiled_shape_of(m, weight)
            assert shape is not None, "these are models' shapes"
            check(m, weight, w, shape, dtype, "residual", False)


SKINNY = [(112, 384), (1024, 3072), (17040, 256)]


@HOPPER_ONLY[1]
@forms
def test_skinny(form: Form) -> None:
    for n, k in SKINNY:
        weight, w = matrix(n, k, form)
        for m in (9, 64, 128):
            shape = skinny_shape(n, k, skinny_padded(m, form), num_sms(DEVICE), form)
            assert shape is not None, "K is a multiple of 128"
            check(m, weight, w, shape, torch.bfloat16, "residual", False)


@HOPPER_ONLY[1]
@pytest.mark.parametrize("form", [Form(128), Form(32, 5, "mins")], ids=str)
@pytest.mark.parametrize(("m", "follows"), [(129, "swiglu"), (300, "residual"), (512, "nothing")])
def test_skinny_tiles_of_x(m: int, follows: FollowedBy, form: Form) -> None:
    """Neighbouring clusters multiply the same rows of W with other rows of x. The last tile of x may be partial."""
    for n, k in SKINNY:
        weight, w = matrix(n, k, form)
        shape = skinny_shape(n, k, skinny_padded(m, form), num_sms(DEVICE), form)
        assert shape is not None, "K is a multiple of 128"
        check(m, weight, w, shape, torch.bfloat16, follows, False)


@HOPPER_ONLY[1]
@pytest.mark.parametrize("cut", [(1, 64, 4), (2, 80, 5), (3, 128, 4), (4, 96, 4), (1, 192, 4)])
@pytest.mark.parametrize("follows", ["nothing", "swiglu", "residual"])
def test_skinny_cuts(follows: FollowedBy, cut: tuple[int, int, int]) -> None:
    for form in (Form(128), Form(16, 6)):
        weight, w = matrix(1104, 2048, form)
        for m in (16, 64):
            check(m, weight, w, SkinnyShape(skinny_padded(m, form), *cut, form), torch.bfloat16, follows, False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 8, 9, 16, 17, 33, 64, 65, 128, 129, 512, 513])
@pytest.mark.parametrize("form", [Form(128, beside="zeros"), Form(32, beside="mins"), Form(32, 8)], ids=str)
@pytest.mark.parametrize("is_reordered", [False, True])
def test_the_layers_products(m: int, dtype: torch.dtype, form: Form, is_reordered: bool) -> None:
    """For few and many rows, the result equals the product with the matrix in 16 bits, except for rounding."""
    weight, w = matrix(8192, 1024, form)
    if is_reordered:
        order = torch.randperm(1024, device=DEVICE)
        weight, w = replace(weight, order=order.int()), torch.empty_like(w).index_copy_(1, order, w)
    x, residual = torch.randn(m, 1024, device=DEVICE).to(dtype), torch.randn(m, 8192, device=DEVICE).to(dtype)
    norm = (1 + torch.randn(1024, device=DEVICE) / 4).to(dtype)

    def normed(x: Tensor) -> Tensor:
        return reference.rms_norm(x, norm, EPS) if x.dtype == dtype else rms_norm_exact(x, norm)

    for ours, expected in (
        (linear_packed(x, weight), lambda x, w, _: F.linear(x, w)),
        (linear_packed(x, weight, norm, EPS), lambda x, w, _: F.linear(normed(x), w)),
        (linear_packed_in_parts(x, weight), lambda x, w, _: F.linear(x, w)),
        (linear_packed_swiglu(x, weight, norm, EPS), lambda x, w, _: reference.swiglu(F.linear(normed(x), w), interleaved=True)),
        (linear_packed_add(x, weight, residual.clone()), lambda x, w, residual: residual + F.linear(x, w)),
    ):
        assert_as_close_as_torch(ours, expected(x, w.to(dtype), residual), expected(x.double(), w, residual.double()))


def test_slices_are_added_in_their_order() -> None:
    """The same rows give the same bits. The result does not depend on which block is last."""
    weight, _ = matrix(4096, 4096, Form(128))
    x = torch.randn(64, 4096, device=DEVICE).bfloat16()
    shape, tiled = PackedShape(8, 16, 1, 2, 3), tiled_shape_of(64, weight)
    assert tiled is not None, "it is a model's shape"
    first_tiled = packed_tiles(x, weight, tiled)
    for m in (8, 16):
        first = packed_rows(x[:m], weight, shape)
        assert all(torch.equal(packed_rows(x[:m], weight, shape), first) for _ in range(50))
    assert all(torch.equal(packed_tiles(x, weight, tiled), first_tiled) for _ in range(50))


@pytest.mark.parametrize("rows", [8, 16, 64])
def test_one_after_the_other_in_a_graph(rows: int) -> None:
    """Each kernel begins while the previous one runs, and still reads the previous kernel's results."""
    width, layers = 1024, 24
    x, norm = torch.randn(rows, width, device=DEVICE).bfloat16(), torch.ones(width, device=DEVICE).bfloat16()
    weights = [matrix(width, width, Form(64))[0] for _ in range(layers)]

    def run(x: Tensor) -> Tensor:
        for weight in weights:
            x = linear_packed(x, weight, norm, EPS)
        return x

    exact = x
    for weight in weights:  # without overlap
        exact = linear_packed(exact, weight, norm, EPS)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(x)
    for _ in range(20):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, exact)


@pytest.mark.parametrize("m", [8, 16, 48])
def test_wide_rows_of_x(m: int) -> None:
    """x and the residual may be parts of wider rows."""
    n, k = 256, 512
    weight, _ = matrix(n, k, Form(64))
    x, residual = torch.randn(m, k, device=DEVICE).bfloat16(), torch.randn(m, n, device=DEVICE).bfloat16()
    wide = torch.full((m, 2 * k), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    wide[:, :k] = x
    sums = torch.zeros(m, 2 * n, device=DEVICE, dtype=torch.bfloat16)
    sums[:, :n] = residual
    linear_packed_add(wide[:, :k], weight, sums[:, :n])
    assert torch.equal(sums[:, :n], linear_packed_add(x, weight, residual))
    assert not sums[:, n:].any()


@pytest.mark.parametrize("follows", ["nothing", "swiglu"])
def test_rows_of_gate_and_up(follows: FollowedBy) -> None:
    """Rows are interleaved before they are packed."""
    codes = torch.randint(0, 16, (512, 256), device=DEVICE, dtype=torch.uint8)
    scales = torch.rand(512, 2, device=DEVICE).half() / 16
    plain = Codes(codes, scales)
    x = torch.randn(4, 256, device=DEVICE).bfloat16()
    shape = PackedShape(1, 16, 1, 1, 2)
    gate_up = packed_rows(x, packed(plain), shape)
    found = packed_rows(x, packed(plain.with_rows(interleaved)), shape, follows)
    expected = reference.swiglu(gate_up) if follows == "swiglu" else interleaved(gate_up.t()).t()
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
