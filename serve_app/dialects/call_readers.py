"""Reads the text of one tool call piece by piece: the function's name and the JSON text of its arguments. Independent of HTTP."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, Literal

from engine.text.call_grammar import STRING, types_of

Schema = Mapping[str, Any]
# open: the call may continue. done: the call is complete. broken: the text began like a call but is invalid. text: not a call.
Status = Literal["open", "done", "broken", "text"]

OPENER, CLOSER = "<tool_call>", "</tool_call>"

_CLOSERS = {"{": "}", "[": "]"}
# The characters that JSON has outside of strings, besides brackets and quotes.
_JSON_CHARS = frozenset(" \t\r\n:,+-.0123456789truefalsnEe")
# A call whose arguments can be sent as they come, because the name is known before the arguments begin.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("[^"\\]+")\s*,\s*"arguments"\s*:\s*')


class CallReader(ABC):
    """Reads the text after `<tool_call>`.

    Attributes:
        status: whether the text is a call; "open" until this is decided.
        name: the function, as soon as it is known.
    """

    def __init__(self) -> None:
        self.status: Status = "open"
        self.name: str | None = None
        self._raw: list[str] = []
        self._arguments: list[str] = []  # parts that were not taken yet

    @property
    def raw(self) -> str:
        """The text that was read so far."""
        return "".join(self._raw)

    def take_arguments(self) -> str:
        """Returns the JSON text of the arguments that is new since the last call."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def read(self, text: str) -> int:
        """Returns the number of characters that were read. Pass the rest again with more text, unless the call has ended."""
        count = self._read(text)
        self._raw.append(text[:count])
        return count

    @abstractmethod
    def finish(self) -> None:
        """Decides the status at the end of the text. Closing tags may be missing."""

    @abstractmethod
    def _read(self, text: str) -> int: ...


class JsonCall(CallReader):
    """`{"name": ..., "arguments": {...}}`."""

    def __init__(self) -> None:
        super().__init__()
        self._read_chars: list[str] = []  # first the characters before the arguments, then those of the arguments
        self._closers: list[str] = []  # closing brackets of the open brackets
        self._in_string = self._is_escaped = self._has_arguments = False

    def finish(self) -> None:
        if self._has_arguments:
            self.status = "done"
        else:
            self.status = "broken" if self._closers else "text"

    def _read(self, text: str) -> int:
        for index, char in enumerate(text):
            if not self._step(char):
                self.finish()
                return index
            if self.status != "open":
                return index + 1
        return len(text)

    def _step(self, char: str) -> bool:
        """Returns whether this character can continue the call."""
        if self._in_string:
            self._in_string = self._is_escaped or char != '"'
            self._is_escaped = char == "\\" and not self._is_escaped
        elif not self._closers and char != "{":
            if not char.isspace():
                return False
        elif char in _CLOSERS:
            if char == "{" and len(self._closers) == 1 and self.name is None:
                self._begin()
            self._closers.append(_CLOSERS[char])
        elif char in "}]":
            if self._closers[-1] != char:
                return False
            self._closers.pop()
        elif char == '"':
            self._in_string = True
        elif char not in _JSON_CHARS:
            return False
        if self._has_arguments:
            self.status = "open" if self._closers else "done"
            return True
        self._read_chars.append(char)
        if self.name is not None:
            self._arguments.append(char)
        if char == "}" and len(self._closers) == (0 if self.name is None else 1):
            self._end()
        return True

    def _begin(self) -> None:
        """An object begins within the call's object."""
        if (head := _HEAD.fullmatch("".join(self._read_chars))) and (name := _parsed(head[1])):
            self.name = name
            self._read_chars.clear()

    def _end(self) -> None:
        """The arguments are complete, or the whole object if the arguments never began."""
        parsed = _parsed("".join(self._read_chars))
        if self.name is not None:
            self._has_arguments = isinstance(parsed, dict)
            self.status = "open" if self._has_arguments else "broken"
            return
        self.status = "broken"
        match parsed:
            case {"name": str(name), **others} if name and isinstance(arguments := others.get("arguments", {}), dict):
                if (written := _written(arguments)) is not None:
                    self.name, self.status = name, "done"
                    self._arguments.append(written)


# A value ends at its closing tag. If this tag is missing, the value ends before another tag at the start of a line.
_VALUE_END = re.compile(f"\n?</parameter>|\n(?=<parameter=|</function>|{CLOSER})")
_VALUE_ENDS = ("</parameter>", "\n</parameter>", "\n<parameter=", "\n</function>", f"\n{CLOSER}")
_NAME = "[^<>\n]{1,256}"
_NAMED_TAG = re.compile(f"<(function|parameter)=({_NAME})>")
_NAMED_TAG_BEGIN = re.compile(f"<(function|parameter)=({_NAME})?")


