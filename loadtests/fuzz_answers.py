"""The fuzzer's judgement of an HTTP answer: its status, and the fault of its form."""

from asyncio import StreamReader
from dataclasses import dataclass
from typing import Any

import h11
import orjson

from cluster.error_forms import form_of
from loadtests.fuzz_cases import Case

_FIELDS = {"tei": {"error", "error_type"}, "openai": {"error", "message", "type", "code"}, "cohere": {"message"}}
# HAProxy's HTTP parser writes this answer to a request that it cannot parse. No line of its configuration changes the text.
_HAPROXYS = b"<html><body><h1>400 Bad request</h1>"
_PLAIN = (400, 413, 415, 422)  # TEI's routes answer these in plain text if the body does not parse


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    content_type: str
    body: bytes


async def read_answer(case: Case, reader: StreamReader) -> Answer | None:
    """The answer to a case's request. None if the server closes the connection first. Raises: h11.RemoteProtocolError."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method=case.method, target="/", headers=[("host", "x")]))
    connection.send(h11.EndOfMessage())
    status, headers, body = 0, {}, bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(1 << 16))
        elif isinstance(event, h11.Response):
            status, headers = event.status_code, dict(event.headers)
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            return Answer(status, headers.get(b"content-type", b"").decode("latin-1"), bytes(body))
        elif isinstance(event, h11.ConnectionClosed):
            return None


def fault_of(case: Case, answer: Answer) -> str:
    """The fault of an answer, or "" for none."""
    if answer.status >= 500 and not (answer.status == 504 and case.has_deadline):
        return "a 5xx"
    if case.method == "HEAD" or answer.status < 200:
        return ""
    if answer.status >= 400:
        return _fault_of_error(case.path, answer)
    if answer.content_type.startswith("application/json"):
        return "" if _json(answer.body) is not None else "an answer that is no JSON"
    if answer.content_type.startswith("text/event-stream"):
        return _fault_of_events(answer.body)
    return "" if case.method != "POST" else f"an answer of the type {answer.content_type!r}"


def _fault_of_error(path: str, answer: Answer) -> str:
    form = form_of(path)
    if answer.status == 400 and answer.body.startswith(_HAPROXYS):
        return ""
    if answer.content_type.startswith("text/plain"):
        return "" if form == "tei" and answer.status in _PLAIN and answer.body else "an error in plain text"
    if not answer.content_type.startswith("application/json"):
        return f"an error of the type {answer.content_type!r}"
    error = _json(answer.body)
    return "" if isinstance(error, dict) and error.keys() >= _FIELDS[form] else f"an error that has not the form {form}"


def _fault_of_events(body: bytes) -> str:
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event and not event.startswith(b":")]
    if not events or events[-1] != b"[DONE]":
        return "a stream without its end"
    return "" if all(_json(each) is not None for each in events[:-1]) else "an event that is no JSON"


def _json(text: bytes) -> Any:
    try:
        return orjson.loads(text)  # strict: it refuses NaN
    except ValueError:
        return None
