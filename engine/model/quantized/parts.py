"""The stored tensors of one quantised matrix. Each is checked when it is taken."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ModelError

SCALES = (torch.float32, torch.float16, torch.bfloat16)


class Parts:
    """The tensors of one linear layer's matrix, by their last names: `qweight`, `scales`. Each is taken and checked once."""

    def __init__(self, module: str, folder: Path, names: Mapping[str, str], read: Callable[[str], Tensor]) -> None:
        """
        Args:
            module: the layer's name.
            folder: for errors.
            names: the tensors' names in the file, by their last names.
            read: gives the tensor with a name in the file.
        """
        self.module, self._folder, self._left, self._read = module, folder, dict(names), read

    def has(self, part: str) -> bool:
        return part in self._left

    def take(self, part: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...] | None = None) -> Tensor:
        """One tensor. None in `shape` stands for any size.

        Raises: ModelError for a tensor that is missing, or of another dtype or shape.
        """
        name = self._left.pop(part, None)
        if name is None:
            raise self.error(f"tensor {self.module}.{part} is missing")
        tensor = self._read(name)
        if tensor.dtype not in dtypes:
            raise self.error(f"tensor {name} is stored as {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
        if not tensor.numel():
            raise self.error(f"tensor {name} has shape {list(tensor.shape)}, it holds no values")
        if shape is not None and not (
            tensor.ndim == len(shape) and all(want in (None, size) for want, size in zip(shape, tensor.shape, strict=True))
        ):
            expected = ", ".join("any" if each is None else str(each) for each in shape)
            raise self.error(f"tensor {name} has shape {list(tensor.shape)}, config.json's quantisation asks for [{expected}]")
        return tensor

    def take_one(self, part: str) -> Tensor:
        """A scale of the whole matrix, [1, 1]. Raises: ModelError as `take`, and for more than one value."""
        scale = self.take(part, SCALES)
        if scale.numel() != 1:
            raise self.error(f"tensor {self.module}.{part} has shape {list(scale.shape)}, expected one value")
        return scale.view(1, 1)

    def skip(self, part: str) -> None:
        """Accept a tensor that only quantised activations need. The tensor may be absent."""
        self._left.pop(part, None)

    def finish(self) -> None:
        """Raises: ModelError naming the tensors that were not taken."""
        if self._left:
            raise self.error(
                f"config.json's quantisation has no tensor {' and no '.join(sorted(self._left.values()))}; the matrix would be "
                "wrong without it"
            )

    def error(self, message: str) -> ModelError:
        return ModelError(f"{self._folder}: {message}")

    def num_groups(self, columns: int, group_size: int | None) -> int:
        """The number of groups of a row. Raises: ModelError if they do not fill the row."""
        size = columns if group_size is None else group_size
        if columns % size or columns % 2:
            raise self.error(f"{self.module}: {columns} columns are not a multiple of the group size {size}, or are odd")
        return columns // size

    def order_of(self, group_of: Tensor, num_groups: int) -> Tensor | None:
        """The order of columns that puts the columns of each group side by side, [K] int64. None if they already are.

        Args:
            group_of: [K] int32, the group of each column.
        Raises: ModelError if the groups have different sizes.
        """
        in_order = bool((group_of[1:] >= group_of[:-1]).all())
        order = None if in_order else torch.argsort(group_of, stable=True)
        expected = torch.arange(num_groups, device=group_of.device).repeat_interleave(len(group_of) // num_groups)
        if not torch.equal((group_of if order is None else group_of[order]).long(), expected):
            raise self.error(f"{self.module}: g_idx does not divide the columns into {num_groups} groups of one size")
        return order
