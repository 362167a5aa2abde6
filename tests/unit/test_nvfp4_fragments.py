"""Products in NVFP4 on a CPU: the layout of the instruction's fragments, the recovered scales, and the choice of the product.

The model of the instruction follows the PTX ISA ("Matrix Fragments for mma.m16n8k64", "Block Scaling") and the same layouts in
CUTLASS (cute/atom/mma_traits_sm120.hpp). It shows that the words of a record, as csrc/nvfp4.cu puts them into registers, and x in
the order `ORDER` give x W^T. `tests/kernels/test_nvfp4.py` runs the kernel itself.
"""

import logging
import re
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import pytest
import torch
from cuda.bindings import nvrtc
from torch import Tensor

from engine.kernels import linear_packed, linear_packed_add, linear_packed_swiglu, nvfp4, reference
from engine.kernels.compile import whole_source
from engine.kernels.nvfp4 import FORM, ORDER, nvfp4_defines, recovers
from engine.kernels.packed import Packed, pack
from engine.model.quantized import kept
from engine.model.quantized.kept import joined, packed
from engine.model.quantized.layout import Codes

LANES = range(32)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Reading:
    """The kernel's choices when it reads a record and x. Each test of a wrong choice changes one of them."""

    words: tuple[int, int] = (2, 1)  # lane t's registers come from the words words[0] * (t / 2) + words[1] * half
    lanes: tuple[int, int] = (0, 1)  # of a pair of lanes, the one of the even nibbles and the one of the odd nibbles
    rows: tuple[int, int] = (0, 4)  # the shifts of row g and row g + 8 within a byte
    scales: tuple[int, ...] = (0, 2, 1, 3)  # the group of each byte of a scale operand of W
    scale_rows: tuple[int, int] = (0, 1)  # the halves of a word of scales, for lanes 4 g and 4 g + 1
    x: tuple[int, ...] = ORDER
    x_scales: tuple[int, ...] = (0, 2, 1, 3)


RIGHT = Reading()


def a_operand(record: Tensor, how: Reading) -> tuple[Tensor, Tensor]:
    """(A [16, 64] codes, its scales [16, 4] bytes), placed as the instruction reads the registers of all lanes."""
    words = record[:128].view(32, 4).long() & 0xFFFFFFFF
    halves = record[128:].view(8, 4).contiguous().view(torch.float16).view(8, 4, 2)  # [row, group, row + 8 or not]
    a, scales = torch.zeros(16, 64, dtype=torch.long), torch.zeros(16, 4)
    for lane in LANES:
        g, t = divmod(lane, 4)
        for register in range(4):
            half, row = divmod(register, 2)
            word = how.words[0] * (t // 2) + how.words[1] * half
            near, far = (int(words[4 * g + t % 2 * 2 + way, word]) >> how.rows[row] & 0x0F0F0F0F for way in how.lanes)
            its = near | far << 4
            for nibble in range(8):
                a[g + row * 8, 8 * t + nibble + half * 32] = its >> 4 * nibble & 15
        if t < 2:  # the lanes that the selector 0 chooses
            scales[g + t * 8] = halves[g, list(how.scales), how.scale_rows[t]].float()
    return a, scales


def b_operand(codes: Tensor, how: Reading) -> Tensor:
    """B [64, 8] from x [8, 64] in the order of memory: word w of a row is of lane w % 4, register w / 4."""
    b, memory = torch.zeros(64, 8, dtype=torch.long), codes[:, list(how.x)].long()
    for lane in LANES:
        g, t = divmod(lane, 4)
        for register in range(2):
            for nibble in range(8):
                b[8 * t + nibble + 32 * register, g] = memory[g, 8 * (4 * register + t) + nibble]
    return b


def operands() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales of W [16, 64] and of x [8, 64]. No two scales of a row are equal."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (24, 64), generator=generator, dtype=torch.uint8)
    scales = torch.stack([torch.tensor([0.5, 1.25, 7.0, 26.0])[torch.randperm(4, generator=generator)] for _ in range(24)])
    scales[:, 1] *= 2 ** torch.randint(0, 3, (24,), generator=generator)
    return codes[:16], scales[:16], codes[16:], scales[16:]


def product(how: Reading) -> tuple[Tensor, Tensor]:
    """(W x^T by the instruction's definition, from the registers; W x^T of the dequantised matrices). Both are exact."""
    w, w_scales, x, x_scales = operands()
    weight = pack(w, FORM, w_scales.half(), row_scales=torch.ones(16))
    a, a_scales = a_operand(weight.records[0, 0], how)
    values = torch.tensor(reference.E2M1, dtype=torch.float64)
    b = values[b_operand(x, how)] * x_scales[:, list(how.x_scales)].double().t().repeat_interleave(16, 0)
    found = (values[a] * a_scales.double().repeat_interleave(16, 1)) @ b
    dequantised = [
        values[codes.int()] * scales.double().repeat_interleave(16, 1) for codes, scales in ((w, w_scales), (x, x_scales))
    ]
    return found, dequantised[0] @ dequantised[1].t()


def test_the_registers_of_a_record_and_of_x_give_the_product() -> None:
    found, expected = product(RIGHT)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "wrong",
    [
        replace(RIGHT, lanes=(1, 0)),
        replace(RIGHT, rows=(4, 0)),
        replace(RIGHT, words=(1, 2)),
        replace(RIGHT, scales=(0, 1, 2, 3)),
        replace(RIGHT, scale_rows=(1, 0)),
        replace(RIGHT, x=tuple(range(64))),
        replace(RIGHT, x=(*ORDER[1::-1], *ORDER[2:])),
        replace(RIGHT, x_scales=(0, 1, 2, 3)),
    ],
    ids=["nibbles", "rows", "groups", "scales of W", "rows' scales of W", "order of x", "two places of x", "scales of x"],
)
def test_each_other_reading_gives_another_product(wrong: Reading) -> None:
    found, expected = product(wrong)
    assert not torch.equal(found, expected)