class XmlCall(CallReader):
    """`<function=NAME><parameter=KEY>\\nVALUE\\n</parameter></function>`.

    A value is a string, unless the schema of the function's parameters gives it another type.
    """

    def __init__(self, schemas: Mapping[str, Schema]) -> None:
        """`schemas`: the schemas of the functions' parameters, by the function's name."""
        super().__init__()
        self._schemas = schemas
        self._in_value = self._has_parameters = self._is_value_begin = False
        self._types = STRING  # the types of the value
        self._value: list[str] = []  # a value that is not a string is converted as a whole

    def finish(self) -> None:
        if self.name is None:
            self.status = "text"
        elif self._in_value:
            self.status = "broken"
        else:
            self._end()

    def _read(self, text: str) -> int:
        start = 0
        while self.status == "open" and (count := (self._read_value if self._in_value else self._read_tag)(text[start:])):
            start += count
        return start

    def _read_tag(self, text: str) -> int:
        """Returns the number of characters of the next tag and the whitespace before it; 0 for an incomplete tag."""
        tag = text.lstrip()
        kind = "function" if self.name is None else "parameter"
        if (named := _NAMED_TAG.match(tag)) and named[1] == kind:
            self._begin_call(named[2]) if self.name is None else self._begin_value(self.name, named[2])
            return len(text) - len(tag) + named.end()
        if self.name is not None and tag.startswith("</function>"):
            self._end()
            return len(text) - len(tag) + len("</function>")
        if self.name is not None and tag.startswith(CLOSER):
            self._end()
            return 0
        ends = () if self.name is None else ("</function>", CLOSER)
        begun = _NAMED_TAG_BEGIN.fullmatch(tag)
        if not (begun and begun[1] == kind) and not any(each.startswith(tag) for each in (f"<{kind}=", *ends)):
            self.status = "text" if self.name is None else "broken"
        return 0

    def _begin_call(self, name: str) -> None:
        self.name = name
        self._arguments.append("{")

    def _begin_value(self, function: str, key: str) -> None:
        schema = self._schemas.get(function, {})
        properties = schema.get("properties")
        self._types = types_of(properties.get(key) if isinstance(properties, Mapping) else None, schema)
        comma = ", " if self._has_parameters else ""
        self._arguments.append(f"{comma}{json.dumps(key, ensure_ascii=False)}: " + ('"' if self._types == STRING else ""))
        self._in_value = self._has_parameters = self._is_value_begin = True

    def _read_value(self, text: str) -> int:
        """Returns: the number of characters that certainly belong to the value, and the number of characters of its end."""
        if self._is_value_begin and text:
            self._is_value_begin = False
            if text[0] == "\n":  # the line break after the tag
                return 1
        end = _VALUE_END.search(text)
        value = text[: end.start() if end else len(text) - held_back(text, _VALUE_ENDS)]
        is_string = self._types == STRING
        if is_string:
            self._arguments.append(json.dumps(value, ensure_ascii=False)[1:-1])
        else:
            self._value.append(value)
        if end is None:
            return len(value)
        self._arguments.append('"' if is_string else _converted("".join(self._value), self._types))
        self._value.clear()
        self._in_value = False
        return end.end()

    def _end(self) -> None:
        self._arguments.append("}")
        self.status = "done"


def held_back(text: str, tags: Collection[str]) -> int:
    """Returns the number of characters at the end of the text that may be the beginning of a tag."""
    if all(tag[0] not in text for tag in tags):  # the case of most texts
        return 0
    longest = min(len(text), max(map(len, tags)) - 1)
    return next((count for count in range(longest, 0, -1) if any(tag.startswith(text[-count:]) for tag in tags)), 0)


def _converted(value: str, types: frozenset[str]) -> str:
    """Returns the JSON text of a value: in one of these types if possible, else as a string."""
    parsed = _parsed({"True": "true", "False": "false", "None": "null"}.get(value.strip(), value))
    fits = {
        "null": parsed is None and value.strip() in ("null", "None"),
        "boolean": isinstance(parsed, bool),
        "integer": isinstance(parsed, int) and not isinstance(parsed, bool),
        "number": isinstance(parsed, int | float) and not isinstance(parsed, bool),
        "object": isinstance(parsed, dict),
        "array": isinstance(parsed, list),
    }
    written = _written(parsed) if any(fits.get(each) for each in types) else None
    return json.dumps(value, ensure_ascii=False) if written is None else written


def _written(value: Any) -> str | None:
    """Returns the JSON text of a parsed value. None for infinity, which 1e999 becomes, and for half of a surrogate pair."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError:
        return None
    return text


def _parsed(text: str) -> Any:
    """Returns the value of a JSON text, or None if the text is not JSON."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
