"""Chat messages -> the model's prompt, by the chat template in the model's folder. No torch here.

The environment is the one of transformers' `apply_chat_template`, so a template gives the same text.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Filter, For, Node, Scope
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

from engine.errors import InvalidInput, ModelError
from engine.model.keys import read_object

Message = Mapping[str, Any]

# Characters of a rendered prompt: far more than the context of a model has.
_MAX_CHARS = 32_000_000
# Iterations of loops and calls of functions while a template renders. Qwen3's template needs 2 to 10 of them for each message.
_MAX_STEPS = 500_000
# The most characters of a template's error in our error. The template's error may contain a whole message.
_MAX_ERROR_CHARS = 500

# No template can use a name with a space, so no template can change the count.
_STEPS = " steps"
_LIMIT_LOOP = "limit_loop"
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", _STEPS})

# Follows the final message while it renders. The characters are for private use, so neither a message nor the template has them.
# The space shows whether the template strips the message.
_END = "\ue000\ue001\ue000 "

# The names of a message's reasoning in published templates and APIs, the most common one first.
_REASONING = ("reasoning_content", "thinking", "reasoning")

# OpenAI's newer name of the role system. Most templates leave out a message with a role that they do not have.
_DEVELOPER = "developer"
_NEED_CONTENT = ("user", "system", _DEVELOPER, "tool")  # roles

# The start of a tool call in a template's text. Line breaks may be written as in Jinja's strings, and quotes may be escaped.
_JSON_CALL = re.compile(r"""<tool_call>(\s|\\n)*\{\\?["'](name|arguments)""")
_XML_CALL = re.compile(r"<tool_call>(\s|\\n)*<function=")


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The marks that a model puts around the parts of an answer, found in the texts of its chat templates.

    `thinks`: reasoning ends with `</think>`. `calls`: the form of the text between `<tool_call>` and `</tool_call>`. It is a JSON
    object with `name` and `arguments`, or `<function=NAME>` with a `<parameter=KEY>` for each argument. None: another form.
    """

    thinks: bool = False
    calls: Literal["json", "xml"] | None = None

    @classmethod
    def of(cls, default: str, tool_use: str) -> "ChatFormat":
        """Find the marks. `tool_use` is the text of the template for requests with tools."""
        calls = "xml" if _XML_CALL.search(tool_use) else "json" if _JSON_CALL.search(tool_use) else None
        return cls("</think>" in default, calls)  # type: ignore[arg-type]  # a conditional of literals is a str to mypy


class ChatTemplate:
    """A model's chat template, compiled. Safe to call from several threads.

    A template is code of the model's authors. It runs in Jinja's sandbox: it reaches neither files nor Python's internals, and
    it cannot change the messages. A render is limited to 32 million characters, to 500,000 iterations of loops and calls of
    functions, and to 100,000 numbers in a `range` (the sandbox's limit). A single expression has no limit: `"a" * 10 ** 10` and a
    string that doubles in a loop may take any memory and time.
    """

    def __init__(
        self,
        default: Template,
        tool_use: Template,
        special_tokens: Mapping[str, str],
        format: ChatFormat = ChatFormat(),
        has_developer: bool = False,
    ) -> None:
        """Use `load` instead. `tool_use` is for requests with tools. The special tokens are variables of both templates."""
        self._default, self._tool_use, self._special_tokens, self.format = default, tool_use, special_tokens, format
        self._has_developer = has_developer  # the role

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate | None":
        """Returns the folder's chat template, or None if the folder has none.

        The files are those that transformers reads: chat_template.jinja and additional_chat_templates/, else `chat_template` in
        tokenizer_config.json, else chat_template.json, which older models that also read images have.

        Raises: ModelError naming the file for a template that cannot be read or does not compile.
        """
        config = read_object(folder / "tokenizer_config.json")
        sources = _sources(folder, config)
        if not sources:
            return None
        if "default" not in sources:
            raise ModelError(
                f"{folder} has the chat templates {sorted(sources)}; the one for ordinary requests must be 'default'"
            )
        default = _compiled(*sources["default"])
        tool_use = _compiled(*sources["tool_use"]) if "tool_use" in sources else default
        texts = (sources["default"][1], sources.get("tool_use", sources["default"])[1])
        has_developer = any(_DEVELOPER in text for text in texts)
        return cls(default, tool_use, _special_tokens(folder, config), ChatFormat.of(*texts), has_developer)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] = {},
    ) -> str:
        """Returns the prompt. It already contains the special tokens, so tokenise it without adding them.

        Args:
            messages: plain JSON data. A content of text parts becomes one string, with a newline between the parts. A field
                that is None is left out. The role developer becomes system, unless the template has it.
            tools: in the form of OpenAI's API.
            add_generation_prompt: end with the start of the assistant's answer.
            continue_final_message: end within the final message, so that the model continues it. Not together with
                `add_generation_prompt`.
            template_kwargs: more variables for the template, such as `enable_thinking`.
        Raises: InvalidInput for messages that the template cannot take, and for a render that exceeds a limit.
        """
        if add_generation_prompt and continue_final_message:
            raise InvalidInput(
                "`continue_final_message` and `add_generation_prompt` exclude each other; set one of them to false"
            )
        if reserved := sorted(_RESERVED & template_kwargs.keys()):
            raise InvalidInput(f"`chat_template_kwargs` cannot have {reserved[0]!r}; use the request's own field for it")
        if not messages:
            raise InvalidInput("`messages` cannot be empty")
        template = self._default if tools is None else self._tool_use
        prepared = [_prepared(index, message) for index, message in enumerate(messages)]
        for message in prepared:
            if message["role"] == _DEVELOPER and not self._has_developer:
                message["role"] = "system"
        variables = {"documents": None, **self._special_tokens, **template_kwargs}
        variables |= {"tools": tools, "add_generation_prompt": add_generation_prompt}
        if not continue_final_message:
            return _rendered(template, {**variables, "messages": prepared})
        final = prepared[-1].get("content")
        if final is None:
            raise InvalidInput("`continue_final_message` needs `content` in the final message")
        prepared[-1]["content"] = final + _END
        return _up_to_end(_rendered(template, {**variables, "messages": prepared}), final)


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """The special tokens and the chat template. With them a client prepares texts as the model's own tokenizer does. null: none.

    Raises: ModelError naming a file that cannot be read.
    """
    config = read_object(folder / "tokenizer_config.json")
    _, template = _sources(folder, config).get("default", (folder, None))
    common = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"))
    kind = config.get("tokenizer_class", "PreTrainedTokenizerFast")
    return {"tokenizer_class": kind, **common, **_special_tokens(folder, config), "chat_template": template}


def _rendered(template: Template, variables: dict[str, Any]) -> str:
    """The rendered text. Raises: InvalidInput for any error in the template."""
    chunks, num_chars = [], 0
    try:
        for chunk in template.generate({**variables, _STEPS: _Steps()}):
            num_chars += len(chunk)
            if num_chars > _MAX_CHARS:
                raise TemplateError(f"it makes more than {_MAX_CHARS} characters; send fewer or shorter messages")
            chunks.append(chunk)
    except Exception as error:  # the template is somebody else's code and may raise anything
        raise InvalidInput(f"the chat template cannot render these messages: {str(error)[:_MAX_ERROR_CHARS]}") from error
    return "".join(chunks)


def _up_to_end(rendered: str, final: str) -> str:
    """Returns the text up to the mark after the final message."""
    end = rendered.rfind(_END.strip())
    if end < 0 or final.strip() not in rendered:
        raise InvalidInput("`continue_final_message`: the chat template changes or leaves out the content of the final message")
    # If the mark has lost its space, the template strips the message. Then it would also strip the space before the mark.
    return rendered[:end] if rendered.startswith(_END, end) else rendered[:end].rstrip()


def _prepared(index: int, message: Message) -> dict[str, Any]:
    """Returns a copy of the message as templates expect it. Raises: InvalidInput for a message that no template can take."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidInput(f"message {index} must be an object with a string `role`")
    fields = {name: value for name, value in message.items() if value is not None}
    if "content" in fields:
        fields["content"] = _text(index, fields["content"])
    elif fields["role"] in _NEED_CONTENT:
        raise InvalidInput(f"message {index} has no `content`; only messages of the assistant may be without it")
    # A template reads the reasoning by one name, and the caller may use another one.
    reasoning = next((fields[name] for name in _REASONING if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _text(index: int, content: Any) -> str:
    """Returns a message's content as one string. Templates of text models seldom take parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidInput(f"message {index}: `content` must be a string or a list of parts, not {type(content).__name__}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise InvalidInput(f"message {index} has a part of type {kind!r}; only parts of type 'text' are supported")
        if not isinstance(part.get("text"), str):
            raise InvalidInput(f"message {index} has a part of type 'text' without a string `text`")
        texts.append(part["text"])
    return "\n".join(texts)


# The environment of the templates.


class _Steps:
    """Counts the iterations of loops and the calls of functions of one render."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = _MAX_STEPS

    def take(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise TemplateError(f"it takes more than {_MAX_STEPS} steps; send fewer or shorter messages")


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with a limit for loops and calls. Without loops and calls a template cannot run long."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> Node:  # type: ignore[override]
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(For):
            loop.iter = Filter(loop.iter, _LIMIT_LOOP, [], [], None, None, lineno=loop.lineno)
        return tree

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __context[_STEPS].take()
        return super().call(__context, __obj, *args, **kwargs)


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's text for training. The text is rendered unchanged."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        lineno = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


class _PublicNamespace(Namespace):
    """Jinja's namespace without names that begin with an underscore. They could reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # without named parameters, because `namespace(self=1)` is allowed
        Namespace.__init__(args[0])
        for name, value in dict(*args[1:], **kwargs).items():
            args[0][name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace cannot have the name {name!r}: it begins with an underscore")
        super().__setitem__(name, value)


class _Dict:
    """`dict` in a template. Python's own class has attributes that the sandbox does not check."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


@pass_context
def _limit_loop(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    steps = context[_STEPS]
    for item in items:
        steps.take()
        yield item


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """The filter `tojson`. Jinja's own filter escapes HTML and sorts the keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters |= {"tojson": _to_json, _LIMIT_LOOP: _limit_loop}
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals |= {"dict": _Dict(), "namespace": _PublicNamespace}
    return environment


_ENVIRONMENT = _environment()


def _compiled(path: Path, source: str) -> Template:
    """The compiled template. Raises: ModelError naming the file."""
    try:
        return _ENVIRONMENT.from_string(source)
    except Exception as error:  # besides Jinja's own errors: Python's compiler refuses some templates
        raise ModelError(f"the chat template in {path} does not compile: {error}") from error


# The files of a model's folder.


def _sources(folder: Path, config: Mapping[str, Any]) -> dict[str, tuple[Path, str]]:
    """Returns the file and the text of each template, by name. Raises: ModelError for a file that cannot be read."""
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    path = folder / "chat_template.jinja"
    files |= {"default": path} if path.is_file() else {}
    if files:
        return {name: (path, _read(path)) for name, path in files.items()}
    path, value = folder / "tokenizer_config.json", config.get("chat_template")
    if value is None:
        path = folder / "chat_template.json"
        value = read_object(path).get("chat_template")
    if value is None:
        return {}
    named = value if isinstance(value, list) else [{"name": "default", "template": value}]
    sources = {}
    for each in named:
        match each:
            case {"name": str(name), "template": str(source)}:
                sources[name] = path, source
            case _:
                raise ModelError(f"{path}: `chat_template` is neither a string nor a list of objects with `name` and `template`")
    return sources


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the named special tokens: bos_token, eos_token, ... special_tokens_map.json is for folders of older versions."""
    older = {} if "added_tokens_decoder" in config else read_object(folder / "special_tokens_map.json")
    named = {name: value for name, value in {**config, **older}.items() if name.endswith("_token")}
    for source in (config, older):
        extra = source.get("extra_special_tokens")
        named |= extra if isinstance(extra, dict) else {}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
