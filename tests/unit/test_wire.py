"""Wires between a gateway and a replica, over real sockets: each call gets its answer, its error or the replica's death."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest

from engine.errors import BackendError, NotFinite
from engine.loop import Embeddings
from engine.options import EmbedOptions
from serve_app.admission.qos import DEFAULT_QOS
from serve_app.gateway.frames import _HEAD, MOST_BYTES, SECRET_BYTES, Kind
from serve_app.gateway.parcel import Answered, Parcel
from serve_app.gateway.remote import Lost, ReplicaDied
from serve_app.gateway.wire import Wire
from serve_app.replica import wire as replica_wire
from serve_app.replica.wire import Wires

Scenario = Callable[["Replica", Wires, Wire], Awaitable[None]]
Run = Callable[[Scenario], None]


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
        finally:  # else a test that fails would wait for ever
            replica.go.set()
            wire.close()
            await asyncio.wait_for(wires.close(), 5)

    def run_it(scenario: Scenario) -> None:
        with asyncio.Runner(loop_factory=loops.new_event_loop) as runner:
            runner.run(whole(scenario))

    return run_it


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


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
        assert wires.calls_since_last() == 1  # it is under way
        waiting.cancel()
        await until(lambda: replica.cancelled == [0])
        assert wires.num_open == 0
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
            each.close()  # as the kernel does
        with pytest.raises(ReplicaDied) as died:
            await waiting
        assert died.value.replica == "it"
        assert wire.is_over
        with pytest.raises(Lost):
            await wire.call([parcel(1)])

    run(scenario)


def test_a_replica_that_stops_in_order_finishes_its_calls(run: Run) -> None:
    async def scenario(replica: Replica, wires: Wires, wire: Wire) -> None:
        waiting = asyncio.ensure_future(wire.call([parcel(0)]))
        await until(lambda: replica.begun == [0])
        closing = asyncio.ensure_future(wires.close())
        await until(lambda: wire.is_over)  # the gateway knows, and chooses another replica
        late = await wire_call_in_spite(wire, parcel(3))
        assert number_of(late[0]) == 3
        assert not closing.done()
        replica.go.set()
        assert number_of((await waiting)[0]) == 0
        await asyncio.wait_for(closing, 5)

    run(scenario)


async def wire_call_in_spite(wire: Wire, sent: Parcel) -> list[Answered]:
    """A call that was on its way when the replica said that it leaves."""
    wire._is_left = False
    try:
        return await wire.call([sent])
    finally:
        wire._is_left = True


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
