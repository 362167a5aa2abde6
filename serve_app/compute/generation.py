"""Generates text: turns prompts into streams of the engine, and the streams' tokens into text. Does not depend on HTTP."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from time import perf_counter
from typing import NamedTuple

from engine.errors import DeadlineOutOfReach, DeadlinePassed, InvalidInput, TokenizerError
from engine.options import SamplingOptions, TokenIds
from engine.request_tag import request_tags
from engine.schedule.stream import Answer, FinishReason, Stream, Token
from engine.text.detokenizer import Detokenizer
from engine.text.prompts import Prompts
from serve_app.admission.accounts import calling
from serve_app.admission.qos import Qos
from serve_app.compute.delivery import Delivery
from serve_app.compute.service import Service
from serve_app.errors import BadRequest, BatchTooLarge
from serve_app.models import GeneratingModel
from serve_app.observe.requests import record, step

# The creation of a stream takes as long as the tokenisation of this many characters.
_CHARS_OF_AN_ANSWER = 50


@dataclass(frozen=True, slots=True)
class Wanted:
    """The generation that one request asks for: `n` answers to each prompt.

    `encode` gives the token ids of the prompts, and may raise InvalidInput. `sampling.max_tokens` is reduced to the rest of the
    context. With a seed, choice i of a prompt has the seed `sampling.seed` + i. `grammar_after` makes the grammar of an answer
    if it depends on the prompt.
    """

    num_prompts: int
    num_chars: int
    encode: Callable[[Prompts], list[TokenIds]]
    sampling: SamplingOptions
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    shown: tuple[str, ...] = ()  # special tokens that are never skipped
    grammar_after: Callable[[TokenIds], str] | None = None


@dataclass(slots=True)  # not frozen, because the creation would take three times as long
class Delta:
    """The text and the token that one step adds to an answer. The last delta has the reason of the end, and may have no token."""

    index: int  # of the answer: prompt * n + choice
    text: str  # may be empty while a later token can complete a character or a stop string
    token: Token | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None  # the stop string that ended the answer
    end: Token | None = None  # the token that ended the answer and does not belong to it


class Usage(NamedTuple):
    """Tokens of a request so far. A prompt counts once, even if it gets several answers."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # tokens of the prompts that were in the cache


# An event of an answer, by the answer's index: a token, the answer's end, or the request's end.
_Event = tuple[int, Token | Future[Answer] | TimeoutError]


@dataclass(slots=True)
class _Answer:
    """An answer that is being generated."""

    stream: Stream
    writer: Detokenizer
    num_tokens: int = 0
    has_ended: bool = False


class _Inbox:
    """Events of one request that `Generation.deltas` has not taken yet. Streams refer to this object instead of the request."""

    def __init__(self, loop: asyncio.AbstractEventLoop, delivery: Delivery) -> None:
        self.loop, self._delivery = loop, delivery
        self._events: list[_Event] = []
        self._has_events: asyncio.Future[None] | None = None  # the future that `take` awaits
        self._is_closed = False

    def close(self) -> None:
        """Drops all events, also later ones."""
        self._is_closed = True
        self._events.clear()

    async def take(self) -> list[_Event]:
        """Waits for at least one event. Returns: all events so far."""
        if not self._events:
            self._has_events = self.loop.create_future()
            await self._has_events
        events, self._events = self._events, []
        return events

    def put(self, index: int, event: Token | Future[Answer] | TimeoutError) -> None:
        """Adds an event. Call it on the event loop."""
        if self._is_closed:
            return
        self._events.append((index, event))
        if self._has_events is not None and not self._has_events.done():
            self._has_events.set_result(None)

    def ended(self, index: int, future: Future[Answer]) -> None:
        """Adds the end of a stream. Any thread may call it."""
        self._delivery.add(partial(self.put, index), future)
        self._delivery.wake()


