"""Reads the signatures of kernels from their sources, and checks the arguments of each launch.

The driver's launch takes addresses and knows neither types nor strides. A missing argument, fp32 instead of bf16, or a strided
tensor would give wrong numbers without an error.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from cuda.core import TensorMapDescriptor
from torch import Tensor

from engine.errors import BackendError
from engine.kernels.compile import read_source

_ENTRY = re.compile(r'extern "C" __global__.*?\b(\w+)\(([^()]*)\)\s*\{', re.DOTALL)
_QUALIFIERS = re.compile(r"\b(const|__grid_constant__|__restrict__)\b")
_PARAMETER = re.compile(r"([\w ]+?) ?(\*?) ?(\w+)$")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kernel.

    `dtype` is the dtype of a tensor. A parameter that is passed by value has none: `value` is the type of the argument. A
    `strided` tensor may have any stride in the first dimension; all other tensors are contiguous.
    """

    name: str
    dtype: torch.dtype | None
    value: type | None = None
    strided: bool = False

    def __str__(self) -> str:
        if self.dtype is None:
            return f"{self.name} as {_KINDS[self.value]}"
        layout = "of contiguous rows" if self.strided else "contiguous"
        return f"{self.name} as a tensor of {_short(self.dtype)}, {layout}"


_KINDS: dict[type | None, str] = {int: "a whole number", np.float32: "a numpy.float32", TensorMapDescriptor: "a tensor map"}


@dataclass(frozen=True, slots=True)
class Signature:
    """The name and the parameters of one entry point, for one set of macros."""

    entry: str
    parameters: tuple[Parameter, ...]

    def values(self, arguments: Sequence[object]) -> list[object]:
        """The values for the launch: a tensor's address, 0 for None, and all other arguments unchanged.

        Raises: BackendError naming the kernel and the parameter, for arguments that the source does not take.
        """
        if len(arguments) != len(self.parameters):
            names = ", ".join(each.name for each in self.parameters)
            raise BackendError(f"kernel {self.entry} takes {len(self.parameters)} arguments ({names}), got {len(arguments)}")
        # A replay of a CUDA graph does not run this.
        return [
            each.data_ptr()
            if isinstance(each, Tensor) and each.dtype is parameter.dtype and each.is_contiguous()
            else self._other(parameter, each)
            for parameter, each in zip(self.parameters, arguments, strict=True)
        ]

    def _other(self, parameter: Parameter, argument: object) -> object:
        if parameter.dtype is None:
            if type(argument) is parameter.value:
                return argument
        elif argument is None:
            return 0
        elif isinstance(argument, Tensor) and argument.dtype is parameter.dtype and parameter.strided and _has_rows(argument):
            return argument.data_ptr()
        raise BackendError(f"kernel {self.entry} takes {parameter}, got {_told(argument)}")


def signature(source: str, entry: str, defines: Mapping[str, int]) -> Signature:
    """The signature of `entry` in `csrc/<source>.cu`, with the macros in `defines`."""
    found = dict(_ENTRY.findall(read_source(source)))
    declared = [_parsed(each, defines) for each in found[entry].split(",")]
    names = [name for _, _, name in declared]
    stems = [name.removesuffix("_stride") for name in names if name.endswith("_stride")]
    # The stride of `x` is `x_stride`; `kv_stride` is the stride of both `k` and `v`.
    strided = {name for stem in stems for name in ([stem] if stem in names else stem)}
    return Signature(
        entry,
        tuple(
            Parameter(name, _dtype(kind, defines), None, name in strided) if pointer else Parameter(name, None, _VALUES[kind])
            for kind, pointer, name in declared
        ),
    )


def entries(source: str) -> list[str]:
    """The entry points of `csrc/<source>.cu`."""
    return [name for name, _ in _ENTRY.findall(read_source(source))]


_VALUES: dict[str, type] = {"i64": int, "float": np.float32, "TensorMap": TensorMapDescriptor}


def _dtype(kind: str, defines: Mapping[str, int]) -> torch.dtype:
    """The dtype of the tensor behind a pointer to `kind`. The typedefs are those of csrc/common.cuh and of the source."""
    half = torch.float16 if defines["HALF"] else torch.bfloat16
    return {
        "u16": half,
        "u8": torch.uint8,
        "KV": (half, torch.float8_e4m3fn, torch.int8)[defines.get("KV8", 0)],
        "Logit": torch.float32 if defines.get("FP32") else half,
        "Out": torch.float8_e4m3fn if defines.get("E4M3") else half,
        "unsigned char": torch.int8 if defines.get("INT8") else torch.float8_e4m3fn,
        "int": torch.int32,
        "int2": torch.int32,
        "Tile": torch.int32,
        "Queue": torch.int32,
        "float": torch.float32,
        "float2": torch.float32,
    }[kind]


def _parsed(declaration: str, defines: Mapping[str, int]) -> tuple[str, bool, str]:
    """ "const int* __restrict__ ids" -> ("int", True, "ids"). `Weights` and `Results` may be tensor maps (csrc/gemm_*.cu)."""
    found = _PARAMETER.match(" ".join(_QUALIFIERS.sub("", declaration).split()))
    assert found, f"a parameter is declared in a new form: {declaration}"
    kind, pointer, name = found.groups()
    if kind == "Weights":
        kind, pointer = ("int", "*") if defines["OPERANDS"] == 4 else ("TensorMap", "")
    if kind == "Results":
        kind, pointer = ("TensorMap", "") if defines["THROUGH_SHARED"] else ("Out", "*")
    return kind, bool(pointer), name.removesuffix("_")


def _has_rows(x: Tensor) -> bool:
    """Whether each x[i] is contiguous. `x` has two or three dimensions."""
    return x.stride(-1) == 1 and (x.ndim == 2 or x.stride(1) == x.shape[2])


def _told(argument: object) -> str:
    if not isinstance(argument, Tensor):
        return f"{argument!r} of type {type(argument).__name__}"
    return f"a tensor of {_short(argument.dtype)}, shape {tuple(argument.shape)}, strides {argument.stride()}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
