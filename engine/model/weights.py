"""Reads a model's tensors from the files of weights, one at a time.

A model takes each tensor by name, moves it to its device and dtype, and keeps only the result. So the peak of memory is the
finished model plus a few tensors. The families list tensors that embeddings do not need, and the load reports them. Any other
tensor that the model did not take stops the load, because the vectors may be wrong without it.
"""

import copy
import fnmatch
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, overload

import torch
from torch import Tensor

from engine.codes import MOST_BITS
from engine.devices import INT4, compute_dtype, is_integrated
from engine.errors import ModelError
from engine.kernels import Packed, Weight, quantize_weight
from engine.model.gguf_codes import read_matrix
from engine.model.gguf_weights import GGUFWeights
from engine.model.quantized.files import QuantizedFiles
from engine.model.quantized.kept import as_codes, in_e4m3, joined, packed, to_four_bits, why_not, why_not_in_e4m3
from engine.model.quantized.layout import Codes, QuantizedMatrix
from engine.model.quantized.scheme import Gguf, Quantization
from engine.model.upload import Uploader
from engine.model.weight_files import WeightFile, open_weights
from engine.model.with_images import language_model_name

log = logging.getLogger(__name__)

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Values of a tied head that are compared with the word embeddings at a time.
_COMPARED_VALUES = 1 << 24
_WORDS = "embed_tokens.weight"  # a decoder's word embeddings


class WeightSource(Protocol):
    """A source of weights. A model takes each weight by its name and shape."""

    device: torch.device
    dtype: torch.dtype  # the model's compute dtype
    decodes: bool  # it is a generation model, so many passes have only a few rows

    def strip_prefix(self, prefixes: Sequence[str], probe: str) -> None: ...

    def has(self, name: str) -> bool: ...

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor: ...

    def take_embedding(self, name: str, *shape: int) -> Tensor: ...

    def take_words(self, name: str, rows: int, columns: int) -> Tensor | Packed: ...

    def take_tied(self, name: str, words: Tensor) -> Tensor: ...

    def take_rows(self, names: Sequence[str], rows: Sequence[int], *columns: int) -> Tensor: ...

    def take_matrix(self, names: Sequence[str], rows: Sequence[int], columns: int) -> Tensor | Codes: ...

    def take_matrices(self, names: Sequence[str], rows: Sequence[int], columns: int) -> list[Tensor | Codes]: ...

    def to_layer_dtype(self, weight: Tensor | Codes) -> Weight: ...

    def derive(self, shape: tuple[int, ...], compute: Callable[[], Tensor]) -> Tensor: ...


