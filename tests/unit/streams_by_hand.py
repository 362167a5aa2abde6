"""Streams of a gateway, and a model that gives them tokens when a test says so."""

import asyncio
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Protocol

from engine.options import SamplingOptions
from engine.schedule.stream import Answer, Stream, Token

VOCABULARY, CONTEXT, EOS = 100, 50, 99


class ByHand:
    """A model whose streams get a token when a test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self.streams: list[Stream] = []
        self.error = error

    def new_stream(self, prompt: Any, options: SamplingOptions) -> Stream:
        return Stream.begin(prompt, options, VOCABULARY, CONTEXT)

    def submit(self, streams: Sequence[Stream]) -> None:
        if self.error is not None:
            raise self.error
        self.streams += streams

    def compute(self, *tokens: Token | int) -> None:
        """One pass: a token for each stream that has not ended."""
        streams = [stream for stream in self.streams if not stream.future.done()]
        for stream, token in zip(streams, tokens, strict=True):
            stream.first_scheduled_at = stream.first_scheduled_at or perf_counter()
            stream.num_cached_tokens = 1
            stream.accept(token if isinstance(token, Token) else Token(token))
        for on_pass in {stream.on_pass for stream in streams} - {None}:
            on_pass()


class Computes(Protocol):
    async def compute(self, stream: Stream, on_begun: Callable[[int | None], None]) -> None:
        """As `Channel.compute`."""


class Begun:
    """A stream that a request of the gateway waits for."""

    def __init__(self, channel: Computes, prompt: Sequence[int], options: SamplingOptions) -> None:
        self.heard: list[Token | str] = []
        self.begun: list[int | None] = []  # cached tokens of the prompt, as reported with the first token
        self.stream = Stream.begin(prompt, options, VOCABULARY, CONTEXT)
        self.stream.on_token = self.heard.append
        self.stream.on_pass = lambda: self.heard.append("pass")
        self.over = asyncio.ensure_future(channel.compute(self.stream, self.begun.append))
        # Otherwise asyncio prints the error of a stream for which its test does not wait, whenever garbage is collected. In the
        # middle of Python's parser such a traceback breaks the parser (github.com/python/cpython/issues/106905).
        self.over.add_done_callback(lambda over: over.cancelled() or over.exception())

    def answer(self) -> Answer:
        answer: Answer = self.stream.future.result(0)
        return answer


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)