class Generation:
    """The answers of one request. `deltas` computes them.

    The engine does not wait for a slow reader. It keeps the tokens that were not read yet, at most `max_tokens` of each answer.
    """

    def __init__(self, service: Service, model: GeneratingModel, wanted: Wanted, qos: Qos) -> None:
        self._service, self._model, self._wanted, self._qos = service, model, wanted, qos
        self._tags, self._record = request_tags.get(), record.get()
        self._delivery, self._inbox = service.delivery, _Inbox(asyncio.get_running_loop(), service.delivery)
        self._answers: list[_Answer] = []
        self._num_open = 0  # answers that have not ended
        self._account, self._num_charged = calling(), 0

    @property
    def usage(self) -> Usage:
        firsts = [answer.stream for answer in self._answers[:: self._wanted.n]]
        return Usage(
            sum(len(stream.prompt) for stream in firsts),
            sum(answer.num_tokens for answer in self._answers),
            sum(stream.num_cached_tokens for stream in firsts),
        )

    @property
    def prompts(self) -> list[TokenIds]:
        """The token ids of the prompts. They are available from the first delta on."""
        return [answer.stream.prompt for answer in self._answers[:: self._wanted.n]]

    def prompt_tokens(self, index: int) -> tuple[Token, ...]:
        """The tokens of an answer's prompt, with `prompt_logprobs`. They are available from the answer's first delta on."""
        tokens = self._answers[index].stream.prompt_tokens
        assert tokens is not None, "the request asked for them, and the answer has begun"
        return tokens

    async def deltas(self) -> AsyncGenerator[list[Delta]]:
        """Yields lists of deltas as they come: all available deltas of all answers, at least one.

        Closing the generator frees the pages of answers that have not ended.

        A request without a deadline gets its first delta within the server's timeout. After the first delta it has no timeout.

        Raises: BadRequest for prompts or options that the model cannot take; Overloaded; DeadlineExceeded; BackendError;
            EngineStopped.
        """
        service, wanted, qos = self._service, self._wanted, self._qos
        start, timeout_s = perf_counter(), qos.deadline_s or service.settings.request_timeout_s
        timer = self._inbox.loop.call_later(timeout_s, self._inbox.put, 0, TimeoutError())
        try:
            with service.admission.admit(wanted.num_prompts * wanted.n, self._model):
                work = (wanted.num_chars + _CHARS_OF_AN_ANSWER * wanted.num_prompts) * wanted.n
                with step("tokenise"):
                    self._answers = await service.off_loop(work, self._prepare, start)
                service.num_streams += len(self._answers)
                service.metrics.tokenize_seconds.observe(perf_counter() - start)
                service.admission.spend(self._model, self.usage.prompt_tokens)
                self._model.submit([answer.stream for answer in self._answers])
                self._num_open, is_first = len(self._answers), True
                while self._num_open:
                    deltas, error = self._take(await self._inbox.take())
                    self._charge()
                    if deltas and is_first:
                        is_first = False
                        service.metrics.first_token_seconds.observe(perf_counter() - start)
                        if qos.deadline_s is None:
                            timer.cancel()
                    if deltas:
                        yield deltas
                    if error is not None:
                        try:
                            raise error
                        finally:
                            del error  # the error refers to this frame
        except (TimeoutError, DeadlinePassed, DeadlineOutOfReach) as error:
            raise service.late(error, timeout_s) from None
        except (InvalidInput, TokenizerError, BatchTooLarge) as error:
            raise BadRequest(str(error)) from None
        finally:
            timer.cancel()
            self._close()
            if isinstance(sys.exception(), Exception):
                self._answers.clear()  # the error's frames refer to this request, and a stream refers to the error

    def _close(self) -> None:
        """Cancels the answers that have not ended, and counts the computed tokens."""
        metrics = self._service.metrics
        self._inbox.close()
        self._service.num_streams -= len(self._answers)
        for answer in self._answers:
            answer.stream.future.cancel()  # does nothing to a stream that has ended
            self._delivery.forget(answer.stream.key)
        metrics.generated_tokens.inc(self.usage.completion_tokens)
        if self._record is not None:
            self._record.tokenized(self._model.info.served_model_name, self.usage.prompt_tokens)
            self._record.tokens_out += self.usage.completion_tokens

    def _charge(self) -> None:
        """Counts the answers' tokens since the last call for the API key."""
        if self._account is not None:
            num_tokens = self.usage.completion_tokens
            self._account.add(self._model.info.served_model_name, num_tokens - self._num_charged)
            self._num_charged = num_tokens

    def _prepare(self, start: float) -> list[_Answer]:
        """Makes the answers, without submitting them. Runs on a thread if the prompts are long."""
        deadline = inf if self._qos.deadline_s is None else start + self._qos.deadline_s
        answers: list[_Answer] = []
        for prompt in self._wanted.encode(self._model.prompts):
            sampling = self._sampling(len(prompt))
            if self._wanted.grammar_after is not None:
                sampling = replace(sampling, grammar=self._wanted.grammar_after(prompt))
            for choice in range(self._wanted.n):
                seed = None if sampling.seed is None else sampling.seed + choice
                stream = self._model.new_stream(prompt, replace(sampling, seed=seed))
                stream.priority, stream.owner, stream.deadline = self._qos.priority, self._qos.owner, deadline
                stream.tags = self._tags
                stream.limit = start + self._service.settings.request_timeout_s
                take = partial(self._inbox.put, len(answers))
                stream.on_token, stream.on_tokens = partial(self._delivery.add, take), self._delivery.add_each
                stream.key = self._delivery.key(take)
                stream.on_pass = self._delivery.wake
                stream.future.add_done_callback(partial(self._inbox.ended, len(answers)))
                writer = self._model.prompts.detokenizer(
                    prompt,
                    self._wanted.stop,
                    skip_special_tokens=self._wanted.skip_special_tokens,
                    shown=self._wanted.shown,
                    include_stop=self._wanted.include_stop,
                )
                answers.append(_Answer(stream, writer))
        return answers

    def _sampling(self, num_tokens: int) -> SamplingOptions:
        """The sampling options for a prompt of `num_tokens` tokens."""
        context = self._model.info.max_input_length
        if not num_tokens:
            raise BadRequest("the prompt has no tokens; send a longer one", "prompt")
        if num_tokens > context - min(1, self._wanted.sampling.max_tokens):
            raise BadRequest(
                f"This model's maximum context length is {context} tokens. However, your prompt contains {num_tokens} input "
                "tokens, which leaves none for the answer; send a shorter prompt",
                "input_tokens",
            )
        most = min(self._wanted.sampling.max_tokens, context - num_tokens)
        return replace(self._wanted.sampling, max_tokens=most)

    def _take(self, events: Sequence[_Event]) -> tuple[list[Delta], Exception | None]:
        """The deltas of these events, up to an error that ends the request. Events after an answer's end are ignored."""
        deltas: list[Delta] = []
        for index, event in events:
            if isinstance(event, TimeoutError):
                return deltas, event
            answer = self._answers[index]
            if answer.has_ended:
                continue
            if isinstance(event, Token):
                answer.num_tokens += 1
                text = answer.writer.push(event.id)
                if answer.writer.stopped is None:
                    deltas.append(Delta(index, text, event))
                    continue
                answer.stream.future.cancel()
                deltas.append(Delta(index, text, event, "stop", answer.writer.stopped))
            else:
                # Not `result()`: it would raise, and the error would refer to this frame, and so to itself.
                error = CancelledError() if event.cancelled() else event.exception()
                if isinstance(error, Exception):
                    return deltas, error
                result = event.result()
                deltas.append(_last_delta(index, answer.writer, result))
                if self._record is not None:
                    self._record.queue_s = max(self._record.queue_s, result.queue_s)
            answer.has_ended = True
            self._num_open -= 1
        return deltas, None


def _last_delta(index: int, writer: Detokenizer, result: Answer) -> Delta:
    text = writer.finish()  # may complete a stop string
    stopped = writer.stopped
    return Delta(index, text, None, result.finish_reason if stopped is None else "stop", stopped, result.end)
