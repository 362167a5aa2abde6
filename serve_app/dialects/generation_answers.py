"""The responses of OpenAI's chat completions and completions: one object, or a chunk for each delta."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from time import time
from typing import Any
from uuid import uuid4

from engine.schedule.stream import Token
from engine.text.prompts import Prompts
from serve_app.compute.generation import Delta, Generation
from serve_app.dialects.chat_parser import CallArguments, CallBegun, CallBroken, ChatParser, Content, Event, Reasoning
from serve_app.dialects.generation_bodies import ChatRequest, CompletionRequest, GenerationBody
from serve_app.dialects.tools import NamedTool

# JSON has no -inf. vLLM sends this number for a token that cannot be chosen.
_LEAST_LOGPROB = -9999.0


class Answers(ABC):
    """The responses to one request."""

    id_prefix: str
    object: str
    chunk_object: str

    def __init__(self, body: GenerationBody, model_name: str, prompts: Prompts, generation: Generation) -> None:
        self._body, self._prompts, self._generation = body, prompts, generation
        self._has_logprobs = body.num_logprobs is not None
        options = body.stream_options
        self._usage_last = options is not None and bool(options.include_usage)
        self._usage_always = self._usage_last and options is not None and bool(options.continuous_usage_stats)
        self._head = {"id": f"{self.id_prefix}-{uuid4().hex}", "created": int(time()), "model": model_name}

    async def whole(self) -> dict[str, Any]:
        """The response without `stream`. Raises: as `Generation.deltas`."""
        by_index: dict[int, list[Delta]] = defaultdict(list)
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                by_index[delta.index].append(delta)
        choices = [self._choice(index, by_index[index]) for index in sorted(by_index)]
        return self._head | {"object": self.object, "choices": choices, "usage": self._usage()}

    async def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        """The chunks of a response with `stream`. Raises: as `Generation.deltas`."""
        has_begun: set[int] = set()
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                if delta.index not in has_begun:
                    has_begun.add(delta.index)
                    for first in self._first_choices(delta.index):
                        yield self._chunk([first])
                for choice in self._chunk_choices(delta):
                    yield self._chunk([choice])
        if self._usage_last:
            yield self._chunk([]) | {"usage": self._usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": self._usage()} if self._usage_always else {}
        return self._head | {"object": self.chunk_object, "choices": choices} | usage

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }

    def _text_of(self, token_id: int) -> str:
        """A token as text. Parts of a character become the replacement character."""
        return self._prompts.token_bytes(token_id).decode("utf-8", "replace")

    def _prompt_logprobs(self, index: int) -> dict[str, Any]:
        """vLLM's field of that name, if the request wants it: the log-probabilities by token id, for each token of a prompt."""
        most = self._body.prompt_logprobs
        if most is None:
            return {}
        return {"prompt_logprobs": [self._by_id(token, most) for token in self._generation.prompt_tokens(index)]}

    def _by_id(self, token: Token, most: int) -> dict[str, Any] | None:
        """The likeliest tokens at one place and the prompt's own, whose rank is null where it is none of these."""
        if token.top is None:
            return None
        ranked: list[tuple[int, float, int | None]] = [(*each, rank) for rank, each in enumerate(token.top[:most], start=1)]
        if all(token_id != token.id for token_id, *_ in ranked):
            ranked.append((token.id, _finite(token.logprob), None))
        return {
            str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._text_of(token_id)}
            for token_id, logprob, rank in ranked
        }

    @abstractmethod
    def _choice(self, index: int, deltas: list[Delta]) -> dict[str, Any]:
        """A choice of the whole response."""

    @abstractmethod
    def _first_choices(self, index: int) -> list[dict[str, Any]]:
        """What is sent of a choice before its first text."""

    def _is_told(self, delta: Delta) -> bool:
        """Whether a delta has a chunk even if it adds no text."""
        return bool(delta.finish_reason) or (self._has_logprobs and delta.token is not None)

    @abstractmethod
    def _chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        """The choices of the chunks that tell a delta, one for each chunk."""


