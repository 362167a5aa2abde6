"""Two texts -> one input, by the tokenizer's own template for pairs or by Qwen3-Reranker's. No torch here.

A template is learned once, at load. Pairs that are too long are truncated on the ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding
from tokenizers import Tokenizer as HFTokenizer

from engine.errors import ModelError
from engine.options import Direction

# This bit is set in the ids of a pair's second text, for models with segment types. `BatchPacker.fill` removes the bit.
SECOND_SEGMENT = 1 << 30


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """prefix, first text, middle, second text, suffix. `mark` is set in the second text's ids: SECOND_SEGMENT or 0."""

    prefix: list[int]
    middle: list[int]
    suffix: list[int]
    mark: int

    @classmethod
    def learn(cls, tokenizer: HFTokenizer, typed: bool) -> "PairTemplate":
        """Find the special tokens around the two texts of a pair, by encoding a pair with and without them.

        Raises: ModelError if the two encodings do not show them.
        """
        first, second = "hello world", "1 2"
        a, b = (tokenizer.encode(text, add_special_tokens=False).ids for text in (first, second))
        whole = tokenizer.encode(first, second)
        start = _find(a, whole.ids, 0)
        then = _find(b, whole.ids, start + len(a))
        types = whole.type_ids
        if start < 0 or then < 0 or any(types[start : start + len(a)]) or (typed and max(types) > 1):
            raise ModelError("the tokenizer's template for pairs was not recognised: this tokenizer.json is not supported")
        marked = [token + SECOND_SEGMENT * (typed and kind == 1) for token, kind in zip(whole.ids, types, strict=True)]
        mark = SECOND_SEGMENT if typed and types[then] else 0
        return cls(marked[:start], marked[start + len(a) : then], marked[then + len(b) :], mark)

    @property
    def special(self) -> list[int]:
        return self.prefix + self.middle + self.suffix

    @property
    def num_special(self) -> int:
        return len(self.special)

    def join(self, first: list[int], second: list[int], room: int, direction: Direction) -> NDArray[np.int32]:
        """Returns the pair's ids. `room`: the most tokens of the two texts together. Longer texts are truncated."""
        if len(first) + len(second) > room:
            kept = longest_first(len(first), len(second), room)
            first, second = truncated(first, kept[0], direction), truncated(second, kept[1], direction)
        ids = np.array(self.prefix + first + self.middle + second + self.suffix, dtype=np.int32)
        if self.mark:
            start = len(self.prefix) + len(first) + len(self.middle)
            ids[start : start + len(second)] |= self.mark
        return ids


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Returns the number of tokens that each of two texts keeps. The longer text loses tokens until both have half of `room`.

    Source: `TruncationStrategy::LongestFirst` of tokenizers.
    """
    shorter = min(first, second, room // 2)
    return (room - shorter, shorter) if first > second else (shorter, room - shorter)


# Source: the model cards of Qwen/Qwen3-Reranker-*.
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = f"<|im_start|>system\n{JUDGE}<|im_end|>\n<|im_start|>user\n"
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class InstructTemplate:
    """Qwen3-Reranker's template. The template's question surrounds the pair and is never truncated.

    Instruction, query and document are tokenised as one text, as on the model card. So a document's first word gives the same
    token as in training. The document is at the end, so truncation from the right removes the document's tokens first.
    """

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self.prefix, self.suffix = (tokenizer.encode(text, add_special_tokens=False).ids for text in (_BEFORE, _AFTER))

    @property
    def special(self) -> list[int]:
        return self.prefix + self.suffix

    @property
    def num_special(self) -> int:
        return len(self.special)

    @staticmethod
    def head(instruction: str, query: str) -> str:
        """Returns the text before a document. A space separates the two."""
        return f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>:"

    @staticmethod
    def head_tokens(body: Encoding, head: int) -> int:
        """Counts the tokens of a head of `head` characters. `body`: the encoding of head and document, with offsets."""
        return sum(start < head for start, _ in body.offsets)

    def wrap(self, ids: list[int], head: int, room: int, direction: Direction) -> NDArray[np.int32]:
        """Returns the ids of an input, truncated to `room` tokens of head and document.

        Args:
            ids: of head and document.
            head: the number of the head's tokens. It is read only if the left side of a longer input loses tokens.
        """
        if len(ids) > room:
            kept = 0 if direction == "right" else min(room, head)
            ids = ids[:room] if direction == "right" else ids[:kept] + truncated(ids[kept:], room - kept, "left")
        return np.array(self.prefix + ids + self.suffix, dtype=np.int32)


def truncated(ids: list[int], room: int, direction: Direction) -> list[int]:
    """The `room` tokens that stay if `direction` is the side that loses tokens."""
    return ids[:room] if direction == "right" else ids[max(0, len(ids) - room) :]


def _find(part: Sequence[int], whole: Sequence[int], start: int) -> int:
    """Returns the first place of `part` in `whole` from `start` on; -1 if there is none."""
    if not part or start < 0:
        return -1
    places = range(start, len(whole) - len(part) + 1)
    return next((place for place in places if whole[place : place + len(part)] == part), -1)
