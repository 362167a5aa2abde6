"""The common part of the responses of OpenAI's chat completions and completions: one object, or chunks."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from time import time
from typing import Any
from uuid import uuid4

import orjson

from engine.schedule.stream import Token
from serve_app.compute.generation import Delta, Generation
from serve_app.dialects.generation_bodies import GenerationBody
from serve_app.models import GeneratingModel

# JSON has no -inf. vLLM sends this number for a token that cannot be chosen.
_LEAST_LOGPROB = -9999.0


class Answers(ABC):
    """The responses to one request."""

    id_prefix: str
    object: str
    chunk_object: str
    text_field: bytes  # the field of a chunk's choice that has the new text

    def __init__(self, body: GenerationBody, model: GeneratingModel, generation: Generation) -> None:
        self._body, self._prompts, self._generation = body, model.prompts, generation
        self._has_logprobs = body.num_logprobs is not None
        options = body.stream_options
        self._usage_last = options is not None and bool(options.include_usage)
        self._usage_always = self._usage_last and options is not None and bool(options.continuous_usage_stats)
        self._head = {"id": f"{self.id_prefix}-{uuid4().hex}", "created": int(time()), "model": model.info.served_model_name}
        # Most chunks differ only in their text. Encoding the other fields once halves the cost of a token.
        self._is_plain = not self._has_logprobs and not self._usage_always
        self._plain_heads: dict[int, bytes] = {}  # by answer: the JSON before the text field's value

    async def whole(self) -> dict[str, Any]:
        """The response without `stream`. Raises: as `Generation.run`."""
        by_index: dict[int, list[Delta]] = defaultdict(list)
        await self._generation.run(lambda delta: by_index[delta.index].append(delta))
        choices = [self._choice(index, by_index[index]) for index in sorted(by_index)]
        return self._head | {"object": self.object, "choices": choices, "usage": self._usage()}

    async def stream(self, write: Callable[[bytes], None]) -> None:
        """Calls `write` with each chunk of a response with `stream`, as JSON, as soon as its token is there.

        Raises: as `Generation.run`.
        """
        has_only_text: dict[int, bool] = {}

        def take(delta: Delta) -> None:
            index = delta.index
            is_text = has_only_text.get(index)
            if is_text is None:
                for first in self._first_choices(index):
                    write(self._chunk([first]))
                is_text = has_only_text[index] = self._is_plain and self._has_only_text(index)
            if is_text and delta.finish_reason is None:
                if delta.text:
                    write(self._text_chunk(index, delta.text))
            else:
                for chunk in self._delta_chunks(delta):
                    write(chunk)

        await self._generation.run(take)
        if self._usage_last:
            write(self._chunk([], {"usage": self._usage()}))

    def hold(self) -> None:
        """As `Generation.hold`."""
        self._generation.hold()

    def release(self) -> None:
        """As `Generation.release`."""
        self._generation.release()

    def _plain_chunk(self, index: int, value: Any) -> bytes:
        """The chunk of a choice with this value of the text field and without an end, for deltas that are `_is_plain`."""
        head = self._plain_heads.get(index)
        if head is None:
            head = orjson.dumps(self._head | {"object": self.chunk_object}).removesuffix(b"}")
            head = self._plain_heads[index] = b'%b,"choices":[{"index":%d,"%b":' % (head, index, self.text_field)
        return head + orjson.dumps(value) + b',"logprobs":null,"finish_reason":null}]}'

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

    def _prompt_logprobs(self, index: int) -> dict[str, Any]:
        """vLLM's `prompt_logprobs`, if the request asks for it: log-probabilities by token id, for each token of a prompt."""
        most = self._body.prompt_logprobs
        if most is None:
            return {}
        return {"prompt_logprobs": [self._by_id(token, most) for token in self._generation.prompt_tokens(index)]}

    def _by_id(self, token: Token, most: int) -> dict[str, Any] | None:
        """The likeliest tokens at one position, and the prompt's token. Its rank is null if it is not one of the likeliest."""
        if token.top is None:
            return None
        ranked: list[tuple[int, float, int | None]] = [(*each, rank) for rank, each in enumerate(token.top[:most], start=1)]
        if all(token_id != token.id for token_id, *_ in ranked):
            ranked.append((token.id, finite(token.logprob), None))
        return {
            str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": self._text_of(token_id)}
            for token_id, logprob, rank in ranked
        }

    @abstractmethod
    def _choice(self, index: int, deltas: list[Delta]) -> dict[str, Any]:
        """A choice of the whole response."""

    @abstractmethod
    def _first_choices(self, index: int) -> list[dict[str, Any]]:
        """The chunks of a choice before its first text."""

    def _is_told(self, delta: Delta) -> bool:
        """Whether a delta has a chunk even if it adds no text."""
        return bool(delta.finish_reason) or (self._has_logprobs and delta.token is not None)

    def _has_only_text(self, index: int) -> bool:
        """Whether each delta of an answer, except the last, only adds its text to the choice."""
        return True

    @abstractmethod
    def _text_chunk(self, index: int, text: str) -> bytes:
        """The chunk of a delta that only adds text."""

    @abstractmethod
    def _delta_chunks(self, delta: Delta) -> list[bytes]:
        """The chunks for a delta."""


def end_of(delta: Delta) -> dict[str, Any]:
    """The fields of a choice at its end."""
    end = {"finish_reason": delta.finish_reason}
    return end | {"stop_reason": delta.stop_reason} if delta.finish_reason else end


def finite(logprob: float | None) -> float:
    """A log-probability as a number that JSON can represent."""
    assert logprob is not None, "the request asked for log-probabilities"
    return max(logprob, _LEAST_LOGPROB)
