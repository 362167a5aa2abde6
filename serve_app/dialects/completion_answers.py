"""Writes the responses of OpenAI's completions."""

from codecs import IncrementalDecoder, getincrementaldecoder
from collections import defaultdict
from typing import Any

from engine.schedule.stream import Token
from serve_app.compute.generation import Delta, Generation
from serve_app.dialects.generation_answers import Answers, end_of, finite
from serve_app.dialects.generation_bodies import CompletionRequest
from serve_app.models import GeneratingModel


class CompletionAnswers(Answers):
    id_prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"
    text_field = b"text"

    def __init__(self, body: CompletionRequest, model: GeneratingModel, generation: Generation) -> None:
        super().__init__(body, model, generation)
        self._echoed = body.prompt if body.echo else None
        self._num_top = body.logprobs or 0
        # By answer: the number of characters of the tokens in earlier log-probabilities, and the decoder that counts them.
        self._offsets: dict[int, int] = defaultdict(int)
        self._decoders: dict[int, IncrementalDecoder] = defaultdict(lambda: getincrementaldecoder("utf-8")("replace"))

    def _choice(self, index: int, deltas: list[Delta]) -> dict[str, Any]:
        text = self._echo(index) + "".join(delta.text for delta in deltas)
        told = self._logprobs(index, self._echoed_tokens(index) + _tokens(deltas))
        return {"index": index, "text": text, "logprobs": told} | end_of(deltas[-1]) | self._prompt_logprobs(index)

    def _first_choices(self, index: int) -> list[dict[str, Any]]:
        text, told = self._echo(index), self._logprobs(index, self._echoed_tokens(index))
        return [{"index": index, "text": text, "logprobs": told, "finish_reason": None}] if text or told else []

    def _text_chunk(self, index: int, text: str) -> bytes:
        return self._plain_chunk(index, text)

    def _delta_chunks(self, delta: Delta) -> list[bytes]:
        if not delta.text and not self._is_told(delta):
            return []
        told = self._logprobs(delta.index, _tokens([delta]))
        return [self._chunk([{"index": delta.index, "text": delta.text, "logprobs": told} | end_of(delta)])]

    def _echo(self, index: int) -> str:
        """The text of an answer's prompt, if the request wants it."""
        if self._echoed is None:
            return ""
        number = index // (self._body.n or 1)
        prompt = self._echoed[number]
        if isinstance(prompt, str):
            return prompt
        ids = self._generation.prompts[number]
        text = self._prompts.decode(ids)
        if text.endswith("\ufffd"):  # maybe a part of a character; the answer's text then has the whole character
            text = "".join(map(self._prompts.detokenizer(ids[:0], skip_special_tokens=False).push, ids.tolist()))
        return text

    def _echoed_tokens(self, index: int) -> list[Token]:
        """The tokens of an answer's prompt, if the request wants their log-probabilities."""
        wanted = self._echoed is not None and self._has_logprobs
        return list(self._generation.prompt_tokens(index)) if wanted else []

    def _logprobs(self, index: int, tokens: list[Token]) -> dict[str, Any] | None:
        if not self._has_logprobs or not tokens:
            return None
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])  # tokens of one character have the offset of the character
            self._offsets[index] += len(self._decoders[index].decode(self._prompts.token_bytes(token.id)))
        return {
            "tokens": [self._text_of(token.id) for token in tokens],
            "token_logprobs": [None if token.logprob is None else finite(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: Token) -> dict[str, float] | None:
        """The likeliest tokens and the chosen one. Of tokens with equal text, the likeliest counts. None for a prompt's first."""
        if token.logprob is None:
            return None
        top: dict[str, float] = {}
        for token_id, logprob in (*(token.top or ())[: self._num_top], (token.id, token.logprob)):
            top.setdefault(self._text_of(token_id), finite(logprob))
        return top


def _tokens(deltas: list[Delta]) -> list[Token]:
    """The tokens of an answer, including the end token: lm-eval expects that only the last token is not the prompt's."""
    return [token for delta in deltas for token in (delta.token, delta.end) if token is not None]
