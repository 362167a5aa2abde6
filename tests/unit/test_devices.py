"""The capabilities of a device, by the reports of the system."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cluster import doctor
from engine import devices
from engine.errors import ModelError

CPU = torch.device("cpu")
# Linux's reports of one processor each, for the GB10 of a DGX Spark, Grace, Ampere Altra and Raspberry Pi 5.
_SINCE_N1 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm"
_V9 = (
    f"{_SINCE_N1} jscvt fcma lrcpc dcpop sha3 sm3 sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm sb paca pacg dcpodp "
    "sve2 sveaes svepmull svebitperm svesha3 svesm4 flagm2 frint svei8mm svebf16 i8mm bf16 dgh bti"
)


def arm(features: str, part: str) -> str:
    return (
        f"processor\t: 0\nBogoMIPS\t: 2000.00\nFeatures\t: {features}\nCPU implementer\t: 0x41\nCPU architecture: 8\n"
        f"CPU variant\t: 0x0\nCPU part\t: {part}\nCPU revision\t: 1\n"
    )


GB10 = arm(f"{_V9} ecv afp wfxt", "0xd87")
GRACE = arm(_V9, "0xd4f")
ALTRA = arm(f"{_SINCE_N1} lrcpc dcpop asimddp ssbs", "0xd0c")
RASPBERRY_PI_5 = arm(f"{_SINCE_N1} lrcpc dcpop asimddp", "0xd0b")
# This report is shortened.
ZEN_4 = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16\nbugs\t\t: sysret_ss_attrs\n"


@pytest.fixture(autouse=True)
def forget_this_cpu() -> Iterator[None]:
    devices.cpu_flags.cache_clear()
    yield
    devices.cpu_flags.cache_clear()


@pytest.mark.parametrize(
    ("cpuinfo", "native_bf16", "shown"),
    [
        (GB10, True, "bf16, i8mm, sve2"),
        (GRACE, True, "bf16, i8mm, sve2"),
        (ALTRA, False, None),
        (RASPBERRY_PI_5, False, None),
        (ZEN_4, True, "avx512_bf16, avx512f, avx2"),
        ("", False, None),
    ],
)
def test_a_cpus_instructions_are_found_on_x86_and_arm(
    cpuinfo: str, native_bf16: bool, shown: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path, **_: cpuinfo)
    assert devices.has_native_bf16(CPU) == native_bf16
    assert devices.choose_dtype("auto", CPU, False) == (torch.bfloat16 if native_bf16 else torch.float32)
    monkeypatch.setattr(doctor, "choose_device", lambda name: CPU)
    found = doctor._kernels().found
    assert found.endswith(f", {shown}") if shown else not {"bf16", "i8mm", "sve2", "avx2"} & set(found.split(", "))


def test_an_unknown_dtype_is_named_with_the_known_ones() -> None:
    """`emberforge generate`, `chat` and `embed`, and a program, give their dtype unchecked."""
    known = "auto, float32, bfloat16, float16, float8, int8, int4"
    with pytest.raises(ModelError, match=f"dtype is 'nope', expected {known}"):
        devices.choose_dtype("nope", CPU, False)
