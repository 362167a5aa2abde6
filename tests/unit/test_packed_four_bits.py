"""4-bit matrices in the kernels' order have their original values when index arithmetic reads them back."""

from itertools import product

import pytest
import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.four_bits import GROUPS, Packed, four_bits_shape, four_bits_shapes, pack4, packs
from engine.model.quantized.layout import FourBits, four_bits

CASES = [*product(GROUPS, (None, "zeros", "mins"))]


def random_matrix(n: int, k: int, group: int, beside: str | None) -> FourBits:
    """A matrix with random codes, scales, and zeros or mins."""
    generator = torch.Generator().manual_seed(n + k + group)
    codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(n, k // group, generator=generator) + 0.01).to(torch.float16)
    zeros = torch.randint(0, 16, scales.shape, generator=generator, dtype=torch.uint8) if beside == "zeros" else None
    mins = torch.randn(scales.shape, generator=generator).to(torch.float16) if beside == "mins" else None
    return four_bits(codes, scales, zeros, mins=mins)


def packed(matrix: FourBits) -> Packed:
    return pack4(matrix.codes, matrix.scales, matrix.zeros, matrix.mins)


def unpacked(weight: Packed) -> Tensor:
    return reference.unpack4(weight.records, weight.group, weight.has_zeros, torch.float32, weight.has_mins)


@pytest.mark.parametrize(("group", "beside"), CASES)
@pytest.mark.parametrize(("n", "k"), [(16, 128), (48, 384), (112, 256)])
def test_every_value_comes_back(n: int, k: int, group: int, beside: str | None) -> None:
    matrix = random_matrix(n, k, group, beside)
    weight = packed(matrix)
    assert (len(weight), weight.k, weight.group) == (n, k, group)
    assert (weight.has_zeros, weight.has_mins) == (beside is not None, beside == "mins")
    assert torch.equal(unpacked(weight), matrix.dequantized(torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize(("group", "beside"), CASES)
def test_no_bit_is_without_a_meaning(group: int, beside: str | None) -> None:
    """Records hold only codes, scales, and zeros or mins: a change of any byte changes the matrix."""
    matrix = random_matrix(16, 128, group, beside)
    weight = packed(matrix)
    before = matrix.dequantized(torch.float32)
    whole = weight.records.view(torch.uint8).flatten()
    expected = 16 * 128 // 2 + 16 * (128 // group) * (4 if beside else 2)
    assert len(whole) == expected
    for place in range(len(whole)):
        whole[place] ^= 0x11
        assert not torch.equal(unpacked(weight), before)
        whole[place] ^= 0x11


def test_what_cannot_be_packed() -> None:
    assert packs(16, 128, 128)
    assert packs(16, 192, 64)
    assert not packs(24, 128, 128), "rows are taken sixteen at a time"
    assert not packs(16, 192, 128)
    assert not packs(16, 96, 32), "columns are taken 64 at a time"
    assert not packs(16, 128, 16)
    assert not packs(16, 4096, 4096)


SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (1024, 2048), (1024, 3072), (576, 576), (960, 576), (16, 64)]


@pytest.mark.slow
@pytest.mark.parametrize("least", [99 << 10, 227 << 10])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rows", [8, 16, 32, 64])
def test_every_matrix_has_a_shape(n: int, k: int, rows: int, least: int) -> None:
    """The shape fits into shared memory and is the fastest of the possible shapes."""
    for group, has_zeros in ((64, True), (32, False)):
        shape = four_bits_shape(n, k, rows, group, has_zeros, 132, least)
        assert shape.shared_bytes(k, rows, group, has_zeros) <= least
        times = {each: seconds for seconds, each in four_bits_shapes(n, k, rows, group, has_zeros, 132, least)}
        assert times[shape] == min(times.values())
