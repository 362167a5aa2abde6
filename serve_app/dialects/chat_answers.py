"""Writes the responses of OpenAI's chat completions."""

from typing import Any

from engine.schedule.stream import Token
from serve_app.compute.generation import Delta, Generation
from serve_app.dialects.chat_parser import CallArguments, CallBegun, CallBroken, ChatParser, Content, Event, Reasoning
from serve_app.dialects.generation_answers import Answers, end_of, finite
from serve_app.dialects.generation_bodies import ChatRequest
from serve_app.dialects.tools import NamedTool
from serve_app.models import GeneratingModel


class _Reader:
    """Parses one answer.

    Attributes:
        is_all_content: whether the whole text of the answer is content.
        num_calls: the number of valid tool calls.
        first_call: the index of the first valid tool call.
        reasoning_tokens: the number of tokens of the reasoning, including tags.
    """

    def __init__(self, parser: ChatParser) -> None:
        self._parser, self.is_all_content = parser, not parser.reads_tags
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
    """The delta of a chunk. A broken call has no delta, because a client cannot take back the part that was sent."""
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
    """The reasoning under both names that clients read."""
    return {"reasoning": text, "reasoning_content": text}


class ChatAnswers(Answers):
    id_prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    text_field = b"delta"
    _body: ChatRequest

    def __init__(self, body: ChatRequest, model: GeneratingModel, generation: Generation) -> None:
        super().__init__(body, model, generation)
        self._format = model.prompts.chat_format
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

    def _has_only_text(self, index: int) -> bool:
        return self._reader(index).is_all_content

    def _text_chunk(self, index: int, text: str) -> bytes:
        return self._plain_chunk(index, {"content": text})

    def _delta_chunks(self, delta: Delta) -> list[bytes]:
        parts = [part for event in self._events(delta) if (part := _part(event))]
        if self._is_plain and delta.finish_reason is None:
            return [self._plain_chunk(delta.index, part) for part in parts]
        if not parts and self._is_told(delta):
            parts = [{"content": ""} if delta.token else {}]
        choices = [{"index": delta.index, "delta": part, "logprobs": None, "finish_reason": None} for part in parts]
        if choices:
            choices[0]["logprobs"] = self._logprobs([delta])
            choices[-1] |= self._end(delta)
        return [self._chunk([choice]) for choice in choices]

    def _events(self, delta: Delta) -> list[Event]:
        """The events of a delta, without those that the request does not ask for."""
        reader = self._reader(delta.index)
        events = reader.read(delta)
        if not self._tells_reasoning:
            events = [event for event in events if not isinstance(event, Reasoning)]
        if self._body.parallel_tool_calls is False:
            calls = (CallBegun, CallArguments)
            events = [event for event in events if not isinstance(event, calls) or event.index == reader.first_call]
        return events

    def _reader(self, index: int) -> _Reader:
        reader = self._readers.get(index)
        if reader is None:
            parser = self._body.parser(self._prompts, self._generation.prompts[0])
            reader = self._readers[index] = _Reader(parser)
        return reader

    @property
    def _tells_reasoning(self) -> bool:
        return self._format.thinks and self._body.include_reasoning is not False

    def _end(self, delta: Delta) -> dict[str, Any]:
        end = end_of(delta)
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
            "logprob": finite(logprob),
            "bytes": list(self._prompts.token_bytes(token_id)),
        }
