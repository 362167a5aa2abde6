"""x W^T in NVFP4 against plain torch. Where the instruction does not exist, plain fp32 arithmetic in the kernel replaces it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module

import pytest
import torch
from closeness import assert_as_close_as_torch
from helpers import DEVICE, DTYPES, EPS, poisoned
from torch import Tensor
from torch.nn import functional as F

from engine.kernels import linear_packed, linear_packed_add, linear_packed_swiglu, nvfp4, reference, rms_norm
from engine.kernels.gemm_hopper import FollowedBy
from engine.kernels.nvfp4 import FORM, ORDER, Nvfp4Rows, has_nvfp4, linear_nvfp4, nvfp4_rows, nvfp4_tiles, recovers
from engine.kernels.packed import Packed, pack
from engine.measure.kernel_checks import Maker, check, nvfp4_cases

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
EMULATED = CAPABILITY[0] != 12
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CAPABILITY < (8, 9), reason="no GPU of capability 8.9, which converts e4m3"),
]
# W's sizes: one strip, a last tile with one strip, several tiles, and steps of one record.
SIZES = [(16, 64), (144, 320), (112, 384), (1024, 1024), (272, 3072)]
ROWS = (1, 7, 128, 129, 300)


def emulated_linear(x: Tensor, weight: Packed, followed_by: FollowedBy = "nothing", out: Tensor | None = None) -> Tensor:
    """`linear_nvfp4` without the instruction."""
    return nvfp4_tiles(nvfp4_rows(x, emulated=True), weight, x.dtype, followed_by, out, emulated=True)


linear: Callable[..., Tensor] = emulated_linear if EMULATED else linear_nvfp4


def matrix(n: int, k: int) -> tuple[Packed, Tensor]:
    """W, and its exact values in fp64. Each row has its own scale, and each group too."""
    torch.manual_seed(n + k)
    codes = torch.randint(0, 16, (n, k), device=DEVICE, dtype=torch.uint8)
    scales = torch.rand(n, k // 16, device=DEVICE) * 440
    scales[0, 0], scales[0, 1] = 0, 2**-9
    scales = scales.to(torch.float8_e4m3fn)
    row_scales = (torch.rand(n, device=DEVICE) + 0.5) / 400 / k**0.5
    both = scales.double() * row_scales.double()[:, None]
    assert recovers(both, row_scales)
    values = torch.tensor(reference.E2M1, device=DEVICE, dtype=torch.float64)[codes.int()]
    return pack(codes, FORM, both.half(), row_scales=row_scales), values * both.repeat_interleave(16, 1)


def rows(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """Rows of different sizes, of which some are far apart. One has an outlier, one begins with zeros, one has only zeros."""
    torch.manual_seed(m)
    x = torch.randn(m, k + 64, device=DEVICE).to(dtype)[:, :k]
    x *= torch.logspace(-2, 1, m, device=DEVICE)[:, None]
    x[m // 2, 5] *= 100
    x[m // 3, :40] = 0
    if m > 4:
        x[4] = 0
    return x


def rounded(x: Tensor) -> Tensor:
    """x as NVFP4 holds it, in fp64."""
    codes, scales, row_scale = reference.quantize_nvfp4(x)
    values = torch.tensor(reference.E2M1, device=DEVICE, dtype=torch.float64)[codes.int()]
    return values * scales.double().repeat_interleave(16, 1) * row_scale.double()[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [64, 320, 2560, 12288])
def test_rows_are_rounded_as_the_reference_says(k: int, dtype: torch.dtype) -> None:
    """Every code and scale, each at its place."""
    for m in ROWS:
        x = rows(m, k, dtype)
        with poisoned():
            found = nvfp4_rows(x, EMULATED)
        codes, scales, row_scale = reference.quantize_nvfp4(x)
        nibbles = torch.stack([found.codes >> 4 * i & 15 for i in range(8)], dim=2).flatten(1).to(torch.uint8)
        assert torch.equal(nibbles.view(m, -1, 64), codes.view(m, -1, 64)[:, :, list(ORDER)])
        assert torch.equal(
            found.scales.view(torch.uint8).view(m, -1, 4), scales.view(torch.uint8).view(m, -1, 4)[:, :, [0, 2, 1, 3]]
        )
        assert torch.equal(found.row_scale, row_scale)


def test_bands_of_rows() -> None:
    """More rows than the 2,048 that are computed with all of W before the next ones. The last band is not full."""
    weight, w = matrix(272, 128)
    for m in (2048, 2049, 4500):
        x = rows(m, 128, torch.bfloat16)
        low, exact = F.linear(rounded(x).bfloat16(), w.bfloat16()), F.linear(rounded(x), w)
        with poisoned():
            assert_as_close_as_torch(linear(x, weight), low, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("follows", ["nothing", "residual", "swiglu"])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_products(n: int, k: int, follows: FollowedBy, dtype: torch.dtype) -> None:
    weight, w = matrix(n, k)
    for m in ROWS:
        x = rows(m, k, dtype)
        residual = torch.randn(m, n, device=DEVICE).to(dtype)

        def expected(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
            y = F.linear(x, w)
            return y + residual if follows == "residual" else reference.swiglu(y, interleaved=True) if follows == "swiglu" else y

        exact = rounded(x)
        low, exact = expected(exact.to(dtype), w.to(dtype), residual), expected(exact, w, residual.double())
        with poisoned():
            y = linear(x, weight, follows, residual if follows == "residual" else None)
        size = exact.abs().amax(1, keepdim=True).clamp(min=1e-3)  # rows differ by three orders of magnitude
        assert_as_close_as_torch(y.double() / size, low.double() / size, exact / size)


def test_a_row_that_is_not_finite_spoils_no_other_row() -> None:
    weight, _ = matrix(144, 320)
    x = rows(40, 320, torch.bfloat16)
    good = linear(x, weight)
    x[3, 17], x[30, 200] = float("nan"), float("inf")
    y = linear(x, weight)
    assert not y[[3, 30]].isfinite().any()
    others = [row for row in range(40) if row not in (3, 30)]
    assert torch.equal(y[others], good[others])


def test_results_may_be_parts_of_wider_rows() -> None:
    weight, _ = matrix(144, 320)
    x = rows(130, 320, torch.bfloat16)
    wide = torch.ones(130, 200, device=DEVICE, dtype=torch.bfloat16)
    linear(x, weight, "residual", wide[:, 20:164])
    assert torch.equal(wide[:, 20:164], linear(x, weight, "residual", torch.ones(130, 144, device=DEVICE, dtype=torch.bfloat16)))
    assert (wide[:, :20] == 1).all()
    assert (wide[:, 164:] == 1).all()


def test_one_after_the_other_in_a_graph() -> None:
    """Each kernel begins while the previous one runs, and still reads the previous kernel's results."""
    width, x = 512, rows(200, 512, torch.bfloat16)
    weights = [matrix(width, width)[0] for _ in range(12)]

    def run(x: Tensor, wait: bool) -> Tensor:
        for weight in weights:
            x = linear(x, weight)
            if wait:
                torch.cuda.synchronize()
        return x

    exact = run(x, wait=True)
    assert exact.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(x, wait=False)
    for _ in range(20):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, exact)


