"""Writes this replica's requests in flight into its journal, and refuses them or runs them alone after a death."""

import logging
from asyncio import CancelledError
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import monotonic
from typing import TypeVar

from ray import serve
from ray.serve.exceptions import RayServeException

from engine.errors import DeviceLost
from serve_app.admission.suspects import Suspects
from serve_app.replica.journal import Journal, OtherJournals, journal_file

log = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds between two searches for new journals.
_LOOK_EVERY_S = 1.0
# A request whose client has left stays in the journal for this time.
_LAST_PASS_S = 5.0


@dataclass(slots=True)
class Entry:
    """Requests in the journal. `error` is the error that they were answered with, or None."""

    error: BaseException | None = None


class InFlight:
    """The requests in flight. Called on one event loop. Any thread may call the callback of `enter`."""

    def __init__(self, folder: Path | None, replica: str) -> None:
        """
        Args:
            folder: the folder of the pool's journals on this node; None writes no file.
            replica: Serve's id of this replica.
        """
        self.suspects = Suspects()
        self._journal = Journal(journal_file(folder, replica))
        self._others = OtherJournals(folder, replica)
        # Other threads take single values out of these two. A request that has left is in neither.
        self._slots: dict[int, Sequence[int]] = {}  # in the journal, by entry
        self._unsettled: dict[int, tuple[int, Callable[[], bool]]] = {}  # streams: fingerprint, and `is_settled`, by entry
        self._entries = count()
        self._left: deque[tuple[float, Sequence[int]]] = deque()  # (end time, slots) of requests whose clients have left
        self._answered = deque[int]()  # suspects with an answer, to be cleared on the event loop
        self._looked_at = -_LOOK_EVERY_S

    @classmethod
    def of_this_replica(cls) -> "InFlight":
        """Uses journals in Ray's folder of this session, so journals of an earlier server do not count."""
        try:
            context = serve.get_replica_context()
        except RayServeException:  # a test or a benchmark without Serve
            return cls(None, "")
        from ray._private.worker import global_worker

        assert global_worker.node is not None, "a replica is a worker of Ray"
        folder = Path(global_worker.node.get_session_dir_path()) / "emberforge" / context.app_name
        return cls(folder, str(context.replica_id.unique_id))

    def look(self) -> None:
        """Finds replicas that have died on this node. A call takes microseconds."""
        now = monotonic()
        if now - self._looked_at > _LOOK_EVERY_S:
            self._looked_at = now
            self._others.look()
            self._settle()
        while self._answered:
            self.suspects.clear(self._answered.popleft())
        while self._left and self._left[0][0] < now:
            self._journal.leave(self._left.popleft()[1])
        if deaths := self._others.deaths():
            log.warning("%d requests were in flight at replicas that died", len(deaths))
            self.suspects.learn(deaths)

    def knows(self, marks: Sequence[int]) -> bool:
        """Whether one of the requests is a suspect."""
        self.look()
        return bool(self.suspects) and any(mark in self.suspects for mark in marks)

    def _settle(self) -> None:
        """Removes the streams from the journal that would not become suspects now. A suspect stays."""
        for entry, (mark, is_settled) in list(self._unsettled.items()):
            if mark not in self.suspects and is_settled():
                self._leave(entry, None)

    def enter(self, mark: int, is_settled: Callable[[], bool] | None = None) -> Callable[[BaseException | None], None]:
        """Writes a request into the journal. Returns: a callback for the request's end, which takes its error.

        Args:
            is_settled: for a stream, `suspects.settled`. A settled stream leaves the journal before its end, unless it is a
                suspect.
        """
        entry = self._enter([mark], is_settled)

        def leave(error: BaseException | None) -> None:
            self._leave(entry, error)
            if error is None and mark in self.suspects:
                self._answered.append(mark)

        return leave

    @contextmanager
    def written(self, marks: Sequence[int], is_settled: Callable[[], bool] | None = None) -> Iterator["Entry"]:
        """Keeps the requests in the journal within the context. An answer clears requests that became suspects.

        Args:
            is_settled: as for `enter`, if there is one request.
        """
        number, entry = self._enter(marks, is_settled), Entry()
        try:
            yield entry
        except BaseException as error:  # not kept in `entry`: its frames refer to `entry`
            self._leave(number, error)
            raise
        self._leave(number, entry.error)
        if entry.error is None:
            for mark in marks:
                self.suspects.clear(mark)

    def _enter(self, marks: Sequence[int], is_settled: Callable[[], bool] | None) -> int:
        entry = next(self._entries)
        self._slots[entry] = self._journal.enter(marks)
        if is_settled is not None:
            self._unsettled[entry] = marks[0], is_settled
        return entry

    def _leave(self, entry: int, error: BaseException | None) -> None:
        """Removes requests from the journal. Not if the device is lost, which will end the replica, and later if the client has
        left, because the request may still be in a pass. Does nothing for an entry that has left."""
        self._unsettled.pop(entry, None)
        slots = self._slots.pop(entry, ())
        if isinstance(error, CancelledError):
            self._left.append((monotonic() + _LAST_PASS_S, slots))
        elif not isinstance(error, DeviceLost):
            self._journal.leave(slots)

    async def run(
        self,
        mark: int,
        work: Callable[[], Awaitable[T]],
        is_proven: Callable[[], bool] | None = None,
        is_settled: Callable[[], bool] | None = None,
    ) -> T:
        """Like `Suspects.run`. The request is in the journal while it runs, a stream until `is_settled` as for `enter`."""
        self.look()
        if mark not in self.suspects:
            with self.written([mark], is_settled):
                return await work()

        async def written() -> T:
            with self.written([mark], is_settled):
                return await work()

        result = await self.suspects.run(mark, written, is_proven)
        if mark not in self.suspects:
            self._others.erase(mark)
        return result

    def close(self) -> None:
        """Removes the journal when the replica stops gracefully."""
        self._journal.remove()
