"""The gateway's side of a channel, which carries this gateway's streams on one replica.

A channel has one long call, in which the replica sends the tokens of all streams, one message per pass. Short calls begin
streams, and cancel streams whose callers have left. At most one short call is in flight, so they arrive in order. Changes that
come in the meantime go into the next short call.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from itertools import count
from math import inf
from time import perf_counter
from typing import Any
from uuid import uuid4

import numpy as np

from engine.errors import EmberError
from engine.schedule.cohort import Listener
from engine.schedule.stream import Answer, Stream, Token, token_of
from serve_app.gateway.remote import LOST, Lost, drop, in_background
from serve_app.gateway.steps import Ended, NewStream, Steps

log = logging.getLogger(__name__)

# Seconds after which a channel without streams ends. An open channel would delay a replica that stops.
IDLE_S = 5.0
# A replica that no longer reports counts as lost if also no message came for this time.
SILENT_S = 4.0
# While no message comes, the channel checks at this interval that the replica still exists.
_LOOK_EVERY_S = 0.5


class Channel:
    """This gateway's streams on one replica. Called on one event loop."""

    def __init__(
        self,
        steps: Callable[[str], Any],
        change: Callable[[str, Sequence[NewStream], Sequence[int]], Any],
        is_heard: Callable[[], bool],
        on_close: Callable[[], None],
    ) -> None:
        """
        Args:
            steps: makes the long call, with the channel's id.
            change: makes a short call that begins streams and cancels others.
            is_heard: whether the replica still reports.
            on_close: called before the streams get the channel's end. After this call the channel takes no stream.
        """
        self.id = uuid4().hex
        self._steps, self._change, self._is_heard, self._on_close = steps, change, is_heard, on_close
        self._streams: dict[int, tuple[Stream, list[Token], asyncio.Future[None]]] = {}  # with the stream's answer
        self._on_begun: dict[int, Callable[[int | None], None]] = {}  # for streams without a token from this replica
        self._numbers = count()
        self._begun: list[NewStream] = []
        self._left: list[int] = []
        self._loop = asyncio.get_running_loop()
        self._used_at = self._heard_at = self._loop.time()
        self._sending: asyncio.Task[None] | None = None
        self._reading = in_background(self._read())

    async def compute(self, stream: Stream, on_begun: Callable[[int | None], None]) -> None:
        """Begins the stream on the replica, or continues it after its tokens. Returns at its end, or when its caller has left.

        Args:
            on_begun: called at the replica's first token, with the number of cached tokens of the prompt. The number is None
                for a stream that continues.
        Raises: one of LOST. `stream.answer` then has all tokens that came before.
        """
        number, over = next(self._numbers), self._loop.create_future()
        self._streams[number], self._on_begun[number] = (stream, stream.answer, over), on_begun
        options = replace(stream.options, seed=stream.seed)
        left_s = inf if stream.deadline == inf else stream.deadline - perf_counter()
        answered = np.array([token.id for token in stream.answer], dtype=np.int32)
        if len(answered):
            options = replace(options, prompt_logprobs=None)  # the scores of the prompt came with the first token
        owner, tags = stream.owner, stream.tags
        self._begun.append(NewStream(number, stream.prompt, options, stream.priority, left_s, answered, owner, tags))
        self._send_soon()
        stream.future.add_done_callback(lambda future: self._leave_if_cancelled(number, future))
        await over

    def _leave_if_cancelled(self, number: int, future: "Future[Answer]") -> None:
        if future.cancelled():
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._leave, number)

    def _leave(self, number: int) -> None:
        if number in self._streams:
            self._left.append(number)
            self._send_soon()
            self._over(number)

    def _over(self, number: int, error: Exception | None = None) -> None:
        _, _, over = self._streams.pop(number)
        self._on_begun.pop(number, None)
        self._used_at = self._loop.time()
        if over.done():  # the caller has left
            return
        if error is None:
            over.set_result(None)
        else:
            over.set_exception(error)

    def _send_soon(self) -> None:
        if self._sending is None:
            self._sending = in_background(self._send())

    async def _send(self) -> None:
        try:
            while self._begun or self._left:
                begun, self._begun = self._begun, []
                left, self._left = self._left, []
                await self._change(self.id, begun, left)
        except Exception as error:
            log.warning("a replica did not accept streams: %r", error)
            self._reading.cancel()
        finally:
            self._sending = None

    async def _read(self) -> None:
        steps = self._steps(self.id)
        reason: Exception | None = None
        message: asyncio.Task[Steps] = asyncio.ensure_future(anext(steps))
        try:
            while True:
                if (await asyncio.wait({message}, timeout=_LOOK_EVERY_S))[0]:
                    self._take(message.result())
                    self._heard_at = self._loop.time()
                    message = asyncio.ensure_future(anext(steps))
                elif self._is_idle() or self._is_lost():
                    break
        except StopAsyncIteration:
            log.warning("a replica has ended a channel with %d streams", len(self._streams))
        except Exception as error:
            reason = error
            log.warning("a channel with %d streams broke: %r", len(self._streams), error)
        finally:
            self._on_close()
            drop(steps, message)
            if self._sending is not None:
                self._sending.cancel()
            for number in list(self._streams):
                lost = Lost("the replica that computes the answer is gone")
                lost.__cause__ = reason
                self._over(number, lost)

    def _is_idle(self) -> bool:
        is_used = self._streams or self._begun or self._left or self._sending is not None
        return not is_used and self._loop.time() - self._used_at > IDLE_S

    def _is_lost(self) -> bool:
        """Whether the replica is lost. A replica that stops gracefully no longer reports, but still finishes its streams."""
        return not self._is_heard() and self._loop.time() - self._heard_at > SILENT_S

    def _take(self, steps: Steps) -> None:
        streams = self._streams
        for number, begun in steps.begun.items():
            if number in streams:
                stream = streams[number][0]
                stream.num_cached_tokens, stream.first_scheduled_at = begun.num_cached_tokens, stream.submitted_at + begun.queue_s
        for number, scores in steps.scores.items():
            if number in streams:
                streams[number][0].scores = scores
        on_passes = self._take_tokens(steps)
        for number, end in steps.ends.items():
            if number in streams:
                self._end(number, end)
        for on_pass in on_passes:
            on_pass()

    def _take_tokens(self, steps: Steps) -> set[Callable[[], None]]:
        """Gives the streams their tokens. Returns: each distinct `Stream.on_pass`."""
        find, logprobs, on_begun, on_passes = self._streams.get, steps.logprobs, self._on_begun, set[Callable[[], None]]()
        heard: dict[Listener, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for place, (number, token_id) in enumerate(zip(steps.numbers.tolist(), steps.token_ids.tolist(), strict=True)):
            found = find(number)
            if found is None:  # the caller has left
                continue
            stream, answer, _ = found
            token = logprobs.get(place) or token_of(token_id)
            answer.append(token)
            if number in on_begun:
                begun = steps.begun.get(number)
                on_begun.pop(number)(None if begun is None else begun.num_cached_tokens)
            if stream.on_tokens is not None and not logprobs:  # `on_tokens` gets only ids
                keys, token_ids = heard[stream.on_tokens]
                keys.append(stream.key)
                token_ids.append(token_id)
            elif stream.on_token is not None:
                stream.on_token(token)
            if stream.on_pass is not None:
                on_passes.add(stream.on_pass)
        for listener, (keys, token_ids) in heard.items():
            listener(np.array(keys, np.int32), np.array(token_ids, np.int32))
        return on_passes

    def _end(self, number: int, end: Ended) -> None:
        stream, _, _ = self._streams[number]
        if isinstance(end, LOST):
            return self._over(number, end)
        self._over(number)
        if isinstance(end, EmberError):
            return stream.fail(end)
        assert not isinstance(end, Exception), "a replica sends only our own errors"
        counts = len(stream.prompt), stream.num_cached_tokens
        answer = Answer(tuple(stream.answer), end.finish_reason, *counts, stream.queue_s, end.end, stream.prompt_tokens)
        with suppress(InvalidStateError):  # the caller has left
            stream.future.set_result(answer)