class _Reader:
    """Parses one answer.

    Attributes:
        num_calls: tool calls that are not broken.
        first_call: the index of the first of these.
        reasoning_tokens: tokens of the reasoning, tags included.
    """

    def __init__(self, parser: ChatParser) -> None:
        self._parser = parser
        self.num_calls = self.reasoning_tokens = 0
        self.first_call: int | None = None

    def read(self, delta: Delta) -> list[Event]:
        was_reasoning = self._parser.is_reasoning
        events = self._parser.push(delta.text)
        self.reasoning_tokens += delta.token is not None and (was_reasoning or self._parser.is_reasoning)
        if delta.finish_reason:
            events += self._parser.finish()
        for event in events:
            if isinstance(event, CallBegun):
                self.num_calls += 1
                self.first_call = event.index if self.first_call is None else self.first_call
            elif isinstance(event, CallBroken):
                self.num_calls -= 1
                self.first_call = None if self.first_call == event.index else self.first_call
        return events


class _Message:
    """Collects the events of a whole answer."""

    def __init__(self) -> None:
        self.content = self.reasoning = ""
        self.calls: dict[int, dict[str, Any]] = {}

    def add(self, event: Event) -> None:
        match event:
            case Content(text):
                self.content += text
            case Reasoning(text):
                self.reasoning += text
            case CallBegun(index, id, name):
                self.calls[index] = {"id": id, "type": "function", "function": {"name": name, "arguments": ""}}
            case CallArguments(index, text):
                self.calls[index]["function"]["arguments"] += text
            case CallBroken(index):
                self.calls.pop(index, None)


