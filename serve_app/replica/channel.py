"""The replica's side of a channel: computes the streams of one gateway, and puts their tokens into messages.

The engine's threads fill the messages, and send them if the gateway reads over a wire. The event loop does no work for a pass,
because it shares the interpreter with the engine's threads.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from engine.errors import BackendError, EmberError, EngineStopped
from engine.request_tag import RequestTag
from engine.schedule.stream import Answer, Stream, Token
from serve_app.gateway.steps import Begun, End, Ended, NewStream, Steps, Unsent
from serve_app.models import GeneratingModel

log = logging.getLogger(__name__)

# A gateway counts as lost, and its streams end, if this many tokens wait for it, or if one token waits for this long. The node of
# the gateway may be unplugged. A connection does not show this for minutes.
MOST_UNSENT = 1 << 17
UNREAD_S = 10.0


class Channels:
    """All channels of this replica, by the ids that gateways gave them. Called on one event loop."""

    def __init__(self, model: GeneratingModel) -> None:
        self._model = model
        self._channels: dict[str, Channel] = {}

    @property
    def tokens_left(self) -> int:
        """The most tokens that the running streams may still generate."""
        return sum(channel.tokens_left for channel in self._channels.values())

    @property
    def num_answering(self) -> int:
        """The number of running streams that have a token."""
        return sum(channel.num_answering for channel in self._channels.values())

    def change(self, channel_id: str, begun: Sequence[NewStream], left: Sequence[int]) -> None:
        """Begins streams, and cancels the streams whose callers have left. Results and errors come in the channel's messages."""
        channel = self._channel(channel_id)
        channel.begin(begun)
        channel.cancel(left)

    def read(self, channel_id: str, on_message: Callable[[], None]) -> "Channel":
        """The channel. From now on the caller takes its messages, until `end`.

        Args:
            on_message: called in any thread when `Channel.take` has a message. It must not raise.
        """
        channel = self._channel(channel_id)
        channel.on_message = on_message
        return channel

    def end(self, channel_id: str) -> None:
        """Cancels the channel's streams."""
        if (channel := self._channels.pop(channel_id, None)) is not None:
            channel.close()

    async def steps(self, channel_id: str) -> AsyncGenerator[Steps]:
        """The messages of a channel, for a gateway that reads through Serve. Closing the generator cancels the channel's streams.

        Raises: EngineStopped if the gateway does not read for too long.
        """
        loop, has_message = asyncio.get_running_loop(), asyncio.Event()
        channel = self.read(channel_id, lambda: _on(loop, has_message.set))
        try:
            while True:
                has_message.clear()
                if (message := channel.take()) is not None:
                    yield message
                else:
                    await has_message.wait()
        finally:
            self.end(channel_id)

    def _channel(self, channel_id: str) -> "Channel":
        """The channel. The first call makes it: a gateway may begin streams or ask for messages first."""
        channel = self._channels.get(channel_id)
        if channel is None:
            channel = self._channels[channel_id] = Channel(self._model)
            asyncio.get_running_loop().call_later(UNREAD_S, self._close_unread, channel_id, channel)
        return channel

    def _close_unread(self, channel_id: str, channel: "Channel") -> None:
        if channel.on_message is None:
            self.end(channel_id)


