"""The request body of OpenAI's decisions: typed questions about one input.

The limits are vLLM's. Single texts have no limit: `payload_limit` limits the whole body, and the context limits each prompt.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator

from serve_app.compute.parameters import Body
from serve_app.dialects.bodies import ModelBody
from serve_app.dialects.faults import quoted
from serve_app.dialects.fields import Items

MAX_QUESTIONS, MAX_CHOICES, MAX_LEVELS = 200, 255, 10


class Strict(Body):
    """A body, or a part of a body, that allows no unknown fields."""

    model_config = ConfigDict(extra="forbid")


class CacheBreakpoint(Strict):
    """OpenAI's hints for its cache. Our cache ignores them, and no answer depends on them."""

    mode: Literal["explicit"]


class TextPart(Strict):
    type: Literal["input_text", "output_text"]
    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None

    @property
    def as_text(self) -> str:
        return self.text


class RefusalPart(Strict):
    type: Literal["refusal"]
    refusal: str

    @property
    def as_text(self) -> str:
        return self.refusal


class JsonPart(Strict):
    type: Literal["input_json"]
    data: dict[str, Any] | Items[dict[str, Any]]

    @property
    def as_text(self) -> str:
        return json.dumps(self.data, ensure_ascii=False)


def _kind(value: Any) -> str:
    """Chooses the union's member by the value, so that an error names only this member."""
    return "text" if isinstance(value, str) else "list"


_Part = Annotated[TextPart | RefusalPart | JsonPart, Field(discriminator="type")]
_Parts = Annotated[Items[_Part], Field(min_length=1)]
_Content = Annotated[Annotated[str, Tag("text")] | Annotated[_Parts, Tag("list")], Discriminator(_kind)]


def text_of(content: str | list[Any]) -> str:
    return content if isinstance(content, str) else "\n".join(part.as_text for part in content)


class Message(Strict):
    role: Literal["user", "developer", "system", "assistant"]
    content: _Content
    type: Literal["message"] = "message"
    phase: Literal["commentary", "final_answer"] | None = None


class Question(Strict):
    instructions: _Content
    name: str | None = None

    @property
    def options(self) -> list[tuple[str, str | None]]:
        """The options from which the model chooses, with their meanings."""
        raise NotImplementedError


class PredicateQuestion(Question):
    type: Literal["predicate"]

    @property
    def options(self) -> list[tuple[str, str | None]]:
        return [("false", None), ("true", None)]


class ChoiceOption(Strict):
    value: bool | str
    description: str | None = None


class ChoiceQuestion(Question):
    type: Literal["choice"]
    choices: Annotated[list[ChoiceOption], Field(min_length=2, max_length=MAX_CHOICES)]

    @field_validator("choices")
    @classmethod
    def _differ(cls, choices: list[ChoiceOption]) -> list[ChoiceOption]:
        given = set[tuple[type, bool | str]]()
        for each in choices:
            if (key := (type(each.value), each.value)) in given:
                raise ValueError(f"two choices have the value {quoted(str(each.value))}; each must be unique")
            given.add(key)
        return choices

    @property
    def options(self) -> list[tuple[str, str | None]]:
        """The value as JSON, in which the string "true" differs from the boolean."""
        return [(json.dumps(each.value, ensure_ascii=False), each.description) for each in self.choices]


class ScoreLevel(Strict):
    label: str
    description: str | None = None


class ScoreQuestion(Question):
    """The levels in order, the lowest first."""

    type: Literal["score"]
    levels: Annotated[list[ScoreLevel], Field(min_length=2, max_length=MAX_LEVELS)]

    @property
    def options(self) -> list[tuple[str, str | None]]:
        return [(each.label, each.description) for each in self.levels]


_Messages = Annotated[Items[Message], Field(min_length=1)]
AnyQuestion = Annotated[PredicateQuestion | ChoiceQuestion | ScoreQuestion, Field(discriminator="type")]


class CacheOptions(Strict):
    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m"] | None = None


class DecisionRequest(ModelBody):
    """Fields about caches and users change no answer, and are ignored."""

    model_config = ConfigDict(extra="forbid")

    input: Annotated[Annotated[str, Tag("text")] | Annotated[_Messages, Tag("list")], Discriminator(_kind)]
    questions: Annotated[list[AnyQuestion], Field(min_length=1, max_length=MAX_QUESTIONS)]
    safety_identifier: Annotated[str, Field(max_length=128)] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None

    @property
    def state(self) -> str:
        """The text that the questions are about. It names the roles if the messages have several."""
        if isinstance(self.input, str):
            return self.input.strip()
        several = len({each.role for each in self.input}) > 1
        texts = [text_of(each.content) for each in self.input]
        said = [f"{each.role}: {text}" if several else text for each, text in zip(self.input, texts, strict=True)]
        return "\n\n".join(said).strip()
