"""The replica's side of a channel: it computes the streams of one gateway, and sends messages with their tokens."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from functools import partial
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from engine.errors import BackendError, EmberError, EngineStopped
from engine.request_tag import RequestTag
from engine.schedule.stream import Answer, Stream, Token
from serve_app.compute.delivery import Delivery
from serve_app.gateway.steps import End, Ended, NewStream, Steps, Unsent
from serve_app.models import GeneratingModel

log = logging.getLogger(__name__)

# If this many tokens wait for a gateway, or a message waits for this long, the gateway no longer reads, and its streams end. Its
# node may be unplugged, and a connection does not show that for minutes.
MOST_UNSENT = 1 << 17
UNREAD_S = 10.0


class Channels:
    """All channels of this replica, by the ids that gateways gave them. Called on one event loop."""

    def __init__(self, model: GeneratingModel) -> None:
        self._model = model
        self._channels: dict[str, Channel] = {}
        self._delivery: Delivery | None = None  # of all channels, so that a pass wakes the event loop once

    @property
    def tokens_left(self) -> int:
        """The most tokens that the running streams may still generate."""
        return sum(channel.tokens_left for channel in self._channels.values())

    @property
    def num_answering(self) -> int:
        """The number of running streams that have a token."""
        return sum(channel.num_answering for channel in self._channels.values())

    def change(self, channel_id: str, begun: Sequence[NewStream], left: Sequence[int]) -> None:
        """Begins streams, and cancels the streams whose callers have left. The messages carry all results, errors too."""
        channel = self._channel(channel_id)
        channel.begin(begun)
        channel.cancel(left)

    async def steps(self, channel_id: str) -> AsyncGenerator[Steps]:
        """The messages of a channel. Closing the generator cancels the channel's streams.

        Raises: EngineStopped if the gateway does not read for too long.
        """
        channel = self._channel(channel_id)
        channel.is_read = True
        try:
            while True:
                yield await channel.message()
        finally:
            self._channels.pop(channel_id, None)
            channel.close()

    def _channel(self, channel_id: str) -> "Channel":
        """Finds or makes the channel: the first call makes it, whether it begins streams or asks for messages."""
        channel = self._channels.get(channel_id)
        if channel is None:
            if self._delivery is None:
                self._delivery = Delivery(asyncio.get_running_loop())
            channel = self._channels[channel_id] = Channel(self._model, self._delivery)
            asyncio.get_running_loop().call_later(UNREAD_S, self._close_unread, channel_id, channel)
        return channel

    def _close_unread(self, channel_id: str, channel: "Channel") -> None:
        if not channel.is_read:
            del self._channels[channel_id]
            channel.close()


class Channel:
    """The streams of one gateway. Tokens that come while a message is sent go into the next message."""

    def __init__(self, model: GeneratingModel, delivery: Delivery) -> None:
        self.is_read = False
        self._model, self._loop, self._delivery = model, asyncio.get_running_loop(), delivery
        self._streams: dict[int, Stream] = {}
        self._fresh: set[int] = set()  # the streams without a token yet
        self._unsent, self._ready = Unsent(), asyncio.Event()
        self._sent_at: float | None = None  # the time at which the current message was handed over
        self._is_closed = False

    @property
    def tokens_left(self) -> int:
        return sum(stream.options.max_tokens - len(stream.answer) for stream in self._streams.values())

    @property
    def num_answering(self) -> int:
        return sum(bool(stream.answer) for stream in self._streams.values())

    def begin(self, begun: Sequence[NewStream]) -> None:
        streams = []
        for new in begun:
            try:
                stream = self._model.new_stream(new.prompt, new.options)
                stream.go_on_after(new.answered.tolist())
            except Exception as error:
                self._end(new.number, error, new.tags)
                continue
            stream.priority, stream.owner, stream.deadline = new.priority, new.owner, perf_counter() + new.deadline_s
            stream.tags = new.tags
            stream.on_token, stream.on_tokens, stream.key = partial(self._got, new.number), self._got_all, new.number
            stream.on_pass = self._delivery.wake
            stream.future.add_done_callback(partial(self._ended, new.number))
            self._streams[new.number] = stream
            if not len(new.answered):
                self._fresh.add(new.number)
            if not stream.future.done():
                streams.append(stream)
        try:
            self._model.submit(streams)
        except Exception as error:
            for stream in streams:
                stream.fail(error)

    def cancel(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._fresh.discard(number)
            if (stream := self._streams.pop(number, None)) is not None:
                stream.future.cancel()

    def close(self) -> None:
        """Cancels all streams, which frees their pages."""
        self._is_closed, self._unsent = True, Unsent()
        self._ready.set()
        self.cancel(list(self._streams))

    async def message(self) -> Steps:
        """The next message. Raises: EngineStopped if the channel has been closed."""
        self._sent_at = None
        await self._ready.wait()
        if self._is_closed:
            raise EngineStopped("the gateway has not read its messages, so its streams were cancelled")
        self._ready.clear()
        unsent, self._unsent = self._unsent, Unsent()
        self._sent_at = self._loop.time()
        return unsent.packed()

    def _got(self, number: int, token: Token) -> None:
        """Adds a token. The engine's threads call this."""
        self._delivery.add(self._keep, (number, token))

    def _got_all(self, numbers: NDArray[np.int64], token_ids: NDArray[np.int32]) -> None:
        """Adds a token of each of these streams, which had tokens before. The engine's threads call this."""
        self._delivery.add(self._keep_all, (numbers, token_ids))

    def _ended(self, number: int, future: "Future[Answer]") -> None:
        """Adds the end of a stream. Any thread may call this."""
        if not future.cancelled():
            self._delivery.add(self._keep_end, (number, future))
            self._delivery.wake()

    def _keep(self, event: tuple[int, Token]) -> None:
        number, token = event
        stream = self._streams.get(number)
        if stream is None:  # the caller has left
            return
        if not self._unsent.numbers:
            self._ready.set()
        self._tell_prompt(number, stream)
        self._unsent.add(number, token)
        self._close_if_unread()

    def _keep_all(self, event: tuple[NDArray[np.int64], NDArray[np.int32]]) -> None:
        """As `_keep`. Tokens of streams whose callers have left are sent, too: the gateway drops them."""
        if self._is_closed:
            return
        self._ready.set()
        self._unsent.add_plain(*event)
        self._close_if_unread()

    def _close_if_unread(self) -> None:
        is_late = self._sent_at is not None and self._loop.time() > self._sent_at + UNREAD_S
        if is_late or len(self._unsent.numbers) > MOST_UNSENT:
            log.error("a gateway does not read its messages: %d streams are cancelled", len(self._streams))
            self.close()

    def _tell_prompt(self, number: int, stream: Stream) -> None:
        """Adds the prompt's cached tokens and scores, with the stream's first token or with its end."""
        if number in self._fresh:
            self._fresh.discard(number)
            self._unsent.cached[number] = stream.num_cached_tokens
            if stream.scores:
                self._unsent.scores[number] = stream.scores

    def _keep_end(self, event: tuple[int, "Future[Answer]"]) -> None:
        number, future = event
        stream = self._streams.pop(number, None)
        if stream is None:
            return
        error = future.exception()
        if error is None:
            self._tell_prompt(number, stream)
            answer = future.result()
            self._end(number, End(answer.finish_reason, answer.queue_s, answer.end))
        else:
            self._fresh.discard(number)
            self._end(number, error if isinstance(error, Exception) else BackendError(repr(error)), stream.tags)

    def _end(self, number: int, end: Ended, tags: tuple[RequestTag, ...] = ()) -> None:
        if isinstance(end, Exception) and not isinstance(end, EmberError):  # an unforeseen error may not be picklable
            log.error("a stream failed", exc_info=end, extra={"tags": tags})
            end = BackendError(f"the replica failed: {end!r}")
        self._unsent.ends[number] = end
        self._ready.set()
