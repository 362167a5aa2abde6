"""Requests leave as one call where that delays none of them by much: those that arrive in one turn of the event loop, and while
every replica has a call in hand, those that arrive before one comes back (Nagle's algorithm, RFC 896, one level up).

A call through Serve costs either side a millisecond or more, whatever it carries: with one short text each, a replica would spend
more on being called than on computing (docs/decisions/024).
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field

from cluster.router import Ticket
from engine.loop import Embeddings
from serve_app.gateway.parcel import Answer, ReplicaCall

_MOST_CALLS = 256
# So many are worth a call of their own: they wait for no other to come back.
_WORTH_A_CALL = 16
# That a request waits at most.
_MOST_WAIT_S = 0.02

_tickets = itertools.count()


def next_ticket(num_tokens: int, longest: int, batch: bool) -> Ticket:
    return Ticket(next(_tickets), num_tokens, longest, batch)


def joint_ticket(tickets: Sequence[Ticket]) -> Ticket:
    """Of requests of one priority that go together; one alone keeps its own."""
    if len(tickets) == 1:
        return tickets[0]
    return next_ticket(sum(each.num_tokens for each in tickets), max(each.longest for each in tickets), tickets[0].batch)


@dataclass(eq=False, slots=True)
class _Waiting:
    call: ReplicaCall
    ticket: Ticket
    answer: "asyncio.Future[Embeddings]"


@dataclass(eq=False, slots=True)
class _Group:
    """Requests of one priority that leave together."""

    batch: bool
    due: float  # on the loop's clock: when it leaves whatever is on the way
    leaving: asyncio.Handle  # the next look at whether it leaves
    members: list[_Waiting] = field(default_factory=list)
    num_tokens: int = 0
    num_waiting: int = 0
    sending: "asyncio.Task[None] | None" = None


class Outbox:
    """Of one pool."""

    def __init__(
        self,
        send: Callable[[Sequence[ReplicaCall], Sequence[Ticket]], Awaitable[list[Answer]]],
        most_tokens: Callable[[], float],
        has_room: Callable[[int], bool],
    ) -> None:
        """
        Args:
            send: makes one call of several, each with its ticket; an error among the answers is its own caller's alone.
            most_tokens: that may go together: what does is answered together, when the last of it is done.
            has_room: whether a small call leaves beside so many that are on the way.
        """
        self._send, self._most_tokens, self._has_room = send, most_tokens, has_room
        self._groups: dict[bool, _Group] = {}  # that have not left, by whether they are of batch priority
        self._on_the_way = {False: 0, True: 0}  # calls, likewise

    async def put(self, call: ReplicaCall, ticket: Ticket) -> Embeddings:
        """Raises: what the call gave, or what `send` raises. Cancelling it cancels what was sent once nobody waits for it."""
        group = self._group_for(ticket)
        waiting = _Waiting(call, ticket, asyncio.get_running_loop().create_future())
        group.members.append(waiting)
        group.num_tokens += ticket.num_tokens
        group.num_waiting += 1
        if len(group.members) == _WORTH_A_CALL:
            self._look_soon(group)
        try:
            return await waiting.answer
        finally:
            group.num_waiting -= 1
            if group.sending is not None and not group.num_waiting:
                group.sending.cancel()  # nothing, once it has ended

    def _group_for(self, ticket: Ticket) -> _Group:
        loop, group = asyncio.get_running_loop(), self._groups.get(ticket.batch)
        if group is not None and (
            group.num_tokens + ticket.num_tokens > self._most_tokens() or len(group.members) == _MOST_CALLS
        ):
            self._leave(group)
            group = None
        if group is None:
            group = _Group(ticket.batch, loop.time() + _MOST_WAIT_S, loop.call_soon(self._look, ticket.batch))
            self._groups[ticket.batch] = group
        return group

    def _look_soon(self, group: _Group) -> None:
        """At the end of this turn, not at a time that was set before."""
        group.leaving.cancel()
        group.leaving = asyncio.get_running_loop().call_soon(self._look, group.batch)

    def _look(self, batch: bool) -> None:
        """Whether what is there leaves now."""
        group = self._groups[batch]
        is_much = len(group.members) >= _WORTH_A_CALL or group.num_tokens >= self._most_tokens()
        if is_much or self._has_room(self._on_the_way[batch]):
            self._leave(group)
        else:
            group.leaving = asyncio.get_running_loop().call_at(group.due, self._leave, group)

    def _leave(self, group: _Group) -> None:
        group.leaving.cancel()
        del self._groups[group.batch]
        group.members = [each for each in group.members if not each.answer.done()]
        if group.members:
            self._on_the_way[group.batch] += 1
            # In a context of its own: one request's identity is not to travel with the others.
            group.sending = asyncio.get_running_loop().create_task(self._deliver(group), context=Context())
            group.sending.add_done_callback(lambda _: self._came_back(group.batch))

    def _came_back(self, batch: bool) -> None:
        self._on_the_way[batch] -= 1
        if (group := self._groups.get(batch)) is not None:
            self._look_soon(group)

    async def _deliver(self, group: _Group) -> None:
        answers: Sequence[Embeddings | BaseException]
        try:
            answers = await self._send([each.call for each in group.members], [each.ticket for each in group.members])
        except asyncio.CancelledError:
            for each in group.members:
                each.answer.cancel()
            raise
        except Exception as error:
            answers = [error] * len(group.members)
        for each, answer in zip(group.members, answers, strict=True):
            if each.answer.done():
                continue
            if isinstance(answer, BaseException):
                each.answer.set_exception(answer)
            else:
                each.answer.set_result(answer)
