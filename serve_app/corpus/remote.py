"""The worker that sends rows to a running server or cluster. Requests have batch priority, so they get the free capacity."""

import base64
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from email.message import Message
from http.client import HTTPException
from time import monotonic
from typing import Any

import numpy as np
import orjson

from engine.errors import EngineStopped, InvalidInput
from serve_app.corpus.files import CorpusError
from serve_app.corpus.folder import GO_ON
from serve_app.corpus.job import Results, Row
from serve_app.corpus.task import Kind, Task, kind_of

_DTYPES = {"float": "<f4", "int8": "i1", "uint8": "u1", "binary": "i1", "ubinary": "u1"}
_ROWS_PER_CALL = 64
# Seconds for which a failing request is repeated, because a server may restart. At the start a failure is an error at once.
_PATIENCE_S = 600.0
_LONGEST_WAIT_S = 30.0
# Seconds without a byte of the answer. The server's own timeout, `request_timeout_s`, is usually shorter.
_TIMEOUT_S = 300.0
# The parts of an emberforge server's `/info` that a job needs.
_INFO = {"served_model_name", "model_dtype", "model_sha", "model_type", "max_client_batch_size"}
_NO_KEY = 401
_OF_THE_ROWS = (400, 413, 422, 424)
_FOR_NOW = (429, 500, 502, 503, 504)


class RemoteWorker:
    """Each call waits in its own thread, so that the server always has the next requests."""

    def __init__(self, url: str, model: str | None, api_key: str | None, num_calls: int, task: Task, ranks: bool) -> None:
        """`model` None means the server's first model.

        Raises: CorpusError for a wrong URL, a server that does not answer, and a model that does not fit.
        """
        _check_url(url)
        self._url, self.num_calls, self._task = url.rstrip("/"), num_calls, task
        self._headers = {"content-type": "application/json", "x-priority": "batch"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._stopping = threading.Event()
        self._patience_s = 0.0
        self.revision: str | None = None
        query = "" if model is None else f"?{urllib.parse.urlencode({'model': model})}"
        info, _ = self._ask(f"/info{query}")
        if not isinstance(info, dict) or (missing := sorted(_INFO - info.keys())):
            said = "it is no object" if not isinstance(info, dict) else f"it has no `{missing[0]}`"
            raise CorpusError(f"{self._url}/info is not the answer of an emberforge server: {said}; give another --url")
        self._patience_s = _PATIENCE_S
        self.model, self.dtype, self.revision = info["served_model_name"], info["model_dtype"], info["model_sha"]
        self.kind: Kind = kind_of(self.model, set(info["model_type"]), ranks)
        self.rows_per_call = 1 if self.kind == "answer" else min(_ROWS_PER_CALL, info["max_client_batch_size"])

    def compute(self, rows: Sequence[Row]) -> Results:
        match self.kind:
            case "embedding":
                return self._embed([text for (text,) in rows])
            case "score":
                answer, headers = self._ask("/predict", {"model": self.model, "inputs": rows})
                scores = np.array([labels[0]["score"] for labels in answer], dtype=np.float32)
                return Results(scores, int(headers["x-compute-tokens"]))
            case "answer":
                return self._answer(rows[0][0])

    def close(self) -> None:
        self._stopping.set()

    def _embed(self, texts: list[str]) -> Results:
        task, body = self._task, {"model": self.model, "input": texts, "encoding_format": "base64"}
        for name in ("dimensions", "output_dtype", "prompt", "prompt_name", "input_type"):
            if (value := getattr(task, name)) is not None:
                body[name] = value
        answer, _ = self._ask("/v1/embeddings", body)
        content = b"".join(base64.b64decode(each["embedding"]) for each in answer["data"])
        vectors = np.frombuffer(content, _DTYPES[task.output_dtype]).reshape(len(texts), -1)
        return Results(vectors, answer["usage"]["prompt_tokens"])

    def _answer(self, text: str) -> Results:
        messages = [{"role": "user", "content": (self._task.prompt or "") + text}]
        body = {"model": self.model, "messages": messages, "max_tokens": self._task.max_tokens, "temperature": 0}
        answer, _ = self._ask("/v1/chat/completions", body)
        content = answer["choices"][0]["message"]["content"] or ""
        return Results(np.array([content], dtype=object), answer["usage"]["total_tokens"])

    def _ask(self, path: str, body: Any = None) -> tuple[Any, Message]:
        """Returns: the content and the headers of the answer. Sends a request again after a temporary failure.

        Raises: InvalidInput for rows that the server refuses; CorpusError; EngineStopped after `close`.
        """
        content = None if body is None else orjson.dumps(body)
        request = urllib.request.Request(f"{self._url}{path}", content, self._headers)  # noqa: S310
        deadline, wait_s = monotonic() + self._patience_s, 1.0
        while not self._stopping.is_set():
            try:
                with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
                    self._check_revision(answer.headers["x-model-revision"])
                    return orjson.loads(answer.read()), answer.headers
            except orjson.JSONDecodeError:
                raise CorpusError(f"{self._url}{path} does not answer with JSON, so it is no emberforge server") from None
            except urllib.error.HTTPError as error:
                reason = f"{error.code}: {_message(error)}"
                if error.code in _OF_THE_ROWS:
                    raise InvalidInput(reason) from None
                if error.code not in _FOR_NOW:
                    wants_key = "; give a valid key with --api-key or EMBERFORGE_API_KEY" if error.code == _NO_KEY else ""
                    raise CorpusError(f"{self._url}{path} answers {reason}{wants_key}") from None
                with suppress(ValueError):  # a proxy may send a date
                    wait_s = float(error.headers.get("retry-after", wait_s))
            except (OSError, HTTPException) as error:  # the connection was refused or reset, or a timeout
                reason = str(error)
            if monotonic() > deadline:
                raise CorpusError(f"{self._url}{path} does not answer ({reason}); when it answers again, {GO_ON}")
            self._stopping.wait(min(wait_s, _LONGEST_WAIT_S))
            wait_s *= 2
        raise EngineStopped("the job has ended")

    def _check_revision(self, revision: str | None) -> None:
        """Raises: CorpusError if the server has another revision of the model now."""
        if self.revision is not None and revision not in (None, self.revision):
            raise CorpusError(
                f"{self._url} has revision {revision} of {self.model} now, but the job began with {self.revision}: "
                "a folder must not mix results of two revisions; begin with a new folder"
            )


def _check_url(url: str) -> None:
    """Raises: CorpusError for a text that is not the URL of a server."""
    try:
        parts = urllib.parse.urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_url = False
    if not is_url:
        raise CorpusError(f"--url {url!r} is not the URL of a server, such as http://127.0.0.1:8000")


def _message(error: urllib.error.HTTPError) -> str:
    """The text of the server's error."""
    try:
        content = orjson.loads(error.read())
    except (OSError, ValueError, HTTPException):
        return error.reason
    said = content.get("error") or content.get("message") if isinstance(content, dict) else None
    return str(said.get("message") if isinstance(said, dict) else said or error.reason)
