"""Token ids of ASCII texts, word by word from a table.

The `tokenizers` library takes 1.5 to 4 us for a token, because each of its steps tracks the position of each character. A request
needs only ids. The ids of a word do not depend on the words around it, so this table asks the library once for each word.

A regular expression that finds each word takes three times as long as `str.split`. So the table also has the ids of whole strings
between two spaces, such as "word," and "don't".
"""

import json
import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, cast

from tokenizers import Tokenizer as HFTokenizer
from tokenizers.models import BPE, WordPiece

# The most characters of a table's strings, about 7 MB. A full table is kept beside a new one, which takes words from it.
_MOST_CHARS = 1 << 18
# The most strings that the table learns in a call. If there are more, the library tokenises the texts, because it needs the
# interpreter for a shorter time than the table needs for new strings.
_MOST_NEW = 128

# The end of a text, among its words. Its ids are the bytes of -1. They are found only there, because the last byte of another id
# is never 0xff.
_END, _MARK = "\0", b"\xff" * 4
# Some tokenizers remove other control characters, and for some they are white space.
_SPACES = " \t\n\r"
_PLAIN = bytes(range(33, 127)) + _SPACES.encode()
_BERT_WORDS = re.compile(r"[0-9A-Za-z]+|[!-/:-@\[-`{-~]|\0")
# The pattern in the tokenizers of Qwen2 and Qwen3, and the same pattern for ASCII: Python's `re` has no \p{L} and \p{N}. A text
# ends before \0.
_QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN_WORDS = re.compile(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\0A-Za-z0-9]?[A-Za-z]+|[0-9]| ?[^\s\0A-Za-z0-9]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?![^\s\0])|\s+|\0"
)
QWEN_STEPS = [
    {"type": "Split", "pattern": {"Regex": _QWEN}, "behavior": "Isolated", "invert": False},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
]


class WordTable:
    """The ids of words and of strings of words. Safe to call from several threads."""

    def __init__(self, tokenizer: HFTokenizer, words: re.Pattern[str], split: Callable[[Sequence[str]], list[str]]) -> None:
        """
        Args:
            words: finds the words of texts that are joined with `_END`.
            split: gives strings of whole words of plain texts, in order, with `_END` between two texts.
        """
        self._tokenizer, self._words, self._split = tokenizer, words, split
        self._ids, self._ids_before = {_END: _MARK}, dict[str, bytes]()
        self._num_chars = 0  # of the strings in `_ids`
        added = [each.content for each in tokenizer.get_added_tokens_decoder().values()]
        # A text with an added token, such as "[SEP]", is not only words. The search begins with the first characters of added
        # tokens, because that is fast.
        # The case is ignored, because the library finds some added tokens in the lower-case text.
        # White space matches other white space, because some tokenizers replace it with spaces first.
        firsts = "".join(_SPACES if each[0] in _SPACES else each[0] for each in added)
        self._marks = "".join({*firsts.lower(), *firsts.upper()})
        self._added = re.compile("|".join(r"\s".join(map(re.escape, re.split(r"\s", each))) for each in added), re.IGNORECASE)

    @classmethod
    def of(cls, tokenizer: HFTokenizer) -> "WordTable | None":
        """The table of a tokenizer that neither truncates nor pads. None for other kinds of tokenizers."""
        normalizer, pre = _state(tokenizer.normalizer), _state(tokenizer.pre_tokenizer)
        model = tokenizer.model
        if any(each.normalized and not each.content.isascii() for each in tokenizer.get_added_tokens_decoder().values()):
            return None  # an added token with accents could match an ASCII text once its accents are removed
        if normalizer.get("type") == "BertNormalizer" and pre == {"type": "BertPreTokenizer"} and isinstance(model, WordPiece):
            return cls(tokenizer, _BERT_WORDS, _split_bert_lower if normalizer["lowercase"] else _split_bert)
        is_qwen = normalizer.get("type", "NFC") == "NFC" and pre.get("type") == "Sequence" and pre["pretokenizers"] == QWEN_STEPS
        if is_qwen and isinstance(model, BPE) and not model.dropout:
            return cls(tokenizer, _QWEN_WORDS, _split_qwen)
        return None

    def ids(self, texts: Sequence[str]) -> list[bytes] | None:
        """The ids that the tokenizer gives for each text without special tokens, as the bytes of int32.

        All texts are searched at once, because the calls for each text would take longer than the searches.

        Returns: None if a text needs the tokenizer itself.
        """
        joined = "".join(texts)
        if not joined.isascii() or joined.encode().translate(None, _PLAIN):
            return None
        if any(mark in joined for mark in self._marks) and self._added.search(joined):
            return None
        strings, known = self._split(texts), self._ids
        try:
            return b"".join([known[each] for each in strings]).split(_MARK)
        except KeyError:
            if not self._learn(strings, known):
                return None
            return b"".join([known[each] for each in strings]).split(_MARK)

    def _learn(self, strings: list[str], known: dict[str, bytes]) -> bool:
        """Adds new strings to `known`. Returns: False if there are too many of them to add all."""
        new = list(set(strings).difference(known))
        if not new:  # another thread has just added them
            return True
        added, before = new[:_MOST_NEW], self._ids_before
        joined = _END.join(added)
        words = self._words.findall(joined)
        unknown = set(words).difference(known)
        known.update({word: before[word] for word in unknown if word in before})
        if unasked := [word for word in unknown if word not in before]:
            known.update(self._from_library(unasked))
        known.update(zip(added, b"".join([known[word] for word in words]).split(_MARK), strict=True))
        self._num_chars += len(joined)
        if self._num_chars > _MOST_CHARS:
            self._ids, self._ids_before, self._num_chars = {_END: _MARK}, known, 0
        return len(new) <= _MOST_NEW

    def _from_library(self, words: list[str]) -> Iterator[tuple[str, bytes]]:
        # `encode` would hold the interpreter.
        (encoding,) = self._tokenizer.encode_batch([words], is_pretokenized=True, add_special_tokens=False)
        ids, word_of = array("i", encoding.ids), cast("list[int]", encoding.word_ids)  # only special tokens have no word
        ends = [bisect_left(word_of, number) for number in range(len(words) + 1)]
        return zip(words, (ids[start:stop].tobytes() for start, stop in pairwise(ends)), strict=True)


def _split_bert(texts: Sequence[str]) -> list[str]:
    return f" {_END} ".join(texts).split()


def _split_bert_lower(texts: Sequence[str]) -> list[str]:
    return f" {_END} ".join(texts).lower().split()


def _split_qwen(texts: Sequence[str]) -> list[str]:
    """A word begins before each space, if white space is only single spaces with other characters behind them."""
    joined = f"\1{_END}\1".join(texts)
    if "  " in joined or " \1" in joined or joined.endswith(" ") or any(space in joined for space in "\t\n\r"):
        return _QWEN_WORDS.findall(_END.join(texts))
    return joined.replace(" ", "\1 ").split("\1")


def _state(step: Any) -> dict[str, Any]:
    """A step of a tokenizer in the form of tokenizer.json. Empty for None."""
    found: dict[str, Any] = json.loads(step.__getstate__()) if step is not None else {}
    return found
