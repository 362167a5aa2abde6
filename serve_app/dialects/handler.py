"""What a handler of a route is: it gets a parsed body and the request's headers, and gives the response's content."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from serve_app.admission.request_state import RequestState
from serve_app.compute.service import Service

Headers = Sequence[tuple[bytes, bytes]]  # raw, names in lower case, as ASGI has them


class Reply(NamedTuple):
    """The content of a response: plain data and numpy arrays. `state` gives the response's headers."""

    content: Any
    state: RequestState | None = None


Handler = Callable[[Service, Any, Headers], Awaitable[Reply]]
