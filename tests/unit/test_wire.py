"""Wires between a gateway and a replica, over real sockets: each call gets its answer, its error or the replica's death."""

import asyncio
import pickle
import select
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from math import inf
from time import monotonic
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from ray.exceptions import ActorDiedError

from cluster.local_ray import free_port
from cluster.router import Report, Ticket
from cluster.stream_router import StreamLoad
from engine.errors import BackendError, NotFinite
from engine.options import EmbedOptions, SamplingOptions
from engine.results import Embeddings
from engine.schedule.stream import Stream, Token
from serve_app.admission.qos import DEFAULT_QOS
from serve_app.compute.turns import Turns
from serve_app.gateway.config import PoolRef
from serve_app.gateway.connection import PoolConnection
from serve_app.gateway.frames import (
    _BUFFER_BYTES,
    _HEAD,
    _PART_BYTES,
    MOST_BYTES,
    SECRET_BYTES,
    FrameProtocol,
    Kind,
    Payload,
    head_of,
    packed,
    unpacked,
)
from serve_app.gateway.outbox import next_ticket
from serve_app.gateway.parcel import Answered, Parcel
from serve_app.gateway.remote import Lost, ReplicaDied, Stopping, Unreachable
from serve_app.gateway.steps import Steps
from serve_app.gateway.wire import Wire
from serve_app.replica import wire as replica_wire
from serve_app.replica.channel import Channels
from serve_app.replica.sender import _AT_ONCE_BYTES, Sender
from serve_app.replica.wire import Wires
from tests.unit.streams_by_hand import CONTEXT, EOS, VOCABULARY, Begun, ByHand, until

Scenario = Callable[["Replica", Wires, Wire], Awaitable[None]]
Run = Callable[[Scenario], None]
RunStreams = Callable[[Callable[["Generates"], Awaitable[None]]], None]


def parcel(number: int, length: int = 3) -> Parcel:
    return Parcel.of([([np.full(length, number, dtype=np.int32)], EmbedOptions(), DEFAULT_QOS)], [0], [None])


