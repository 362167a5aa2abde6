"""Shows each quantised matrix of a checkpoint as one tensor, `weight` [N, K], among the other tensors."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.model.quantized.awq import read_awq
from engine.model.quantized.compressed_tensors import read_compressed_tensors
from engine.model.quantized.fp8 import read_fp8
from engine.model.quantized.gptq import read_gptq
from engine.model.quantized.layout import QuantizedMatrix
from engine.model.quantized.modelopt import read_modelopt
from engine.model.quantized.parts import Parts
from engine.model.quantized.scheme import Awq, CompressedTensors, Fp8, Gptq, ModelOpt, Scheme
from engine.model.weight_files import WeightFile

# A module with one of these tensors is quantised. The matrix's other tensors have the same prefix.
_PACKED = ("qweight", "weight_packed")
_SCALES = ("weight_scale", "weight_scale_inv")
_OTHERS = (
    "weight", "qzeros", "scales", "g_idx", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale",
    "weight_scale_2", "input_scale", "activation_scale", "input_zero_point", "input_global_scale",
)  # fmt: skip
_CACHE_SCALES = (
    ".self_attn.k_scale",
    ".self_attn.v_scale",
    ".self_attn.q_scale",
    ".self_attn.kv_scale",
    ".k_proj.output_scale",
    ".v_proj.output_scale",
    ".k_proj.k_scale",
    ".v_proj.v_scale",
)


class QuantizedFiles:
    """All files of a quantised checkpoint as one file. `tensor` dequantises a matrix when it is taken."""

    def __init__(
        self,
        files: Sequence[WeightFile],
        scheme: Scheme,
        folder: Path,
        to_device: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
    ) -> None:
        """
        Args:
            to_device: brings a matrix's tensors to the device that dequantises it.
            dtype: the dtype of dequantised matrices.
        """
        self._files, self._scheme, self._folder, self._to_device, self._dtype = files, scheme, folder, to_device, dtype
        self._file_of = {name: file for file in files for name in file.names}
        # config.json's fp8 has no key for a cache in 8 bits. ModelOpt may have it in another file.
        if isinstance(scheme, Fp8 | ModelOpt) or (isinstance(scheme, CompressedTensors) and scheme.has_cache_scales):
            self._file_of = {name: file for name, file in self._file_of.items() if not name.endswith(_CACHE_SCALES)}
        self._left: dict[WeightFile, set[str]] = {file: set() for file in files}  # tensors that are not taken yet
        for name, file in self._file_of.items():
            self._left[file].add(name)
        self._parts_of = self._find_parts()
        parts = {name for found in self._parts_of.values() for name in found.values()}
        plain = [name for name in self._file_of if name not in parts]
        self.names: tuple[str, ...] = (*plain, *(f"{module}.weight" for module in self._parts_of))
        matrices = (self._num_codes(module, found) for module, found in self._parts_of.items())
        self.num_values = sum(map(self._size, plain)) + sum(matrices)

    def tensor(self, name: str) -> Tensor:
        """A plain tensor in its stored form, or a matrix [N, K] in `dtype` on the device.

        Raises: ModelError naming a tensor of the matrix that is missing, superfluous, or of another shape or dtype.
        """
        found = self.matrix(name)
        return found if isinstance(found, Tensor) else found.dequantized(self._dtype)

    def matrix(self, name: str) -> Tensor | QuantizedMatrix:
        """The same as `tensor`, but a matrix is in its layout on the device."""
        names = self._parts_of.get(name.removesuffix(".weight"))
        if names is None:
            tensor = self._file_of[name].tensor(name)
            self._count([name])
            return tensor
        parts = Parts(
            name.removesuffix(".weight"), self._folder, names, lambda part: self._to_device(self._file_of[part].tensor(part))
        )
        matrix = self._matrix(parts)
        parts.finish()
        self._count(names.values())
        return matrix

    def size(self, name: str) -> int:
        names = self._parts_of.get(name.removesuffix(".weight"))
        return self._size(name) if names is None else self._num_codes(name.removesuffix(".weight"), names)

    def adds_nothing(self, name: str) -> bool:
        """Whether the tensor is a quantised layer's bias of zeros. AutoGPTQ writes one for layers without a bias."""
        module, _, part = name.rpartition(".")
        return part == "bias" and module in self._parts_of and not bool(self._file_of[name].tensor(name).any())

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _matrix(self, parts: Parts) -> QuantizedMatrix:
        match self._scheme:
            case Fp8():
                return read_fp8(parts, self._scheme)
            case Gptq():
                return read_gptq(parts, self._scheme)
            case Awq():
                return read_awq(parts, self._scheme)
            case CompressedTensors():
                return read_compressed_tensors(parts, self._scheme)
            case ModelOpt():
                return read_modelopt(parts, self._scheme)

    def _find_parts(self) -> dict[str, dict[str, str]]:
        """For each quantised module, its tensors' full names by their last names."""
        found: dict[str, dict[str, str]] = {}
        for name in self._file_of:
            module, _, part = name.rpartition(".")
            if part in (*_PACKED, *_SCALES):
                found[module] = {}
        for module, parts in found.items():
            parts |= {part: f"{module}.{part}" for part in (*_PACKED, *_SCALES, *_OTHERS) if f"{module}.{part}" in self._file_of}
            if "weight" in parts and any(part in parts for part in _PACKED):
                raise ModelError(f"{self._folder}: {module} has both a weight and a quantised one: {', '.join(parts.values())}")
        return found

    def _num_codes(self, module: str, names: dict[str, str]) -> int:
        """The number of a matrix's values. 0 if its codes are missing, which `tensor` reports."""
        codes = next((names[part] for part in (*_PACKED, "weight") if part in names), None)
        return 0 if codes is None else self._size(codes) * self._scheme.values_a_code(module)

    def _size(self, name: str) -> int:
        return self._file_of[name].size(name)

    def _count(self, names: Iterable[str]) -> None:
        """Close each file after its last tensor, because a mapping's pages count as this process's memory."""
        for name in names:
            file = self._file_of[name]
            self._left[file].discard(name)
            if not self._left[file]:
                file.close()
