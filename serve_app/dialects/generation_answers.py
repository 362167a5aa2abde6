"""The responses of OpenAI's chat completions and completions: one object, or a chunk for each delta."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from time import time
from typing import Any
from uuid import uuid4

import orjson

from engine.schedule.stream import Token
from engine.text.prompts import Prompts
from serve_app.compute.generation import Delta, Generation
from serve_app.dialects.generation_bodies import ChatRequest, CompletionRequest, GenerationBody

# JSON has no -inf. vLLM sends this number for a token that cannot be chosen.
_LEAST_LOGPROB = -9999.0


class Answers(ABC):
    """The responses to one request."""

    id_prefix: str
    object: str
    chunk_object: str
    # The JSON around the text in a choice of a chunk.
    before_text: bytes
    after_text: bytes

    def __init__(self, body: GenerationBody, model_name: str, prompts: Prompts, generation: Generation) -> None:
        self._prompts, self._generation = prompts, generation
        self._has_logprobs = body.num_logprobs is not None
        options = body.stream_options
        self._usage_last = options is not None and bool(options.include_usage)
        self._usage_always = self._usage_last and options is not None and bool(options.continuous_usage_stats)
        self._head = {"id": f"{self.id_prefix}-{uuid4().hex}", "created": int(time()), "model": model_name}

    async def whole(self) -> dict[str, Any]:
        """The response without `stream`. Raises: as `Generation.deltas`."""
        by_index: dict[int, list[Delta]] = defaultdict(list)
        async with aclosing(self._generation.deltas()) as deltas:
            async for ready in deltas:
                for delta in ready:
                    by_index[delta.index].append(delta)
        choices = [self._choice(index, by_index[index]) for index in sorted(by_index)]
        return self._head | {"object": self.object, "choices": choices, "usage": self._usage()}

    async def chunks(self) -> AsyncGenerator[list[bytes]]:
        """The chunks of a response with `stream`, as JSON: at least one, and all that are there.

        Raises: as `Generation.deltas`.
        """
        has_begun: set[int] = set()
        # Most chunks differ in their text alone. To encode the rest once halves the cost of a token.
        head = orjson.dumps(self._head | {"object": self.chunk_object}).removesuffix(b"}") + b',"choices":[{"index":'
        is_plain = not self._has_logprobs and not self._usage_always
        async with aclosing(self._generation.deltas()) as deltas:
            async for ready in deltas:
                chunks: list[bytes] = []
                for delta in ready:
                    if delta.index not in has_begun:
                        has_begun.add(delta.index)
                        chunks += [self._chunk([first]) for first in self._first_choices(delta.index)]
                    if is_plain and delta.text and delta.finish_reason is None:
                        parts = head, b"%d" % delta.index, self.before_text, orjson.dumps(delta.text), self.after_text
                        chunks.append(b"".join(parts))
                    elif delta.text or delta.finish_reason or (self._has_logprobs and delta.token):
                        chunks.append(self._chunk([self._chunk_choice(delta)]))
                if chunks:
                    yield chunks
        if self._usage_last:
            yield [self._chunk([], {"usage": self._usage()})]

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        if usage is None:
            usage = {"usage": self._usage()} if self._usage_always else {}
        return orjson.dumps(self._head | {"object": self.chunk_object, "choices": choices} | usage)

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

    @abstractmethod
    def _choice(self, index: int, deltas: list[Delta]) -> dict[str, Any]:
        """A choice of the whole response."""

    @abstractmethod
    def _first_choices(self, index: int) -> list[dict[str, Any]]:
        """What is sent of a choice before its first text."""

    @abstractmethod
    def _chunk_choice(self, delta: Delta) -> dict[str, Any]:
        """A choice of a chunk."""


class ChatAnswers(Answers):
    id_prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    before_text, after_text = b',"delta":{"content":', b'},"logprobs":null,"finish_reason":null}]}'

    def __init__(self, body: ChatRequest, model_name: str, prompts: Prompts, generation: Generation) -> None:
        super().__init__(body, model_name, prompts, generation)

    def _choice(self, index: int, deltas: list[Delta]) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(delta.text for delta in deltas), "refusal": None}
        return {"index": index, "message": message, "logprobs": self._logprobs(deltas)} | _end(deltas[-1])

    def _first_choices(self, index: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def _chunk_choice(self, delta: Delta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text or delta.token else {}
        return {"index": delta.index, "delta": content, "logprobs": self._logprobs([delta])} | _end(delta)

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
    before_text, after_text = b',"text":', b',"logprobs":null,"finish_reason":null}]}'

    def __init__(self, body: CompletionRequest, model_name: str, prompts: Prompts, generation: Generation) -> None:
        super().__init__(body, model_name, prompts, generation)
        self._body = body
        self._offsets: dict[int, int] = defaultdict(int)  # of each answer: characters of the tokens that were told

    def _choice(self, index: int, deltas: list[Delta]) -> dict[str, Any]:
        text = self._echo(index) + "".join(delta.text for delta in deltas)
        return {"index": index, "text": text, "logprobs": self._logprobs(index, deltas)} | _end(deltas[-1])

    def _first_choices(self, index: int) -> list[dict[str, Any]]:
        text = self._echo(index)
        return [{"index": index, "text": text, "logprobs": None, "finish_reason": None}] if text else []

    def _chunk_choice(self, delta: Delta) -> dict[str, Any]:
        return {"index": delta.index, "text": delta.text, "logprobs": self._logprobs(delta.index, [delta])} | _end(delta)

    def _echo(self, index: int) -> str:
        """The text of an answer's prompt, if the request wants it."""
        if not self._body.echo:
            return ""
        number = index // (self._body.n or 1)
        prompt = self._body.prompt[number]
        return prompt if isinstance(prompt, str) else self._prompts.decode(self._generation.prompts[number])

    def _logprobs(self, index: int, deltas: list[Delta]) -> dict[str, Any] | None:
        tokens = [delta.token for delta in deltas if delta.token is not None]
        if not self._has_logprobs or not tokens:
            return None
        texts, offsets = [self._text_of(token.id) for token in tokens], []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: Token) -> dict[str, float]:
        """The likeliest tokens and the chosen one. Of tokens with the same text, the likeliest counts."""
        top: dict[str, float] = {}
        for token_id, logprob in (*(token.top or ()), (token.id, token.logprob)):
            top.setdefault(self._text_of(token_id), _finite(logprob))
        return top


def _end(delta: Delta) -> dict[str, Any]:
    end = {"finish_reason": delta.finish_reason}
    return end | {"stop_reason": delta.stop_reason} if delta.finish_reason else end


def _finite(logprob: float | None) -> float:
    assert logprob is not None, "the request asked for log-probabilities"
    return max(logprob, _LEAST_LOGPROB)
