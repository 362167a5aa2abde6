"""JSON responses, encoded straight from numpy arrays: Python floats are never made."""

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response


def to_json(content: Any) -> bytes:
    """JSON of plain data and C-contiguous arrays. A float32 gets the shortest decimals that give the number back."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def json_response(content: bytes, headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    """A response with this JSON."""
    return Response(content, status, headers, media_type="application/json")
