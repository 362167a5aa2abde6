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
    return base64_rows(vectors) if encoding_format == "base64" else list(vectors)


def base64_rows(vectors: Vectors) -> list[str]:
    """Base64 of each vector's bytes, little-endian."""
    rows = vectors.astype(vectors.dtype.newbyteorder("<"), copy=False)
    return [binascii.b2a_base64(row, newline=False).decode("ascii") for row in rows]
