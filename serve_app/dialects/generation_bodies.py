"""The request bodies of OpenAI's chat completions and completions, with vLLM's fields.

A field is honoured, or refused by name if it would change the answer. Fields that nobody knows are ignored.
"""

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import Field, PlainValidator, ValidationError, WithJsonSchema, model_validator

from engine.model.config import GenerationConfig
from engine.options import SamplingOptions, TextOrIds, TokenIds
from engine.text.prompts import Prompts
from serve_app.compute.generation import Wanted
from serve_app.compute.parameters import MAX_UINT32, Body
from serve_app.dialects.bodies import ModelBody
from serve_app.dialects.fields import Inputs
from serve_app.errors import BadRequest
from serve_app.models import ModelInfo

T = TypeVar("T", bound=ModelBody)

# The limits of OpenAI and vLLM.
MAX_STOPS = 4
MAX_TOP_LOGPROBS = 20
_MAX_STOP_CHARS = 1000
_MAX_BIAS = 100.0
_MAX_ERROR_CHARS = 200
# The default of `max_tokens` in `/v1/completions`. null allows the rest of the context.
_COMPLETION_TOKENS = 16

# Fields that would change the answer and are not supported, with the values that ask for nothing. null asks for nothing, too.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "tools": (),
    "tool_choice": ("none", "auto"),  # without tools
    "functions": (),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structural_tag": (),
    "grammar": ("",),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "stop_regex": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "best_of": (1,),
    "suffix": ("",),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "thinking_token_budget": (),
    "chat_template": (),
    "documents": ([],),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "lora_path": (),
    "cache_salt": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}
_INSTEAD = {"priority": "; send the header `x-priority`", "chat_template": "; the model's own template is used"}


def parse_request(schema: type[T], content: bytes) -> T:
    """Raises: BadRequest naming the first field at fault."""
    try:
        return schema.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")[:_MAX_ERROR_CHARS]
        if first["type"] == "json_invalid":
            raise BadRequest(f"the body is not JSON: {message}") from None
        raise BadRequest(f"`{field}`: {message}" if field else message, str(first["loc"][0]) if field else None) from None


