"""Answers questions with fixed options, by the log-probability of each option's label as the first token of the model's reply.

Each question has its own prompt: the state, the question, and the options with their labels. The prompts share the state, so the
KV cache computes it once: if the state fills a page or more, the first question's prompt is computed before the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import exp
from string import ascii_uppercase
from typing import NamedTuple

import numpy as np

from engine.errors import InvalidInput
from engine.options import SamplingOptions, TokenIds
from engine.schedule.pages import PAGE_SIZE
from engine.text.prompts import Prompts
from serve_app.admission.qos import Qos
from serve_app.compute.generation import Delta, Generation, Usage, Wanted
from serve_app.compute.service import Service
from serve_app.models import GeneratingModel

_VARIABLES = {"enable_thinking": False}  # the label must be the reply's first token, so the model must not think before it
_PROBE = "zyx"  # a text that is in no template
_BETWEEN = "\n\n"  # between the state and a question


class Label(NamedTuple):
    text: str
    token_id: int


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels that are a single token at the start of a model's reply, in order, and the end of the model's prompts."""

    all: tuple[Label, ...]
    ending: str


@lru_cache(16)
def labels_of(prompts: Prompts) -> Labels:
    """The labels of A to Z and AA to ZZ that are one token. Raises: InvalidInput if the model has no chat template."""
    text = _rendered(prompts, _PROBE)
    ids = _ids(prompts, text)
    found: dict[int, str] = {}
    for letters in (*product(ascii_uppercase), *product(ascii_uppercase, repeat=2)):
        longer = _ids(prompts, text + "".join(letters))
        if len(longer) == len(ids) + 1 and (longer[:-1] == ids).all():
            found.setdefault(int(longer[-1]), "".join(letters))
    return Labels(tuple(Label(label, token_id) for token_id, label in found.items()), text.rpartition(_PROBE)[2])


@dataclass(frozen=True, slots=True)
class Asked:
    """One question: the text between the state and the options, and the options with their descriptions."""

    text: str
    options: Sequence[tuple[str, str | None]]


class Read(NamedTuple):
    """The answer to one question."""

    probabilities: list[float]  # of the options, by softmax over only their labels: the sum is 1
    mass: float  # the sum of the labels' probabilities among all tokens

    @property
    def top(self) -> int:
        return max(range(len(self.probabilities)), key=self.probabilities.__getitem__)

    @property
    def confidence(self) -> float:
        """The probability of the likeliest option's label among all tokens."""
        return self.probabilities[self.top] * self.mass


class Decisions:
    """The questions of one request about one state."""

    def __init__(self, state: str, questions: Sequence[Asked]) -> None:
        self._state, self._questions = state, questions

    async def read(self, service: Service, model: GeneratingModel, qos: Qos) -> tuple[list[Read], Usage]:
        """Returns: the answers in order, and the number of tokens of all prompts. Raises: as `Generation.run`."""
        labels = (await service.in_thread(labels_of, model.prompts)).all
        if len(labels) < (most := max(len(each.options) for each in self._questions)):
            raise InvalidInput(f"a question has {most} options, but this model's tokenizer has labels for only {len(labels)}")
        options = SamplingOptions(max_tokens=1, temperature=0.0, logprobs_of=tuple(each.token_id for each in labels[:most]))
        num_chars = (len(self._state) + max(len(str(each)) for each in self._questions)) * len(self._questions)
        wanted = Wanted(len(self._questions), num_chars, self._encode, options, first_alone=_share_pages)
        generation, found = Generation(service, model, wanted, qos), dict[int, Read]()

        def take(delta: Delta) -> None:
            if delta.token is not None:
                num_options = len(self._questions[delta.index].options)
                found[delta.index] = read_of(delta.token.logprobs_of[:num_options])

        await generation.run(take)
        return [found[index] for index in sorted(found)], generation.usage

    def _encode(self, prompts: Prompts) -> list[TokenIds]:
        texts = [self._text(prompts, question) for question in self._questions]
        return _encode(prompts, self._state + _BETWEEN, texts)

    def _text(self, prompts: Prompts, question: Asked) -> str:
        labels = labels_of(prompts)
        lines = [question.text, ""]
        for label, (option, description) in zip(labels.all, question.options, strict=False):
            lines.append(f"{label.text}. {option}: {description}" if description else f"{label.text}. {option}")
        lines += ["", "Reply with the label of one option, and nothing else."]
        text = _rendered(prompts, self._state + _BETWEEN + "\n".join(lines))
        if not text.endswith(labels.ending):
            raise InvalidInput("the chat template changes the end of this prompt, so the tokens of the labels are unknown")
        return text


def read_of(logprobs: Sequence[float]) -> Read:
    """The probabilities of options whose labels have these log-probabilities."""
    largest = max(logprobs)
    weights = [exp(each - largest) for each in logprobs]
    return Read([each / sum(weights) for each in weights], exp(largest) * sum(weights))


def _encode(prompts: Prompts, state: str, texts: Sequence[str]) -> list[TokenIds]:
    """The token ids of prompts with the same state. The common part is tokenised once if the tokenizer allows it."""
    cut = texts[0].find(state) + len(state)
    beginning = texts[0][:cut]
    halves = np.concatenate((_ids(prompts, _PROBE + _BETWEEN), _ids(prompts, _PROBE)))
    # A tokenizer that puts a space before each text needs whole texts.
    splits = prompts.decode(halves) == _PROBE + _BETWEEN + _PROBE
    if cut < len(state) or not splits or not all(text.startswith(beginning) for text in texts):
        return [_ids(prompts, text) for text in texts]
    first = _ids(prompts, beginning)
    return [np.concatenate((first, _ids(prompts, text[cut:]))) for text in texts]


def _share_pages(prompts: Sequence[TokenIds]) -> bool:
    """Whether there are several prompts with the same first page. The cache never finds a shorter common prefix."""
    first = prompts[0][:PAGE_SIZE]
    return len(prompts) > 1 and len(first) == PAGE_SIZE and all(np.array_equal(each[:PAGE_SIZE], first) for each in prompts)


def _rendered(prompts: Prompts, text: str) -> str:
    """The prompt of a text. Raises: InvalidInput if the model has no chat template, or if the template refuses the text."""
    if prompts.template is None:
        raise InvalidInput("this model has no chat template, so it cannot answer questions; decisions need a chat model")
    return prompts.template.render([{"role": "user", "content": text}], template_kwargs=_VARIABLES)


def _ids(prompts: Prompts, text: str) -> TokenIds:
    return prompts.encode(text, add_special_tokens=False)
