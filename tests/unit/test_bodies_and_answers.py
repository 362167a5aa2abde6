"""Request bodies that are slow or large, and answers that are sent in parts."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from cluster.settings import ServerSettings
from engine.options import EmbedOptions
from engine.text.tokenizer import Token
from loadtests import stalls
from serve_app.admission.admission import Admission
from serve_app.admission.bytes_in_flight import BytesInFlight, Hold
from serve_app.compute.service import Service
from serve_app.dialects.openai import Entries
from serve_app.dialects.tei_answers import _Predictions, _Sparse
from serve_app.dialects.vectors import Base64, EncodingFormat, encoded_rows
from serve_app.errors import BadBody, Overloaded
from serve_app.http import body as bodies
from serve_app.http import encode
from serve_app.http.json_shape import Shape, shape_of
from serve_app.http.routes import _parsed
from serve_app.observe.metrics import Metrics

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a"\\,{}[]: é'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='k"\\,{}[]'), inner, max_size=4),
    max_leaves=20,
)


def _counted(content: Any) -> Shape:
    """The shape, from the parsed content."""
    if not isinstance(content, list | dict):
        return Shape(0, 0, isinstance(content, str))
    inner = [_counted(each) for each in (content.values() if isinstance(content, dict) else content)]
    return Shape(
        isinstance(content, dict) + sum(each.objects for each in inner),
        1 + max(0, len(inner) - 1) + sum(each.values for each in inner),
        (len(content) if isinstance(content, dict) else 0) + sum(each.strings for each in inner),
    )


@pytest.mark.slow
@given(_JSON, st.sampled_from([None, 2]), st.booleans())
def test_the_shape_is_counted_without_parsing(content: Any, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(content, indent=indent, ensure_ascii=ascii_only)
    assert shape_of(text.encode()) == _counted(content)


@given(st.binary(max_size=200))
def test_the_shape_of_anything_is_counted(text: bytes) -> None:
    assert min(shape_of(text)) >= 0


class _Backend:
    def models(self) -> list[dict[str, Any]]:
        return []

    def backlog_s(self, name: str | None = None) -> float:
        return 0.0


def _service(**settings: Any) -> Service:
    return Service(_Backend(), ServerSettings(**settings), Metrics("bodies"))  # type: ignore[arg-type]


def _request(*chunks: bytes, pause_s: float = 0.0, until: asyncio.Event | None = None) -> Request:
    """A request whose parts come after `pause_s` each, the second one not before `until`."""
    waiting = list(chunks)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(pause_s)
        if until is not None and len(waiting) < len(chunks):
            await until.wait()
        return {"type": "http.request", "body": waiting.pop(0), "more_body": bool(waiting)}

    return Request({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive)


def _read(service: Service, request: Request) -> bytes:
    return asyncio.run(bodies.read_body(request, service, service.admission.hold()))


def test_a_body_comes_in_any_chunks() -> None:
    assert _read(_service(), _request(b'{"inputs":', b'"a"', b"}")) == b'{"inputs":"a"}'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([{"text": "a"}] * 5000, "the body has 5000 objects, the limit is 3072"),
        ([[1] * 140_000], r"the body has 140001 values \(texts, numbers, lists\), the limit is 130000"),
        (["a"] * 70_000, r"the body has 70000 texts and names, the limit is 65536"),
        (["é" * 1_000_001], r"the body has 1000001 escaped characters, the limit is 1000000"),
    ],
)
def test_a_body_with_too_much_in_it_is_refused_before_it_is_parsed(content: Any, words: str) -> None:
    with pytest.raises(BadBody, match=words) as caught:
        _read(_service(), _request(json.dumps(content).encode()))
    assert caught.value.status == 413


def test_large_texts_are_no_reason_to_refuse() -> None:
    content = json.dumps({"inputs": ['{"a": [1, 2, "b\\\\"]}, ' * 1000] * 64}).encode()
    assert _read(_service(), _request(content)) == content


@given(st.lists(st.sampled_from(["[", "]", "{", "}", '""', ",", "1", ":", "\\"]), max_size=30).map("".join))
def test_a_body_that_needs_no_count_is_within_the_limits(content: str) -> None:
    """The limits are those of a body that is a ten-thousandth of the size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "_MOST_VALUES", 13)
        patch.setattr(bodies, "_MOST_STRINGS", 6)
        patch.setattr(bodies, "_OTHER_OBJECTS", 2)
        if bodies._is_within_limits(content.encode(), 1):
            bodies._check(content.encode(), 1)


