"""CORS: which web pages may call this server."""

from collections.abc import Sequence

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware


def cors(origins: Sequence[str]) -> Middleware:
    """The middleware. It answers a preflight itself, because a preflight has no API key.

    Pages may send any header, because OpenAI's SDK sends a dozen of its own. The server accepts no cookies, so headers are
    harmless. Pages may read all headers of a response, as the SDK does with Retry-After.
    """
    return Middleware(
        CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=["*"]
    )
