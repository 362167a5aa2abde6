"""wgmma reads the registers of W's operand while the next instructions run: none of them may write these registers.

NVRTC assumes that an operand has been read when wgmma begins. Without `pin` in csrc/gemm_skinny.cu NVRTC gives the
registers to other values, and products are wrong from time to time.
"""

import re

import pytest
from cuda.bindings import nvrtc

from engine.codes import Form
from engine.kernels.compile import whole_source
from engine.kernels.gemm_skinny import skinny_defines, skinny_shape

_WRITES = re.compile(r"\s*(?:@!?%p\d+\s+)?(?!st\.|bra|cp\.|bar\.|fence|wgmma)[a-z][\w.:]*\s+(\{[^}]*\}|%\w+)")


def ptx_of(defines: dict[str, int]) -> list[str]:
    """The lines of PTX of csrc/gemm_skinny.cu. Calls NVRTC directly, because cuda.core needs a driver for this."""
    status, program = nvrtc.nvrtcCreateProgram(whole_source("gemm_skinny").encode(), b"gemm_skinny.cu", 0, [], [])
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    macros = [f"-D{name}={value}".encode() for name, value in defines.items()]
    options = [b"-arch=compute_90a", b"-std=c++17", b"-default-device", *macros]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    text = b" " * nvrtc.nvrtcGetPTXSize(program)[1]
    nvrtc.nvrtcGetPTX(program, text)
    return str(text, "ascii").splitlines()


@pytest.mark.parametrize(
    ("rows", "form", "n", "k"),
    [
        (128, Form(128), 4096, 4096),
        (64, Form(128), 24576, 4096),
        (64, Form(16, 6), 4096, 4096),
        (64, Form(32, 8), 24576, 4096),
        (16, Form(32, 5, "mins"), 4096, 4096),
        (64, Form(16, is_float=True), 4096, 4096),
    ],
    ids=str,
)
def test_no_instruction_writes_an_operand_before_the_wait(rows: int, form: Form, n: int, k: int) -> None:
    shape = skinny_shape(n, k, rows, 132, form)
    assert shape is not None, "it is a model's shape"
    groups: list[set[str]] = [set()]  # the registers that products in flight read, by commit; the last is not committed
    num_products = num_waits = 0
    for line in ptx_of(skinny_defines(4, k, shape, "residual")):
        if "wgmma.mma_async" in line:
            _, operand = re.findall(r"\{([^{}]*)\}", line[line.index("wgmma") :])[:2]
            groups[-1] |= {each.strip() for each in operand.split(",")}
            num_products += 1
        elif "wgmma.commit_group" in line:
            groups.append(set())
        elif "wgmma.wait_group" in line:
            left = int(re.findall(r"(\d+);", line)[0])
            groups = groups[-1 - left :]
            num_waits += 1
        elif found := _WRITES.match(line):
            written = {each.strip(" {}") for each in found[1].split(",")}
            assert not written & set().union(*groups), line
    assert (num_products, num_waits) == (8, 3)
