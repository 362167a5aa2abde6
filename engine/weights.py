"""safetensors files -> tensors, one at a time, straight from the memory map.

A model takes each tensor by name, moves it to its device and dtype, and keeps only the result: at the peak there is
the finished model plus one tensor. Whatever no model took is either known to be needless for embeddings and reported,
or stops the load: an unknown tensor may be the one that makes the vectors right.
"""

import fnmatch
import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from pickle import UnpicklingError
from types import TracebackType
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from engine.errors import ModelError

log = logging.getLogger(__name__)

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class Tensors(Protocol):
    """What a model takes its weights from."""

    device: torch.device
    dtype: torch.dtype

    def strip_prefix(self, prefixes: Sequence[str], probe: str) -> None: ...

    def has(self, name: str) -> bool: ...

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor: ...

    def take_table(self, name: str, *shape: int) -> Tensor: ...

    def take_rows(self, names: Sequence[str], rows: Sequence[int], *columns: int) -> Tensor: ...


class Shapes:
    """Has every tensor, of the shape asked for and without content: a model made of it tells what it would take."""

    def __init__(self) -> None:
        self.device, self.dtype = torch.device("meta"), torch.float32
        self.num_parameters = 0
        self.num_multiplied = 0  # of matrices: each token is multiplied with every one of them

    def strip_prefix(self, prefixes: Sequence[str], probe: str) -> None:
        pass

    def has(self, name: str) -> bool:
        return True

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        self.num_multiplied += math.prod(shape) if len(shape) > 1 else 0
        return self.take_table(name, *shape)

    def take_table(self, name: str, *shape: int) -> Tensor:
        self.num_parameters += math.prod(shape)
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def take_rows(self, names: Sequence[str], rows: Sequence[int], *columns: int) -> Tensor:
        return self.take(names[0], sum(rows), *columns)


class Checkpoint:
    """The tensors of one model folder, single file or sharded. Use as a context manager."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Raises: ModelError when there is no safetensors file, or a shard the index names is missing."""
        self.folder, self.device, self.dtype = folder, device, dtype
        self._stack = ExitStack()
        self._file_of: dict[str, safe_open] = {}
        self._taken: set[str] = set()
        self._untaken: dict[safe_open, int] = {}  # how many tensors of a file are still to come
        for path in _shards(folder):
            try:
                file = self._stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} cannot be read as safetensors: {error}") from error
            self._file_of |= dict.fromkeys(file.keys(), file)
            self._untaken[file] = len(file.keys())
        self._prefix = ""

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    @property
    def num_bytes(self) -> int:
        """What all tensors take in the model's dtype, from the headers alone."""
        shapes: Iterator[list[int]] = (file.get_slice(name).get_shape() for name, file in self._file_of.items())  # type: ignore[no-untyped-call]
        return sum(map(math.prod, shapes)) * self.dtype.itemsize

    def strip_prefix(self, prefixes: Sequence[str], probe: str) -> None:
        """Settle which of `prefixes` the names carry (`bert.`, `model.`, or ""), by looking for `probe`."""
        for prefix in prefixes:
            if prefix + probe in self._file_of:
                self._prefix = prefix
                return
        raise ModelError(f"{self.folder}: no tensor named {' or '.join(prefix + probe for prefix in prefixes)}")

    def has(self, name: str) -> bool:
        return self._full(name) in self._file_of

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor on the model's device, in its dtype or in `dtype`, for what is computed at load.

        Raises: ModelError on a missing name, shape or dtype.
        """
        return self._read(name, shape).to(device=self.device, dtype=dtype or self.dtype)

    def take_table(self, name: str, *shape: int) -> Tensor:
        """As `take`, of a table that tokens look their rows up in."""
        return self.take(name, *shape)

    def take_rows(self, names: Sequence[str], rows: Sequence[int], *columns: int) -> Tensor:
        """Several tensors stacked along their first axis into one, e.g. Q, K and V into one projection."""
        stacked = torch.empty(sum(rows), *columns, device=self.device, dtype=self.dtype)
        start = 0
        for name, count in zip(names, rows, strict=True):
            stacked[start : start + count].copy_(self._read(name, (count, *columns)))
            start += count
        return stacked

    def finish(self, needless: Sequence[str]) -> list[str]:
        """Account for what was not taken.

        Args:
            needless: glob patterns, without prefix, of tensors that embeddings do not need (heads, buffers).
        Returns: the needless names found. Raises: ModelError naming tensors that nobody expected.
        """
        left = sorted(set(self._file_of) - self._taken)
        bare = [name.removeprefix(self._prefix) for name in left]
        unknown = [name for name, short in zip(left, bare, strict=True) if not _matches(short, needless)]
        if unknown:
            raise ModelError(
                f"{self.folder}: {len(unknown)} tensors are not part of this architecture, so its vectors would be "
                f"wrong without them: {', '.join(unknown[:8])}"
            )
        if left:
            log.info("%s: not needed for embeddings, not loaded: %s", self.folder, ", ".join(left))
        return left

    def _full(self, name: str) -> str:
        """With the prefix, or as it is: a head lies beside the body, without the body's prefix."""
        full = self._prefix + name
        return name if full not in self._file_of and name in self._file_of else full

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        full = self._full(name)
        if full not in self._file_of:
            raise ModelError(f"{self.folder}: tensor {full} is missing")
        file = self._file_of[full]
        tensor: Tensor = file.get_tensor(full)  # type: ignore[no-untyped-call]
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{self.folder}: tensor {full} has shape {list(tensor.shape)}, config.json asks for {list(shape)}")
        if tensor.dtype not in _FLOATS:
            raise ModelError(f"{self.folder}: tensor {full} is stored as {tensor.dtype}; quantised weights are not supported")
        if full not in self._taken:
            self._taken.add(full)
            self._untaken[file] -= 1
            if not self._untaken[file]:  # drop the map of a shard that is done: its pages count as ours until then
                file.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return tensor


def read_linear(folder: Path, name: str, columns: int) -> tuple[Tensor, Tensor] | None:
    """(weight [rows, columns], bias [rows]) of a layer that has a file of its own, `name`.safetensors or, as torch saves a state
    dict, `name`.pt; None where there is neither. No code of a .pt is run.

    Raises: ModelError naming the file.
    """
    path = folder / f"{name}.safetensors"
    if not path.is_file():
        path = folder / f"{name}.pt"
    try:
        tensors = load_file(path) if path.suffix == ".safetensors" else torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return None
    except (SafetensorError, UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    shapes = {key: tuple(each.shape) for key, each in tensors.items()} if isinstance(tensors, dict) else {}
    rows = shapes.get("weight", (0,))[0]
    if shapes != {"weight": (rows, columns), "bias": (rows,)}:
        raise ModelError(f"{path} holds {shapes or type(tensors).__name__}, expected weight [n, {columns}] and bias [n]")
    return tensors["weight"], tensors["bias"]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise ModelError(f"{folder} has no model.safetensors (other weight formats are never loaded)")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{index} cannot be read: {error!r}") from error
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if missing:
        raise ModelError(f"{index} names shards that are not in the folder: {', '.join(missing)}")
    return [folder / name for name in names]
