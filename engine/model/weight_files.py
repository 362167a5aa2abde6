"""Opens the files of a model's weights: safetensors, or PyTorch's format without them, or one GGUF file without either.

All files are mapped into memory: a read of a tensor loads its pages, and the system may drop them again. PyTorch files are read
with `weights_only`, which builds tensors and runs no code (docs/decisions/017). torch up to 1.5 wrote files that are not zips.
They cannot be mapped, so the whole file is in memory until all its tensors are taken.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ModelError
from engine.model.gguf_weights import GGUFWeights
from engine.model.weight_paths import weight_paths

# In torch's error, the name of the first object of a file that is not a tensor.
_FORBIDDEN = re.compile(r"\bGLOBAL (\S+)")
_CONVERT = (
    "import torch, safetensors.torch as s; d = torch.load('{}', weights_only=False); "
    "s.save_file({{k: v.clone() for k, v in d.items() if torch.is_tensor(v)}}, '{}.safetensors')"
)


class WeightFile(Protocol):
    """One file of named tensors."""

    names: tuple[str, ...]
    num_values: int  # the number of values of all tensors

    def tensor(self, name: str) -> Tensor:
        """The tensor on the CPU in its stored dtype. It is dequantised if it is stored in blocks."""
        ...

    def size(self, name: str) -> int:
        """The number of the tensor's values. Reads none of them."""
        ...

    def close(self) -> None:
        """Release the mapping. Tensors that share the mapping stay valid and keep it alive."""
        ...


def open_weights(folder: Path) -> list[WeightFile]:
    """Every file of weights of a folder, whether there is one file or several shards.

    Raises: ModelError naming the missing, damaged or refused file, and the way out.
    """
    kinds: dict[str, Callable[[Path], WeightFile]] = {".safetensors": _Safetensors, ".gguf": GGUFWeights}
    return [kinds.get(path.suffix, _PyTorch)(path) for path in weight_paths(folder)]


def read_linear(folder: Path, name: str, columns: int) -> tuple[Tensor, Tensor] | None:
    """(weight [rows, columns], bias [rows]) of a layer with its own file, `name`.safetensors or torch's `name`.pt.

    Returns None if there is no such file. Raises: ModelError naming the file.
    """
    kinds: dict[str, type[_Safetensors | _PyTorch]] = {".safetensors": _Safetensors, ".pt": _PyTorch}
    path = next((path for path in map((folder / name).with_suffix, kinds) if path.is_file()), None)
    if path is None:
        return None
    file = kinds[path.suffix](path)
    tensors = {each: file.tensor(each) for each in file.names}
    shapes = {each: tuple(tensor.shape) for each, tensor in tensors.items()}
    rows = shapes.get("weight", (0,))[0]
    if shapes != {"weight": (rows, columns), "bias": (rows,)}:
        raise ModelError(f"{path} holds {shapes}, expected weight [n, {columns}] and bias [n]")
    return tensors["weight"], tensors["bias"]


class _Safetensors:
    def __init__(self, path: Path) -> None:
        try:
            self._file = safe_open(str(path), framework="pt", device="cpu").__enter__()  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read as safetensors: {error}") from error
        self.names: tuple[str, ...] = tuple(self._file.keys())
        self.num_values = sum(map(self.size, self.names))

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def size(self, name: str) -> int:
        return math.prod(self._file.get_slice(name).get_shape())

    def close(self) -> None:
        self._file.__exit__(None, None, None)


class _PyTorch:
    def __init__(self, path: Path) -> None:
        self._tensors = _load(path)
        self.names: tuple[str, ...] = tuple(self._tensors)
        # Tied tensors are stored once under several names.
        distinct = {(tensor.data_ptr(), tensor.shape): tensor.numel() for tensor in self._tensors.values()}
        self.num_values = sum(distinct.values())

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name].detach()  # old files contain parameters

    def size(self, name: str) -> int:
        return self._tensors[name].numel()

    def close(self) -> None:
        self._tensors.clear()


def _load(path: Path) -> dict[str, Tensor]:
    try:
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        content = torch.load(path, map_location="cpu", mmap=is_zip, weights_only=True)
    except UnpicklingError as error:
        found = _FORBIDDEN.search(str(error))
        if found is None:
            raise ModelError(f"{path} cannot be read as a PyTorch file: it is damaged, or is not a PyTorch file") from error
        raise ModelError(
            f"{path} holds more than tensors ({found[1]}), and its code is never run; if you trust its authors, convert it: "
            f'python -c "{_CONVERT.format(path.name, path.stem.removeprefix("pytorch_"))}"'
        ) from error
    except Exception as error:  # a damaged file makes the unpickler raise anything
        raise ModelError(f"{path} cannot be read as a PyTorch file: {(str(error) or repr(error)).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, expected tensors by name")
    for name, value in content.items():
        plain = isinstance(value, Tensor) and value.layout is torch.strided and value.device.type == "cpu"
        if not isinstance(name, str) or not plain:
            raise ModelError(f"{path}: {name} is a {type(value).__name__}, expected a plain tensor")
    return content