def _part(event: Event) -> dict[str, Any]:
    """The delta of a chunk. A call that has been sent cannot be taken back, so a broken one has no delta."""
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return _reasoning(text)
        case CallBegun(index, id, name):
            call = {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case CallBroken():
            return {}


def _reasoning(text: str | None) -> dict[str, Any]:
    """Clients read the reasoning by either name."""
    return {"reasoning": text, "reasoning_content": text}


class ChatAnswers(Answers):
    id_prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    _body: ChatRequest

    def __init__(self, body: ChatRequest, model_name: str, prompts: Prompts, generation: Generation) -> None:
        super().__init__(body, model_name, prompts, generation)
        self._format = prompts.chat_format
        self._readers: dict[int, _Reader] = {}

    async def whole(self) -> dict[str, Any]:
        return await super().whole() | self._prompt_logprobs(0)

    def _choice(self, index: int, deltas: list[Delta]) -> dict[str, Any]:
        message = _Message()
        for delta in deltas:
            for event in self._events(delta):
                message.add(event)
        told: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
        if self._tells_reasoning:
            told |= _reasoning(message.reasoning or None)
        if message.calls:
            told["tool_calls"] = [call for _, call in sorted(message.calls.items())]
        if message.calls or message.reasoning:
            told["content"] = message.content or None
        return {"index": index, "message": told, "logprobs": self._logprobs(deltas)} | self._end(deltas[-1])

    def _first_choices(self, index: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def _chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        parts = [part for event in self._events(delta) if (part := _part(event))]
        if not parts and self._is_told(delta):
            parts = [{"content": ""} if delta.token else {}]
        choices = [{"index": delta.index, "delta": part, "logprobs": None, "finish_reason": None} for part in parts]
        if choices:
            choices[0]["logprobs"] = self._logprobs([delta])
            choices[-1] |= self._end(delta)
        return choices

    def _events(self, delta: Delta) -> list[Event]:
        """What a delta adds, without what the request does not want told."""
        reader = self._readers.get(delta.index)
        if reader is None:
            parser = self._body.parser(self._prompts, self._generation.prompts[0])
            reader = self._readers[delta.index] = _Reader(parser)
        events = reader.read(delta)
        if not self._tells_reasoning:
            events = [event for event in events if not isinstance(event, Reasoning)]
        if self._body.parallel_tool_calls is False:
            calls = (CallBegun, CallArguments)
            events = [event for event in events if not isinstance(event, calls) or event.index == reader.first_call]
        return events

    @property
    def _tells_reasoning(self) -> bool:
        return self._format.thinks and self._body.include_reasoning is not False

    def _end(self, delta: Delta) -> dict[str, Any]:
        end = _end(delta)
        is_named = isinstance(self._body.tool_choice, NamedTool)
        if delta.finish_reason == "stop" and self._readers[delta.index].num_calls and not is_named:
            end["finish_reason"] = "tool_calls"
        return end

    def _usage(self) -> dict[str, Any]:
        usage = super()._usage()
        if self._format.thinks:
            num_tokens = sum(reader.reasoning_tokens for reader in self._readers.values())
            usage["completion_tokens_details"] = {"reasoning_tokens": num_tokens}
        return usage

    def _logprobs(self, deltas: list[Delta]) -> dict[str, Any] | None:
        tokens = [delta.token for delta in deltas if delta.token is not None]
        if not self._has_logprobs or not tokens:
            return None
        return {"content": [self._logprob(token) for token in tokens], "refusal": None}

    def _logprob(self, token: Token) -> dict[str, Any]:
        top = [self._entry(token_id, logprob) for token_id, logprob in token.top or ()]
        return self._entry(token.id, token.logprob) | {"top_logprobs": top}

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": self._text_of(token_id),
            "logprob": _finite(logprob),
            "bytes": list(self._prompts.token_bytes(token_id)),
        }


class CompletionAnswers(Answers):
    id_prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: CompletionRequest, model_name: str, prompts: Prompts, generation: Generation) -> None:
        super().__init__(body, model_name, prompts, generation)
        self._echoed = body.prompt if body.echo else None
        self._num_top = body.logprobs or 0
        self._offsets: dict[int, int] = defaultdict(int)  # of each answer: characters of the tokens that were told

    def _choice(self, index: int, deltas: list[Delta]) -> dict[str, Any]:
        text = self._echo(index) + "".join(delta.text for delta in deltas)
        told = self._logprobs(index, self._echoed_tokens(index) + _tokens(deltas))
        return {"index": index, "text": text, "logprobs": told} | _end(deltas[-1]) | self._prompt_logprobs(index)

    def _first_choices(self, index: int) -> list[dict[str, Any]]:
        text, told = self._echo(index), self._logprobs(index, self._echoed_tokens(index))
        return [{"index": index, "text": text, "logprobs": told, "finish_reason": None}] if text else []

    def _chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        if not delta.text and not self._is_told(delta):
            return []
        return [
            {"index": delta.index, "text": delta.text, "logprobs": self._logprobs(delta.index, _tokens([delta]))} | _end(delta)
        ]

    def _echo(self, index: int) -> str:
        """The text of an answer's prompt, if the request wants it."""
        if self._echoed is None:
            return ""
        number = index // (self._body.n or 1)
        prompt = self._echoed[number]
        return prompt if isinstance(prompt, str) else self._prompts.decode(self._generation.prompts[number])

    def _echoed_tokens(self, index: int) -> list[Token]:
        """The tokens of an answer's prompt, if the request wants their log-probabilities."""
        wanted = self._echoed is not None and self._has_logprobs
        return list(self._generation.prompt_tokens(index)) if wanted else []

    def _logprobs(self, index: int, tokens: list[Token]) -> dict[str, Any] | None:
        if not self._has_logprobs or not tokens:
            return None
        texts, offsets = [self._text_of(token.id) for token in tokens], []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [None if token.logprob is None else _finite(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: Token) -> dict[str, float] | None:
        """The likeliest tokens and the chosen one. Of tokens with the same text, the likeliest counts. None: a prompt's first."""
        if token.logprob is None:
            return None
        top: dict[str, float] = {}
        for token_id, logprob in (*(token.top or ())[: self._num_top], (token.id, token.logprob)):
            top.setdefault(self._text_of(token_id), _finite(logprob))
        return top


def _tokens(deltas: list[Delta]) -> list[Token]:
    """The tokens of an answer, with the one that ended it: lm-eval takes all but the last one for the prompt's."""
    return [token for delta in deltas for token in (delta.token, delta.end) if token is not None]


def _end(delta: Delta) -> dict[str, Any]:
    end = {"finish_reason": delta.finish_reason}
    return end | {"stop_reason": delta.stop_reason} if delta.finish_reason else end


def _finite(logprob: float | None) -> float:
    assert logprob is not None, "the request asked for log-probabilities"
    return max(logprob, _LEAST_LOGPROB)
