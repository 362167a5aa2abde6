"""wgmma reads the registers of W's operand while the next instructions run: none of them may write these registers.

NVRTC assumes that an operand has been read when wgmma begins. Without `pin` in csrc/packed_tiles.cu NVRTC gives the
registers to other values, and products are wrong from time to time.
"""

import re

import pytest
import torch
from cuda.bindings import nvrtc

from engine.codes import Form
from engine.kernels.compile import whole_source
from engine.kernels.packed_tiles import tiled_defines, tiled_shape

_WRITES = re.compile(r"\s*(?:@!?%p\d+\s+)?(?!st\.|bra|cp\.|bar\.|fence|wgmma)[a-z][\w.:]*\s+(\{[^}]*\}|%\w+)")


def ptx_of(defines: dict[str, int]) -> list[str]:
    """The lines of PTX of csrc/packed_tiles.cu. Calls NVRTC directly, because cuda.core needs a driver for this."""
    status, program = nvrtc.nvrtcCreateProgram(whole_source("packed_tiles").encode(), b"packed_tiles.cu", 0, [], [])
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    macros = [f"-D{name}={value}".encode() for name, value in defines.items()]
    options = [b"-arch=compute_90a", b"-std=c++17", b"-default-device", *macros]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    text = b" " * nvrtc.nvrtcGetPTXSize(program)[1]
    nvrtc.nvrtcGetPTX(program, text)
    return str(text, "ascii").splitlines()


# A warp has one strip, in the second case two. A step has one group of each strip.
@pytest.mark.parametrize(
    ("rows", "form", "n", "k"),
    [
        (128, Form(128), 4096, 4096),
        (64, Form(128), 24576, 4096),
        (64, Form(64), 4096, 576),
        (64, Form(16, 6), 4096, 4096),
        (64, Form(32, 8), 24576, 4096),
        (64, Form(16, is_float=True), 4096, 4096),
    ],
    ids=str,
)
def test_no_instruction_writes_an_operand_before_the_wait(rows: int, form: Form, n: int, k: int) -> None:
    shape = tiled_shape(n, k, rows, form, 132, 227 << 10, True)
    assert shape is not None, "it is a model's shape"
    read: set[str] = set()  # registers that products in flight read
    num_products = 0
    for line in ptx_of(tiled_defines(rows, form, shape, "residual", torch.bfloat16)):
        if "wgmma.mma_async" in line:
            _, operand = re.findall(r"\{([^{}]*)\}", line[line.index("wgmma") :])[:2]
            read |= {each.strip() for each in operand.split(",")}
            num_products += 1
        elif "wgmma.wait_group" in line:
            read.clear()
        elif found := _WRITES.match(line):
            written = {each.strip(" {}") for each in found[1].split(",")}
            assert not written & read, line
    assert num_products == shape.tall * shape.per_step * form.chunk // 16