class Replica:
    """Answers with the first token id. Id 0 waits until `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.begun: list[int] = []
        self.cancelled: list[int] = []

    async def answer(self, parcels: Sequence[Parcel]) -> list[Answered]:
        return [await self._one(int(each.token_ids[0]), len(each.token_ids)) for each in parcels]

    async def _one(self, number: int, length: int) -> Answered:
        self.begun.append(number)
        if number == 13:
            return NotFinite()
        if number == 14:
            raise ZeroDivisionError("a bug")
        if number == 0:
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                self.cancelled.append(number)
                raise
        return Embeddings(np.full((1, length), number, dtype=np.float32), {}, 0.0, 0.0)


def number_of(answer: Answered) -> int:
    assert isinstance(answer, Embeddings), answer
    assert answer.vectors is not None
    return int(answer.vectors[0, 0])


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Scenario], None]:
    """Runs a scenario in each of the event loops that Serve may use."""
    loops = asyncio if request.param == "asyncio" else pytest.importorskip("uvloop")

    async def whole(scenario: Scenario) -> None:
        replica = Replica()
        wires = Wires(replica.answer, "127.0.0.1")
        wire = Wire("it", wires.address)
        await wire.connect()
        try:
            await scenario(replica, wires, wire)
        finally:  # otherwise a failing test would wait forever
            replica.go.set()
            wire.close()
            await asyncio.wait_for(wires.close(), 5)

    def run_it(scenario: Scenario) -> None:
        with asyncio.Runner(loop_factory=loops.new_event_loop) as runner:
            runner.run(whole(scenario))

    return run_it


def test_many_calls_share_a_connection_and_each_hears_its_own_answer(run: Run) -> None:
    async def scenario(replica: Replica, wires: Wires, wire: Wire) -> None:
        slow = asyncio.ensure_future(wire.call([parcel(0)]))
        numbers = range(20, 220)
        answers = await asyncio.gather(*(wire.call([parcel(each), parcel(each + 1)]) for each in numbers))
        assert [[number_of(each) for each in answer] for answer in answers] == [[each, each + 1] for each in numbers]
        assert not slow.done()
        assert len(wires.connections) == 1
        replica.go.set()
        assert number_of((await slow)[0]) == 0
        assert wires.calls_since_last() == 201
        assert wires.calls_since_last() == 0

    run(scenario)


def _feed(protocol: FrameProtocol, sent: bytes) -> None:
    """Delivers the bytes as an event loop does, buffer by buffer."""
    while sent:
        room = protocol.get_buffer(-1)
        part, sent = sent[: len(room)], sent[len(room) :]
        room[: len(part)] = part
        protocol.buffer_updated(len(part))


class _Frames(FrameProtocol):
    """Keeps the frames of its connection."""

    def __init__(self, preamble: int = 0, turns: Turns | None = None) -> None:
        super().__init__(preamble, turns)
        self.preamble, self.frames = b"", list[tuple[int, Kind, bytes]]()

    def preamble_received(self, preamble: bytes) -> bool:
        self.preamble = preamble
        return True

    def frame_received(self, number: int, kind: Kind, payload: Payload) -> None:
        self.frames.append((number, kind, bytes(payload)))


@pytest.mark.parametrize("seed", range(20))
def test_frames_arrive_whole_whatever_the_pieces(seed: int) -> None:
    rng = np.random.default_rng(seed)
    edge = _BUFFER_BYTES - _HEAD.size  # the largest payload that the buffer holds
    sizes = rng.permutation([0, 0, 1, 20, 300, 5_000, edge - 1, edge, edge + 1, 40_000, 100_000])
    frames = [(int(rng.integers(1 << 40)), Kind(int(rng.integers(1, 9))), rng.bytes(size)) for size in sizes]
    protocol, preamble = _Frames(preamble=(seed % 3) * 16), rng.bytes((seed % 3) * 16)
    sent = preamble + b"".join(head_of(*frame) + frame[2] for frame in frames)
    while sent:
        cut = int(rng.integers(1, 1 + min(len(sent), [3_000, 50_000][seed % 2])))
        _feed(protocol, sent[:cut])
        sent = sent[cut:]
    assert protocol.preamble == preamble
    assert protocol.frames == frames


class _Reading:
    """A transport that counts the pauses of its reading."""

    def __init__(self) -> None:
        self.reads, self.num_pauses = True, 0

    def pause_reading(self) -> None:
        self.reads, self.num_pauses = False, self.num_pauses + 1

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return False


def test_parts_of_a_large_payload_wait_for_their_turns() -> None:
    async def scenario() -> None:
        turns, transport = Turns(), _Reading()
        protocol, content = _Frames(turns=turns), bytes(range(256)) * (3 * _PART_BYTES // 256)
        protocol.connection_made(transport)  # type: ignore[arg-type]
        rest = memoryview(head_of(5, Kind.ANSWER, content) + content)

        def feed() -> None:
            nonlocal rest
            while rest and transport.reads:
                num_bytes = min(len(rest), len(protocol.get_buffer(-1)))
                _feed(protocol, bytes(rest[:num_bytes]))
                rest = rest[num_bytes:]

        async with turns.turn():  # other large work
            feed()
            for _ in range(10):
                await asyncio.sleep(0)
            assert not transport.reads
        while rest:
            await until(lambda: transport.reads)
            feed()
        assert protocol.frames == [(5, Kind.ANSWER, content)]
        assert transport.num_pauses == 2

    asyncio.run(scenario())


def test_a_small_call_does_not_wait_for_all_large_ones_that_came_with_it(run: Run) -> None:
    async def scenario(replica: Replica, wires: Wires, wire: Wire) -> None:
        calls = [pickle.dumps([parcel(2, 5_000)])] * 50 + [pickle.dumps([parcel(1)])]
        (connection,) = wires.connections
        frames = [head_of(1_000 + number, Kind.CALL, call) + call for number, call in enumerate(calls)]
        _feed(connection, b"".join(frames))
        await until(lambda: len(replica.begun) == 51)
        assert replica.begun.index(1) < 5

    run(scenario)


def test_a_small_answer_does_not_wait_for_large_ones_on_the_way(run: Run) -> None:
    async def scenario(replica: Replica, wires: Wires, _: Wire) -> None:
        pool = PoolConnection(PoolRef(name=uuid4().hex, node_class="cpu", tokens_per_s=1000.0))
        pool._handle = object()  # type: ignore[assignment]  # no call goes through Serve
        pool.load.update({"it": Report(monotonic(), wire=wires.address)}, now=monotonic())

        def send(number: int, length: int) -> asyncio.Future[list[Answered]]:
            call = [np.full(length, number, dtype=np.int32)], EmbedOptions(), DEFAULT_QOS
            return asyncio.ensure_future(pool.send([call], [next_ticket(length, 1, batch=False)]))  # type: ignore[arg-type]

        large = [send(0, 1_000_000) for _ in range(20)]  # answers of 4 MB
        await until(lambda: len(replica.begun) == 20)
        replica.go.set()
        await asyncio.wait(large, return_when=asyncio.FIRST_COMPLETED)
        (answer,) = await send(7, 3)
        assert number_of(answer) == 7
        assert sum(each.done() for each in large) < 10
        await asyncio.wait(large)
        assert [number_of(each.result()[0]) for each in large] == [0] * 20
        for each in pool._wires.values():
            each.close()

    run(scenario)


def test_a_connection_outlives_four_thousand_million_calls(run: Run) -> None:
    async def scenario(replica: Replica, wires: Wires, wire: Wire) -> None:
        wire._numbers = count((1 << 32) - 1)
        for number in (5, 6):
            assert number_of((await wire.call([parcel(number)]))[0]) == number

    run(scenario)


def test_a_large_message_arrives_whole(run: Run) -> None:
    async def scenario(replica: Replica, wires: Wires, wire: Wire) -> None:
        (answer,) = await wire.call([parcel(7, 3_000_000)])
        assert isinstance(answer, Embeddings)
        assert answer.vectors is not None
        assert answer.vectors.shape == (1, 3_000_000)
        assert (answer.vectors == 7).all()

    run(scenario)


def test_a_large_message_is_sent_in_several_rounds_of_the_event_loop(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(replica: Replica, wires: Wires, wire: Wire) -> None:
        loop, rounds, sent = asyncio.get_running_loop(), count(), Counter[int]()
        now = next(rounds)

        def tick() -> None:
            nonlocal now
            now = next(rounds)
            ticking[0] = loop.call_soon(tick)

        def send(self: Sender, parts: tuple[Payload, ...]) -> int:
            sent[now] += (num_bytes := whole(self, parts))
            return num_bytes

        ticking, whole = [loop.call_soon(tick)], Sender._send
        with monkeypatch.context() as patch:
            patch.setattr(Sender, "_send", send)
            await wire.call([parcel(7, 500_000)])
        ticking[0].cancel()
        assert sum(sent.values()) > 2_000_000
        assert max(sent.values()) <= _AT_ONCE_BYTES

    run(scenario)


@pytest.mark.parametrize("sizes", [[], [3], [100_000], [3, 100_000, 20_000, 5]])
def test_arrays_of_an_answer_are_not_copied_if_they_are_large(sizes: list[int]) -> None:
    arrays = [np.arange(size, dtype=np.float32) for size in sizes]
    parts = packed((arrays, "the rest"))
    large = [each for each in arrays if each.nbytes >= 1 << 16]
    assert len(parts) == 2 + len(large)
    assert all(map(np.shares_memory, map(np.frombuffer, parts[1:-1]), large))
    payload = bytearray().join(parts)
    got, rest = unpacked(payload)
    assert rest == "the rest"
    assert [each.tolist() for each in got] == [each.tolist() for each in arrays]
    assert all(each.flags.writeable and each.flags.aligned for each in got)
    content = np.frombuffer(payload, dtype=np.uint8)
    assert [np.shares_memory(each, content) for each in got] == [each.nbytes >= 1 << 16 for each in got]


def test_an_error_is_its_calls_alone(run: Run) -> None:
    async def scenario(replica: Replica, wires: Wires, wire: Wire) -> None:
        wrong, bug, right = await asyncio.gather(*(wire.call([parcel(each)]) for each in (13, 14, 15)), return_exceptions=True)
        assert isinstance(wrong, list)
        assert isinstance(wrong[0], NotFinite)
        assert isinstance(bug, BackendError)
        assert "a bug" in str(bug)
        assert isinstance(right, list)
        assert number_of(right[0]) == 15

    run(scenario)


def test_a_caller_that_leaves_cancels_its_call(run: Run) -> None:
    async def scenario(replica: Replica, wires: Wires, wire: Wire) -> None:
        waiting = asyncio.ensure_future(wire.call([parcel(0)]))
        await until(lambda: replica.begun == [0])
        assert wires.calls_since_last() == 1
        assert wires.calls_since_last() == 1  # the call is under way
        waiting.cancel()
        await until(lambda: replica.cancelled == [0] and wires.num_open == 0)
        assert wire.is_idle
        assert number_of((await wire.call([parcel(9)]))[0]) == 9

    run(scenario)


def test_a_gateway_that_is_gone_cancels_its_calls(run: Run) -> None:
    async def scenario(replica: Replica, wires: Wires, wire: Wire) -> None:
        waiting = asyncio.ensure_future(wire.call([parcel(0)]))
        await until(lambda: replica.begun == [0])
        wire.close()
        await until(lambda: replica.cancelled == [0])
        assert not wires.connections
        with pytest.raises(Lost):
            await waiting

    run(scenario)


def test_a_replica_whose_process_ends_has_died(run: Run) -> None:
    async def scenario(replica: Replica, wires: Wires, wire: Wire) -> None:
        waiting = asyncio.ensure_future(wire.call([parcel(0)]))
        await until(lambda: replica.begun == [0])
        for each in list(wires.connections):
            each.close()  # as the kernel does when the process ends
        with pytest.raises(ReplicaDied) as died:
            await waiting
        assert died.value.replica == "it"
        assert wire.is_over
        with pytest.raises(Unreachable):
            await wire.call([parcel(1)])

    run(scenario)


def test_a_replica_that_stops_in_order_finishes_its_calls(run: Run) -> None:
    async def scenario(replica: Replica, wires: Wires, wire: Wire) -> None:
        waiting = asyncio.ensure_future(wire.call([parcel(0)]))
        await until(lambda: replica.begun == [0])
        closing = asyncio.ensure_future(wires.close())
        await until(lambda: wire.is_over)  # the gateway knows, and chooses another replica
        late = await wire.call([parcel(3)])  # a call that was on its way
        assert number_of(late[0]) == 3
        assert not closing.done()
        replica.go.set()
        assert number_of((await waiting)[0]) == 0
        await asyncio.wait_for(closing, 5)

    run(scenario)


def test_who_has_no_secret_is_cut_off(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(replica: Replica, wires: Wires, wire: Wire) -> None:
        host, port, secret = wires.address
        stranger = Wire("it", (host, port, "00" * SECRET_BYTES))
        await stranger.connect()
        with pytest.raises(Lost):
            await stranger.call([parcel(5)])
        monkeypatch.setattr(replica_wire, "_SECRET_S", 0.1)
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(bytes.fromhex(secret)[:-1])
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        assert replica.begun == []
        assert number_of((await wire.call([parcel(5)]))[0]) == 5

    run(scenario)


@pytest.mark.parametrize("head", [(MOST_BYTES + 1, 0, Kind.CALL), (0, 0, 77)])
def test_bytes_that_are_no_frames_end_the_connection(run: Run, head: tuple[int, int, int]) -> None:
    async def scenario(replica: Replica, wires: Wires, wire: Wire) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        host, port, secret = wires.address
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(bytes.fromhex(secret) + _HEAD.pack(*head))
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        assert number_of((await wire.call([parcel(5)]))[0]) == 5

    run(scenario)


def test_a_message_may_come_byte_by_byte(run: Run) -> None:
    async def scenario(replica: Replica, wires: Wires, wire: Wire) -> None:
        sent: list[bytes] = []

        class Recorder:
            def writelines(self, parts: Sequence[bytes]) -> None:
                sent.extend(parts)

            def is_closing(self) -> bool:
                return False

        recorded: Any = Wire("it", wires.address)
        recorded._transport = Recorder()
        call = asyncio.ensure_future(recorded.call([parcel(6)]))
        await asyncio.sleep(0)
        host, port, secret = wires.address
        reader, writer = await asyncio.open_connection(host, port)
        for byte in bytes.fromhex(secret) + b"".join(sent):
            writer.write(bytes([byte]))
            await writer.drain()
        await until(lambda: replica.begun == [6])
        assert len(await asyncio.wait_for(reader.readexactly(_HEAD.size), 5)) == _HEAD.size
        writer.close()
        call.cancel()

    run(scenario)


def test_a_replica_that_cannot_be_reached() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        wire = Wire("it", ("127.0.0.1", port, "00" * SECRET_BYTES))
        tries = await asyncio.gather(*(wire.connect() for _ in range(3)), return_exceptions=True)
        assert [type(each) for each in tries] == [ConnectionRefusedError] * 3

    asyncio.run(scenario())


# Streams.


class Generates:
    """A replica whose model the test drives, and a gateway's connection to its pool."""

    def __init__(self) -> None:
        self.model = ByHand()
        self.channels = Channels(self.model)  # type: ignore[arg-type]
        self.embeds = Replica()
        self.wires = Wires(self.embeds.answer, "127.0.0.1", self.channels)
        self.pool = PoolConnection(PoolRef(name=uuid4().hex, node_class="cpu", tokens_per_s=1000.0), StreamLoad)
        self.pool._handle = object()  # type: ignore[assignment]  # no call goes through Serve
        self.reports("it")

    def reports(self, *replicas: str) -> None:
        report = Report(monotonic(), pages=100, wire=self.wires.address)
        self.pool.load.update(dict.fromkeys(replicas, report), now=monotonic())

    @property
    def wire(self) -> Wire:
        return self.pool._wires["it", False]

    async def begin(self, *prompts: Sequence[int]) -> list[Begun]:
        first = len(self.model.streams)
        begun = [Begun(self, prompt, SamplingOptions(max_tokens=CONTEXT, stop_ids=(EOS,))) for prompt in prompts]
        await until(lambda: len(self.model.streams) == first + len(prompts))
        return begun

    async def compute(self, stream: Stream, _: Any) -> None:
        """As `Channel.compute`."""
        await self.pool.generate(stream, Ticket(0, CONTEXT, CONTEXT))


