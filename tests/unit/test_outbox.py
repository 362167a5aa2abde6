"""Requests that are joined into one call to a replica: each gets its own result or error."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.router import Ticket
from engine.errors import BackendError, EngineStopped
from engine.options import EmbedOptions
from engine.results import Embeddings
from serve_app.admission.qos import DEFAULT_QOS
from serve_app.gateway.outbox import Outbox, joint_ticket, next_ticket
from serve_app.gateway.parcel import Answer, ReplicaCall

MOST_TOKENS = 512


def call(name: int, num_tokens: int = 8, batch: bool = False, owner: str = "", num_inputs: int = 1) -> tuple[ReplicaCall, Ticket]:
    ids = np.full(num_tokens, name, dtype=np.int32)
    qos = replace(DEFAULT_QOS, owner=owner)
    return ([ids] * num_inputs, EmbedOptions(), qos), next_ticket(num_tokens * num_inputs, num_tokens, batch)


def answer_of(given: ReplicaCall) -> Embeddings:
    return Embeddings(np.array([[given[0][0][0]]], dtype=np.float32), {}, 0.0, 0.0)


class Replica:
    """Keeps the calls that it gets. `wrong` maps a request's name to its error."""

    def __init__(self, wrong: dict[int, Exception] | None = None, hold: bool = False) -> None:
        self.wrong, self.sent, self.cancelled = wrong or {}, list[tuple[int, Ticket]](), 0
        self.go = asyncio.Event()
        if not hold:
            self.go.set()

    async def send(self, calls: Sequence[ReplicaCall], tickets: Sequence[Ticket]) -> list[Answer]:
        assert len(calls) == len(tickets)
        self.sent.append((len(calls), joint_ticket(tickets)))
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return [self.wrong.get(int(each[0][0][0])) or answer_of(each) for each in calls]


def outbox_to(send: Callable[[Sequence[ReplicaCall], Sequence[Ticket]], Awaitable[list[Answer]]], most_calls: int = 99) -> Outbox:
    return Outbox(send, lambda: MOST_TOKENS, lambda on_the_way: on_the_way < most_calls)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def within_a_while() -> None:
        async with asyncio.timeout(10):
            await test()

    asyncio.run(within_a_while())


