"""Grammars that hold an answer to a form: their texts, in llguidance's own format. Imports neither torch nor tokenizers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

# Whitespace between the parts of JSON. Without a limit, a small model that finds no next word writes whitespace for ever.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"

Schema = Mapping[str, Any] | bool


@dataclass(frozen=True, slots=True)
class Tagged:
    """JSON of a schema between two texts, such as a tool call between its markers.

    The texts are plain text: a special token's name in them does not stand for that token. `$ref` in the schema refers to the
    schema itself, so JSON around the schema's JSON belongs into the texts.
    """

    begin: str
    schema: Schema
    end: str


def of_schema(schema: Schema) -> str:
    """The grammar of JSON that meets a JSON schema."""
    return _joined({"json_schema": _bounded(schema)})


def of_any_object() -> str:
    """The grammar of any JSON object."""
    return of_schema({"type": "object"})


def of_regex(pattern: str) -> str:
    """The grammar of texts that match a regular expression from the first to the last character."""
    return LLMatcher.grammar_from_regex(pattern)


def of_choices(choices: Sequence[str]) -> str:
    """The grammar of texts that are one of `choices`."""
    return _joined({"lark_grammar": "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices))})


def of_lark(text: str) -> str:
    """The grammar that a text in llguidance's variant of Lark describes."""
    return _joined({"lark_grammar": text})


def of_tagged(alternatives: Sequence[Tagged], separator: str | None = None) -> str:
    """The grammar of one of `alternatives`, or, with a separator, of one or more of them with the separator between them."""
    rules = [f"{json.dumps(each.begin)} @schema{i} {json.dumps(each.end)}" for i, each in enumerate(alternatives)]
    more = "" if separator is None else f" ({json.dumps(separator)} tagged)*"
    schemas = [{"name": f"schema{i}", "json_schema": _bounded(each.schema)} for i, each in enumerate(alternatives)]
    return _joined({"lark_grammar": f"start: tagged{more}\ntagged: " + "\n  | ".join(rules)}, *schemas)


def _bounded(schema: Schema) -> Schema:
    """The schema with a limit on whitespace. llguidance takes its options from `x-guidance`; those of a caller stay."""
    if schema is False or (schema is not True and "x-guidance" in schema):
        return schema
    return {**({} if schema is True else schema), "x-guidance": {"whitespace_pattern": _WHITESPACE}}


def _joined(*grammars: Mapping[str, Any]) -> str:
    """The text that llguidance takes. The first grammar is the whole; it may refer to the others by name."""
    return json.dumps({"grammars": grammars})
