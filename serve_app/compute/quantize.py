"""Quantises float32 vectors to int8, uint8 or bits, as sentence-transformers' `quantize_embeddings` does.

The vectors already have their final dimensions and are normalised. docs/decisions/014 has the reasons for the default ranges and
the recall of each type.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine.errors import InvalidInput, ModelError
from engine.model.config import ModelConfig
from engine.model.keys import read_object

Quantized = Literal["int8", "uint8", "binary", "ubinary"]
OutputDtype = Literal["float", Quantized]
Vectors = NDArray[np.float32]
# Dimensions -> [2, dimensions] float32: the least and the greatest value of each dimension.
Ranges = Mapping[int, Vectors]

RANGES_FILE = "int8_ranges.json"

# The default range in units of 1 / sqrt(D), the root mean square of a component of a normalised vector with D dimensions.
_DEFAULT_RANGE = 8.0


def quantize(vectors: Vectors, dtype: OutputDtype, ranges: Ranges) -> Vectors | NDArray[np.int8] | NDArray[np.uint8]:
    """[B, D] float32 -> [B, D] (float, int8, uint8), or [B, D / 8] with the first dimension in the highest bit (binary, ubinary).

    A signed value is the unsigned value minus 128. `check_dtype` must have accepted the arguments.
    """
    if dtype == "float":
        return vectors
    if dtype in ("binary", "ubinary"):
        unsigned = np.packbits(vectors > 0, axis=-1)
    else:
        starts, ends = ranges.get(vectors.shape[-1], _default_ranges(vectors.shape[-1]))
        steps = (ends - starts) / 255
        steps = np.where(steps == 0, 1, steps)  # for a dimension that never varies
        unsigned = np.clip(np.floor((vectors - starts) / steps), 0, 255).astype(np.uint8)
    return unsigned if dtype in ("uint8", "ubinary") else (unsigned ^ 0x80).view(np.int8)


def check_dtype(dtype: OutputDtype, dimensions: int, normalized: bool, ranges: Ranges) -> None:
    """Raises: InvalidInput if vectors with `dimensions` dimensions cannot be quantised to `dtype`."""
    if dtype in ("binary", "ubinary") and dimensions % 8:
        raise InvalidInput(
            f"`{dtype}` packs 8 dimensions into a byte, and {dimensions} is not a multiple of 8; choose other dimensions"
        )
    if dtype in ("int8", "uint8") and not normalized and dimensions not in ranges:
        raise InvalidInput(
            f"`{dtype}` of vectors that are not normalised needs calibrated ranges: leave `normalize` true, or put "
            f"ranges for {dimensions} dimensions into the model's {RANGES_FILE}"
        )


def read_ranges(folder: Path, config: ModelConfig) -> dict[int, Vectors]:
    """The calibrated ranges in a model's folder: `{"384": [[384 minima], [384 maxima]], ...}`.

    A folder without the file has no ranges, and a model that gives scores has none.

    Raises: ModelError naming the file and the fault.
    """
    if not config.embeds:
        return {}
    path = folder / RANGES_FILE
    content = read_object(path)
    return dict(_entry(path, key, value, config.embedding_size) for key, value in content.items())


def _entry(path: Path, key: str, value: Any, embedding_size: int) -> tuple[int, Vectors]:
    if not key.isdecimal() or not 0 < int(key) <= embedding_size:
        raise ModelError(f"{path}: {key!r} is not a number of dimensions from 1 to {embedding_size}")
    dimensions = int(key)
    try:
        ranges = np.asarray(value, dtype=np.float32)
    except (ValueError, TypeError):
        ranges = np.empty(0, dtype=np.float32)
    if ranges.shape != (2, dimensions) or not np.isfinite(ranges).all() or (ranges[0] > ranges[1]).any():
        raise ModelError(
            f"{path}: {key} must hold {dimensions} minima and {dimensions} maxima, [[...], [...]], finite and in order"
        )
    return dimensions, ranges


@lru_cache(maxsize=16)
def _default_ranges(dimensions: int) -> Vectors:
    """Ranges for which int8 is the value times 127 / r, rounded and saturating. Zero and the signs do not change."""
    step = min(1.0, _DEFAULT_RANGE / dimensions**0.5) / 127
    ranges = np.empty((2, dimensions), dtype=np.float32)
    ranges[0], ranges[1] = -128.5 * step, 126.5 * step
    return ranges