def test_the_order_has_each_column_once_and_keeps_groups_together() -> None:
    assert sorted(ORDER) == list(range(64))
    groups = [{column // 16 for column in ORDER[16 * block : 16 * block + 16]} for block in range(4)]
    assert groups == [{0}, {2}, {1}, {3}]


@pytest.mark.slow
def test_the_kernel_has_the_instruction() -> None:
    """One for each strip, tile and record of a step: 2 * 8 * 2. The emulation has none."""
    assert [ptx(emulated).count(INSTRUCTION) for emulated in (False, True)] == [32, 0]


INSTRUCTION = "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3"


def ptx(emulated: bool) -> str:
    status, program = nvrtc.nvrtcCreateProgram(whole_source("nvfp4").encode(), b"nvfp4.cu", 0, [], [])
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    defines = nvfp4_defines(2, "residual", torch.bfloat16, emulated)
    options = [b"-arch=compute_90" if emulated else b"-arch=compute_120a", b"-std=c++17", b"-default-device"]
    options += [f"-D{name}={value}".encode() for name, value in defines.items()]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    text = b" " * nvrtc.nvrtcGetPTXSize(program)[1]
    nvrtc.nvrtcGetPTX(program, text)
    return str(text, "ascii")


def test_rounding_goes_to_the_nearest_value_and_from_the_middle_to_the_even_code() -> None:
    """The largest value of each group is 6 * 448, so the values are the codes' values times 448."""
    sizes = torch.tensor([0.0, 0.2, 0.25, 0.3, 0.75, 1.2, 1.25, 1.3, 1.75, 2.5, 2.6, 3.5, 4.9, 5.0, 5.1, 6.0])
    codes, scales, row_scale = reference.quantize_nvfp4(448 * torch.stack((sizes, -sizes)).repeat(1, 4))
    expected = [0, 0, 0, 1, 2, 2, 2, 3, 4, 4, 5, 6, 6, 6, 7, 7]
    assert codes[0].tolist() == expected * 4
    assert codes[1].tolist() == [code + 8 for code in expected] * 4
    assert (scales.float() == 448).all()
    assert (row_scale == 1).all()


def test_every_size_of_a_row_is_rounded_within_the_format() -> None:
    """A value's error is at most a sixth of its group's largest value, and what rounding the scale adds: below 0.25 of it."""
    torch.manual_seed(0)
    x = torch.randn(40, 256) * torch.logspace(-30, 30, 40)[:, None] * torch.logspace(-1, 1, 16).repeat_interleave(16)
    x[7, :16] = 0
    codes, scales, row_scale = reference.quantize_nvfp4(x)
    values = torch.tensor(reference.E2M1)[codes.int()] * (scales.float() * row_scale[:, None]).repeat_interleave(16, 1)
    error = (values - x).abs().view(40, 16, 16).amax(2)
    assert (error <= 0.25 * x.abs().view(40, 16, 16).amax(2)).all()
    zeros, none, tiny = reference.quantize_nvfp4(torch.tensor([[0.0] * 16, [1e-38] * 16]))
    assert not zeros.any()
    assert not none[0].float().any()
    assert tiny.isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_with_a_value_that_is_not_finite_has_no_finite_result(bad: float) -> None:
    x = torch.ones(3, 64)
    x[1, 5] = bad
    y = reference.linear_nvfp4(x, torch.ones(8, 64))
    assert y.isfinite().all(1).tolist() == [True, False, True]


def e4m3_scales(*shape: int) -> Tensor:
    """All numbers of e4m3 from 0 to 448, and some again."""
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return every.repeat(-(-shape[0] * shape[1] // 127))[: shape[0] * shape[1]].view(shape)


@pytest.mark.parametrize("row_scale", [1.0, 0.37, 1 / 8192, 1.3e-4, 2.0**-14.9, 64.0])
def test_fp16_keeps_every_scale_of_usual_matrices(row_scale: float) -> None:
    scales, rows = e4m3_scales(16, 16), torch.full((16,), row_scale)
    assert recovers(scales.double() * rows[:, None].double(), rows)
    assert recovers(scales * rows[:, None], rows), "joined matrices have their scales in fp32"


@pytest.mark.parametrize("row_scale", [2.0**-15.5, 1e-6])
def test_fp16_loses_small_scales_of_small_matrices(row_scale: float) -> None:
    scales, rows = e4m3_scales(16, 16), torch.full((16,), row_scale)
    assert not recovers(scales.double() * rows[:, None], rows)
    large = scales.clamp(min=64)  # their products are far above fp16's least number
    assert recovers(large.double() * rows[:, None], rows)


def test_scales_that_are_no_products_are_not_recovered() -> None:
    rows = torch.ones(16)
    assert not recovers(-e4m3_scales(16, 16), rows)
    assert not recovers(torch.full((16, 16), 1.03), rows)
    assert not recovers(torch.full((16, 16), 460.0), rows)


def nvfp4_codes(n: int, whole: float | None) -> Codes:
    scales, codes = e4m3_scales(n, 8), torch.randint(0, 16, (n, 128), dtype=torch.uint8)
    rows = None if whole is None else torch.full((n,), whole)
    return Codes(codes, scales.double() * (whole or 1.0), is_float=True, row_scales=rows)


@pytest.fixture
def with_nvfp4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "has_nvfp4", lambda device: True)


@pytest.mark.usefixtures("with_nvfp4")
def test_joined_matrices_keep_their_scales() -> None:
    """q, k and v are joined. Gate and up are joined, and their rows alternate."""
    parts = [nvfp4_codes(32, 1e-3), nvfp4_codes(16, 2.5e-3)]
    whole = joined(parts)
    assert whole is not None
    weight = packed(whole)
    assert weight.row_scales is not None
    assert weight.row_scales.tolist() == pytest.approx([1e-3] * 32 + [2.5e-3] * 16)
    in_turn = whole.with_rows(lambda rows: rows.flip(0))
    assert in_turn.row_scales is not None
    assert torch.equal(in_turn.row_scales, weight.row_scales.flip(0))
    assert [part.row_scales.tolist() for part in weight.split(32) if part.row_scales is not None] == [
        weight.row_scales[:32].tolist(), weight.row_scales[32:].tolist(),
    ]  # fmt: skip
    assert weight.to(torch.device("meta")).row_scales is not None
    assert weight.nbytes == weight.records.nbytes + weight.counters.nbytes + 4 * 48


@pytest.mark.usefixtures("with_nvfp4")
def test_a_neighbour_with_inputs_in_16_bits_decides_for_both() -> None:
    whole = joined([nvfp4_codes(16, 1e-3), nvfp4_codes(16, None)])
    assert whole is not None
    assert whole.row_scales is None
    assert packed(whole).row_scales is None


@pytest.mark.usefixtures("with_nvfp4")
def test_a_matrix_whose_scales_fp16_loses_is_dequantised() -> None:
    assert packed(nvfp4_codes(16, 1e-6)).row_scales is None


def test_a_device_without_the_instruction_keeps_16_bits() -> None:
    assert not nvfp4.has_nvfp4(CPU)
    assert packed(nvfp4_codes(16, 1e-3)).row_scales is None


@pytest.mark.parametrize(
    ("trial", "passes", "said"),
    [(0.003, True, ""), (0.5, False, "by 0.500"), (float("nan"), False, "by nan"), (RuntimeError("no image"), False, "no image")],
)
def test_the_first_use_is_a_trial(
    trial: float | Exception, passes: bool, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It runs once for a device. A failure is one warning."""
    calls = []

    def error(device: torch.device) -> float:
        calls.append(device)
        if isinstance(trial, Exception):
            raise trial
        return trial

    monkeypatch.setattr(nvfp4, "_trial_error", error)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 1))
    nvfp4._passes.cache_clear()
    device = torch.device("cuda", 0)
    with caplog.at_level(logging.WARNING):
        found = [nvfp4.has_nvfp4(device) for _ in range(3)]
    nvfp4._passes.cache_clear()
    assert found == [passes] * 3
    assert calls == [device]
    assert len(caplog.messages) == (not passes)
    assert re.search(said, "".join(caplog.messages))


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (11, 0)])
def test_other_chips_have_no_trial(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(nvfp4, "_passes", lambda device: pytest.fail("a kernel would be compiled"))
    assert not nvfp4.has_nvfp4(torch.device("cuda", 0))


def test_each_row_of_the_trial_has_another_scale() -> None:
    """So a product with the scale of another row fails."""
    weight, x = nvfp4.trial(CPU)
    assert weight.row_scales is not None
    assert len(set(weight.row_scales.tolist())) == len(weight)
    exact = reference.linear_nvfp4(x, reference.unpack(weight.records, FORM, torch.float32))
    rolled = reference.linear_nvfp4(x, reference.unpack(weight.records.roll(1, 0), FORM, torch.float32))
    assert (rolled - exact).abs().max() > 10 * nvfp4._TRIAL_ERROR * exact.abs().max()


def test_many_rows_take_nvfp4_if_the_matrix_has_scales_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = import_module("engine.kernels.linear_packed")
    taken: list[str] = []

    def note(name: str) -> Any:
        return lambda x, *others: taken.append(f"{name} {len(x)}") or x

    for name in ("linear_nvfp4", "linear", "linear_add", "linear_swiglu", "_few"):
        monkeypatch.setattr(module, name, note(name))
    monkeypatch.setattr(module, "runs_on", lambda x: True)
    monkeypatch.setattr(module, "unpacked", lambda weight, dtype: weight)
    weight, _ = nvfp4.trial(CPU)

    def run(weight: Packed, rows: int) -> None:
        x, norm = torch.ones(rows, weight.k), torch.ones(weight.k)
        linear_packed(x, weight)
        linear_packed_add(x, weight, x)
        linear_packed_swiglu(x, weight, None, 1e-6)
        monkeypatch.setattr(module, "rms_norm", lambda x, norm, eps: x[:1])
        linear_packed(x, weight, norm, 1e-6)

    run(weight, 64)
    assert taken == ["_few 64"] * 4
    taken.clear()
    run(weight, 65)
    assert taken == ["linear_nvfp4 65"] * 3 + ["linear_nvfp4 1"], "the last one is normalised first"
    taken.clear()
    run(replace(weight, row_scales=None), 65)
    assert taken == ["linear 65", "linear_add 65", "linear_swiglu 65", "linear 65"]
