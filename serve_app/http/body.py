"""Reading request bodies."""

from starlette.requests import Request

from serve_app.errors import BadBody


async def read_body(request: Request, limit: int) -> bytes:
    """The body. Raises: BadBody for another content type (415) or more than `limit` bytes (413), as early as possible."""
    headers = request.headers
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise BadBody("Expected request with `Content-Type: application/json`", 415)
    length = headers.get("content-length", "")
    chunks, size = [], int(length) if length.isdigit() else 0
    if size <= limit:
        size = 0
        async for chunk in request.stream():
            chunks.append(chunk)
            if (size := size + len(chunk)) > limit:
                break
    if size > limit:
        raise BadBody(f"Failed to buffer the request body: length limit exceeded ({limit} bytes; set --payload-limit)", 413)
    return b"".join(chunks)
