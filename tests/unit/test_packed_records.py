"""Packed matrices have their original values when index arithmetic reads them back."""

from itertools import product

import pytest
import torch
from torch import Tensor

from engine.codes import Form
from engine.kernels import reference
from engine.kernels.packed import Packed
from engine.kernels.packed_rows import packed_shape, packed_shapes
from engine.kernels.packed_tiles import tiled_shape
from engine.model.quantized.kept import packed
from engine.model.quantized.layout import Codes

FORMS = [
    *(Form(group, beside=beside) for group in (32, 64, 128) for beside in (None, "zeros", "mins")),
    *(Form(group, bits) for group in (16, 32, 128) for bits in (4, 5, 6, 8)),
    Form(32, 5, "mins"),
    Form(64, 6, "zeros"),
    Form(16, is_float=True),
    Form(32, is_float=True),
    *(Form(group, 8, is_float=True) for group in (16, 64, 128)),
]  # fmt: skip
forms = pytest.mark.parametrize("form", FORMS, ids=str)


def random_matrix(n: int, k: int, form: Form) -> Codes:
    """A matrix with random codes, scales, and zeros or mins."""
    generator = torch.Generator().manual_seed(n + k + form.group)
    most = 1 << form.bits
    codes = torch.randint(0, most, (n, k), generator=generator, dtype=torch.uint8)
    if form.is_float and form.bits == 8:
        codes[codes & 127 == 127] = 0  # no numbers
    scales = (torch.rand(n, k // form.group, generator=generator) + 0.01).to(torch.float16)
    zeros = torch.randint(0, most, scales.shape, generator=generator, dtype=torch.uint8) if form.beside == "zeros" else None
    mins = torch.randn(scales.shape, generator=generator).to(torch.float16) if form.beside == "mins" else None
    return Codes(codes, scales, form.bits, zeros, mins, form.is_float)


def unpacked(weight: Packed) -> Tensor:
    return reference.unpack(weight.records, weight.form, torch.float32)


@forms
@pytest.mark.parametrize(("n", "k"), [(16, 128), (48, 384), (112, 256)])
def test_every_value_comes_back(n: int, k: int, form: Form) -> None:
    matrix = random_matrix(n, k, form)
    weight = packed(matrix)
    assert (len(weight), weight.k, weight.form) == (n, k, form)
    assert torch.equal(unpacked(weight), matrix.dequantized(torch.float32))


@pytest.mark.slow
@forms
def test_no_bit_is_without_a_meaning(form: Form) -> None:
    """Records hold only codes, scales, and zeros or mins: a change of any byte changes the matrix."""
    matrix = random_matrix(16, 128, form)
    weight = packed(matrix)
    before = matrix.dequantized(torch.float32)
    whole = weight.records.view(torch.uint8).flatten()
    assert len(whole) == 16 * 128 * form.bits // 8 + 16 * (128 // form.group) * (4 if form.beside else 2)
    assert len(whole) == 128 // form.chunk * form.record_bytes
    for place in range(len(whole)):
        whole[place] ^= 0x11
        assert not torch.equal(unpacked(weight), before)
        whole[place] ^= 0x11


def test_what_cannot_be_packed() -> None:
    assert Form(128).fits(16, 128)
    assert Form(64).fits(16, 192)
    assert not Form(128).fits(24, 128), "rows are taken sixteen at a time"
    assert not Form(128).fits(16, 192)
    assert not Form(32).fits(16, 96), "columns are taken 64 at a time"
    assert Form(16).fits(16, 128)
    assert not Form(16, beside="mins").fits(16, 128)
    assert not Form(4096).fits(16, 4096)
    assert not Form(128, 8, "zeros").fits(16, 128), "bf16 does not hold all differences of two codes"
    assert not Form(128, 7).fits(16, 128)


SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (1024, 2048), (1024, 3072), (576, 576), (960, 576), (16, 64)]


@pytest.mark.slow
@pytest.mark.parametrize("least", [99 << 10, 227 << 10])
@pytest.mark.parametrize(("n", "k"), [*SHAPES, (5120, 25600), (16384, 53248)])
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_every_matrix_has_a_shape(n: int, k: int, rows: int, least: int) -> None:
    """The shape fits into shared memory and is the fastest of the possible shapes."""
    for form in (Form(64, beside="zeros"), Form(32), Form(16, 6), Form(128, 8)):
        if not form.fits(n, k):
            continue
        shape = packed_shape(n, k, rows, form, 132, least)
        assert shape is not None, "every model's matrices have one"
        assert shape.shared_bytes(k, rows, form) <= least
        times = {each: seconds for seconds, each in packed_shapes(n, k, rows, form, 132, least)}
        assert times[shape] == min(times.values())


@forms
def test_every_matrix_has_tiles_for_64_rows(form: Form) -> None:
    """Also on cards with 99 KiB of shared memory for a block."""
    for (n, k), rows, least in product(SHAPES, (16, 32, 64), (99 << 10, 163 << 10, 227 << 10)):
        if form.fits(n, k):
            shape = tiled_shape(n, k, rows, form, 132, least)
            assert shape is not None, (n, k, rows, least)
            assert shape.shared_bytes(rows, form) <= least
