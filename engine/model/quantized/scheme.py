"""Typed descriptions of a checkpoint's storage of matrices. `quantization_config.py` reads them from config.json."""

import re
from dataclasses import dataclass
from typing import Literal

from engine.codes import Form

Strategy = Literal["tensor", "channel", "group", "block"]
# Columns that share a scale.
NVFP4_GROUP, MXFP4_GROUP = 16, 32


@dataclass(frozen=True, slots=True)
class Fp8:
    """Matrices in e4m3 with a scale for each block, or one for the matrix if `block` is None."""

    block: tuple[int, int] | None
    has_input_scales: bool
    ignores_layers: bool = False  # some layers' matrices are not quantised

    def values_a_code(self, module: str) -> int:
        return 1

    def __str__(self) -> str:
        return "FP8" if self.block is None else f"FP8 in blocks of {self.block[0]} x {self.block[1]}"


@dataclass(frozen=True, slots=True)
class Gptq:
    """GPTQ. `group_size` None: one group of all columns. `adds_one`: the file has each zero minus 1 (GPTQ v1)."""

    bits: Literal[4, 8]
    group_size: int | None
    symmetric: bool  # config.json says that every zero is 2^(bits - 1)
    reorders: bool  # desc_act: g_idx gives the group of each column
    adds_one: bool
    ignores_layers: bool = False  # as in `Fp8`

    def values_a_code(self, module: str) -> int:
        return 32 // self.bits

    def __str__(self) -> str:
        return f"GPTQ of {self.bits} bits"


@dataclass(frozen=True, slots=True)
class Awq:
    """AWQ in its gemm version. `group_size` as in `Gptq`."""

    group_size: int | None
    has_zeros: bool = True  # False: config.json says that every zero is 8
    ignores_layers: bool = False  # as in `Fp8`

    def values_a_code(self, module: str) -> int:
        return 8

    def __str__(self) -> str:
        return "AWQ of 4 bits"


@dataclass(frozen=True, slots=True)
class ModelOpt:
    """NVIDIA's ModelOpt: NVFP4, or FP8 with one scale for the matrix."""

    algorithm: Literal["NVFP4", "FP8"]
    inputs_in_4_bits: bool = False  # as in `Group`
    ignores_layers: bool = False  # as in `Fp8`

    def values_a_code(self, module: str) -> int:
        return 2 if self.algorithm == "NVFP4" else 1

    def __str__(self) -> str:
        return f"ModelOpt's {self.algorithm}"


@dataclass(frozen=True, slots=True)
class Group:
    """compressed-tensors' storage of the matrices of one group of layers."""

    targets: tuple[str, ...]
    bits: Literal[4, 8]
    is_float: bool
    strategy: Strategy | Literal["tensor_group"]  # the latter is NVFP4's
    symmetric: bool
    packed: bool
    group_size: int | None = None  # for strategy "group"
    block: tuple[int, int] | None = None  # for strategy "block"
    reorders: bool = False
    has_input_scales: bool = False  # for static activations
    inputs_in_4_bits: bool = False  # the inputs of the layers are in NVFP4, too

    def __str__(self) -> str:
        return f"{'float' if self.is_float else 'int'} of {self.bits} bits"


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    groups: tuple[Group, ...]
    ignore: tuple[str, ...]
    has_cache_scales: bool = False  # scales for keys and values in 8 bits; the engine does not use them
    ignores_layers: bool = False  # as in `Fp8`

    def group_of(self, module: str) -> Group | None:
        """The group of a linear layer. A target with the layer's name comes before one with its class. None: ignored."""
        if any(_names(target, module) or target == "Linear" for target in self.ignore):
            return None
        named = (group for group in self.groups if any(_names(target, module) for target in group.targets))
        of_class = (group for group in self.groups if "Linear" in group.targets)
        return next(named, None) or next(of_class, None)

    def values_a_code(self, module: str) -> int:
        group = self.group_of(module)
        if group is None or not group.packed:
            return 1
        return 2 if group.is_float else 32 // group.bits

    def __str__(self) -> str:
        return f"compressed-tensors, {' and '.join(dict.fromkeys(map(str, self.groups)))}"


@dataclass(frozen=True, slots=True)
class Gguf:
    """A GGUF file. Each of its tensors has a type of its own."""

    kinds: tuple[str, ...]  # ggml's names for the types of the layers' matrices, the type with the most values first
    num_values: int  # in the matrices of all layers
    kept: tuple[tuple[tuple[Form, int], ...], ...]  # for each layer: how many values can stay in codes of each form
    words: Form | None = None  # the form in which the word embeddings can stay
    head: Form | None = None  # the form in which a head of its own can stay

    def __str__(self) -> str:
        return f"GGUF with {' and '.join(self.kinds)}"


# `values_a_code(module)` of a scheme: the number of values in one element of the tensor that holds the layer's codes.
Scheme = Fp8 | Gptq | Awq | CompressedTensors | ModelOpt
Quantization = Scheme | Gguf


def _names(target: str, module: str) -> bool:
    """Whether a target of compressed-tensors is this module's whole name, or a regular expression that matches its start."""
    return re.match(target[3:], module) is not None if target.startswith("re:") else target == module
