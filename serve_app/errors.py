"""The API's own errors, and the status, type and text of every error.

`http/errors.py` turns errors into HTTP responses, `grpc/status.py` into gRPC statuses.
"""

import math
from collections.abc import Iterable
from difflib import get_close_matches

from engine.errors import BackendError, EmberError, EmptyInput, EngineStopped, InvalidInput, TokenizerError

_PREFIX = "Input validation error: "
# The most characters of an error's text, and those of its end if it is longer. The metadata of a gRPC call may have 8 KiB.
_MAX_CHARS, _END_CHARS = 1000, 300


class ApiError(EmberError):
    """An error of the API itself. `error_type` is the type in the response's body."""

    status = 500
    error_type = "Backend"
    headers: dict[str, str] = {}
    param: str | None = None  # the wrong field of the request, for error forms that name it


class BadRequest(ApiError):
    """A request for text has a wrong or unsupported field. `param` names the field."""

    status, error_type = 400, "BadRequestError"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class WrongModel(BadRequest):
    """The route needs vectors and the model generates text, or the route needs text and the model gives vectors."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "model")


class BadInstance(ApiError):
    """An instance of `/vertex` is not a body of any route."""

    status, error_type = 422, "Validation"


class BadMessage(ApiError):
    """A gRPC message does not parse, or the method cannot use it."""

    status, error_type = 422, "Validation"


class MessageTooLong(ApiError):
    """A gRPC message has more bytes than `payload_limit`."""

    status, error_type = 413, "Validation"


class EmptyBatch(ApiError):
    """The list of inputs is empty."""

    status, error_type = 400, "Empty"


class BatchTooLarge(ApiError):
    """The request has more inputs than `max_client_batch_size`."""

    status, error_type = 422, "Validation"


class Unauthorized(ApiError):
    """The request has no API key, or an unknown one. TEI's routes answer without a body, as in TEI."""

    status, error_type = 401, "Unauthorized"
    headers = {"www-authenticate": "Bearer"}

    def __init__(self, message: str = "no valid API key; send it as `Authorization: Bearer KEY`") -> None:
        super().__init__(message)


class NoPlan(ApiError):
    """The console cannot plan a models.yaml. The text names the line and the key, or the model or node that is wrong."""

    status, error_type = 422, "Validation"


class BadHeader(ApiError):
    """A request header (priority, deadline) has a wrong value."""

    status, error_type = 422, "Validation"


class WrongTask(ApiError):
    """The model cannot do this route's task."""

    status, error_type = 424, "Backend"

    def __init__(self, message: str) -> None:
        super().__init__(f"Backend error: {message}")


class ScoreNotFinite(ApiError):
    """A score is NaN or infinite."""

    status, error_type = 424, "Backend"

    def __init__(self) -> None:
        super().__init__("score is NaN")  # TEI's words


class UnknownModel(ApiError):
    """The server has no model of this name, or not for this API key."""

    status, error_type = 404, "NotFound"

    @classmethod
    def among(cls, name: str, names: Iterable[str]) -> "UnknownModel":
        """The error for `name`. `names` are the models and aliases that the caller may see."""
        names = tuple(names)
        return cls(f"model `{name}` is not served here; the models are {', '.join(names)}{did_you_mean(name, names)}")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of an error: suggests the name of `names` that is most similar to `name`. Empty if none is similar."""
    folded, asked = {each.casefold(): each for each in names}, name.casefold()
    # A repository's id may have a long owner before a served name.
    close = get_close_matches(asked, folded, n=1) or get_close_matches(asked.rpartition("/")[2], folded, n=1)
    return f"; did you mean '{folded[close[0]]}'?" if close else ""


class UnknownRoute(ApiError):
    """The path does not exist (404), or does not support this method (405)."""

    error_type = "NotFound"

    def __init__(self, message: str, status: int, allow: str = "") -> None:
        """`allow` lists the methods of an existing path."""
        super().__init__(message)
        self.status = status
        self.headers = {"allow": allow} if allow else {}


class Unhealthy(ApiError):
    """The engine cannot answer now. Another replica may."""

    status, error_type = 503, "Unhealthy"


class DeadlineExceeded(ApiError):
    """The request did not finish in time. The server has dropped the request's work."""

    status, error_type = 504, "Timeout"


class Overloaded(ApiError):
    """Too many requests wait. The header `retry-after` tells the client when to try again."""

    status, error_type = 429, "Overloaded"

    def __init__(self, backlog_s: float, message: str = "Model is overloaded") -> None:
        super().__init__(message)
        self.headers = {"retry-after": str(max(1, math.ceil(backlog_s)))}


class Asleep(ApiError):
    """The model has no replica now. The server has started one."""

    status, error_type = 503, "Unhealthy"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.headers = {"retry-after": str(math.ceil(retry_after_s))}


class Quarantined(ApiError):
    """The request was in flight when two replicas died. The server refuses it for some minutes."""

    status, error_type = 422, "Quarantined"

    def __init__(self, left_s: int) -> None:
        super().__init__(
            f"this request was running when two replicas of the model died, so it is refused for {left_s} s; "
            "change the input, or contact the operator"
        )
        self.left_s = left_s

    def __reduce__(self) -> tuple[type["Quarantined"], tuple[int]]:
        """Makes the error pickle, because a replica sends it to a gateway."""
        return Quarantined, (self.left_s,)


class BadBody(ApiError):
    """The body is not valid JSON for the route. TEI's routes answer in plain text, as in TEI."""

    error_type = "Validation"

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def describe(error: EmberError) -> tuple[int, str, str]:
    """HTTP status, type and text of an error. A text that repeats a long name of the client is cut in the middle."""
    status, error_type, text = _described(error)
    return status, error_type, text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - _END_CHARS]} ... {text[-_END_CHARS:]}"


def _described(error: EmberError) -> tuple[int, str, str]:
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
