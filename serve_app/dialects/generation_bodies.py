"""The request bodies of OpenAI's chat completions and completions, with vLLM's fields.

A field that would change the answer is supported, or refused with its name. Unknown fields are ignored.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from pydantic import Field, PlainValidator, ValidationError, WithJsonSchema, model_validator

from engine.model.config import GenerationConfig
from engine.options import SamplingOptions, TextOrIds, TokenIds
from engine.text.call_grammar import Reasoned, of_calls
from engine.text.prompts import Prompts
from serve_app.compute.generation import Wanted
from serve_app.compute.parameters import MAX_UINT32, Body
from serve_app.dialects.bodies import ModelBody, body_fault
from serve_app.dialects.call_readers import CLOSER, OPENER, JsonCall, XmlCall
from serve_app.dialects.chat_parser import END_THINK, THINK, ChatParser
from serve_app.dialects.faults import named, quoted
from serve_app.dialects.fields import Inputs, Items
from serve_app.dialects.structured import form_of
from serve_app.dialects.tools import NamedTool, ToolChoice, Tools, schemas_of, with_parsed_calls
from serve_app.errors import BadRequest
from serve_app.models import GeneratingModel, ModelInfo

T = TypeVar("T", bound=ModelBody)

# The limits of OpenAI and vLLM.
MAX_STOPS = 4
MAX_TOP_LOGPROBS = 20
_MAX_STOP_CHARS = 1000
_MAX_BIAS = 100.0
# The most tokens of `<think>` at the end of a prompt, with the whitespace after it.
_TAG_TOKENS = 16
# The default of `max_tokens` in `/v1/completions`, as in OpenAI's API.
_COMPLETION_TOKENS = 16
# The limit of an answer if the request sets none, for the descriptions of the fields.
_MODELS_LIMIT = "`max_new_tokens` of the model's generation_config.json, or else the rest of the context"

# Unsupported fields that would change the answer, with the values that have no effect. null has no effect either.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "tools": (),
    "tool_choice": ("none", "auto"),  # without tools
    "functions": (),
    "function_call": ("none", "auto"),
    "structural_tag": (),
    "grammar": ("",),
    "ebnf": (),
    "stop_regex": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
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
_INSTEAD = {
    "priority": "; send the header `x-priority`",
    "chat_template": "; the model's own template is used",
    "grammar": "; send a Lark grammar as `structured_outputs`: {`grammar`: ...}",
    "ebnf": "; send a Lark grammar as `structured_outputs`: {`grammar`: ...}",
}
# The compilation of a byte of a grammar takes as long as the tokenisation of this many characters.
_CHARS_OF_A_GRAMMAR_BYTE = 100


def parse_request(schema: type[T], content: bytes) -> T:
    """Parses a body. Raises: BadRequest naming the first wrong field."""
    try:
        return schema.model_validate_json(content)
    except ValidationError as error:
        fault = body_fault(error, content)
        if not fault.is_json:
            raise BadRequest(f"the body is not JSON: {fault.reason}") from None
        if not fault.field:
            raise BadRequest(f"the body: {fault.reason}") from None
        raise BadRequest(f"`{fault.field}`: {fault.reason}", fault.field.partition(".")[0]) from None


def _parse_stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise ValueError(f"expected a string or a list of strings, got {named(value)}")
    for index, each in enumerate(stops):
        if not isinstance(each, str):
            raise ValueError(f"[{index}] is {named(each)}, expected a string")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"{len(stops)} stop strings, the limit is {MAX_STOPS}")
    for each in stops:
        if not 0 < len(each) <= _MAX_STOP_CHARS:
            raise ValueError(f"a stop string has {len(each)} characters, it must have from 1 to {_MAX_STOP_CHARS} characters")
    return tuple(stops)


def _parse_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """`{"50256": -100}`, with token ids as strings. Values are clipped to -100 and 100."""
    if not isinstance(value, dict):
        raise ValueError(f"expected an object of numbers by token id, got {named(value)}")
    biases = []
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= len(str(MAX_UINT32))):
            raise ValueError(f"the key {quoted(key)} is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or bias != bias:
            raise ValueError(f"the value of token {key} is {named(bias)}, expected a number")
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
_MAX_N = 128  # OpenAI's limit; each answer is a separate stream
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(ModelBody):
    """The fields that both routes have. null means the default."""

    honoured: ClassVar[frozenset[str]] = frozenset()  # fields of `_REFUSED` that this route supports

    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_UINT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.001, le=1000, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Bias | None = None
    allowed_token_ids: Annotated[Items[Unsigned], Field(min_length=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Field(ge=1, le=_MAX_N)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description=f"The most tokens of an answer. Default: {_MODELS_LIMIT}"
    )
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: Stop | None = None
    stop_token_ids: Items[Unsigned] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None  # a schema, or JSON in a string
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    json_schema: Any = None  # as `guided_json`
    regex: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, fields: Any) -> Any:
        """Raises: BadRequest naming a field that is not supported."""
        if isinstance(fields, dict):
            for name, neutral in _REFUSED.items():
                if name not in cls.honoured and (value := fields.get(name)) is not None and value not in neutral:
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
        """The most tokens of an answer; None if the request does not limit them."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """The number of likeliest tokens that the answer lists with each token; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The number of likeliest tokens that the answer lists with each token of the prompt; None: no log-probabilities."""
        return self.prompt_logprobs

    def wanted(self, model: GeneratingModel) -> Wanted:
        """The generation that the request asks for. Raises: BadRequest if the model does not support the request."""
        raise NotImplementedError

    def _wanted(
        self,
        model: GeneratingModel,
        num_prompts: int,
        num_chars: int,
        encode: Callable[[Prompts], list[TokenIds]],
        shown: tuple[str, ...] = (),
    ) -> Wanted:
        form = form_of(self.__dict__)
        if form is not None:
            num_chars += _CHARS_OF_A_GRAMMAR_BYTE * len(form.grammar)

        def encode_checked(prompts: Prompts) -> list[TokenIds]:
            if form is not None:
                form.check()  # here, because a long check runs on a thread
            return encode(prompts)

        return Wanted(
            num_prompts,
            num_chars,
            encode_checked,
            self._sampling(model.info, model.generation, None if form is None else form.grammar),
            self.n or 1,
            self.stop or (),
            bool(self.include_stop_str_in_output),
            self.skip_special_tokens is not False,
            shown,
        )

    def _sampling(self, info: ModelInfo, said: GenerationConfig, grammar: str | None) -> SamplingOptions:
        """The request's options, else those of the model's authors, else options that change no logit."""
        stop_ids = tuple(self.stop_token_ids or ())
        given = {
            "logit_bias": tuple(token for token, _ in self.logit_bias or ()),
            "allowed_token_ids": tuple(self.allowed_token_ids or ()),
            "stop_token_ids": stop_ids,
        }
        for name, ids in given.items():
            if ids and max(ids) >= info.vocab_size:
                raise BadRequest(f"`{name}` has token id {max(ids)}, the vocabulary ends at {info.vocab_size - 1}", name)
        return SamplingOptions(max_tokens=info.max_input_length).chosen(
            said,
            max_tokens=self.most_tokens,
            temperature=self.temperature,
            top_k=None if self.top_k is None else max(0, self.top_k),
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            allowed=None if self.allowed_token_ids is None else given["allowed_token_ids"],
            seed=self.seed,
            min_tokens=self.min_tokens,
            stop_ids=stop_ids if self.ignore_eos else (*said.eos_ids, *stop_ids),
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            grammar=grammar,
        )


class ChatRequest(GenerationBody):
    honoured = frozenset({"tools", "tool_choice"})

    messages: Annotated[Items[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="The same limit as `max_tokens`. If a request has both fields, this one counts"
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _chat_agrees(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("`top_logprobs` is for requests with `logprobs`: true", "top_logprobs")
        choice = self.tool_choice
        if self.tools is None and choice not in (None, "none", "auto"):
            raise BadRequest(
                "`tool_choice` asks for a tool call, but there are no `tools`; send `tools`, or leave it out", "tool_choice"
            )
        if isinstance(choice, NamedTool) and choice.name not in schemas_of(self.tools or ()):
            raise BadRequest(f"`tool_choice` names {quoted(choice.name)}, which is not in `tools`", "tool_choice")
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def callable(self) -> tuple[dict[str, Any], ...] | None:
        """The tools that the answer may call, or None."""
        return None if self.tool_choice == "none" else self.tools

    def wanted(self, model: GeneratingModel) -> Wanted:
        chat_format = model.prompts.chat_format
        if self.callable and chat_format.calls is None:
            raise BadRequest(
                f"`tools`: the chat template of model `{model.info.served_model_name}` does not write tool calls in a supported "
                "form; leave them out",
                "tools",
            )
        # the values that the template may use
        num_chars = len(str(self.messages)) + len(str(self.chat_template_kwargs)) + len(str(self.callable))
        shown = ((THINK, END_THINK) if chat_format.thinks else ()) + ((OPENER, CLOSER) if self.callable else ())
        wanted = self._wanted(model, 1, num_chars, self._encode, shown)
        form, may_answer = wanted.sampling.grammar, self.tool_choice in (None, "none", "auto")
        if form is None and (may_answer or not self.callable):
            return wanted
        if not may_answer and form is not None:
            raise BadRequest("`tool_choice` cannot be combined with a form of the answer; leave one out", "tool_choice")
        return replace(wanted, grammar_after=partial(self._grammar, model.prompts, form))

    def parser(self, prompts: Prompts, prompt: TokenIds) -> ChatParser:
        """The parser of an answer to a prompt."""
        chat_format = prompts.chat_format
        new_call: Callable[[], JsonCall | XmlCall] | None = None
        if self.callable:
            new_call = JsonCall if chat_format.calls == "json" else partial(XmlCall, schemas_of(self.callable))
        is_reasoning = self._reasoning_after(prompts, prompt) == "open"
        return ChatParser(thinks=chat_format.thinks, is_reasoning=is_reasoning, new_call=new_call)

    def _reasoning_after(self, prompts: Prompts, prompt: TokenIds) -> Reasoned:
        """Whether the prompt has opened or closed the reasoning, or the model may open it."""
        if not prompts.chat_format.thinks:
            return "none"
        if self.continue_final_message:
            final = str(self.messages[-1].get("content"))
            return "open" if final.rfind(THINK) > final.rfind(END_THINK) else "none"
        end = prompts.decode(prompt[-_TAG_TOKENS:]).rstrip()
        return "open" if end.endswith(THINK) else "none" if end.endswith(END_THINK) else "may"

    def _grammar(self, prompts: Prompts, form: str | None, prompt: TokenIds) -> str:
        """The grammar of the form, and of the calls that `tool_choice` requires or that the answer may have instead."""
        schemas, choice = schemas_of(self.callable or ()), self.tool_choice
        reasoning = self._reasoning_after(prompts, prompt)
        if not schemas and form is not None and reasoning != "open":
            return form
        tags = (THINK, END_THINK, OPENER, CLOSER)
        return of_calls(
            {choice.name: schemas[choice.name]} if isinstance(choice, NamedTool) else schemas,
            prompts.chat_format.calls or "json",
            tokens={tag for tag in tags if prompts.tokenizer.token_to_id(tag) is not None},
            several=not isinstance(choice, NamedTool) and self.parallel_tool_calls is not False,
            reasoning=reasoning,
            instead=form,
        )

    def _encode(self, prompts: Prompts) -> list[TokenIds]:
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables = {"enable_thinking": self.reasoning_effort != "none"} | variables
        ids = prompts.encode_chat(
            with_parsed_calls(self.messages),
            tools=self.callable,
            add_special_tokens=bool(self.add_special_tokens),
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            template_kwargs=variables,
        )
        return [ids]


class CompletionRequest(GenerationBody):
    honoured = frozenset({"echo"})

    prompt: Inputs
    max_tokens: Annotated[int, Field(ge=0)] | None = Field(
        _COMPLETION_TOKENS, description=f"The most tokens of an answer. null: {_MODELS_LIMIT}"
    )
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

    def wanted(self, model: GeneratingModel) -> Wanted:
        if not self.prompt:
            raise BadRequest("`prompt` cannot be empty", "prompt")
        return self._wanted(model, len(self.prompt), sum(map(len, self.prompt)), self._encode)

    def _encode(self, prompts: Prompts) -> list[TokenIds]:
        return [self._ids(each, prompts) for each in self.prompt]

    def _ids(self, prompt: TextOrIds, prompts: Prompts) -> TokenIds:
        if isinstance(prompt, str):
            return prompts.encode(prompt, add_special_tokens=self.add_special_tokens is not False)
        return np.array(prompt, dtype=np.int64)  # `new_stream` checks ids and narrows them