def test_a_body_that_pauses_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_SLOW_S", 0.01)
    monkeypatch.setattr(bodies, "_PAUSE_S", 0.01)
    with pytest.raises(BadBody, match="paused") as caught:
        _read(_service(), _request(b"{", b"}", pause_s=5))
    assert caught.value.status == 408


def test_a_body_has_the_time_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on routes whose answer may take longer."""
    monkeypatch.setattr(bodies, "_SLOW_S", 0.01)
    with pytest.raises(BadBody, match=r"the body was not complete within 0\.05 s") as caught:
        _read(_service(request_timeout_s=0.05), _request(*[b" "] * 100, pause_s=0.01))
    assert caught.value.status == 408


def test_slow_bodies_have_half_of_the_places_and_the_others_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_SLOW_S", 0.01)
    service = _service(max_concurrent_requests=4)
    may_end = asyncio.Event()

    def read(request: Request) -> "asyncio.Task[bytes]":
        return asyncio.create_task(bodies.read_body(request, service, service.admission.hold()))

    async def read_many() -> None:
        slow = [read(_request(b"{", b"}", until=may_end)) for _ in range(3)]
        (refused,), places = await asyncio.wait(slow, return_when=asyncio.FIRST_COMPLETED)
        assert isinstance(refused.exception(), Overloaded)
        monkeypatch.setattr(bodies, "_SLOW_S", 60.0)  # so that a busy machine makes no fast body slow
        assert await read(_request(b"{", b"}")) == b"{}"
        may_end.set()
        assert await asyncio.gather(*places) == [b"{}", b"{}"]
        may_end.clear()
        monkeypatch.setattr(bodies, "_SLOW_S", 0.01)
        later = read(_request(b"{", b"}", until=may_end))  # the places are free again
        await asyncio.sleep(0.05)
        may_end.set()
        assert await later == b"{}"

    asyncio.run(read_many())


def test_the_bytes_in_flight_have_a_budget() -> None:
    budget = BytesInFlight(100)
    computed, other = Hold(budget), Hold(budget)
    computed.expect(60)
    with pytest.raises(Overloaded):  # the refusal comes before the request is computed
        other.expect(60)
    computed.add_answer(50)
    assert budget.now == 60
    computed.add_answer(70)
    assert budget.now == 70
    computed.release()
    first, second = Hold(budget), Hold(budget)
    first.add(60)
    with pytest.raises(Overloaded, match="too much memory"):
        second.add(50)
    second.add(40)
    first.release()
    first.release()
    assert budget.now == 40
    second.release()
    alone = Hold(budget)
    alone.add(1000)  # no other request needs the memory
    with pytest.raises(Overloaded):
        second.add(1)


def test_small_requests_find_space_beside_large_ones() -> None:
    budget = BytesInFlight(25_600)
    Hold(budget).add(25_500)
    with pytest.raises(Overloaded):
        Hold(budget).add(101)
    for _ in range(33):
        Hold(budget).add(100)
    with pytest.raises(Overloaded):
        Hold(budget).add(100)


def test_a_request_whose_answer_has_no_room_is_not_even_tokenised() -> None:
    service, model = _service(), SimpleNamespace(info=SimpleNamespace(labels=(), embedding_size=1000))
    service.admission.hold().add(255 << 20)

    async def run() -> None:
        async with service.whole_request([], service.admission.hold()):
            state = service.begin(["a"] * 1000)
            await service.compute(state, model, EmbedOptions(), 1000, tokenised.append, 1)  # type: ignore[arg-type]

    tokenised: list[int] = []
    with pytest.raises(Overloaded, match="too much memory"):
        asyncio.run(run())
    assert not tokenised


def test_a_body_and_its_answer_leave_the_budget() -> None:
    settings = ServerSettings()
    admission = Admission(settings, Metrics("budget"), lambda _: 0.0)
    hold = admission.hold()
    response = asyncio.run(encode.json_answer(_service(), np.zeros((4, 4), np.float32), None, hold))
    assert admission._bytes.now > 0

    async def send(_: Any) -> None: ...

    async def receive() -> Any: ...

    asyncio.run(response({"type": "http"}, receive, send))
    assert admission._bytes.now == 0


_VECTORS = np.random.default_rng(0).standard_normal((40, 300)).astype(np.float32)


@pytest.mark.parametrize(
    "content",
    [
        _VECTORS,
        {"object": "list", "data": [{"index": i, "embedding": row} for i, row in enumerate(_VECTORS)], "usage": {"n": 1}},
        [[_VECTORS[:3], _VECTORS[3:4]], [], [_VECTORS]],
        {"texts": ["é" * 5000] * 3, "none": None, "empty": {}, "deep": {"rows": list(_VECTORS)}},
        [Base64(row) for row in _VECTORS],
        {"object": "list", "data": Entries(_VECTORS, "float")},
        {"object": "list", "data": Entries(_VECTORS, "base64")},
        [_Sparse(np.ones(20, dtype=[("index", np.int32), ("value", np.float32)]))] * 40,
        [_Sparse(np.ones(number, dtype=[("index", np.int32), ("value", np.float32)])) for number in (0, 99, 0, 0, 9, 99, 0)],
        [_Predictions(row, [f"LABEL_{i}" for i in range(300)]) for row in _VECTORS],
        [[Token(i, "a", False, i, i + 1) for i in range(200)], [Token(0, "[CLS]", True, None, None)]],
        [],
        "x" * 9000,
    ],
)
def test_an_answer_in_parts_is_the_answer(content: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = encode.to_json(content)
    monkeypatch.setattr(encode, "_PART_BYTES", 2000)
    parts = list(encode.json_parts(content, encode.json_size(content)))
    assert b"".join(parts) == whole
    if not isinstance(content, str) and len(content):
        assert len(parts) > 3
        assert max(map(len, parts)) < 32_000


@pytest.mark.parametrize("encoding_format", [None, "float", "base64"])
def test_the_entries_of_vectors_are_openais(encoding_format: EncodingFormat) -> None:
    entries = Entries(_VECTORS, encoding_format)
    plain = [
        {"object": "embedding", "index": index, "embedding": row}
        for index, row in enumerate(encoded_rows(_VECTORS, encoding_format))
    ]
    assert encode.to_json(entries) == encode.to_json(plain)
    assert encode.json_size({"data": entries}) == pytest.approx(encode.json_size({"data": plain}), rel=0.01)
    assert encode.to_json(Entries(_VECTORS[:0], encoding_format)) == b"[]"


def test_other_requests_go_on_between_the_parts_of_all_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "_PART_BYTES", 2000)
    events: list[str] = []

    async def other() -> None:
        while True:
            events.append("other")
            await asyncio.sleep(0)

    async def send(message: Any) -> None:
        events.append("part" if message.get("body") else "frame")

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def run() -> None:
        task = asyncio.create_task(other())
        await asyncio.gather(*(answer() for _ in range(5)))
        task.cancel()

    async def answer() -> None:
        response = await encode.json_answer(service, _VECTORS, None, Hold(BytesInFlight(1 << 30)))
        await response({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)

    service = _service()
    asyncio.run(run())
    parts = [index for index, event in enumerate(events) if event == "part"]
    assert len(parts) > 50
    assert all("other" in events[left:right] for left, right in pairwise(parts[1:]))


def test_other_requests_go_on_between_bodies_of_some_texts() -> None:
    service, events = _service(), list[str]()

    async def other() -> None:
        while True:
            events.append("other")
            await asyncio.sleep(0)

    async def run() -> None:
        task = asyncio.create_task(other())
        await asyncio.gather(*(_parsed(service, lambda _: events.append("body"), b"x" * 10_000) for _ in range(20)))
        task.cancel()

    asyncio.run(run())
    bodies = [index for index, event in enumerate(events) if event == "body"]
    assert len(bodies) == 20
    assert all("other" in events[left:right] for left, right in pairwise(bodies))


def test_large_arrays_and_bodies_are_worked_on_on_threads() -> None:
    service = _service()

    async def run(size: int) -> set[int]:
        in_which = await service.with_arrays(size, threading.get_ident)
        return {in_which, await _parsed(service, lambda _: threading.get_ident(), b"x" * size)}

    assert asyncio.run(run(1000)) == {threading.get_ident()}
    assert threading.get_ident() not in asyncio.run(run(1_000_000))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["one short text", "the same, int8", "2,048 documents as objects", "2,048 texts, 1,000 classes"])
def test_what_is_measured_is_answered(what: str) -> None:
    """`loadtests.stalls` has its own fake model. Only this test notices if the fake lacks a new part of the interface."""
    path, task, body = next(rest for name, *rest in stalls.requests() if name == what)
    assert asyncio.run(stalls.measured(path, task, body))[0] == 200


def test_a_request_has_one_deadline_for_all_of_it() -> None:
    """Body, tokenisation and passes each end within the deadline, but not all of them together."""
    service = _service(request_timeout_s=0.05)

    async def steps() -> AsyncIterator[int]:
        for step in range(5):
            await asyncio.sleep(0.02)
            yield step

    async def run() -> int:
        count = 0
        async with service.whole_request([]):
            async for _ in steps():
                count += 1
        return count

    with pytest.raises(Exception, match=r"was not finished within 0\.05 s"):
        asyncio.run(run())
