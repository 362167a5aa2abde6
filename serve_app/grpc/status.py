"""Turns errors into gRPC statuses: the same texts as over HTTP, with a code for each error type."""

from engine.errors import EmberError
from serve_app.errors import ApiError, Unauthorized, WrongTask, describe

_CODES = {
    "BadRequestError": "INVALID_ARGUMENT",
    "Empty": "INVALID_ARGUMENT",
    "Validation": "INVALID_ARGUMENT",
    "Quarantined": "INVALID_ARGUMENT",
    "Tokenizer": "FAILED_PRECONDITION",
    "Backend": "FAILED_PRECONDITION",
    "Overloaded": "RESOURCE_EXHAUSTED",
    "Unhealthy": "UNAVAILABLE",
    "Unauthorized": "UNAUTHENTICATED",
    "NotFound": "NOT_FOUND",
    "Timeout": "DEADLINE_EXCEEDED",
}
# Codes of single errors, before the codes by type. gRPC itself uses this code for a message that is too long.
_STATUS_CODES = {413: "RESOURCE_EXHAUSTED", 500: "INTERNAL"}
# The most bytes of a call's details. gRPC percent-encodes a byte as up to three. Clients refuse metadata of over 8 KiB. At over
# 64 KiB HAProxy ends its connection to the process, with the calls of all clients.
_MOST_DETAILS = 2_000


def grpc_status(error: EmberError) -> tuple[str, str, dict[str, str]]:
    """Name of the code, details and trailing metadata of a call that failed."""
    status, error_type, message = describe(error)
    if isinstance(error, Unauthorized):
        message = "No valid auth token"  # TEI's text
    if isinstance(error, WrongTask):
        message = message.removeprefix("Backend error: ")  # as in TEI's gRPC
    code = _STATUS_CODES.get(status) or _CODES[error_type]
    return code, message.encode()[:_MOST_DETAILS].decode(errors="ignore"), error.headers if isinstance(error, ApiError) else {}
