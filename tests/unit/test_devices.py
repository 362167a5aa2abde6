"""The capabilities of a device, by the reports of the system."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cluster import doctor
from engine import devices

CPU = torch.device("cpu")
# Shortened: of a Neoverse N2, of a Cortex-A72, and of a Zen 4.
N2 = "processor\t: 0\nBogoMIPS\t: 2000.00\nFeatures\t: fp asimd sve sve2 i8mm bf16\nCPU implementer\t: 0x41\n"
A72 = "processor\t: 0\nFeatures\t: fp asimd evtstrm aes\n"
ZEN_4 = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16\nbugs\t\t: sysret_ss_attrs\n"


@pytest.fixture(autouse=True)
def forget_this_cpu() -> Iterator[None]:
    devices.cpu_flags.cache_clear()
    yield
    devices.cpu_flags.cache_clear()


@pytest.mark.parametrize(
    ("cpuinfo", "native_bf16", "shown"),
    [(N2, True, "bf16, i8mm, sve2"), (A72, False, None), (ZEN_4, True, "avx512_bf16, avx512f, avx2"), ("", False, None)],
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
