"""The checks of a card's kernels. Without a GPU plain torch replaces the kernels, so the checks find no difference."""

from typing import Any

import pytest
import torch

from engine import kernels
from engine.kernels import reference
from engine.measure import kernel_checks
from engine.measure.kernel_checks import Case, Maker, check, check_kernels

CPU = torch.device("cpu")


def cases() -> list[Case]:
    """All cases except the large products, and attention over packed sequences, whose launcher runs only on GPUs."""
    make = Maker(CPU, torch.bfloat16)
    found = [*kernel_checks.elementwise_cases(make), *kernel_checks.product_cases(make)]
    for dtype in (torch.float8_e4m3fn, torch.int8):
        found += kernel_checks.cases_in_8_bits(make, dtype)
    found += kernel_checks.cases_in_codes(make)
    found += kernel_checks.paged_cases(make, (9, 0))
    return [case for case in found if not case.shape.startswith("4096 x")]


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case.kernel} {case.shape}")
def test_plain_torch_passes(case: Case) -> None:
    checked = check(case)
    assert checked.problem is None
    assert checked.error <= checked.tolerance < 1.0
    assert checked.tolerance > 0


def test_every_operation_has_a_case() -> None:
    make = Maker(CPU, torch.bfloat16)
    found = {case.kernel for case in (*cases(), *kernel_checks.attention_cases(make, (9, 0)))} | {"sample"}
    helpers = {"MaybeQuantized", "Quantized", "choices_of", "interleaved", "quantize_weight", "Packed", "Weight"}
    assert set(kernels.__all__) - helpers <= found


def test_tokens_that_are_chosen_pass() -> None:
    assert check(Case("sample", "", lambda: kernel_checks._sample(Maker(CPU, torch.bfloat16), 4, 1000))).is_right


def rms_norm_case() -> Case:
    return next(case for case in cases() if case.kernel == "rms_norm")


@pytest.mark.parametrize("wrong", [1.01, torch.nan, torch.inf])
def test_a_wrong_value_is_found(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> torch.Tensor:
        out = reference.rms_norm(*arguments)
        out[-1, -1] = out.amax() * wrong + 0.1
        return out

    monkeypatch.setattr(kernels, "rms_norm", broken)
    checked = check(rms_norm_case())
    assert not checked.is_right
    assert checked.error > checked.tolerance


def test_a_kernel_that_does_not_run_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError("launching rms_norm: no kernel image\nand more lines")

    monkeypatch.setattr(kernels, "rms_norm", broken)
    checked = check(rms_norm_case())
    assert checked.problem == "RuntimeError: launching rms_norm: no kernel image"
    assert not checked.is_right


def test_a_cpu_has_no_kernels_to_check() -> None:
    assert check_kernels(CPU) == []


@pytest.mark.gpu
def test_every_kernel_is_right_here() -> None:
    wrong = [each for each in check_kernels(torch.device("cuda", 0)) if not each.is_right]
    assert not wrong
