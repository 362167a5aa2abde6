"""Keys and values in 8 bits: the values of codes and scales, and caches that are written and read in pages."""

import math

import pytest
import torch

from engine.kernels import reference
from engine.kernels.cache8 import Cache8, rounded, widened


def test_values_come_back_within_half_a_step_of_e4m3() -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 3, 64) * torch.exp2(torch.randint(-20, 12, (50, 3, 1)))
    codes, scales = rounded(x)
    assert (codes.dtype, codes.shape, scales.dtype, scales.shape) == (torch.float8_e4m3fn, x.shape, torch.uint8, (50, 3))
    most = x.abs().amax(-1, keepdim=True)
    error = (widened(codes, scales, torch.float32) - x).abs()
    allowed = torch.maximum(x.abs() / 16, (most * 2**-17).clamp(min=2**-32))
    assert (error <= allowed).all(), "normal numbers have three bits, subnormal ones a step of 2^-9"


@pytest.mark.parametrize(
    ("most", "exponent"), [(448.0, 0), (449.0, 1), (224.0, -1), (1.0, -8), (57344.0, 7), (1e6, 7), (1e-9, -22), (0.0, -22)]
)
def test_the_power_is_the_least_that_brings_all_values_into_range(most: float, exponent: int) -> None:
    codes, scales = rounded(torch.tensor([most / 2, -most, 0.0, most / 4]))
    assert int(scales) == exponent + 247
    found = widened(codes, scales, torch.float32)
    wanted = torch.tensor([most / 2, -most, 0.0, most / 4]).clamp(-57344, 57344)
    assert ((found - wanted).abs() <= wanted.abs() / 16 + 2**-32).all()


def test_bf16_and_fp16_hold_each_number_that_codes_stand_for() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[codes.float().isfinite()].expand(30, -1)
    scales = torch.arange(225, 255, dtype=torch.uint8)
    wide = widened(codes, scales, torch.float32)
    assert torch.equal(widened(codes, scales, torch.bfloat16).float(), wide)
    normal = (wide.abs() >= 2**-14) | (wide == 0)
    assert torch.equal(widened(codes, scales, torch.float16).float()[normal], wide[normal])
    assert torch.equal(wide[0], codes[0].float() * 2.0**-22)
    assert torch.equal(wide[-1], codes[0].float() * 2.0**7)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_head_that_is_not_finite_is_nan(bad: float) -> None:
    x = torch.ones(3, 2, 32)
    x[1, 1, 7] = bad
    found = widened(*rounded(x), torch.bfloat16)
    assert found[1, 1].isnan().all()
    found[1, 1] = 1
    assert torch.equal(found, torch.ones(3, 2, 32, dtype=torch.bfloat16))


@pytest.mark.parametrize("norm", [False, True])
def test_rope_store_writes_what_16_bits_would_hold_rounded(norm: bool) -> None:
    torch.manual_seed(1)
    qkv, table = torch.randn(7, 8, 32).bfloat16(), reference.rope_table(32, 1e4, 9, torch.device("cpu"))
    norms = (torch.rand(32).bfloat16(), torch.rand(32).bfloat16(), 1e-6) if norm else None
    positions, slots = torch.arange(7).int(), torch.tensor([5, 11, -1, 0, 3, -1, 8]).int()
    wide, cache = torch.zeros(2, 12, 2, 32).bfloat16(), Cache8.empty((2, 12, 2, 32), torch.device("cpu"))
    cache.values.view(torch.uint8).fill_(0)
    cache.scales.fill_(0)
    reference.rope_store(qkv.clone(), table, positions, 4, wide, slots, norms)
    reference.rope_store(qkv.clone(), table, positions, 4, cache, slots, norms)
    written = slots[slots >= 0].long()
    expected = widened(*rounded(wide[:, written]), torch.bfloat16)
    assert torch.equal(cache.rows(written, torch.bfloat16), expected)
    others = torch.tensor([1, 2, 4, 6, 7, 9, 10])
    assert not cache.rows(others, torch.bfloat16).any()


@pytest.mark.parametrize("window", [None, 5])
def test_attention_reads_the_values_that_the_codes_stand_for(window: int | None) -> None:
    """Pages have four tokens and are not consecutive. Values that no token sees are NaN."""
    torch.manual_seed(2)
    wide = torch.randn(2, 24, 2, 32).bfloat16()
    codes, scales = rounded(wide)
    cache, wide = Cache8(codes, scales.transpose(1, 2).contiguous()), widened(codes, scales, torch.bfloat16)
    cache.scales[:, :, 8:12] = 255
    cache.values.view(torch.uint8)[:, 8:12] = 0
    lengths, starts, pages = (3, 1), (6, 9), ((5, 1, 3), (0, 4, 3))
    q = torch.randn(4, 4, 32).bfloat16()
    found, expected = (reference.cached_attention(q, lengths, each, starts, pages, 4, window) for each in (cache, wide))
    assert torch.equal(found, expected)
    assert found.isfinite().all()
