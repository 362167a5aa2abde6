"""SwiGLU, GeGLU, and bias + exact GeLU."""

from functools import cache
from typing import cast

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.launch import Kernel, half, runs_on

THREADS = 256


def swiglu(gate_up: Tensor, interleaved: bool = False) -> Tensor:
    """Returns silu(gate) * up. [T, 2 I] -> [T, I], dtype kept. Gate is the left half, or eight columns of both alternate."""
    return _gated("swiglu", gate_up, interleaved) if runs_on(gate_up) else reference.swiglu(gate_up, interleaved)


def geglu(gate_up: Tensor, tanh: bool = False) -> Tensor:
    """Returns gelu(gate) * up, shapes as in `swiglu`. The checkpoint decides between exact GeLU and the tanh form."""
    if not runs_on(gate_up):
        return reference.geglu(gate_up, tanh)
    return _gated("geglu_tanh" if tanh else "geglu", gate_up)


def _gated(entry: str, gate_up: Tensor, interleaved: bool = False) -> Tensor:
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    kernel = _kernel(entry, width, gate_up.dtype, gate_up.device, interleaved)
    kernel(-(-num_rows * width // (8 * THREADS)), gate_up, out, num_rows)
    return out


def gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    """Replaces x by the exact GeLU (with erf) of x + bias and returns x. x [T, I], bias [I]."""
    if bias is None:
        return cast(Tensor, torch.ops.aten.gelu_(x))
    if not runs_on(x):
        return reference.gelu(x, bias)
    num_rows, width = x.shape
    _kernel("gelu", width, x.dtype, x.device)(-(-num_rows * width // (8 * THREADS)), x, bias, num_rows)
    return x


@cache
def _kernel(entry: str, width: int, dtype: torch.dtype, device: torch.device, interleaved: bool = False) -> Kernel:
    return Kernel("activation", entry, activation_defines(width, dtype, interleaved), device, THREADS)


def activation_defines(width: int, dtype: torch.dtype, interleaved: bool = False) -> dict[str, int]:
    assert width % 8 == 0, "rows are read eight values at a time"
    return {"I": width, "INTERLEAVED": int(interleaved), "THREADS": THREADS, "HALF": half(dtype)}
