"""Vectors -> response bytes, straight from numpy: no Python float is ever made."""

import binascii
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from engine.tokenizer import Token

Vectors = NDArray[np.float32]

_NUMPY = orjson.OPT_SERIALIZE_NUMPY


def to_json(value: Any) -> bytes:
    """JSON of plain data and of C-contiguous float32 arrays, shortest decimals that give the same float32 back."""
    return orjson.dumps(value, option=_NUMPY)


def openai_embeddings(vectors: Vectors, encoding_format: Literal["float", "base64"], model: str, num_tokens: int) -> bytes:
    """OpenAI's list of embeddings; base64 is of little-endian float32."""
    if encoding_format == "base64":
        rows: Sequence[Any] = [
            binascii.b2a_base64(row, newline=False).decode("ascii") for row in vectors.astype("<f4", copy=False)
        ]
    else:
        rows = list(vectors)
    return to_json(
        {
            "object": "list",
            "data": [{"object": "embedding", "embedding": row, "index": index} for index, row in enumerate(rows)],
            "model": model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
    )


def tokens(batches: Sequence[Sequence[Token]]) -> bytes:
    """TEI's `/tokenize` answer."""
    return to_json(batches)


def from_json(content: bytes) -> Any:
    """Raises: ValueError."""
    return orjson.loads(content)
