"""The types of a route's handler: it gets a parsed body and the request's headers, and returns the response's content."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from serve_app.admission.request_state import RequestState
from serve_app.compute.service import Service
from serve_app.models import ServedModel

Headers = Sequence[tuple[bytes, bytes]]  # raw, with names in lower case, as in ASGI


class Reply(NamedTuple):
    """The content of a response as plain data and numpy arrays. The model and the state are for its headers."""

    content: Any
    model: ServedModel | None
    state: RequestState | None = None

    def headers(self) -> dict[str, str]:
        headers = {} if self.state is None else self.state.headers()
        if self.model is not None and (revision := self.model.info.revision) is not None:
            headers["x-model-revision"] = revision
        return headers


Handler = Callable[[Service, Any, Headers], Awaitable[Reply]]