@pytest.fixture
def endless_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request leaves the queue because of its waiting time."""
    monkeypatch.setattr("serve_app.gateway.outbox._MOST_WAIT_S", 1e6)


def test_what_arrives_in_one_turn_leaves_as_one_call() -> None:
    async def test() -> None:
        replica = Replica()
        outbox = outbox_to(replica.send)
        answers = await asyncio.gather(*(outbox.put(*call(name)) for name in range(5)))
        assert [each.vectors[0, 0] for each in answers] == [0, 1, 2, 3, 4]  # type: ignore[index]
        ((count, ticket),) = replica.sent
        assert (count, ticket.num_tokens, ticket.longest) == (5, 40, 8)
        await outbox.put(*call(9))
        assert [count for count, _ in replica.sent] == [5, 1]

    run(test)


def test_one_alone_keeps_its_ticket() -> None:
    async def test() -> None:
        replica = Replica()
        given, ticket = call(1)
        await outbox_to(replica.send).put(given, ticket)
        assert replica.sent == [(1, ticket)]

    run(test)


def test_long_requests_and_other_priorities_leave_apart() -> None:
    async def test() -> None:
        replica = Replica()
        outbox = outbox_to(replica.send)
        given = [call(1), call(2, batch=True), call(3, 5000), call(4), call(5, batch=True)]
        answers = await asyncio.gather(*(outbox.put(*each) for each in given))
        assert [each.vectors[0, 0] for each in answers] == [1, 2, 3, 4, 5]  # type: ignore[index]
        sent = sorted((count, ticket.num_tokens, ticket.longest, ticket.batch) for count, ticket in replica.sent)
        assert sent == [(1, 8, 8, False), (1, 8, 8, False), (1, 5000, 5000, False), (2, 16, 8, True)]

    run(test)


def test_a_call_carries_so_many_tokens_at_most() -> None:
    async def test() -> None:
        replica = Replica()
        outbox = outbox_to(replica.send)
        await asyncio.gather(*(outbox.put(*call(name, 100)) for name in range(12)))
        assert [(count, ticket.num_tokens) for count, ticket in replica.sent] == [(5, 500), (5, 500), (2, 200)]

    run(test)


def test_a_call_carries_so_many_inputs_at_most() -> None:
    async def test() -> None:
        replica = Replica()
        outbox = outbox_to(replica.send)
        await asyncio.gather(*(outbox.put(*call(name, 1, num_inputs=count)) for name, count in enumerate((200, 56, 1, 300, 1))))
        assert [(count, ticket.num_tokens) for count, ticket in replica.sent] == [(2, 256), (1, 1), (1, 300), (1, 1)]

    run(test)


@pytest.mark.parametrize(("num_tokens", "num_inputs"), [(MOST_TOKENS + 1, 1), (1, 257)])
def test_nothing_waits_for_a_large_request(num_tokens: int, num_inputs: int, endless_wait: None) -> None:
    async def test() -> None:
        replica = Replica(hold=True)
        outbox = outbox_to(replica.send, most_calls=1)
        large = [asyncio.ensure_future(outbox.put(*call(name, num_tokens, num_inputs=num_inputs))) for name in range(3)]
        await asyncio.sleep(0.01)
        short = asyncio.ensure_future(outbox.put(*call(4)))
        await asyncio.sleep(0.01)
        assert len(replica.sent) == 4
        joint = asyncio.ensure_future(outbox.put(*call(5)))
        await asyncio.sleep(0.01)
        assert len(replica.sent) == 4, "while the short request has a call, the next one waits for it"
        replica.go.set()
        await asyncio.gather(*large, short, joint)

    run(test)


def test_an_error_is_its_own_callers_alone() -> None:
    async def test() -> None:
        outbox = outbox_to(Replica({1: BackendError("not finite")}).send)
        first, second, third = await asyncio.gather(*(outbox.put(*call(name)) for name in range(3)), return_exceptions=True)
        assert isinstance(second, BackendError)
        assert isinstance(first, Embeddings)
        assert isinstance(third, Embeddings)

    run(test)


def test_when_the_call_is_lost_all_of_them_hear() -> None:
    async def test() -> None:
        async def send(calls: Sequence[ReplicaCall], tickets: Sequence[Ticket]) -> list[Answer]:
            raise EngineStopped("gone")

        outbox = outbox_to(send)
        answers = await asyncio.gather(*(outbox.put(*call(name)) for name in range(3)), return_exceptions=True)
        assert all(isinstance(each, EngineStopped) for each in answers)

    run(test)


def test_while_enough_calls_are_on_the_way_what_arrives_waits_for_one_to_come_back(endless_wait: None) -> None:
    async def test() -> None:
        replica, outbox, tasks = await _one_on_the_way()
        for name in range(1, 4):
            tasks.append(asyncio.ensure_future(outbox.put(*call(name))))
            await _turns()
        urgent = asyncio.ensure_future(outbox.put(*call(9, batch=True)))  # no call of this priority is on its way
        await _turns()
        assert [(count, ticket.batch) for count, ticket in replica.sent] == [(1, False), (1, True)]
        replica.go.set()
        answers = await asyncio.gather(*tasks, urgent)
        assert [each.vectors[0, 0] for each in answers] == [0, 1, 2, 3, 9]  # type: ignore[index]
        assert [count for count, _ in replica.sent] == [1, 1, 3]

    run(test)


@pytest.mark.parametrize("wrong", [EngineStopped("gone"), None], ids=["lost", "cancelled"])
def test_a_call_that_is_lost_or_cancelled_makes_room_too(wrong: Exception | None, endless_wait: None) -> None:
    async def test() -> None:
        replica = Replica(hold=True)

        async def send(calls: Sequence[ReplicaCall], tickets: Sequence[Ticket]) -> list[Answer]:
            answers = await replica.send(calls, tickets)
            if wrong is not None and len(replica.sent) == 1:
                raise wrong
            return answers

        outbox = outbox_to(send, most_calls=1)
        first = asyncio.ensure_future(outbox.put(*call(0)))
        await _turns()
        second = asyncio.ensure_future(outbox.put(*call(1)))
        await _turns()
        if wrong is None:
            first.cancel()
            await _turns()
        replica.go.set()
        assert (await second).vectors[0, 0] == 1  # type: ignore[index]
        with pytest.raises(asyncio.CancelledError if wrong is None else EngineStopped):
            await first
        assert (await outbox.put(*call(2))).vectors[0, 0] == 2  # type: ignore[index]

    run(test)


def test_what_waits_leaves_when_it_has_waited_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        replica, outbox, tasks = await _one_on_the_way()
        start = asyncio.get_running_loop().time()
        tasks += [asyncio.ensure_future(outbox.put(*call(name))) for name in (1, 2)]
        while len(replica.sent) == 1:
            await asyncio.sleep(0.01)
        waited_s = asyncio.get_running_loop().time() - start
        replica.go.set()
        await asyncio.gather(*tasks)
        assert [count for count, _ in replica.sent] == [1, 2]
        assert waited_s >= 0.1

    monkeypatch.setattr("serve_app.gateway.outbox._MOST_WAIT_S", 0.1)
    run(test)


def test_what_is_worth_a_call_does_not_wait(endless_wait: None) -> None:
    async def test() -> None:
        replica, outbox, tasks = await _one_on_the_way()
        for name in range(1, 20):
            tasks.append(asyncio.ensure_future(outbox.put(*call(name))))
            await _turns()
        assert [count for count, _ in replica.sent] == [1, 16]
        replica.go.set()
        await asyncio.gather(*tasks)
        assert [count for count, _ in replica.sent] == [1, 16, 3]

    run(test)


def test_what_is_as_much_as_goes_together_does_not_wait(endless_wait: None) -> None:
    async def test() -> None:
        replica, outbox, tasks = await _one_on_the_way()
        for name in range(1, 7):
            tasks.append(asyncio.ensure_future(outbox.put(*call(name, 100))))  # the sixth would exceed MOST_TOKENS
            await _turns()
        tasks.append(asyncio.ensure_future(outbox.put(*call(7, MOST_TOKENS))))
        await _turns()
        assert [(count, ticket.num_tokens) for count, ticket in replica.sent] == [(1, 8), (5, 500), (1, 100), (1, 512)]
        replica.go.set()
        await asyncio.gather(*tasks)

    run(test)


async def _one_on_the_way() -> tuple[Replica, Outbox, list[asyncio.Future[Embeddings]]]:
    """A replica that holds its first call, an outbox that allows one call at a time, and the requests' tasks."""
    replica = Replica(hold=True)
    outbox = outbox_to(replica.send, most_calls=1)
    tasks: list[asyncio.Future[Embeddings]] = [asyncio.ensure_future(outbox.put(*call(0)))]
    await _turns()
    return replica, outbox, tasks


