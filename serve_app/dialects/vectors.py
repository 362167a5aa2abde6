"""Puts vectors into the form of the dialects' responses."""

import binascii
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from serve_app.compute.quantize import OutputDtype, quantize
from serve_app.compute.service import NUMBER_BYTES, Service
from serve_app.models import ServedModel

# float32, or quantised
Vectors = NDArray[np.float32] | NDArray[np.int8] | NDArray[np.uint8]
EncodingFormat = Literal["float", "base64"] | None


async def quantized(service: Service, arrays: Sequence[Vectors | None], dtype: OutputDtype, model: ServedModel) -> list[Vectors]:
    """The float32 vectors of each array, in `dtype`."""
    given: list[Any] = [each for each in arrays if each is not None]
    if dtype == "float":
        return given
    ranges, size = model.info.int8_ranges, sum(each.size for each in given)
    return await service.with_arrays(size, lambda: [quantize(each, dtype, ranges) for each in given])


def encoded_rows(vectors: Vectors, encoding_format: EncodingFormat) -> Sequence[Any]:
    """Each vector as an array, or in base64."""
    if encoding_format != "base64":
        return list(vectors)
    return list(map(Base64, vectors.astype(vectors.dtype.newbyteorder("<"), copy=False)))


def vectors_size(vectors: Vectors, encoding_format: EncodingFormat) -> int:
    """The approximate bytes of the JSON of all vectors."""
    return vectors.nbytes * 4 // 3 if encoding_format == "base64" else NUMBER_BYTES * vectors.size


class Deferred:
    """A value that is built while the response is encoded. A large response is encoded in parts, and other requests run between.

    Not an `ABC`, because the encoder checks the class of each value, and `isinstance` of an `ABC` takes three times as long.
    """

    __slots__ = ()

    json_size: int  # the approximate bytes of the value's JSON

    def plain(self) -> Any:
        """The value as plain data."""
        raise NotImplementedError


class DeferredList(Deferred):
    """A list whose items are built when their part of the response is encoded. All items have about the same size."""

    __slots__ = ()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def part(self, start: int, stop: int) -> list[Any]:
        """The items [start, stop) as plain data. `stop` may be beyond the end."""

    def plain(self) -> list[Any]:
        return self.part(0, len(self))


class Base64(Deferred):
    """A vector in base64. Its bytes are little-endian."""

    __slots__ = ("json_size", "vector")

    def __init__(self, vector: NDArray[Any]) -> None:
        self.vector, self.json_size = vector, vectors_size(vector, "base64")

    def plain(self) -> str:
        return binascii.b2a_base64(self.vector.data, newline=False).decode("ascii")