class ShapeCounter:
    """A source without values. It gives a tensor for any name and shape, and counts the parameters that a model takes."""

    def __init__(self) -> None:
        self.device, self.dtype, self.decodes = torch.device("meta"), torch.float32, False
        self.num_parameters = 0
        self.num_multiplied = 0  # parameters of the matrices, which are used for each token
        # Values and rows of the layers' matrices, and the values of the largest matrix.
        self.num_quantized, self.num_scales, self.most_quantized = 0, 0, 0
        self.columns = 0  # the greatest common divisor of the columns of these matrices

    def strip_prefix(self, prefixes: Sequence[str], probe: str) -> None:
        pass

    def has(self, name: str) -> bool:
        return True

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        self.num_multiplied += math.prod(shape) if len(shape) > 1 else 0
        return self.take_embedding(name, *shape)

    def take_embedding(self, name: str, *shape: int) -> Tensor:
        self.num_parameters += math.prod(shape)
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def take_words(self, name: str, rows: int, columns: int) -> Tensor:
        return self.take_embedding(name, rows, columns)

    def take_tied(self, name: str, words: Tensor) -> Tensor:
        return words

    def take_rows(self, names: Sequence[str], rows: Sequence[int], *columns: int) -> Tensor:
        return self.take(names[0], sum(rows), *columns)

    def take_matrix(self, names: Sequence[str], rows: Sequence[int], columns: int) -> Tensor:
        return self.take(names[0], sum(rows), columns)

    def take_matrices(self, names: Sequence[str], rows: Sequence[int], columns: int) -> list[Tensor | Codes]:
        return [self.take_matrix(names, rows, columns)]

    def to_layer_dtype(self, weight: Tensor | Codes) -> Weight:
        assert isinstance(weight, Tensor), "take gives only tensors"
        self.num_quantized += weight.numel()
        self.num_scales += len(weight)
        self.most_quantized = max(self.most_quantized, weight.numel())
        self.columns = math.gcd(self.columns, weight.shape[1])
        return weight

    def derive(self, shape: tuple[int, ...], compute: Callable[[], Tensor]) -> Tensor:
        """Computes nothing: for arithmetic on the meta device torch imports its compiler, which takes 1 to 3 s."""
        return torch.empty(shape, device=self.device, dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class Kept:
    """The matrices that stay in their codes on a device, if its kernels take them."""

    most_bits: int = 0  # codes of up to so many bits stay
    e4m3: bool = False  # only codes in e4m3 stay, for products in 8 bits

    def __bool__(self) -> bool:
        return self.most_bits > 0 or self.e4m3


class Checkpoint:
    """The tensors of one model folder, from one file or several shards. Use it as a context manager."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        on_progress: Callable[[float], None] | None = None,
        scheme: Quantization | None = None,
    ) -> None:
        """
        Args:
            dtype: a dtype of 8 bits applies to the layers' matrices. The rest is in `compute_dtype`.
            on_progress: called after each tensor with the share of the tensors that are read.
            scheme: a quantised checkpoint's storage of matrices. Each matrix is dequantised when it is taken, except those that
                `take_matrix` leaves in their codes.
        Raises: ModelError if there is no file of weights, or if a file cannot be read.
        """
        self.folder, self.device, self.dtype = folder, device, compute_dtype(dtype)
        self.decodes = False
        self.kept_on: Callable[[torch.device], Kept] = lambda _: Kept()  # what stays in its codes on a device
        self._quantized = dtype if dtype != self.dtype else None
        # On a GB10, copies to the GPU from a file's mapping were measured at 0.1 to 0.5 GB/s.
        self._leaves_mapping = is_integrated(device)
        self._upload = Uploader(device) if device.type == "cuda" and not self._leaves_mapping else None
        self._files = open_weights(folder)
        self._dequantizes: QuantizedFiles | None = None
        if scheme is not None and not isinstance(scheme, Gguf):
            self._dequantizes = QuantizedFiles(self._files, scheme, folder, self.to_device, self.dtype)
            self._files = [self._dequantizes]
        self._quantized_matrices = Counter[str | None]()  # by the reason to dequantise them; None: they stay in codes
        self._file_of: dict[str, tuple[WeightFile, str]] = {}  # a tensor's file and its name there, by our name
        self._taken: set[str] = set()
        self._untaken: dict[WeightFile, int] = {}  # the number of a file's tensors that are not taken yet
        for file in self._files:
            self._file_of |= {_today(name): (file, name) for name in file.names}
            self._untaken[file] = len(file.names)
        self._num_left_out = 0  # values
        self._prefix = ""
        self._on_progress = on_progress

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for file in self._files:
            file.close()
        if self._upload is not None:
            self._upload.close()

    @contextmanager
    def on(self, device: torch.device) -> Iterator["Checkpoint"]:
        """The same files for another device. Both share the count of taken tensors, so `finish` is called once."""
        other = copy.copy(self)
        other.device = device
        other._leaves_mapping = is_integrated(device)
        other._upload = Uploader(device) if device.type == "cuda" and not other._leaves_mapping else None
        try:
            yield other
        finally:
            if other._upload is not None:
                other._upload.close()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in the model's dtype, except those that are left out. Reads none of them."""
        return (sum(file.num_values for file in self._files) - self._num_left_out) * self.dtype.itemsize

    def leave_out_images(self) -> None:
        """Leaves only the language model of a model that also reads images, with the names of a language model's own files."""
        named, self._file_of = self._file_of, {}
        for name, (file, stored) in named.items():
            if (new := language_model_name(name)) is not None:
                self._file_of[new] = file, stored
            else:
                self._untaken[file] -= 1
                self._num_left_out += file.size(stored)

    def strip_prefix(self, prefixes: Sequence[str], probe: str) -> None:
        """Find the prefix of the body's names (`bert.`, `model.`, or ""): for it there is a tensor prefix + `probe`."""
        for prefix in prefixes:
            if prefix + probe in self._file_of:
                self._prefix = prefix
                return
        raise ModelError(f"{self.folder}: no tensor named {' or '.join(prefix + probe for prefix in prefixes)}")

    def take_words_from_head(self) -> None:
        """Lets a tied head stand for the word embeddings if the files have only the head, as transformers does.

        A file has a tensor that two modules share only once, and some programs keep the head's name.
        """
        if "lm_head.weight" in self._file_of and not any(name.endswith(_WORDS) for name in self._file_of):
            self._file_of[f"model.{_WORDS}"] = self._file_of.pop("lm_head.weight")

    def has(self, name: str) -> bool:
        return self._full(name) is not None

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor on the model's device, in the model's dtype or in `dtype`.

        Raises: ModelError on a missing name, shape or dtype.
        """
        return self._on_device(self._read(name, shape), dtype or self.dtype)

    def take_embedding(self, name: str, *shape: int) -> Tensor:
        """The same as `take`, for a table. Tokens read rows of a table and are not multiplied by it."""
        return self.take(name, *shape)

    def take_words(self, name: str, rows: int, columns: int) -> Tensor | Packed:
        """A table with a row for each word. If matrices may stay in their codes, it stays in codes of any number of bits.

        So `--dtype int4` rounds no words.
        """
        if not self._kept.most_bits:
            return self.take_embedding(name, rows, columns)
        found = self._read(name, (rows, columns), keeps=True)
        if isinstance(found, Tensor):
            return self._on_device(found, self.dtype)
        reason = why_not(found, MOST_BITS)
        if isinstance(found, Codes) and found.order is not None:  # a token reads a row of the table as it is
            reason = "words in another order"
        self._quantized_matrices[reason] += 1
        if reason is None and isinstance(found, Codes):
            return packed(found.to(self.device))
        return self._on_device(found.dequantized(self.dtype), self.dtype)

    def take_tied(self, name: str, words: Tensor) -> Tensor:
        """The matrix of a head that config.json ties to the word embeddings `words`, which may be on another device.

        If the files have a matrix `name` with other values, the result is that matrix, as in transformers.
        """
        if not self.has(name):
            return words
        head = self._read(name, tuple(words.shape))
        step = max(1, _COMPARED_VALUES // words.shape[1])  # a second matrix on the device could exceed the device's memory
        parts = zip(torch.split(head, step), torch.split(words, step), strict=True)
        if all(torch.equal(self._on_device(part, words.dtype), same.to(self.device)) for part, same in parts):
            return words
        log.warning("%s: config.json ties %s to the word embeddings, but their values differ; it is not tied", self.folder, name)
        return self._on_device(head, self.dtype)

    def take_rows(self, names: Sequence[str], rows: Sequence[int], *columns: int) -> Tensor:
        """Several tensors stacked along their first axis into one, such as Q, K and V into one projection."""
        stacked = torch.empty(sum(rows), *columns, device=self.device, dtype=self.dtype)
        start = 0
        for name, count in zip(names, rows, strict=True):
            self._copy(self._read(name, (count, *columns)), stacked[start : start + count])
            start += count
        return stacked

    def take_matrix(self, names: Sequence[str], rows: Sequence[int], columns: int) -> Tensor | Codes:
        """A layer's matrix, from one tensor or several stacked along their rows. It is in codes if all of them stay so."""
        if not self._kept:
            return self.take_rows(names, rows, columns) if len(names) > 1 else self.take(names[0], rows[0], columns)
        parts = [self._read(name, (count, columns), keeps=True) for name, count in zip(names, rows, strict=True)]
        kept = [part for part in parts if isinstance(part, Codes) and self._why_not(part) is None]
        if len(kept) == len(parts) and (whole := joined(kept)) is not None:
            self._quantized_matrices[None] += len(kept)
            return whole.to(self.device)
        plain = []
        for part in parts:
            if not isinstance(part, Tensor):
                self._quantized_matrices[self._why_not(part) or "a neighbour of another kind"] += 1
                part = part.dequantized(self.dtype)
            plain.append(self._on_device(part, self.dtype))
        return torch.cat(plain)

    def take_matrices(self, names: Sequence[str], rows: Sequence[int], columns: int) -> list[Tensor | Codes]:
        """The same as `take_matrix`, for layers that may be computed separately. Neighbours of one kind are stacked."""
        if not self._kept:
            return [self.take_matrix(names, rows, columns)]
        found: list[Tensor | Codes] = []
        for name, count in zip(names, rows, strict=True):
            part = self.take_matrix([name], [count], columns)
            if found and (both := _stacked(found[-1], part)) is not None:
                found[-1] = both
            else:
                found.append(part)
        return found

    def to_layer_dtype(self, weight: Tensor | Codes) -> Weight:
        """A layer's matrix in the layers' dtype, which may have 4 to 8 bits. A CPU dequantises 4 bits.

        Raises: ModelError for a shape that 4 or 8 bits refuse.
        """
        if isinstance(weight, Codes):
            return in_e4m3(weight) if self._kept.e4m3 else packed(weight)
        if self._quantized == INT4:
            rounded = to_four_bits(weight)
            return packed(rounded) if weight.is_cuda else rounded.dequantized(weight.dtype)
        return weight if self._quantized is None else quantize_weight(weight, self._quantized)

    def derive(self, shape: tuple[int, ...], compute: Callable[[], Tensor]) -> Tensor:
        """A tensor of this shape that a model computes at load, for example from its weights."""
        derived = compute()
        assert derived.shape == shape, f"{derived.shape} is not {shape}"
        return derived

    def take_all(self) -> dict[str, Tensor]:
        """Every tensor by its stored name, in its stored form, for callers with their own rules for names and shapes.

        The tensors share the files' mappings. `to_device` copies them to the GPU.
        """
        self._taken.update(self._file_of)
        return {name: file.tensor(stored) for name, (file, stored) in self._file_of.items()}

    def to_device(self, tensor: Tensor) -> Tensor:
        """A tensor of `take_all` on the model's device."""
        return self._on_device(tensor, tensor.dtype)

    def finish(self, unused: Sequence[str], elsewhere: Sequence[str] = ()) -> list[str]:
        """Check the tensors that were not taken.

        Args:
            unused: glob patterns, without the prefix, of tensors that embeddings do not need (heads, buffers).
            elsewhere: glob patterns of tensors that another process loads.
        Returns: the names that match `unused`. Raises: ModelError naming unexpected tensors.
        """
        left = sorted(set(self._file_of) - self._taken)
        left = [name for name in left if not _matches(name.removeprefix(self._prefix), elsewhere)]
        if self._dequantizes is not None:
            left = [name for name in left if not self._dequantizes.adds_nothing(name)]
        bare = [name.removeprefix(self._prefix) for name in left]
        unknown = [name for name, short in zip(left, bare, strict=True) if not _matches(short, unused)]
        if unknown:
            raise ModelError(
                f"{self.folder}: {len(unknown)} tensors are not part of this architecture, so its vectors would be "
                f"wrong without them: {', '.join(unknown[:8])}"
            )
        if self._quantized_matrices:
            num_kept = self._quantized_matrices.pop(None, 0)
            reasons = ", ".join(f"{count} with {why}" for why, count in self._quantized_matrices.items())
            told = f"{reasons} are dequantised" if reasons else "none is dequantised"
            log.info("%s: %d matrices stay in their codes, %s", self.folder, num_kept, told)
        if left:
            log.info("%s: not needed for embeddings, not loaded: %s", self.folder, ", ".join(left))
        return left

    def _full(self, name: str) -> str | None:
        """The name with the prefix, or the bare name (heads have no prefix). If both exist, `finish` reports the unused one."""
        return next((each for each in (self._prefix + name, name) if each in self._file_of), None)

    @overload
    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor: ...
    @overload
    def _read(self, name: str, shape: tuple[int, ...], keeps: bool) -> Tensor | QuantizedMatrix: ...
    def _read(self, name: str, shape: tuple[int, ...], keeps: bool = False) -> Tensor | QuantizedMatrix:
        """One tensor of a file. With `keeps`, a quantised matrix is in its layout."""
        full = self._full(name)
        if full is None:
            raise ModelError(f"{self.folder}: tensor {' or '.join(dict.fromkeys((self._prefix + name, name)))} is missing")
        file, stored = self._file_of[full]
        tensor = self._matrix(file, stored) if keeps else file.tensor(stored)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{self.folder}: tensor {full} has shape {list(tensor.shape)}, config.json asks for {list(shape)}")
        if isinstance(tensor, Tensor) and tensor.dtype not in _FLOATS:
            raise ModelError(
                f"{self.folder}: tensor {full} is stored as {tensor.dtype}, and nothing says how it is quantised: "
                "its scales are missing, or the quantization_config of config.json"
            )
        if full not in self._taken:
            self._taken.add(full)
            if self._on_progress is not None:
                self._on_progress(len(self._taken) / len(self._file_of))
            self._untaken[file] -= 1
            if not self._untaken[file]:  # a mapping's pages count as this process's memory until the mapping is closed
                file.close()
        return tensor

    @property
    def _kept(self) -> Kept:
        return self.kept_on(self.device)

    def _why_not(self, matrix: QuantizedMatrix) -> str | None:
        """The reason why a layer's matrix does not stay in its codes. None if it does."""
        return why_not_in_e4m3(matrix) if self._kept.e4m3 else why_not(matrix, self._kept.most_bits)

    def _matrix(self, file: WeightFile, stored: str) -> Tensor | QuantizedMatrix:
        if isinstance(file, QuantizedFiles):
            matrix = file.matrix(stored)
            return matrix if isinstance(matrix, Tensor) else as_codes(matrix)
        return read_matrix(file, stored, self.to_device) if isinstance(file, GGUFWeights) else file.tensor(stored)

    def _on_device(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A file's tensor on the model's device. On a CPU it may be the tensor itself, if the dtype is the file's.

        A dequantised matrix is already on the device.
        """
        if self._upload is None or tensor.is_cuda:
            return self._unmapped(tensor).to(device=self.device, dtype=dtype)
        target = torch.empty_like(tensor, device=self.device, dtype=dtype)
        self._upload(tensor, target)
        return target

    def _copy(self, tensor: Tensor, target: Tensor) -> None:
        if self._upload is None or tensor.is_cuda:
            target.copy_(self._unmapped(tensor))
        else:
            self._upload(tensor, target)

    def _unmapped(self, tensor: Tensor) -> Tensor:
        """A copy in ordinary memory if the GPU is integrated. Otherwise the tensor itself, perhaps in a file's mapping."""
        return tensor.clone() if self._leaves_mapping and not tensor.is_cuda else tensor


def _stacked(first: Tensor | Codes, second: Tensor | Codes) -> Tensor | Codes | None:
    """The rows of both. None if they are of different kinds."""
    if isinstance(first, Codes) and isinstance(second, Codes):
        return joined([first, second])
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.cat([first, second])
    return None


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _today(name: str) -> str:
    """A tensor's modern name. Checkpoints converted from TensorFlow call a norm's weight and bias gamma and beta."""
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name
