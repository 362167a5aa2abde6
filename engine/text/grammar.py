"""Grammars that limit an answer to a form: their texts in llguidance's format, and the tokens that they allow next.

Imports neither torch nor tokenizers.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

import numpy as np
from cachetools import LRUCache
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from engine.errors import InvalidInput
from engine.options import SamplingOptions

# Bytes of a grammar's text. The time to compile a schema grows with the square of the number of properties.
MAX_BYTES = 65_536
# A grammar that exceeds these limits is refused, or its answer fails. With llguidance's defaults the first mask of
# `(a{1000}){1000}` takes 3 s and 200 MB (docs/decisions/031).
_LIMITS = LLParserLimits(
    initial_lexer_fuel=100_000,
    step_lexer_fuel=20_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
_MAX_ERROR_CHARS = 300
# The most compiled grammars that a model keeps. Requests of one program often share a schema, and choices of a request always do.
_MOST_COMPILED = 32
# Whitespace between the parts of JSON. Without a limit, a small model may write whitespace for ever.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"

Schema = Mapping[str, Any] | bool


def of_schema(schema: Schema, *, compact: bool = False) -> str:
    """The grammar of JSON that is valid by a JSON schema. `compact`: without whitespace between the parts of JSON."""
    return _alone({"json_schema": bounded(schema, compact=compact)})


def of_any_object() -> str:
    """The grammar of any JSON object."""
    return of_schema({"type": "object"})


def of_regex(pattern: str) -> str:
    """The grammar of texts that match a regular expression as a whole."""
    return LLMatcher.grammar_from_regex(pattern)


def of_choices(choices: Sequence[str]) -> str:
    """The grammar of texts that are one of `choices`."""
    return _alone({"lark_grammar": "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices))})


def of_lark(text: str) -> str:
    """The grammar of a text in llguidance's variant of Lark."""
    return _alone({"lark_grammar": text})


def with_named(grammar: str, name: str, other: str) -> str:
    """The grammar together with another one. The grammar's Lark text may refer to the other one by `@name`."""
    (used,) = json.loads(other)["grammars"]
    return json.dumps({"grammars": [*json.loads(grammar)["grammars"], {**used, "name": name}]})


def bounded(schema: Schema, *, compact: bool = False) -> Schema:
    """The schema with a limit on whitespace, or with none if `compact`.

    llguidance reads its options from `x-guidance`. A caller's own options stay.
    """
    if schema is False or (schema is not True and "x-guidance" in schema):
        return schema
    options = {"whitespace_flexible": False} if compact else {"whitespace_pattern": _WHITESPACE}
    return {**({} if schema is True else schema), "x-guidance": options}


def _alone(grammar: Mapping[str, Any]) -> str:
    """The text of one grammar in llguidance's format."""
    return json.dumps({"grammars": [grammar]})


def check(grammar: str) -> None:
    """Find the faults that need no tokenizer. Raises: InvalidInput with the compiler's message."""
    num_bytes = len(grammar.encode(errors="surrogatepass"))
    if num_bytes > MAX_BYTES:
        raise InvalidInput(f"the grammar has {num_bytes} bytes, the limit is {MAX_BYTES}; send a smaller one")
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=_LIMITS)
    if is_error:
        raise _invalid(messages[0])


def _invalid(message: str) -> InvalidInput:
    return InvalidInput(f"the grammar does not compile: {message.strip()[:_MAX_ERROR_CHARS]}")


class Compiler:
    """Makes the matchers of one model's streams. Safe to call from several threads."""

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, eos_ids: Sequence[int]) -> None:
        """`tokenizer_json` gives the text of a tokenizer.json. It is called once, by `prepare` or for the first grammar."""
        self._tokenizer_json, self._vocab_size, self._eos_ids = tokenizer_json, vocab_size, list(eos_ids)
        self._lock = Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: LRUCache[str, LLMatcher] = LRUCache(_MOST_COMPILED)

    def prepare(self) -> None:
        """Loads the tokenizer before the first grammar. The load holds the interpreter for seconds, and so all streams.

        A tokenizer that takes no grammars fails at the first grammar, not here.
        """
        with self._lock, suppress(InvalidInput):
            self._tokenizer = self._tokenizer or self._load()

    def matcher(self, grammar: str, options: SamplingOptions) -> "Matcher":
        """Raises: InvalidInput for a grammar that does not compile, with the compiler's message."""
        with self._lock:
            tokenizer = self._tokenizer = self._tokenizer or self._load()
            compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = _compile(grammar, tokenizer)
        with self._lock:
            self._compiled[grammar] = compiled
            compiled = compiled.deep_copy()
        possible = np.zeros(32 * -(-self._vocab_size // 32), dtype=np.bool_)
        if options.allowed is None:
            possible[: self._vocab_size] = True
        else:
            possible[list(options.allowed)] = True
        # An end-of-text token may be chosen only if it is a stop id. Otherwise it would not end the answer.
        possible[[id for id in tokenizer.eos_tokens if id < self._vocab_size and id not in options.stop_ids]] = False
        return Matcher(compiled, np.packbits(possible, bitorder="little").view("<i4"))

    def _load(self) -> LLTokenizer:
        try:
            return LLTokenizer(self._tokenizer_json(), eos_token=self._eos_ids or None)
        except ValueError as error:
            raise InvalidInput(f"this model's tokenizer takes no grammars, leave them out: {error}") from error


def _compile(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    check(grammar)
    compiled = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    compiled.compute_bitmask()  # a regex that is too large fails here
    if compiled.is_error():
        raise _invalid(compiled.get_error())
    return compiled


class Matcher:
    """The position of one answer in its grammar. Only one thread at a time may use it."""

    def __init__(self, matcher: LLMatcher, possible: NDArray[np.int32]) -> None:
        """`possible`: a bit mask of the tokens that may ever be chosen."""
        self._matcher, self._possible = matcher, possible

    @property
    def is_over(self) -> bool:
        """Whether the grammar allows no more tokens."""
        return self._matcher.is_stopped()

    def allowed(self, banned: Sequence[int] = ()) -> NDArray[np.int32] | None:
        """The bit mask of the tokens that may come next, without the `banned` ones. None if the answer is complete.

        Tokens of the mask that the model does not have are never allowed.
        Raises: InvalidInput if no token may come and the answer is incomplete, and for a grammar that takes too long.
        """
        whole = np.frombuffer(self._matcher.compute_bitmask(), dtype="<i4")
        self._check()
        mask = whole[: len(self._possible)] & self._possible[: len(whole)]
        for token in banned:
            if token < 32 * len(mask):
                mask[token // 32] &= np.int32(~(1 << token % 32) if token % 32 < 31 else 0x7FFFFFFF)
        if mask.any():
            return mask
        if self._matcher.is_accepting():
            return None
        raise InvalidInput("no token may be chosen: the other options exclude all tokens that the grammar allows next")

    def accept(self, token: int) -> None:
        """Consume the token that was chosen. Raises: InvalidInput for a grammar that takes too long."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidInput(f"the grammar failed after a part of the answer: {self._matcher.get_error()[:_MAX_ERROR_CHARS]}")
