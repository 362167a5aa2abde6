"""Requests that arrive in one turn of the event loop leave as one call, where that delays none of them by much.

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
from serve_app.parcel import Answer, Call

_MOST_CALLS = 256

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
    call: Call
    ticket: Ticket
    answer: "asyncio.Future[Embeddings]"


@dataclass(eq=False, slots=True)
class _Group:
    """Requests of one priority that leave together."""

    members: list[_Waiting] = field(default_factory=list)
    num_tokens: int = 0
    sending: "asyncio.Task[None] | None" = None


class Outbox:
    """Of one pool."""

    def __init__(
        self, send: Callable[[Sequence[Call], Sequence[Ticket]], Awaitable[list[Answer]]], most_tokens: Callable[[], float]
    ) -> None:
        """
        Args:
            send: makes one call of several, each with its ticket; an error among the answers is its own caller's alone.
            most_tokens: that may go together: what does is answered together, when the last of it is done.
        """
        self._send, self._most_tokens = send, most_tokens
        self._groups: dict[bool, _Group] = {}  # that have not left, by whether they are of batch priority

    async def put(self, call: Call, ticket: Ticket) -> Embeddings:
        """Raises: what the call gave, or what `send` raises. Cancelling it cancels what was sent once nobody waits for it."""
        group = self._group_for(ticket)
        waiting = _Waiting(call, ticket, asyncio.get_running_loop().create_future())
        group.members.append(waiting)
        group.num_tokens += ticket.num_tokens
        try:
            return await waiting.answer
        finally:
            if group.sending is not None and all(each.answer.done() for each in group.members):
                group.sending.cancel()  # nothing, once it has ended

    def _group_for(self, ticket: Ticket) -> _Group:
        group = self._groups.get(ticket.batch)
        if group is None or group.num_tokens + ticket.num_tokens > self._most_tokens() or len(group.members) == _MOST_CALLS:
            group = self._groups[ticket.batch] = _Group()
            # In a context of its own: one request's identity is not to travel with the others.
            asyncio.get_running_loop().call_soon(self._leave, group, ticket.batch, context=Context())
        return group

    def _leave(self, group: _Group, batch: bool) -> None:
        if self._groups.get(batch) is group:
            del self._groups[batch]
        group.members = [each for each in group.members if not each.answer.done()]
        if group.members:
            group.sending = asyncio.ensure_future(self._deliver(group))

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
