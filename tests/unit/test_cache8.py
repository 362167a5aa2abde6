"""Keys and values in 8 bits: the values of codes and scales, and caches that are written and read in pages."""

import math

import pytest
import torch

from engine.kernels import reference
from engine.kernels.cache8 import Cache8, rounded, widened

E4M3 = torch.float8_e4m3fn
both = pytest.mark.parametrize("dtype", [E4M3, torch.int8], ids=["e4m3", "int8"])


def test_values_come_back_within_half_a_step_of_int8() -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 3, 64) * torch.exp2(torch.randint(-15, 12, (50, 3, 1)))
    codes, scales = rounded(x, torch.int8)
    assert (codes.dtype, codes.shape, scales.dtype, scales.shape) == (torch.int8, x.shape, torch.uint8, (50, 3))
    most = x.abs().amax(-1, keepdim=True)
    step = torch.exp2((most / 127).log2().ceil()).clamp(min=2**-24)
    assert ((widened(codes, scales, torch.float32) - x).abs() <= step / 2).all()
    assert (codes.abs().amax(-1) > 62).all(), "a smaller power would not hold the largest value"


def test_values_come_back_within_half_a_step_of_e4m3() -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 3, 64) * torch.exp2(torch.randint(-20, 12, (50, 3, 1)))
    codes, scales = rounded(x, E4M3)
    assert (codes.dtype, codes.shape, scales.dtype, scales.shape) == (torch.float8_e4m3fn, x.shape, torch.uint8, (50, 3))
    most = x.abs().amax(-1, keepdim=True)
    error = (widened(codes, scales, torch.float32) - x).abs()
    allowed = torch.maximum(x.abs() / 16, (most * 2**-17).clamp(min=2**-32))
    assert (error <= allowed).all(), "normal numbers have three bits, subnormal ones a step of 2^-9"


@pytest.mark.parametrize(
    ("most", "exponent"), [(448.0, 0), (449.0, 1), (224.0, -1), (1.0, -8), (57344.0, 7), (1e6, 7), (1e-9, -22), (0.0, -22)]
)
def test_the_power_is_the_least_that_brings_all_values_into_range(most: float, exponent: int) -> None:
    codes, scales = rounded(torch.tensor([most / 2, -most, 0.0, most / 4]), E4M3)
    assert int(scales) == exponent + 247
    found = widened(codes, scales, torch.float32)
    wanted = torch.tensor([most / 2, -most, 0.0, most / 4]).clamp(-57344, 57344)
    assert ((found - wanted).abs() <= wanted.abs() / 16 + 2**-32).all()


@pytest.mark.parametrize(
    ("most", "power"), [(127.0, 0), (128.0, 1), (63.5, -1), (1.0, -6), (65024.0, 9), (1e6, 9), (1e-9, -24), (0.0, -24)]
)
def test_the_power_of_int8_is_the_least_that_brings_all_values_into_range(most: float, power: int) -> None:
    codes, scales = rounded(torch.tensor([-most, most / 2]), torch.int8)
    assert int(scales) == power + 127
    assert int(codes[0]) == max(-127, round(-most / 2.0**power))


def test_bf16_and_fp16_hold_each_number_of_int8() -> None:
    codes, scales = torch.arange(-127, 128).to(torch.int8).expand(34, -1), torch.arange(103, 137, dtype=torch.uint8)
    wide = widened(codes, scales, torch.float32)
    assert torch.equal(wide, codes.float() * torch.exp2(torch.arange(-24, 10.0))[:, None])
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(widened(codes, scales, dtype).float(), wide)


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


@both
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_head_that_is_not_finite_is_nan(bad: float, dtype: torch.dtype) -> None:
    x = torch.ones(3, 2, 32)
    x[1, 1, 7] = bad
    found = widened(*rounded(x, dtype), torch.bfloat16)
    assert found[1, 1].isnan().all()
    found[1, 1] = 1
    assert torch.equal(found, torch.ones(3, 2, 32, dtype=torch.bfloat16))


@both
@pytest.mark.parametrize("norm", [False, True])
def test_rope_store_writes_what_16_bits_would_hold_rounded(norm: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    qkv, table = torch.randn(7, 8, 32).bfloat16(), reference.rope_table(32, 1e4, 9, torch.device("cpu"))
    norms = (torch.rand(32).bfloat16(), torch.rand(32).bfloat16(), 1e-6) if norm else None
    positions, slots = torch.arange(7).int(), torch.tensor([5, 11, -1, 0, 3, -1, 8]).int()
    wide, cache = torch.zeros(2, 12, 2, 32).bfloat16(), Cache8.empty((2, 12, 2, 32), dtype, torch.device("cpu"))
    cache.values.view(torch.uint8).fill_(0)
    cache.scales.fill_(0)
    reference.rope_store(qkv.clone(), table, positions, 4, wide, slots, norms)
    reference.rope_store(qkv.clone(), table, positions, 4, cache, slots, norms)
    written = slots[slots >= 0].long()
    expected = widened(*rounded(wide[:, written], dtype), torch.bfloat16)
    assert torch.equal(cache.rows(written, torch.bfloat16), expected)
    others = torch.tensor([1, 2, 4, 6, 7, 9, 10])
    assert not cache.rows(others, torch.bfloat16).any()


@both
@pytest.mark.parametrize("window", [None, 5])
def test_attention_reads_the_values_that_the_codes_stand_for(window: int | None, dtype: torch.dtype) -> None:
    """Pages have four tokens and are not consecutive. Values that no token sees are NaN."""
    torch.manual_seed(2)
    wide = torch.randn(2, 24, 2, 32).bfloat16()
    codes, scales = rounded(wide, dtype)
    cache, wide = Cache8(codes, scales.transpose(1, 2).contiguous()), widened(codes, scales, torch.bfloat16)
    cache.scales[:, :, 8:12] = 255
    cache.values.view(torch.uint8)[:, 8:12] = 0
    lengths, starts, pages = (3, 1), (6, 9), ((5, 1, 3), (0, 4, 3))
    q = torch.randn(4, 4, 32).bfloat16()
    found, expected = (reference.cached_attention(q, lengths, each, starts, pages, 4, window) for each in (cache, wide))
    assert torch.equal(found, expected)
    assert found.isfinite().all()