@pytest.fixture(params=["asyncio", "uvloop"])
def stream(request: pytest.FixtureRequest) -> RunStreams:
    """Runs a scenario of streams in each of the event loops that Serve may use."""
    loops = asyncio if request.param == "asyncio" else pytest.importorskip("uvloop")

    async def whole(scenario: Callable[[Generates], Awaitable[None]]) -> None:
        replica = Generates()
        try:
            await scenario(replica)
        finally:
            for each in replica.pool._wires.values():
                each.close()
            await asyncio.wait_for(replica.wires.close(), 5)

    def run_it(scenario: Callable[[Generates], Awaitable[None]]) -> None:
        with asyncio.Runner(loop_factory=loops.new_event_loop) as runner:
            runner.run(whole(scenario))

    return run_it


def test_tokens_and_ends_of_streams_arrive(stream: RunStreams) -> None:
    async def scenario(replica: Generates) -> None:
        first, second, third = await replica.begin([1, 2], [3], [4])
        replica.model.compute(7, 8, 9)
        await until(lambda: third.heard == [Token(9), "pass"])
        second.stream.future.cancel()
        await until(lambda: replica.model.streams[1].future.cancelled())
        replica.model.compute(EOS, 10)
        await first.over
        assert (first.answer().finish_reason, first.answer().tokens) == ("stop", (Token(7),))
        replica.model.compute(EOS)
        await third.over
        assert third.heard == [Token(9), "pass", Token(10), "pass"]
        assert (len(replica.wires.connections), replica.wires.num_open) == (1, 1)
        assert replica.wires.calls_since_last() == 1  # without this call Serve could put the pool to sleep

    stream(scenario)