class Channel:
    """The streams of one gateway. Tokens that arrive while a message is sent go into the next message.

    Streams begin and are cancelled on the event loop. The engine's threads add tokens and ends.
    """

    def __init__(self, model: GeneratingModel) -> None:
        self.on_message: Callable[[], None] | None = None  # see `Channels.read`; None until the gateway reads
        self._model, self._loop = model, asyncio.get_running_loop()
        self._lock = threading.Lock()  # guards the attributes below. A thread that holds it takes no other lock.
        self._streams: dict[int, Stream] = {}
        self._fresh: set[int] = set()  # the streams without a token yet
        self._unsent, self._since = Unsent(), 0.0  # the next message, and the time at which it began
        self._flushes_soon = self._will_close = self._is_closed = False

    @property
    def tokens_left(self) -> int:
        return sum(stream.options.max_tokens - stream.num_answered for stream in self._running())

    @property
    def num_answering(self) -> int:
        return sum(stream.num_answered > 0 for stream in self._running())

    def _running(self) -> list[Stream]:
        with self._lock:
            return list(self._streams.values())

    def begin(self, begun: Sequence[NewStream]) -> None:
        streams = []
        for new in begun:
            try:
                stream = self._model.new_stream(new.prompt, new.options)
                stream.go_on_after(new.answered.tolist())
            except Exception as error:
                self._add_end(new.number, error, new.tags)
                continue
            stream.priority, stream.owner, stream.deadline = new.priority, new.owner, perf_counter() + new.deadline_s
            stream.tags = new.tags
            stream.on_token, stream.on_tokens, stream.key = partial(self._add, new.number), self._add_all, new.number
            stream.on_pass = self.flush
            with self._lock:
                self._streams[new.number] = stream
                if not len(new.answered):
                    self._fresh.add(new.number)
            stream.future.add_done_callback(partial(self._ended, new.number))
            if not stream.future.done():
                streams.append(stream)
        try:
            self._model.submit(streams)
        except Exception as error:
            for stream in streams:
                stream.fail(error)
        self.flush()

    def cancel(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            with self._lock:
                self._fresh.discard(number)
                stream = self._streams.pop(number, None)
            if stream is not None:
                stream.future.cancel()

    def close(self) -> None:
        """Cancels all streams, which frees their pages."""
        with self._lock:
            self._is_closed, self._unsent = True, Unsent()
            numbers = list(self._streams)
        self.cancel(numbers)
        if self.on_message is not None:
            self.on_message()

    def flush(self) -> None:
        """Calls `on_message` if there is a message. Any thread may call this; the engine's threads do after each pass."""
        if self._unsent and self.on_message is not None:
            self.on_message()

    def take(self) -> Steps | None:
        """The next message, if there is one. Any thread may call this. Raises: EngineStopped if the channel has been closed."""
        with self._lock:
            if self._is_closed:
                raise EngineStopped("the gateway has not read its messages, so its streams were cancelled")
            if not self._unsent:
                return None
            unsent, self._unsent = self._unsent, Unsent()
        return unsent.packed()

    def _add(self, number: int, token: Token) -> None:
        """Adds a token to the next message."""
        with self._lock:
            stream = self._streams.get(number)
            if stream is None:  # the caller has left
                return
            self._begin_message()
            self._tell_prompt(number, stream)
            self._unsent.add(number, token)

    def _add_all(self, numbers: NDArray[np.int32], token_ids: NDArray[np.int32]) -> None:
        """Adds one token for each of these streams, which have had tokens before.

        Tokens of streams whose callers have left are sent, too. The gateway drops them.
        """
        with self._lock:
            if not self._is_closed:
                self._begin_message()
                self._unsent.add_plain(numbers, token_ids)

    def _begin_message(self) -> None:
        """Called before each token is added."""
        unsent, now = self._unsent, perf_counter()
        if not unsent:
            self._since = now
        elif (now > self._since + UNREAD_S or len(unsent.numbers) >= MOST_UNSENT) and not self._will_close:
            log.error("a gateway does not read its messages: %d streams are cancelled", len(self._streams))
            self._will_close = True
            _on(self._loop, self.close)

    def _ended(self, number: int, future: "Future[Answer]") -> None:
        """Adds the end of a stream. Any thread may call this."""
        if future.cancelled():
            return
        with self._lock:
            stream = self._streams.pop(number, None)
            if stream is None:
                return
            error = future.exception()
            if error is None:
                self._tell_prompt(number, stream)
            self._fresh.discard(number)
        if error is None:
            answer = future.result()
            self._add_end(number, End(answer.finish_reason, answer.end))
        else:
            self._add_end(number, error if isinstance(error, Exception) else BackendError(repr(error)), stream.tags)
        if not self._flushes_soon:  # a stream may end without a pass, so no `on_pass` follows
            self._flushes_soon = True
            _on(self._loop, self._flush_soon)

    def _flush_soon(self) -> None:
        self._flushes_soon = False
        self.flush()

    def _tell_prompt(self, number: int, stream: Stream) -> None:
        """Adds the stream's `Begun` and its prompt's scores, with the stream's first token or with its end."""
        if number in self._fresh:
            self._fresh.discard(number)
            self._unsent.begun[number] = Begun(stream.num_cached_tokens, stream.queue_s)
            if stream.scores:
                self._unsent.scores[number] = stream.scores

    def _add_end(self, number: int, end: Ended, tags: tuple[RequestTag, ...] = ()) -> None:
        if isinstance(end, Exception) and not isinstance(end, EmberError):  # an unexpected error may not be picklable
            log.error("a stream failed", exc_info=end, extra={"tags": tags})
            end = BackendError(f"the replica failed: {end!r}")
        with self._lock:
            if not self._unsent:
                self._since = perf_counter()
            self._unsent.ends[number] = end


def _on(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop is closed, and no caller waits
        loop.call_soon_threadsafe(call)
