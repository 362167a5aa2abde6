"""Joins requests for one pool into calls, unless a request would then wait much longer.

Requests that arrive in one turn of the event loop leave as one call. While every replica has a joint call, new requests wait
until one returns, and then leave together (Nagle's algorithm, RFC 896). The call of a large request takes long, and no request
waits for it.

All requests of a call have one owner, because they are answered when the last of them is finished, and the queue of a replica
lets a request wait only for other requests of its owner.

A call through Serve costs each side at least a millisecond, even a small one. With one short text in each call, a replica would
spend more time on calls than on computing (docs/decisions/024).
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field

from cluster.router import Ticket
from engine.request_tag import request_tags
from engine.results import Embeddings
from serve_app.gateway.parcel import Answer, ReplicaCall

# The most inputs of a joint call. A request with more inputs has a call of its own.
_MOST_INPUTS = 256
# A group of this many requests leaves at once, without waiting for another call to return.
_WORTH_A_CALL = 16
# The longest time that a request waits to leave.
_MOST_WAIT_S = 0.02

_tickets = itertools.count()


def next_ticket(num_tokens: int, longest: int, batch: bool, replica: str | None = None, fingerprint: int = 0) -> Ticket:
    """A ticket of the request that the current task works on."""
    tags = request_tags.get()
    return Ticket(next(_tickets), num_tokens, longest, batch, replica, fingerprint, tags[0] if tags else None)


def joint_ticket(tickets: Sequence[Ticket]) -> Ticket:
    """The ticket of a joint call of requests of one priority. A single request keeps its own ticket."""
    if len(tickets) == 1:
        return tickets[0]
    return next_ticket(sum(each.num_tokens for each in tickets), max(each.longest for each in tickets), tickets[0].batch)


_Kind = tuple[bool, str]  # whether the priority is batch, and the owner


@dataclass(eq=False, slots=True)
class _Waiting:
    call: ReplicaCall
    ticket: Ticket
    answer: "asyncio.Future[Embeddings]"


@dataclass(eq=False, slots=True)
class _Group:
    """Requests of one priority and one owner that leave as one call."""

    kind: _Kind
    due: float  # the latest time at which the group leaves, on the event loop's clock
    leaving: asyncio.Handle  # the next check whether the group leaves
    members: list[_Waiting] = field(default_factory=list)
    num_tokens: int = 0
    num_inputs: int = 0
    num_waiting: int = 0
    sending: "asyncio.Task[None] | None" = None

    def cancel(self) -> None:
        for each in self.members:
            each.answer.cancel()

    def answer(self, answers: "Sequence[Embeddings | BaseException]") -> None:
        """Gives each waiting caller its answer."""
        for each, answer in zip(self.members, answers, strict=True):
            if each.answer.done():
                continue
            if isinstance(answer, BaseException):
                each.answer.set_exception(answer)
            else:
                each.answer.set_result(answer)


class Outbox:
    """The outbox of one pool."""

    def __init__(
        self,
        send: Callable[[Sequence[ReplicaCall], Sequence[Ticket]], Awaitable[list[Answer]]],
        most_tokens: Callable[[], float],
        has_room: Callable[[int], bool],
    ) -> None:
        """
        Args:
            send: sends several requests, each with its ticket, as one call. An error among the answers concerns one caller only.
            most_tokens: the most tokens of a call. All requests of a call are answered when the last one is finished.
            has_room: whether a small call may leave while the given number of joint calls is in flight.
        """
        self._send, self._most_tokens, self._has_room = send, most_tokens, has_room
        self._groups: dict[_Kind, _Group] = {}  # groups that have not left
        self._under_way = Counter[_Kind]()  # the number of joint calls without an answer

    async def put(self, call: ReplicaCall, ticket: Ticket) -> Embeddings:
        """Sends one request and waits for its result. The call is cancelled when all callers in it have cancelled.

        Raises: the request's own error, or an error that `send` raises.
        """
        sequences, _, qos = call
        group = self._group_for((ticket.batch, qos.owner), ticket.num_tokens, len(sequences))
        waiting = _Waiting(call, ticket, asyncio.get_running_loop().create_future())
        group.members.append(waiting)
        group.num_tokens += ticket.num_tokens
        group.num_inputs += len(sequences)
        group.num_waiting += 1
        if len(group.members) == _WORTH_A_CALL:
            self._check_soon(group)
        try:
            return await waiting.answer
        finally:
            group.num_waiting -= 1
            if group.sending is not None and not group.num_waiting:
                group.sending.cancel()  # does nothing if the call has ended
            del waiting, group  # an error refers to this frame, and both refer to the error

    def _group_for(self, kind: _Kind, num_tokens: int, num_inputs: int) -> _Group:
        loop, group = asyncio.get_running_loop(), self._groups.get(kind)
        if group is not None and not self._is_joint(group.num_tokens + num_tokens, group.num_inputs + num_inputs):
            self._leave(group)
            group = None
        if group is None:
            group = _Group(kind, loop.time() + _MOST_WAIT_S, loop.call_soon(self._check, kind))
            self._groups[kind] = group
        return group

    def _is_joint(self, num_tokens: int, num_inputs: int) -> bool:
        """Whether a call of this size is a joint call, or could become one. A larger call is one large request."""
        return num_tokens <= self._most_tokens() and num_inputs <= _MOST_INPUTS

    def _check_soon(self, group: _Group) -> None:
        """Checks at the end of this turn of the event loop instead of at the time set before."""
        group.leaving.cancel()
        group.leaving = asyncio.get_running_loop().call_soon(self._check, group.kind)

    def _check(self, kind: _Kind) -> None:
        """Sends the group if it is large or if a replica is idle; otherwise later, when the group is due."""
        group = self._groups[kind]
        is_full = group.num_tokens >= self._most_tokens() or group.num_inputs >= _MOST_INPUTS
        if is_full or len(group.members) >= _WORTH_A_CALL or self._has_room(self._under_way[kind]):
            self._leave(group)
        else:
            group.leaving = asyncio.get_running_loop().call_at(group.due, self._leave, group)

    def _leave(self, group: _Group) -> None:
        group.leaving.cancel()
        del self._groups[group.kind]
        group.members = [each for each in group.members if not each.answer.done()]
        if group.members:
            # In a new context, so that one request's id is not used for the other requests.
            group.sending = asyncio.get_running_loop().create_task(self._deliver(group), context=Context())
            if self._is_joint(group.num_tokens, group.num_inputs):
                self._under_way[group.kind] += 1
                group.sending.add_done_callback(lambda _: self._returned(group.kind))

    def _returned(self, kind: _Kind) -> None:
        self._under_way[kind] -= 1
        if not self._under_way[kind]:
            del self._under_way[kind]
        if (group := self._groups.get(kind)) is not None:
            self._check_soon(group)

    async def _deliver(self, group: _Group) -> None:
        answers: Sequence[Embeddings | BaseException] = ()
        try:
            try:
                answers = await self._send([each.call for each in group.members], [each.ticket for each in group.members])
            except asyncio.CancelledError:
                group.cancel()
                raise
            except Exception as error:
                answers = [error] * len(group.members)
            group.answer(answers)
        finally:
            del answers, group  # an error refers to this frame, and both refer to the error