def _parse_stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
        raise ValueError("expected a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"{len(stops)} stop strings, the limit is {MAX_STOPS}")
    if not all(0 < len(each) <= _MAX_STOP_CHARS for each in stops):
        raise ValueError(f"a stop string has from 1 to {_MAX_STOP_CHARS} characters")
    return tuple(stops)


def _parse_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """`{"50256": -100}`, with token ids as strings. Values beyond 100 are cut."""
    if not isinstance(value, dict):
        raise ValueError("expected an object of numbers by token id")
    biases = []
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= len(str(MAX_UINT32))):
            raise ValueError(f"the key {key[:_MAX_ERROR_CHARS]!r} is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or bias != bias:
            raise ValueError(f"the value of token {key} is not a number")
        biases.append((int(key), float(max(-_MAX_BIAS, min(_MAX_BIAS, bias)))))
    return tuple(biases)


Unsigned = Annotated[int, Field(ge=0, le=MAX_UINT32)]
_STRING = {"type": "string"}
Stop = Annotated[
    tuple[str, ...],
    PlainValidator(_parse_stop),
    WithJsonSchema({"anyOf": [_STRING, {"type": "array", "items": _STRING, "maxItems": MAX_STOPS}]}),
]
Bias = Annotated[
    tuple[tuple[int, float], ...],
    PlainValidator(_parse_bias),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(ModelBody):
    """The fields that both routes have. null asks for the default."""

    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_UINT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Bias | None = None
    allowed_token_ids: Annotated[list[Unsigned], Field(min_length=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_UINT32)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: Stop | None = None
    stop_token_ids: list[Unsigned] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, fields: Any) -> Any:
        """Raises: BadRequest naming a field that is not supported."""
        if isinstance(fields, dict):
            for name, neutral in _REFUSED.items():
                if (value := fields.get(name)) is not None and value not in neutral:
                    raise BadRequest(f"`{name}` is not supported; leave it out{_INSTEAD.get(name, '')}", name)
            if fields.get("priority") not in (None, 0):
                raise BadRequest(f"`priority` is not supported; leave it out{_INSTEAD['priority']}", "priority")
        return fields

    @model_validator(mode="after")
    def _agree(self) -> "GenerationBody":
        """Raises: BadRequest for fields that contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise BadRequest("`stream_options` is for requests with `stream`; leave it out", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise BadRequest("`prompt_logprobs` is for requests without `stream`; leave one out", "prompt_logprobs")
        if self.min_tokens and self.stop:
            raise BadRequest("`min_tokens` is not supported together with `stop`; leave one out", "min_tokens")
        most = self.most_tokens
        if most is not None and (self.min_tokens or 0) > most:
            raise BadRequest(f"`min_tokens` is {self.min_tokens}, it must be at most `max_tokens`, {most}", "min_tokens")
        return self

    @property
    def most_tokens(self) -> int | None:
        """Tokens that the request allows an answer to have; None where it does not say."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens the answer tells with each token; None: no log-probabilities at all."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the tokens of the prompt."""
        return self.prompt_logprobs

    def wanted(self, info: ModelInfo, said: GenerationConfig) -> Wanted:
        """What the request wants of a model. `said` is what the model's authors say of generation."""
        raise NotImplementedError

    def _wanted(
        self,
        info: ModelInfo,
        said: GenerationConfig,
        num_prompts: int,
        num_chars: int,
        encode: Callable[[Prompts], list[TokenIds]],
    ) -> Wanted:
        return Wanted(
            num_prompts,
            num_chars,
            encode,
            self._sampling(info, said),
            self.n or 1,
            self.stop or (),
            bool(self.include_stop_str_in_output),
            self.skip_special_tokens is not False,
        )

    def _sampling(self, info: ModelInfo, said: GenerationConfig) -> SamplingOptions:
        """The request's options, else those of the model's authors, else such as change no logit."""
        stop_ids = tuple(self.stop_token_ids or ())
        given = {
            "logit_bias": tuple(token for token, _ in self.logit_bias or ()),
            "allowed_token_ids": tuple(self.allowed_token_ids or ()),
            "stop_token_ids": stop_ids,
        }
        for name, ids in given.items():
            if ids and max(ids) >= info.vocab_size:
                raise BadRequest(f"`{name}` has token id {max(ids)}, the vocabulary ends at {info.vocab_size - 1}", name)
        return SamplingOptions(
            max_tokens=_first(self.most_tokens, said.max_new_tokens, info.max_input_length),
            temperature=_first(self.temperature, said.temperature, 1.0),
            top_k=max(0, _first(self.top_k, said.top_k, 0)),
            top_p=_first(self.top_p, said.top_p, 1.0),
            min_p=_first(self.min_p, said.min_p, 0.0),
            repetition_penalty=_first(self.repetition_penalty, said.repetition_penalty, 1.0),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.logit_bias or (),
            allowed=None if self.allowed_token_ids is None else given["allowed_token_ids"],
            seed=self.seed,
            min_tokens=self.min_tokens or 0,
            stop_ids=stop_ids if self.ignore_eos else (*said.eos_ids, *stop_ids),
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
        )


class ChatRequest(GenerationBody):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None

    @model_validator(mode="after")
    def _chat_agrees(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("`top_logprobs` is for requests with `logprobs`: true", "top_logprobs")
        if self.echo:
            raise BadRequest("`echo` is not supported; leave it out", "echo")
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    def wanted(self, info: ModelInfo, said: GenerationConfig) -> Wanted:
        num_chars = len(str(self.messages)) + len(str(self.chat_template_kwargs))  # what the template may put in
        return self._wanted(info, said, 1, num_chars, self._encode)

    def _encode(self, prompts: Prompts) -> list[TokenIds]:
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables = {"enable_thinking": self.reasoning_effort != "none"} | variables
        ids = prompts.encode_chat(
            self.messages,
            add_special_tokens=bool(self.add_special_tokens),
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            template_kwargs=variables,
        )
        return [ids]


class CompletionRequest(GenerationBody):
    prompt: Inputs
    max_tokens: Annotated[int, Field(ge=0)] | None = _COMPLETION_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _completion_agrees(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise BadRequest("`max_tokens` 0 is for requests with `echo` or `prompt_logprobs`; send 1 or more", "max_tokens")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        asked = [each for each in (self.prompt_logprobs, self.logprobs if self.echo else None) if each is not None]
        return max(asked, default=0 if self.max_tokens == 0 else None)

    def wanted(self, info: ModelInfo, said: GenerationConfig) -> Wanted:
        if not self.prompt:
            raise BadRequest("`prompt` cannot be empty", "prompt")
        return self._wanted(info, said, len(self.prompt), sum(map(len, self.prompt)), self._encode)

    def _encode(self, prompts: Prompts) -> list[TokenIds]:
        return [self._ids(each, prompts) for each in self.prompt]

    def _ids(self, prompt: TextOrIds, prompts: Prompts) -> TokenIds:
        if isinstance(prompt, str):
            return prompts.encode(prompt, add_special_tokens=self.add_special_tokens is not False)
        return np.array(prompt, dtype=np.int64)  # `new_stream` checks ids and narrows them


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
