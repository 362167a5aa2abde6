"""A fake model that generates the test's text: one byte per token, from a thread like an engine."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from byte_tokenizer import byte_tokenizer

from engine.errors import InvalidInput
from engine.model.config import GenerationConfig
from engine.options import SamplingOptions, TokenIds
from engine.schedule.request import Slice
from engine.schedule.stream import Stream, Token
from engine.text.chat import ChatTemplate, tokenizer_settings
from engine.text.prompts import Prompts
from serve_app.models import ModelInfo

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
CONTEXT = 200
EOS = 256


class FakeGenerator:
    """A model that generates `answers`. The streams of a call get the answers in turn, one byte a token, and then the end.

    With `error`, each stream fails after `fail_after` tokens. With `held`, the answers repeat without end. With `stall`, each
    stream gets 20 tokens, and then none until it is cancelled. `late_s` is the time in seconds until the first token.
    """

    def __init__(
        self,
        folder: Path,
        *answers: str | bytes,
        error: Exception | None = None,
        fail_after: int = 0,
        held: bool = False,
        stall: bool = False,
        template: str = TEMPLATE,
        context: int = CONTEXT,
        late_s: float = 0.0,
    ) -> None:
        (folder / "chat_template.jinja").write_text(template)
        self.tokenizer = None
        self.info = replace(
            ModelInfo("fake", "fake", "float32", "cpu", "mean", 16, context, 1000, 0), task="generation", vocab_size=257
        )
        self.prompts = Prompts(byte_tokenizer(), ChatTemplate.load(folder), tokenizer_settings(folder))
        self.generation = GenerationConfig(tied=True, eos_ids=(EOS,), temperature=0.5)
        self.streams: list[Stream] = []
        self._answers, self._error, self._fail_after, self._held = answers, error, fail_after, held or stall
        self._stall, self._late_s = stall, late_s
        self.thread: threading.Thread | None = None

    def new_stream(self, prompt: TokenIds, options: SamplingOptions) -> Stream:
        if int(max(prompt)) > EOS:
            raise InvalidInput(f"input 0 has token id {int(max(prompt))}, the vocabulary ends at {EOS}")
        return Stream(np.asarray(prompt, dtype=np.int32), options, options.seed or 0)

    def submit(self, streams: Sequence[Stream]) -> None:
        self.streams += streams
        self.thread = threading.Thread(target=self._compute, args=(list(streams),), daemon=True)
        self.thread.start()

    def _compute(self, streams: list[Stream]) -> None:
        scripts = [answer.encode() if isinstance(answer, str) else answer for answer in self._answers]
        step = 0
        wait([stream.future for stream in streams], self._late_s)
        while any(not stream.future.done() for stream in streams):
            for index, stream in enumerate(streams):
                stream.first_scheduled_at = time.perf_counter()
                if step == 0 and stream.options.prompt_logprobs is not None:
                    targets = [_token(token, stream.options.prompt_logprobs) for token in stream.prompt[1:].tolist()]
                    stream.accept_scores(Slice(stream, 0, 0, len(stream.prompt)), targets)
                    if stream.future.done():
                        continue
                if self._error is not None and step >= self._fail_after:
                    stream.fail(self._error)
                    continue
                script = scripts[index % len(scripts)]
                if self._stall and step >= 20:
                    time.sleep(0.001)
                elif self._held:
                    stream.accept(Token(script[step % len(script)]))
                    time.sleep(0.001)
                else:
                    token = _token(script[step] if step < len(script) else EOS, stream.options.logprobs)
                    # -1 for the first id that the request names, -2 for the second one
                    stream.accept(token._replace(logprobs_of=tuple(-1.0 - k for k in range(len(stream.options.logprobs_of)))))
            step += 1
            for on_pass in {stream.on_pass for stream in streams} - {None}:
                on_pass()


def _token(token_id: int, logprobs: int | None) -> Token:
    """The log-probability of the chosen token is -0.5, that of the k-th other token is -k."""
    if logprobs is None:
        return Token(token_id)
    top = [(token_id, -0.5), *((1 + k, -float(k)) for k in range(1, logprobs))]
    return Token(token_id, -0.5, tuple(top[:logprobs]))


def events(text: str) -> list[Any]:
    """The data of each event of a response, without the framing."""
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]
