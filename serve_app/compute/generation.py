"""Generates text: turns prompts into streams of the engine, and the streams' tokens into text. Does not depend on HTTP."""

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Sequence
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
    # Tells from the prompts whether the first answer is computed before the others, which then find its prompt's pages.
    first_alone: Callable[[Sequence[TokenIds]], bool] | None = None


@dataclass(slots=True)  # not frozen, because the creation would take three times as long
class Delta:
    """The text and the token that one step adds to an answer. The last delta has the reason of the end, and may have no token."""

    index: int  # of the answer: prompt * n + choice
    text: str  # may be empty while a later token can complete a character or a stop string
    token: Token | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string, or the id of the request's stop token, that ended the answer
    end: Token | None = None  # the token that ended the answer and does not belong to it


class Usage(NamedTuple):
    """Tokens of a request so far. A prompt counts once, even if it gets several answers."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # tokens of the prompts that were in the cache


@dataclass(slots=True)
class _Answer:
    """An answer that is being generated."""

    index: int  # prompt * n + choice
    stream: Stream
    writer: Detokenizer
    num_tokens: int = 0
    has_ended: bool = False


class Generation:
    """The answers of one request. `run` computes them.

    The engine does not wait for a slow reader. It keeps the tokens that were not read yet, at most `max_tokens` of each answer.
    """

    def __init__(self, service: Service, model: GeneratingModel, wanted: Wanted, qos: Qos) -> None:
        self._service, self._model, self._wanted, self._qos = service, model, wanted, qos
        self._tags, self._record = request_tags.get(), record.get()
        self._delivery = service.delivery
        self._answers: list[_Answer] = []
        self._num_open = 0  # answers that have not ended
        self._later: list[Stream] = []  # the streams that wait for the end of the first answer
        self._is_held, self._kept = False, deque[tuple[_Answer, Token | Future[Answer]]]()
        self._until_first: asyncio.TimerHandle | None = None  # the timer of the first delta
        self._account = calling()

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

    def hold(self) -> None:
        """Keeps the tokens from now on. Call it for a reader that is slower than the engine."""
        self._is_held = True

    def release(self) -> None:
        """Ends `hold`. The kept tokens become deltas at once, until `hold` is called again."""
        self._is_held = False
        while self._kept and not self._is_held:
            self._on_event(*self._kept.popleft())

    async def run(self, take: Callable[[Delta], None]) -> None:
        """Computes the answers. Returns when all have ended. Cancelling frees the pages of answers that have not ended.

        A request without a deadline gets its first delta within the server's timeout. After the first delta it has no timeout.

        Args:
            take: called on the event loop with each delta as soon as its token is there. This coroutine sleeps meanwhile: a task
                that wakes up and sends for each token took a quarter of a gateway's time (docs/decisions/072).
        Raises: BadRequest for prompts or options that the model cannot take; Overloaded; DeadlineExceeded; BackendError;
            EngineStopped; an error of `take`.
        """
        service, wanted, qos = self._service, self._wanted, self._qos
        loop, self._start = asyncio.get_running_loop(), perf_counter()
        timeout_s = qos.deadline_s or service.settings.request_timeout_s
        self._take = take
        self._over: asyncio.Future[Exception | None] = loop.create_future()  # when all answers have ended, or at an error
        timer = self._until_first = loop.call_later(timeout_s, self._end, TimeoutError())
        try:
            with service.admission.admit(wanted.num_prompts * wanted.n, self._model):
                work = (wanted.num_chars + _CHARS_OF_AN_ANSWER * wanted.num_prompts) * wanted.n
                with step("tokenise"):
                    async with asyncio.timeout(timeout_s):  # the timer above does not end this wait for a thread
                        self._answers = await service.off_loop(work, self._prepare, self._start)
                service.num_streams += len(self._answers)
                service.metrics.tokenize_seconds.observe(perf_counter() - self._start)
                service.admission.spend(self._model, self.usage.prompt_tokens)
                self._num_open = len(self._answers)
                self._listen()
                self._submit()
                if (error := await self._over) is not None:
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

    def _listen(self) -> None:
        """Makes the streams report to this request."""
        delivery = self._delivery
        for answer in self._answers:
            stream = answer.stream
            key = stream.key = delivery.key(partial(self._on_event, answer))
            stream.on_token, stream.on_tokens, stream.on_pass = partial(delivery.add, key), delivery.add_each, delivery.wake
            stream.future.add_done_callback(partial(delivery.add_last, key))

    def _submit(self) -> None:
        streams = [answer.stream for answer in self._answers]
        num_first = 1 if self._is_first_alone else len(streams)
        self._later = streams[num_first:]
        self._model.submit(streams[:num_first])

    def _submit_later(self) -> None:
        later, self._later = self._later, []
        for stream in later:
            stream.submitted_at, stream.limit = perf_counter(), inf  # after the first delta a request has no timeout
        self._model.submit(later)

    def _close(self) -> None:
        """Cancels the answers that have not ended, and counts the computed tokens."""
        metrics = self._service.metrics
        del self._take, self._over  # they refer to the caller and to an error, whose frames refer to this object
        if self._num_open:  # nobody has read these tokens; otherwise they come after a stop string
            self._count([answer for answer, event in self._kept if isinstance(event, Token)])
        self._kept.clear()
        self._later.clear()
        self._service.num_streams -= len(self._answers)
        for answer in self._answers:
            answer.stream.future.cancel()  # does nothing to a stream that has ended
            self._delivery.forget(answer.stream.key)
        metrics.generated_tokens.inc(self.usage.completion_tokens)
        if self._record is not None:
            self._record.queue_s = max([self._record.queue_s, *(answer.stream.queue_s for answer in self._answers)])
            self._record.tokenized(self._model.info.served_model_name, self.usage.prompt_tokens)
            self._record.tokens_out += self.usage.completion_tokens

    def _prepare(self, start: float) -> list[_Answer]:
        """Makes the answers, without submitting them. Runs on a thread if the prompts are long."""
        deadline = inf if self._qos.deadline_s is None else start + self._qos.deadline_s
        answers: list[_Answer] = []
        prompts = self._wanted.encode(self._model.prompts)
        self._is_first_alone = self._wanted.first_alone is not None and self._wanted.first_alone(prompts)
        for prompt in prompts:
            sampling = self._sampling(prompt)
            for choice in range(self._wanted.n):
                own = sampling if sampling.seed is None or not choice else replace(sampling, seed=sampling.seed + choice)
                stream = self._model.new_stream(prompt, own)
                stream.priority, stream.owner, stream.deadline = self._qos.priority, self._qos.owner, deadline
                stream.tags = self._tags
                stream.limit = start + self._service.settings.request_timeout_s
                writer = self._model.prompts.detokenizer(
                    prompt,
                    self._wanted.stop,
                    skip_special_tokens=self._wanted.skip_special_tokens,
                    shown=self._wanted.shown,
                    include_stop=self._wanted.include_stop,
                )
                answers.append(_Answer(len(answers), stream, writer))
        return answers

    def _sampling(self, prompt: TokenIds) -> SamplingOptions:
        """The options of a prompt's first answer. Raises: BadRequest for an empty prompt, and for one that fills the context."""
        wanted, context, num_tokens = self._wanted, self._model.info.max_input_length, len(prompt)
        if not num_tokens:
            raise BadRequest("the prompt has no tokens; send a longer one", "prompt")
        if num_tokens > context - min(1, wanted.sampling.max_tokens):
            raise BadRequest(
                f"This model's maximum context length is {context} tokens. However, your prompt contains {num_tokens} input "
                "tokens, which leaves none for the answer; send a shorter prompt",
                "input_tokens",
            )
        most = min(wanted.sampling.max_tokens, context - num_tokens)
        grammar = wanted.sampling.grammar if wanted.grammar_after is None else wanted.grammar_after(prompt)
        return replace(wanted.sampling, max_tokens=most, grammar=grammar)

    def _on_event(self, answer: _Answer, event: Token | Future[Answer]) -> None:
        """Gives the caller the delta of an event, or keeps the event. Events after an answer's end are ignored.

        Raises nothing, because the events of other requests follow in the same call of `Delivery`.
        """
        if self._is_held:
            self._kept.append((answer, event))
            return
        if answer.has_ended:
            return
        try:
            if isinstance(event, Token):
                self._count([answer])
                writer = answer.writer
                delta = Delta(answer.index, writer.push(event.id), event)
                if writer.stopped is not None:
                    answer.stream.future.cancel()
                    delta.finish_reason, delta.stop_reason = "stop", writer.stopped
            # Not `result()`: it would raise, and the error would refer to this frame, and so to itself.
            elif (error := CancelledError() if event.cancelled() else event.exception()) is None:
                delta = self._last(answer, event.result())
            else:
                assert isinstance(error, Exception), "an engine fails a stream with an Exception"
                return self._end(error)
            if self._until_first is not None:
                self._begin(answer.stream)
            self._take(delta)
            if delta.finish_reason is not None and self._later:
                self._submit_later()
        except Exception as error:
            return self._end(error)
        if delta.finish_reason is not None:
            answer.has_ended = True
            self._num_open -= 1
            if not self._num_open:
                self._end(None)

    def _count(self, answers: Sequence[_Answer]) -> None:
        """Counts a token of each of these answers."""
        for answer in answers:
            answer.num_tokens += 1
        if self._account is not None and answers:
            self._account.add(self._model.info.served_model_name, len(answers))

    def _last(self, answer: _Answer, result: Answer) -> Delta:
        text = answer.writer.finish()  # may complete a stop string
        stopped: str | int | None = answer.writer.stopped
        reason = result.finish_reason if stopped is None else "stop"
        if stopped is None and result.end is not None and result.end.id not in self._model.generation.eos_ids:
            stopped = result.end.id
        return Delta(answer.index, text, None, reason, stopped, result.end)

    def _begin(self, stream: Stream) -> None:
        """Notes the first delta of the request. The delta belongs to this stream."""
        assert self._until_first is not None, "the caller has checked it"
        metrics = self._service.metrics
        metrics.queue_seconds.observe(stream.queue_s)
        if stream.options.max_tokens:  # a prompt that is only scored has no token
            metrics.first_token_seconds.observe(perf_counter() - self._start)
        if self._qos.deadline_s is None:
            self._until_first.cancel()
        self._until_first = None

    def _end(self, error: Exception | None) -> None:
        """Makes `run` return, or raise the error. No delta comes after it."""
        for answer in self._answers:
            answer.has_ended = True
        if not self._over.done():
            self._over.set_result(error)
