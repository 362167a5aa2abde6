"""Random weights for measurements, made on their device: they need no download and no file."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.kernels import Weight
from engine.model.quantized.layout import Codes

_DEVIATION = 0.02  # the standard deviation of the weights, as in initialised models; norms are around 1


class RandomWeights:
    """A `WeightSource` that gives random values for every name."""

    def __init__(self, device: torch.device, dtype: torch.dtype, decodes: bool) -> None:
        self.device, self.dtype, self.decodes = device, dtype, decodes
        self._generator = torch.Generator(device).manual_seed(0)

    def strip_prefix(self, prefixes: Sequence[str], probe: str) -> None:
        pass

    def has(self, name: str) -> bool:
        return True

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        is_norm = "norm" in name.lower() and name.endswith("weight")
        values = torch.empty(shape, device=self.device, dtype=dtype or self.dtype)
        return values.normal_(float(is_norm), _DEVIATION, generator=self._generator)

    def take_embedding(self, name: str, *shape: int) -> Tensor:
        return self.take(name, *shape)

    def take_words(self, name: str, rows: int, columns: int) -> Tensor:
        return self.take(name, rows, columns)

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
        return weight

    def derive(self, shape: tuple[int, ...], compute: Callable[[], Tensor]) -> Tensor:
        return compute()
