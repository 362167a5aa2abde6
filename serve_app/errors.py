"""The one place where an error becomes a status and a body.

Native routes answer TEI's `{"error", "error_type"}`; OpenAI routes answer OpenAI's envelope and TEI's flat fields in
one object, so that the openai SDK and TEI's own scripts both find what they look for; Cohere's answer `{"message"}`.
gRPC's methods end with a code for the type, and the same text.
"""

import math
from typing import Literal

import orjson
from starlette.responses import Response

from engine.errors import BackendError, EmberError, EmptyInput, EngineStopped, InvalidInput, TokenizerError

_PREFIX = "Input validation error: "

Form = Literal["tei", "openai", "cohere"]
# Cohere answers 400 to whatever is wrong with a request, and knows no 424.
_COHERE_STATUS = {422: 400, 424: 500}

_GRPC_CODES = {
    "Empty": "INVALID_ARGUMENT",
    "Validation": "INVALID_ARGUMENT",
    "Tokenizer": "FAILED_PRECONDITION",
    "Backend": "FAILED_PRECONDITION",
    "Overloaded": "RESOURCE_EXHAUSTED",
    "Unhealthy": "UNAVAILABLE",
    "Unauthorized": "UNAUTHENTICATED",
    "NotFound": "NOT_FOUND",
    "Timeout": "DEADLINE_EXCEEDED",
}


class ApiError(EmberError):
    """A request the HTTP layer itself answers with an error. `error_type` is what the body calls it."""

    status = 500
    error_type = "Backend"
    headers: dict[str, str] = {}


class BadInstance(ApiError):
    """An instance of `/vertex` is not the JSON of any route."""

    status, error_type = 422, "Validation"


class BadMessage(ApiError):
    """A gRPC message that its schema allows and its method does not."""

    status, error_type = 422, "Validation"


class EmptyBatch(ApiError):
    """A list of inputs that holds none."""

    status, error_type = 400, "Empty"


class BatchTooLarge(ApiError):
    """More inputs in one request than `max_client_batch_size`."""

    status, error_type = 422, "Validation"


class Unauthorized(ApiError):
    """No API key, or one that is not among the server's. Native routes answer it with no body, as TEI does."""

    status, error_type = 401, "Unauthorized"
    headers = {"www-authenticate": "Bearer"}

    def __init__(self) -> None:
        super().__init__("no valid API key; send it as `Authorization: Bearer KEY`")


class BadHeader(ApiError):
    """A header that says how the request is to be computed has a value that cannot be used."""

    status, error_type = 422, "Validation"


class WrongTask(ApiError):
    """The model is not of the kind that this route needs."""

    status, error_type = 424, "Backend"

    def __init__(self, message: str) -> None:
        super().__init__(f"Backend error: {message}")


class ScoreNotFinite(ApiError):
    """A score is NaN or infinite."""

    status, error_type = 424, "Backend"

    def __init__(self) -> None:
        super().__init__("score is NaN")  # TEI's words


class UnknownModel(ApiError):
    """`model` names something this address does not serve."""

    status, error_type = 404, "NotFound"


class UnknownRoute(ApiError):
    """No such path, or not with this method."""

    error_type = "NotFound"

    def __init__(self, message: str, status: int, allow: str = "") -> None:
        """`allow` has the methods that the path does take, where it is there."""
        super().__init__(message)
        self.status = status
        self.headers = {"allow": allow} if allow else {}


class Unhealthy(ApiError):
    """The engine cannot answer now; another replica may."""

    status, error_type = 503, "Unhealthy"


class DeadlineExceeded(ApiError):
    """The request's time was up before its vectors were there; it was dropped wherever it was."""

    status, error_type = 504, "Timeout"


class Overloaded(ApiError):
    """Too much is waiting; the client is told when to come back."""

    status, error_type = 429, "Overloaded"

    def __init__(self, backlog_s: float, message: str = "Model is overloaded") -> None:
        super().__init__(message)
        self.headers = {"retry-after": str(max(1, math.ceil(backlog_s)))}


class Asleep(ApiError):
    """The model has no replica at the moment; one is being started."""

    status, error_type = 503, "Unhealthy"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.headers = {"retry-after": str(math.ceil(retry_after_s))}


class BadBody(ApiError):
    """The body is not the JSON this route takes. Native routes answer plain text here, as TEI does."""

    error_type = "Validation"

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def error_response(error: EmberError, form: Form) -> Response:
    """The answer to a request that failed, in the form of its route."""
    status, error_type, message = _describe(error)
    headers = error.headers if isinstance(error, ApiError) else {}
    if form == "cohere":
        return _json({"message": message}, 400 if isinstance(error, WrongTask) else _COHERE_STATUS.get(status, status), headers)
    if form == "openai":
        flat = {"message": message, "type": error_type, "code": status}
        return _json({"error": flat | {"param": None}} | flat, status, headers)
    if isinstance(error, Unauthorized):
        return Response(None, status, headers)
    if isinstance(error, BadBody):
        return Response(message, status, headers, media_type="text/plain; charset=utf-8")
    return _json({"error": message, "error_type": error_type}, status, headers)


def grpc_status(error: EmberError) -> tuple[str, str, dict[str, str]]:
    """(name of the code, details, trailing metadata) of a call that failed."""
    status, error_type, message = _describe(error)
    if isinstance(error, Unauthorized):
        message = "No valid auth token"
    if isinstance(error, WrongTask):
        message = message.removeprefix("Backend error: ")  # as TEI
    code = "INTERNAL" if status == 500 else _GRPC_CODES[error_type]
    return code, message, error.headers if isinstance(error, ApiError) else {}


def _describe(error: EmberError) -> tuple[int, str, str]:
    """(status, type, text) of an error."""
    match error:
        case ApiError():
            return error.status, error.error_type, str(error)
        case EmptyInput():
            return 400, "Empty", _PREFIX + str(error)
        case InvalidInput():
            return 422, "Validation", _PREFIX + str(error)
        case TokenizerError():
            return 422, "Tokenizer", str(error)
        case EngineStopped():
            return 503, "Unhealthy", "unhealthy"
        case BackendError():
            return 424, "Backend", f"Backend error: {error}"
        case _:
            return 500, "Backend", str(error)


def _json(body: dict[str, object], status: int, headers: dict[str, str]) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")
