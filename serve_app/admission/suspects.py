"""Remembers the requests that were in flight when a replica died, because one of them may have killed the replica.

A request with one death is a suspect. Only one suspect runs at a time, so a second death is certainly its own fault. A request
with two deaths is refused for `REFUSED_S`. A suspect that gets its answer is no longer a suspect, and a stream that has got some
tokens does not become one (docs/decisions/034).
"""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Iterable, Sequence
from hashlib import blake2b
from math import ceil, inf
from time import time
from typing import Any, NamedTuple, TypeVar

from engine.options import TokenIds
from engine.schedule.stream import Stream
from engine.sequences import Sequences
from serve_app.errors import Quarantined

T = TypeVar("T")

# Seconds for which a request is refused after its second death, and for which a first death is remembered.
REFUSED_S = 600.0
_DEATHS_TO_REFUSE = 2
# The most suspects that are remembered. A replica at its limit has a thousand requests.
_MOST = 8192
# Tokens after which a stream on another replica has passed the point at which its first replica died.
_PROOF_TOKENS = 4
# A stream that has got this many tokens from a replica does not become a suspect if the replica dies. A request that kills a
# replica nearly always kills it with its prompt or with its first tokens.
_SETTLED_TOKENS = 16
# Seconds after which the next suspect may run although the current one still runs.
_ALONE_S = 10.0
# Seconds between two checks of a suspect's progress.
_LOOK_EVERY_S = 0.02


class Death(NamedTuple):
    """The death of a replica, and a request that was in flight there."""

    fingerprint: int
    replica: str  # Serve's id of the replica, which is never used again
    at: float  # seconds since the epoch


def fingerprint(model: str, sequences: Sequence[TokenIds]) -> int:
    """A 64-bit number over 0. It is the same for the same token ids in every process."""
    whole = Sequences.of(sequences)
    head = f"{model}|{len(whole)}|".encode()
    digest = blake2b(b"".join([head, array("q", whole.bounds), whole.token_ids.tobytes()]), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def innocence(stream: Stream) -> Callable[[], bool]:
    """Whether a stream is innocent: it has its answer, or another replica has continued it beyond the point of the death.

    A stream that starts from the beginning may be far from the token at which its first replica died.
    """
    proof = len(stream.answer) + _PROOF_TOKENS if stream.answer else inf
    return lambda: len(stream.answer) >= proof or _has_answer(stream)


def settled(stream: Stream) -> Callable[[], bool]:
    """Whether a stream has got `_SETTLED_TOKENS` tokens since now. Then it is no suspect if its present replica dies."""
    enough = stream.num_answered + _SETTLED_TOKENS
    return lambda: stream.num_answered >= enough


def _has_answer(stream: Stream) -> bool:
    future = stream.future
    return future.done() and not future.cancelled() and future.exception() is None


class Suspects:
    """The deaths that one process knows. Called on one event loop."""

    def __init__(self, clock: Callable[[], float] = time) -> None:
        self._clock = clock
        self._deaths: dict[int, dict[str, float]] = {}  # by fingerprint: the replicas that died, and when
        self._cleared: dict[int, set[str]] = {}  # the deaths that the request has been cleared of
        self._ended: dict[str, float] = {}  # dead replicas, and the time at which this process learned of each death
        self._alone = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._deaths)

    def __contains__(self, mark: int) -> bool:
        return mark in self._deaths

    @property
    def deaths(self) -> list[Death]:
        """All deaths that still count."""
        self._forget_old()
        return [Death(mark, *each) for mark, its in self._deaths.items() for each in its.items()]

    def learn(self, deaths: Iterable[Sequence[Any]]) -> None:
        """Adds deaths; known deaths are ignored. Each is a `Death`, or a list of a death's three fields."""
        for mark, replica, at in map(Death._make, deaths):
            self._known_dead(replica)
            if replica not in self._cleared.get(mark, ()):
                self._deaths.setdefault(mark, {}).setdefault(replica, at)
        self._forget_old()

    def now(self) -> float:
        """Seconds since the epoch, for `died`."""
        return self._clock()

    def died(self, mark: int, replica: str, sent_at: float | None = None) -> Death | None:
        """Records a death that this process has just noticed.

        Args:
            sent_at: when the request was sent to the replica. None: before the replica's death.
        Returns: None if the replica was already known to be dead when the request was sent. Routers learn of a death later.
        """
        if sent_at is not None and sent_at > self._ended.get(replica, inf):
            return None
        death = Death(mark, replica, self._clock())
        self.learn([death])
        return death

    def _known_dead(self, replica: str) -> None:
        self._ended.setdefault(replica, self._clock())
        while len(self._ended) > _MOST:
            del self._ended[next(iter(self._ended))]

    def clear(self, mark: int) -> None:
        """Records that the request has been answered. Its deaths no longer count, even if another process reports them again."""
        if replicas := self._deaths.pop(mark, None):
            self._cleared.setdefault(mark, set()).update(replicas)
            while len(self._cleared) > _MOST:
                del self._cleared[next(iter(self._cleared))]

    def check(self, mark: int) -> None:
        """Raises: Quarantined for a request with two deaths."""
        times = sorted(self._deaths.get(mark, {}).values())
        if len(times) < _DEATHS_TO_REFUSE:
            return
        if (left_s := times[-1] + REFUSED_S - self._clock()) > 0:
            raise Quarantined(ceil(left_s))
        del self._deaths[mark]

    async def run(self, mark: int, work: Callable[[], Awaitable[T]], is_proven: Callable[[], bool] | None = None) -> T:
        """Returns `work()` for a request with this fingerprint. A suspect first waits until no other suspect runs.

        Args:
            is_proven: tells whether a stream is innocent, while it runs and at its end. If None, a result proves it.
        Raises: Quarantined.
        """
        if mark not in self._deaths:
            result = await work()
            if mark in self._deaths and (is_proven is None or is_proven()):  # an equal request was lost in the meantime
                self.clear(mark)
            return result
        self.check(mark)
        async with self._alone:
            self.check(mark)  # an equal request may have died in the meantime
            working = asyncio.ensure_future(work())
            try:
                await _until(lambda: working.done() or (is_proven is not None and is_proven()), working)
            except asyncio.CancelledError:
                working.cancel()
                raise
        if is_proven is not None and is_proven():
            self.clear(mark)
        result = await working
        if is_proven is None or is_proven():
            self.clear(mark)
        return result

    def _forget_old(self) -> None:
        oldest = self._clock() - REFUSED_S
        for mark in [mark for mark, its in self._deaths.items() if max(its.values()) < oldest]:
            del self._deaths[mark]
        while len(self._deaths) > _MOST:
            del self._deaths[next(iter(self._deaths))]


async def _until(holds: Callable[[], bool], working: "asyncio.Future[Any]") -> None:
    """Returns when the condition is true, and after `_ALONE_S` at the latest."""
    loop = asyncio.get_running_loop()
    end = loop.time() + _ALONE_S
    while not holds() and loop.time() < end:
        await asyncio.wait({working}, timeout=_LOOK_EVERY_S)