@pytest.mark.parametrize("normed", [False, True])
def test_many_rows_of_a_layer_are_rounded(normed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows keep 16 bits. So do many rows of a matrix without scales of rows."""
    monkeypatch.setattr(import_module("engine.kernels.linear_packed"), "linear_nvfp4", linear)
    weight, w = matrix(1024, 1024)
    norm = (1 + torch.randn(1024, device=DEVICE) / 4).bfloat16() if normed else None
    plain = replace(weight, row_scales=None)
    for m in (64, 65, 200):
        x = torch.randn(m, 1024, device=DEVICE).bfloat16()
        mine = x if norm is None else rms_norm(x, norm, EPS)
        many, few = (F.linear(each, w) for each in (rounded(mine), mine.double()))
        residual = torch.ones(m, 1024, device=DEVICE, dtype=torch.bfloat16)
        for given in (weight, plain):
            exact = many if given is weight and m > 64 else few
            y = linear_packed(x, given, norm, EPS)
            gated = linear_packed_swiglu(x, given, norm, EPS)
            error = (y.double() - exact).abs().max() / exact.abs().max()
            assert error < 0.02, "the other product differs by more than a tenth"
            expected = reference.swiglu(exact.clone(), interleaved=True)
            assert (gated.double() - expected).abs().max() / expected.abs().max() < 0.04
            if norm is None:
                added = linear_packed_add(x, given, residual.clone())
                assert (added.double() - 1 - exact).abs().max() / exact.abs().max() < 0.02
    assert (many - few).abs().max() / few.abs().max() > 0.05


def test_the_trial_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails if the scales of rows, the scales of groups, or the halves of a byte of x are exchanged."""
    monkeypatch.setattr(nvfp4, "linear_nvfp4", linear)
    error = nvfp4._trial_error(DEVICE)
    assert error < nvfp4._TRIAL_ERROR / 2
    tiles, quantized = nvfp4_tiles, partial(nvfp4_rows, emulated=EMULATED)

    def other_rows(x: Tensor, weight: Packed) -> Tensor:
        its = quantized(x)
        return tiles(Nvfp4Rows(its.codes, its.scales, its.row_scale.roll(1)), weight, x.dtype, emulated=EMULATED)

    def other_scales(x: Tensor, weight: Packed) -> Tensor:
        its = quantized(x)
        return tiles(Nvfp4Rows(its.codes, its.scales.roll(1, 1), its.row_scale), weight, x.dtype, emulated=EMULATED)

    def other_halves(x: Tensor, weight: Packed) -> Tensor:
        its = quantized(x)
        swapped = its.codes >> 4 & 0x0F0F0F0F | (its.codes & 0x0F0F0F0F) << 4
        return tiles(Nvfp4Rows(swapped, its.scales, its.row_scale), weight, x.dtype, emulated=EMULATED)

    for wrong in (other_rows, other_scales, other_halves):
        monkeypatch.setattr(nvfp4, "linear_nvfp4", wrong)
        assert nvfp4._trial_error(DEVICE) > 2 * nvfp4._TRIAL_ERROR


def test_doctors_cases_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvfp4, "linear_nvfp4", linear)
    for case in nvfp4_cases(Maker(DEVICE, torch.bfloat16)):
        checked = check(case)
        assert checked.is_right, checked


def test_this_device_multiplies_nvfp4_if_it_has_the_instruction() -> None:
    assert has_nvfp4(DEVICE) == (not EMULATED)
