"""Token ids of short ASCII texts, word by word from a table.

The `tokenizers` library takes 1.5 to 4 us for a token, because each of its steps tracks the position of each character. A request
needs only ids. The ids of a word do not depend on the words around it, so this table asks the library once for each word.
"""

import json
import re
from itertools import chain
from typing import Any

from tokenizers import Tokenizer as HFTokenizer
from tokenizers.models import BPE, WordPiece

# The most words of a table: about 15 MB. Later words are not kept.
_MOST_WORDS = 1 << 16
# A longer word is not kept. Most words of this length occur once.
_LONGEST_WORD = 32

# Some tokenizers remove other control characters, and for some they are white space.
_PLAIN = re.compile(r"[\t\n\r -~]*")
_BERT_WORDS = re.compile(r"[0-9A-Za-z]+|[!-/:-@\[-`{-~]")
# The pattern in the tokenizers of Qwen2 and Qwen3, and the same pattern for ASCII: Python's `re` has no \p{L} and \p{N}.
_QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN_WORDS = re.compile(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_STEPS = [
    {"type": "Split", "pattern": {"Regex": _QWEN}, "behavior": "Isolated", "invert": False},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
]


class WordTable:
    """The ids of all words so far. Safe to call from several threads."""

    def __init__(self, tokenizer: HFTokenizer, words: re.Pattern[str], lowercase: bool) -> None:
        self._tokenizer, self._words, self._lowercase = tokenizer, words, lowercase
        self._ids: dict[str, tuple[int, ...]] = {}
        added = [each.content for each in tokenizer.get_added_tokens_decoder().values()]
        # A text with an added token, such as "[SEP]", is not only words. The search begins with the first characters of added
        # tokens, because that is fast.
        # The case is ignored, because the library finds some added tokens in the lower-case text.
        self._marks = "".join({each[0].lower() for each in added} | {each[0].upper() for each in added})
        self._added = re.compile("|".join(map(re.escape, added)), re.IGNORECASE)

    @classmethod
    def of(cls, tokenizer: HFTokenizer) -> "WordTable | None":
        """The table of a tokenizer that neither truncates nor pads. None for other kinds of tokenizers."""
        normalizer, pre = _state(tokenizer.normalizer), _state(tokenizer.pre_tokenizer)
        model = tokenizer.model
        if any(each.normalized and not each.content.isascii() for each in tokenizer.get_added_tokens_decoder().values()):
            return None  # an added token with accents could match an ASCII text once its accents are removed
        if normalizer.get("type") == "BertNormalizer" and pre == {"type": "BertPreTokenizer"} and isinstance(model, WordPiece):
            return cls(tokenizer, _BERT_WORDS, bool(normalizer["lowercase"]))
        is_qwen = normalizer.get("type", "NFC") == "NFC" and pre.get("type") == "Sequence" and pre["pretokenizers"] == QWEN_STEPS
        if is_qwen and isinstance(model, BPE) and not model.dropout:
            return cls(tokenizer, _QWEN_WORDS, lowercase=False)
        return None

    def ids(self, text: str) -> list[int] | None:
        """The ids that the tokenizer gives without special tokens. None for a text that needs the tokenizer itself."""
        if not _PLAIN.fullmatch(text):
            return None
        if any(mark in text for mark in self._marks) and self._added.search(text):
            return None
        words, known = self._words.findall(text.lower() if self._lowercase else text), self._ids
        try:
            return list(chain.from_iterable([known[word] for word in words]))
        except KeyError:
            new = self._learn([word for word in dict.fromkeys(words) if word not in known])
            return list(chain.from_iterable([new[word] if word in new else known[word] for word in words]))

    def _learn(self, words: list[str]) -> dict[str, tuple[int, ...]]:
        encoding = self._tokenizer.encode(words, is_pretokenized=True, add_special_tokens=False)
        ids: dict[str, tuple[int, ...]] = dict.fromkeys(words, ())
        for index, id in zip(encoding.word_ids, encoding.ids, strict=True):
            assert index is not None, "only special tokens have no word"
            ids[words[index]] += (id,)
        if len(self._ids) + len(words) <= _MOST_WORDS:
            self._ids.update({word: each for word, each in ids.items() if len(word) <= _LONGEST_WORD})
        return ids


def _state(step: Any) -> dict[str, Any]:
    """A step of a tokenizer in the form of tokenizer.json. Empty for None."""
    found: dict[str, Any] = json.loads(step.__getstate__()) if step is not None else {}
    return found