async def _turns(count: int = 4) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("leaving", [1, 3])
def test_the_call_is_cancelled_once_nobody_waits_for_it(leaving: int) -> None:
    async def test() -> None:
        replica = Replica(hold=True)
        outbox = outbox_to(replica.send)
        tasks: list[asyncio.Task[Any]] = [asyncio.ensure_future(outbox.put(*call(name))) for name in range(3)]
        await _turns()
        for task in tasks[:leaving]:
            task.cancel()
        await _turns()
        assert replica.cancelled == (leaving == 3)
        replica.go.set()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(each, asyncio.CancelledError) for each in answers] == [index < leaving for index in range(3)]

    run(test)


def test_who_leaves_before_the_call_is_not_sent() -> None:
    async def test() -> None:
        replica = Replica()
        outbox = outbox_to(replica.send)
        tasks = [asyncio.ensure_future(outbox.put(*call(name))) for name in range(2)]
        asyncio.get_running_loop().call_soon(tasks[0].cancel)
        await asyncio.wait(tasks)
        assert tasks[0].cancelled()
        assert tasks[1].result().vectors[0, 0] == 1  # type: ignore[index]
        assert [count for count, _ in replica.sent] == [1]

    run(test)


def test_requests_of_two_owners_never_share_a_call_and_none_waits_for_the_others() -> None:
    async def test() -> None:
        replica = Replica(hold=True)
        outbox = outbox_to(replica.send, most_calls=1)
        flood = [asyncio.ensure_future(outbox.put(*call(number, owner="flood"))) for number in range(3)]
        await asyncio.sleep(0.001)
        other = asyncio.ensure_future(outbox.put(*call(9, owner="other")))  # the flood has the only call on its way
        for _ in range(5):
            await asyncio.sleep(0)
        assert [num_calls for num_calls, _ in replica.sent] == [3, 1]
        replica.go.set()
        await asyncio.gather(*flood, other)
        assert not outbox._under_way

    run(test)
