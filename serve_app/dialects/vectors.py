"""Vectors as the dialects' responses have them."""

import binascii
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine.loop import Embeddings
from serve_app.compute.quantize import OutputDtype, quantize
from serve_app.models import ServedModel

# float32, or quantised
Vectors = NDArray[np.float32] | NDArray[np.int8] | NDArray[np.uint8]


def quantized(result: Embeddings, dtype: OutputDtype, model: ServedModel) -> Vectors:
    """The vectors of a result, in `dtype`."""
    assert result.vectors is not None
    return quantize(result.vectors, dtype, model.info.int8_ranges)


def encoded_rows(vectors: Vectors, encoding_format: Literal["float", "base64"] | None) -> Sequence[Any]:
    """Each vector as an array, or in base64."""
    return list(map(Base64, vectors)) if encoding_format == "base64" else list(vectors)


class Base64:
    """A vector that the response has in base64. The text is made when the response is encoded, which may be in parts."""

    __slots__ = ("vector",)

    def __init__(self, vector: NDArray[Any]) -> None:
        self.vector = vector

    def text(self) -> str:
        """Base64 of the vector's bytes, little-endian."""
        ordered = self.vector.astype(self.vector.dtype.newbyteorder("<"), copy=False)
        return binascii.b2a_base64(ordered.data, newline=False).decode("ascii")
