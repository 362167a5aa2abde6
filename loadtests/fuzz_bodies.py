"""Bodies for every POST route, from a seeded `Random`: valid ones, and ones with values that no honest client sends."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

Operations = dict[str, list[str]]  # the fields that a body may have, by the path of its POST route
Generated = dict[str, list[Any]]  # bodies as JSON values, by the path of their POST route

_MESSAGES = [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "What is red?"}]
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": _SCHEMA}}
_ONE_TOKEN: dict[str, Any] = {"max_tokens": 1, "temperature": 0}
_QUESTION = {"id": "a", "type": "boolean", "question": "Is it red?"}
_EMBED = [
    {"inputs": "one text"},
    {"inputs": ["one", "two"], "truncate": True, "normalize": False, "dimensions": 64},
    {"inputs": [[101, 7592, 102]], "truncation_direction": "Left", "output_dtype": "int8"},
]
_RANKED = {"query": "what is red?", "texts": ["a rose", "the sea"], "raw_scores": True, "return_text": True}
_COHERE_RANKED = {"query": "what is red?", "documents": ["a rose", {"text": "the sea"}], "top_n": 1}
_OPENAI = [{"input": "one text"}, {"input": ["one", "two"], "encoding_format": "base64", "dimensions": 32, "user": "me"}]
_COHERE = [{"texts": ["one", "two"], "input_type": "search_query", "embedding_types": ["float", "int8"], "truncate": "END"}]
_SIMILAR = {"inputs": {"source_sentence": "one", "sentences": ["two", "three"]}, "parameters": {"truncate": True}}
_PREDICTED = {"inputs": [["one", "two"], ["three"]], "raw_scores": True}

# Valid bodies of every POST route, without the model's name.
VALID: dict[str, list[dict[str, Any]]] = {
    "/embed": _EMBED,
    "/v1/embeddings": _OPENAI,
    "/embeddings": _OPENAI,
    "/v1/chat/completions": [
        {"messages": _MESSAGES} | _ONE_TOKEN,
        {"messages": _MESSAGES, "stream": True, "stream_options": {"include_usage": True}, "max_completion_tokens": 2},
        {"messages": _MESSAGES, "tools": [_TOOL], "tool_choice": "auto", "logprobs": True, "top_logprobs": 2} | _ONE_TOKEN,
        {"messages": _MESSAGES, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}}
        | _ONE_TOKEN,
        {"messages": _MESSAGES, "n": 2, "seed": 1, "top_p": 0.5, "stop": ["."], "logit_bias": {"5": 1.5}, "max_tokens": 2},
    ],
    "/v1/completions": [
        {"prompt": "one, two,"} | _ONE_TOKEN,
        {"prompt": ["one", "two"], "stream": True, "max_tokens": 2, "stop": "."},
        {"prompt": [1, 2, 3], "echo": True, "logprobs": 1, "guided_regex": "[a-z]+", "max_tokens": 1},
        {"prompt": "one", "guided_choice": ["a", "b"], "max_tokens": 1, "min_p": 0.1, "repetition_penalty": 1.2},
        {"prompt": "one", "guided_grammar": 'start: "a" | "b"', "max_tokens": 1, "stop_token_ids": [2]},
    ],
    "/v1/decisions": [{"input": "a rose", "questions": [_QUESTION]}],
    "/v1/rerank": [_COHERE_RANKED],
    "/v2/rerank": [_COHERE_RANKED],
    "/v1/embed": _COHERE,
    "/v2/embed": _COHERE,
    "/": [*_EMBED, _SIMILAR, _RANKED],
    "/invocations": [*_EMBED, _SIMILAR, _PREDICTED],
    "/rerank": [_RANKED, _COHERE_RANKED],
    "/predict": [_PREDICTED],
    "/embed_sparse": [{"inputs": ["one", "two"]}],
    "/embed_hybrid": [{"inputs": ["one"], "outputs": ["dense"]}],
    "/embed_all": [{"inputs": "one text", "truncate": True}],
    "/similarity": [_SIMILAR],
    "/vertex": [{"instances": [{"inputs": "one"}, {"inputs": "two"}]}],
    "/tokenize": [{"inputs": ["one", "two"], "add_special_tokens": False}, {"prompt": "one"}, {"messages": _MESSAGES}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
    "/decode": [{"ids": [[101, 102]], "skip_special_tokens": False}],
}

_DEEP = "@deep@"  # stands for many nested brackets, which `json.dumps` cannot write
_STRINGS = (
    "",
    " ",
    "\x00",
    "\x7f\x1b[0m",
    "\ud800",
    "a\udfff",
    "\U0010ffff",
    "\u202e\u200d\ufeff",
    "é" * 50,
    "\U0001f9d1\u200d\U0001f680",
    "null",
    "-1",
    "NaN",
    "../../etc/passwd",
    "{{ 7 * 7 }}",
    "%s%n%x",
    "<|im_start|>",
    "<|endoftext|>",
    "[SEP][CLS]",
    "(a+)+$",
    "(",
    "[^",
    "\\",
    "start: start",
    "http://127.0.0.1:1/",
    "int8",
    "base64",
    "auto",
    "json_object",
    "@all",
    "\r\n\r\n",
)
_NUMBERS = (
    0,
    -1,
    1,
    2,
    0.5,
    -0.0,
    1e308,
    -1e308,
    5e-324,
    2**31 - 1,
    2**31,
    2**32,
    2**53 + 1,
    2**63,
    2**64,
    10**40,
    float("nan"),
    float("inf"),
    float("-inf"),
    49152,
    30522,
)


def hostile(random: Random) -> Any:
    """A value that is wrong for a field, or very unusual."""
    kind = random.randrange(12)
    if kind < 3:
        return random.choice(_NUMBERS)
    if kind < 6:
        return random.choice(_STRINGS)
    if kind < 8:
        return random.choice((None, True, False, [], {}, [[]], [None], {"": ""}, [{}], [[[1]]], {"$ref": "#"}, _DEEP))
    if kind < 9:
        return [hostile(random) for _ in range(random.randrange(4))]
    if kind < 10:
        names = ("type", "text", "id", "content", "role", "name", "schema", "properties", "enum", "pattern", "")
        return {random.choice(names): hostile(random) for _ in range(3)}
    if kind < 11:
        return "".join(chr(random.choice((random.randrange(128), random.randrange(0xD800)))) for _ in range(random.randrange(40)))
    size = random.choice((1000,) * 8 + (20_000, 300_000))
    return random.choice(("word " * (size // 5), "x" * size, [0] * size, ["a"] * (size // 10), "\U0001f680" * (size // 4)))


@dataclass(frozen=True, slots=True)
class Body:
    """A request's body and the headers that belong to it."""

    content: bytes
    headers: tuple[tuple[str, bytes], ...]