def test_a_stream_hears_that_its_replica_died(stream: RunStreams) -> None:
    async def scenario(replica: Generates) -> None:
        (begun,) = await replica.begin([1])
        replica.model.compute(7)
        await until(lambda: len(begun.heard) == 2)
        for each in list(replica.wires.connections):
            each.close()  # as the kernel does when the process ends
        with pytest.raises(ReplicaDied) as died:
            await begun.over
        assert (died.value.replica, begun.stream.answer) == ("it", [Token(7)])
        assert not begun.stream.future.done()
        await until(lambda: replica.model.streams[0].future.cancelled())

    stream(scenario)


def test_a_gateway_that_is_gone_ends_its_streams(stream: RunStreams) -> None:
    async def scenario(replica: Generates) -> None:
        (begun,) = await replica.begin([1])
        replica.wire.close()
        await until(lambda: replica.model.streams[0].future.cancelled())
        assert replica.wires.num_open == 0
        with pytest.raises(Lost):
            await begun.over

    stream(scenario)


def test_later_streams_use_a_wire_that_the_first_ones_did_not_know(stream: RunStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that has just started may know a replica before its address."""

    class ThroughServe:
        async def compute(self, stream: Stream, _: Any) -> None:
            early.append(stream)
            await asyncio.Future()

    early: list[Stream] = []

    async def scenario(replica: Generates) -> None:
        open_channel = replica.pool._open_channel
        monkeypatch.setattr(
            replica.pool, "_open_channel", lambda *given: ThroughServe() if given[-1] is None else open_channel(*given)
        )
        replica.pool.load.update({"it": Report(monotonic(), pages=100)}, now=monotonic())
        first = Begun(replica, [1], SamplingOptions(max_tokens=5))
        await until(lambda: early == [first.stream])
        replica.reports("it")
        (second,) = await replica.begin([2])
        replica.model.compute(EOS)
        await second.over
        assert (early, first.over.done()) == ([first.stream], False)
        first.over.cancel()
        await asyncio.wait({first.over})

    stream(scenario)


def test_streams_of_a_replica_that_stops_move_if_there_is_another(stream: RunStreams) -> None:
    async def scenario(replica: Generates) -> None:
        replica.reports("it", "other")
        (begun,) = await replica.begin([1])
        replica.model.compute(7)
        await until(lambda: len(begun.heard) == 2)
        await asyncio.wait_for(replica.wires.close(), 5)
        with pytest.raises(Stopping):
            await begun.over
        assert replica.model.streams[0].future.cancelled()

    stream(scenario)


def test_streams_of_a_replica_that_stops_do_not_move_to_a_silent_one(stream: RunStreams) -> None:
    async def scenario(replica: Generates) -> None:
        (begun,) = await replica.begin([1])
        replica.reports("it", "silent")
        replica.pool.load.replicas["silent"].heard_at = -inf
        closing = asyncio.ensure_future(replica.wires.close())
        await until(lambda: replica.wire.is_left)
        replica.model.compute(EOS)
        await begun.over
        assert begun.answer().finish_reason == "stop"
        replica.pool._channels["it", True]._reading.cancel()  # an idle channel ends like this
        await asyncio.wait_for(closing, 5)

    stream(scenario)


def test_streams_of_a_replica_that_stops_finish_there_if_it_is_the_only_one(stream: RunStreams) -> None:
    async def scenario(replica: Generates) -> None:
        (begun,) = await replica.begin([1])
        closing = asyncio.ensure_future(replica.wires.close())
        await until(lambda: replica.wire.is_left)
        new = Begun(replica, [2], SamplingOptions(max_tokens=5))
        await asyncio.sleep(0.1)
        assert len(replica.model.streams) == 1  # a new stream waits for another replica
        replica.model.compute(EOS)
        await begun.over
        assert begun.answer().finish_reason == "stop"
        assert not closing.done()
        new.stream.future.cancel()
        await new.over
        replica.pool._channels["it", True]._reading.cancel()  # an idle channel ends like this
        await asyncio.wait_for(closing, 5)

    stream(scenario)


def test_tokens_for_a_gateway_that_does_not_read_wait_at_the_replica_and_join(stream: RunStreams) -> None:
    async def scenario(replica: Generates) -> None:
        (begun,) = await replica.begin([1])
        replica.model.compute(7)
        await until(lambda: len(begun.heard) == 2)
        (connection,) = replica.wires.connections
        replica.wire._transport.pause_reading()  # type: ignore[union-attr]
        large = Token(5, -0.5, tuple((each, -1.5 * each) for each in range(100_000)))
        for _ in range(40):
            if not connection._sender.is_full:
                replica.model.compute(large)
                await asyncio.sleep(0.02)
        assert connection._sender.is_full
        for _ in range(5):
            replica.model.compute(6)
        await asyncio.sleep(0.05)
        (channel,) = replica.channels._channels.values()
        assert channel._unsent.token_ids.tolist()[-5:] == [6] * 5
        replica.wire._transport.resume_reading()  # type: ignore[union-attr]
        await until(lambda: begun.stream.answer[-5:] == [Token(6)] * 5)
        replica.model.compute(EOS)
        await begun.over

    stream(scenario)


def test_the_engine_s_thread_sends_tokens_while_the_event_loop_is_busy(stream: RunStreams) -> None:
    """Messages of two channels share one connection, with and without log-probabilities."""

    async def scenario(replica: Generates) -> None:
        begun = await replica.begin([1], [2])
        await until(lambda: bool(replica.wires.connections))
        received: list[tuple[Kind, Payload]] = []
        replica.wire.frame_received = lambda number, kind, payload: received.append((kind, payload))  # type: ignore[method-assign]

        def compute() -> None:
            for each in range(10):
                replica.model.compute(each, Token(each, -0.5) if each % 2 else each)

        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()  # the event loop does nothing in the meantime
        ready, _, _ = select.select([replica.wire._transport.get_extra_info("socket").fileno()], [], [], 5)  # type: ignore[union-attr]
        assert ready
        await until(lambda: len(received) == 10)
        messages = [Steps.of_plain(each) if kind is Kind.TOKENS else pickle.loads(each) for kind, each in received]
        assert [each.token_ids.tolist() for each in messages] == [[each, each] for each in range(10)]
        assert [kind for kind, _ in received] == [Kind.STEPS] + [Kind.STEPS, Kind.TOKENS] * 4 + [Kind.STEPS]
        for each in begun:
            each.stream.future.cancel()

    stream(scenario)


def test_a_stream_finishes_at_a_replica_that_serve_no_longer_lists(stream: RunStreams) -> None:
    async def scenario(replica: Generates) -> None:
        (begun,) = await replica.begin([1])
        replica.reports("new")
        (later,) = await replica.begin([2])  # over a new connection
        replica.model.compute(EOS, EOS)
        await asyncio.gather(begun.over, later.over)
        assert begun.answer().finish_reason == later.answer().finish_reason == "stop"

    stream(scenario)


def test_a_stream_with_tokens_waits_for_a_replica(stream: RunStreams) -> None:
    async def scenario(replica: Generates) -> None:
        replica.pool._woken_at = inf  # so no call goes through Serve
        replica.reports()
        begun = Begun(replica, [1], SamplingOptions(max_tokens=5, stop_ids=(EOS,)))
        begun.stream.answer.append(Token(7))
        await asyncio.sleep(0)
        replica.reports("it")
        await until(lambda: len(replica.model.streams) == 1)
        replica.model.compute(EOS)
        await begun.over
        assert begun.answer().tokens == (Token(7),)

    stream(scenario)


def test_a_stream_that_no_replica_has_memory_for_does_not_wait(stream: RunStreams) -> None:
    async def scenario(replica: Generates) -> None:
        replica.pool.load.update({"it": Report(monotonic(), pages=100, longest_input=4)}, now=monotonic())
        long = Stream.begin([1], SamplingOptions(max_tokens=5), VOCABULARY, CONTEXT)
        with pytest.raises(Lost, match="no replica with memory for 5 tokens"):
            await asyncio.wait_for(replica.pool.generate(long, Ticket(0, 5, 5)), 5)

    stream(scenario)


def test_a_connection_that_has_ended_is_made_again(stream: RunStreams) -> None:
    async def scenario(replica: Generates) -> None:
        for prompt in ([1], [2]):
            (begun,) = await replica.begin(prompt)
            replica.model.compute(EOS)
            await begun.over
            for each in list(replica.wires.connections):
                each.close()
            await until(lambda: replica.wire.is_over and not replica.pool._channels)

    stream(scenario)


def test_a_replica_stops_computing_for_a_caller_that_leaves(stream: RunStreams) -> None:
    async def scenario(replica: Generates) -> None:
        call = [np.zeros(3, np.int32)], EmbedOptions(), DEFAULT_QOS
        leaving = asyncio.ensure_future(replica.pool.send([call], [Ticket(0, 3, 3)]))
        await until(lambda: replica.embeds.begun == [0])
        leaving.cancel()
        await until(lambda: replica.embeds.cancelled == [0])

    stream(scenario)


def test_a_replica_that_dies_behind_serve_is_known_to_have_died(stream: RunStreams) -> None:
    class Broken:
        async def compute(self, stream: Stream, _: Any) -> None:
            raise Lost("the replica that computes the answer is gone") from ActorDiedError()

    async def scenario(replica: Generates) -> None:
        replica.pool.load.update({"it": Report(monotonic(), pages=100)}, now=monotonic())
        replica.pool._channels["it", False] = Broken()  # type: ignore[assignment]
        with pytest.raises(ReplicaDied):
            await Begun(replica, [1], SamplingOptions(max_tokens=5)).over

    stream(scenario)


def test_a_call_goes_to_the_next_replica_if_the_first_cannot_be_reached(stream: RunStreams) -> None:
    """Serve still lists a dead replica for some seconds."""

    async def scenario(replica: Generates) -> None:
        host, _, *rest = replica.wires.address
        load = replica.pool.load
        dead = Report(monotonic(), pages=100, wire=(host, free_port(), *rest))
        load.update({"dead": dead}, now=monotonic())  # equal replicas are ranked in the order of their first reports
        load.update({"dead": dead, "it": Report(monotonic(), pages=100, wire=replica.wires.address)}, now=monotonic())
        load.opened(ticket := Ticket(0, 1, 1))
        assert load.ranked(ticket, monotonic()) == ["dead", "it"]
        wire = await replica.pool._wire_for(ticket, is_large=False)
        assert (wire, load.replica_of(ticket)) == (replica.wire, "it")

    stream(scenario)


def test_a_call_does_not_go_through_serve_to_a_replica_that_is_gone(stream: RunStreams) -> None:
    """Serve would send calls to this replica for some seconds. Its error would not say that the call was never sent."""

    async def scenario(replica: Generates) -> None:
        host, _, *rest = replica.wires.address
        load, pool = replica.pool.load, replica.pool
        load.opened(ticket := Ticket(0, 1, 1))
        assert await pool._wire_for(ticket, is_large=False) is not None
        pool._wires.pop(("it", False)).close()
        gone = Report(monotonic(), pages=100, wire=(host, free_port(), *rest))
        load.update({"it": gone}, now=monotonic())
        with pytest.raises(Unreachable):
            await pool._wire_for(ticket, is_large=False)
        load.finished(ticket, monotonic(), failed=True)
        assert load.replicas["it"].failures == 1  # so calls go to other pools first
        load.update({"new": gone}, now=monotonic())
        # Serve gets the call, because a firewall may close the port of a new replica.
        assert await pool._wire_for(Ticket(1, 1, 1), is_large=False) is None

    stream(scenario)