def body(random: Random, path: str, fields: Sequence[str], models: Sequence[str], generated: Sequence[Any] = ()) -> Body:
    """A valid or a generated body of the route at `path`. Up to three places are changed, and sometimes its bytes are broken."""
    bases = generated if generated and random.random() < 0.3 else VALID[path]
    given = json.loads(json.dumps(random.choice(bases)))
    if isinstance(given, dict) and random.random() < 0.9:
        given["model"] = random.choice(models)
    for _ in range(random.choice((0, 1, 1, 1, 2, 3))):
        given = _changed(random, given, fields)
    text = json.dumps(given, ensure_ascii=random.random() < 0.8)
    depth = random.choice((10, 100, 1000, 20_000))
    content = text.replace(f'"{_DEEP}"', "[" * depth + "]" * depth).encode("utf-8", "surrogatepass")
    return _as_text(random, content) if random.random() < 0.2 else Body(content, _JSON)


_JSON = (("content-type", b"application/json"),)


def _changed(random: Random, given: Any, fields: Sequence[str]) -> Any:
    """Replaces, removes, adds or wraps one value."""
    kind = random.randrange(10)
    if kind == 0:
        return hostile(random) if random.random() < 0.2 else [given]
    if isinstance(given, dict) and kind < 5:
        name = random.choice(fields) if fields and random.random() < 0.9 else str(random.choice(_STRINGS))
        return given | {name: hostile(random)}
    holder, key = random.choice(_places(given) or [({}, "")])
    if not holder:
        return given
    if kind == 5:
        del holder[key]
    elif kind == 6:
        holder[key] = [holder[key]]
    else:
        holder[key] = hostile(random)
    return given


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (list or dict, key) within a value."""
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    return [place for key, item in items for place in [(value, key), *_places(item)]]


def _as_text(random: Random, content: bytes) -> Body:
    """The body with wrong bytes, a wrong type or a wrong encoding."""
    kind, at = random.randrange(9), random.randrange(len(content) + 1)
    if kind == 0:
        return Body(content[:at], _JSON)
    if kind == 1:
        return Body(
            content[:at] + random.choice((b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\x00", b"\xf8\x88")) + content[at:], _JSON
        )
    if kind == 2:
        types = (
            b"text/plain",
            b"",
            b"application/json; charset=utf-16",
            b"multipart/form-data; boundary=x",
            b"application/xml",
            b"\xff",
        )
        return Body(content, (("content-type", random.choice(types)),))
    if kind == 3:
        return Body(
            gzip.compress(content, mtime=0), (*_JSON, ("content-encoding", random.choice((b"gzip", b"br", b"deflate", b"x"))))
        )
    if kind == 4:  # duplicate keys
        return Body(b'{"model":1,"inputs":"x","input":null,' + content[1:], _JSON)
    if kind == 5:
        return Body(content + random.choice((b" ", b"\n", b"}", content, b"\x00", b",")), _JSON)
    if kind == 6:
        return Body(content.decode("utf-8", "replace").encode("utf-16"), _JSON)
    if kind == 7:
        return Body(random.randbytes(random.randrange(64)), _JSON)
    changed = bytearray(content)
    for _ in range(random.randrange(1, 6)):
        changed[random.randrange(len(changed))] = random.randrange(256)
    return Body(bytes(changed), _JSON)
