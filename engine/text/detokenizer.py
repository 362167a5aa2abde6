"""Token ids -> text, one token at a time, up to the first stop string. No torch here.

Every token is a fixed string of bytes. The text is these bytes, decoded as UTF-8. So a token costs the same at the start and at
the end of a long answer, and no earlier token is decoded again. `tokenizers.decoders.DecodeStream` decodes the last tokens at
each step instead. A run of invalid bytes makes its steps longer and longer, and it raises for some runs of byte tokens.
"""

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence
from contextlib import suppress

from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders

from engine.errors import InvalidInput, ModelError

_Utf8Decoder = getincrementaldecoder("utf-8")
# The most bytes of an incomplete UTF-8 character.
_MAX_PARTIAL_BYTES = 3
# The names that SentencePiece gives to tokens for a single byte.
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


class TokenBytes:
    """The bytes that each token of a vocabulary adds to a text. Safe to use from several threads.

    All streams of a tokenizer share its table. Do not add tokens to the tokenizer afterwards.
    """

    def __init__(self, tokenizer: HFTokenizer) -> None:
        """Raises: ModelError for a decoder whose text for a token depends on the tokens after it."""
        decoder = tokenizer.decoder
        if isinstance(decoder, decoders.BPEDecoder | decoders.CTC):
            raise ModelError(f"tokenizer.json has the decoder {type(decoder).__name__}; text generation does not support it")
        self.tokenizer = tokenizer
        self._decode = decoder.decode if decoder else " ".join
        self._alphabet = _byte_alphabet() if self._decode(["Ã", "©"]) == "é" else None
        self._has_byte_tokens = self._decode(["<0xC3>", "<0xA9>"]) == "é"
        self.special_ids = frozenset(id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self._known: dict[int, bytes] = {}
        self.texts = _Texts(self)

    def __getitem__(self, token_id: int) -> bytes:
        """Returns the bytes of a token that follows another token. An id without a token has none."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._bytes(token_id)
        return found

    def opening(self, token_id: int) -> bytes:
        """Returns the bytes of the first token of a text. Some decoders leave out the space before the first word."""
        token = self.tokenizer.id_to_token(token_id)
        text = self._decode([token]) if token is not None else ""
        # The replacement character stands for a part of a character: such a token has no space before it.
        return self[token_id] if "\ufffd" in text else text.encode()

    def _bytes(self, token_id: int) -> bytes:
        token = self.tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._alphabet is not None:
            # Added tokens may have characters outside of the alphabet. They are plain text.
            known = all(char in self._alphabet for char in token)
            return bytes(self._alphabet[char] for char in token) if known else token.encode()
        if self._has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return self._decode(["a", token]).removeprefix("a").encode()


class _Texts(dict[int, str | None]):
    """The text of each token. None for a special token, and for one with a part of a character."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes

    def __missing__(self, token_id: int) -> str | None:
        text: str | None = None
        if token_id not in self._token_bytes.special_ids:
            with suppress(UnicodeDecodeError):
                text = self._token_bytes[token_id].decode()
        self[token_id] = text
        return text


class Detokenizer:
    """The text of one answer, as its tokens arrive.

    The results of all calls of `push` and of `finish` together are `tokenizer.decode(prompt_ids + answer)` without the prompt's
    text, up to the stop string. There is one exception. If consecutive byte tokens (<0x0A>) are not valid UTF-8, `tokenizers`
    gives a replacement character for each byte, even for bytes of complete characters. Here complete characters stay, because
    the caller may already have them.
    A character that begins in the prompt and ends in the answer is in the answer's text.

    Attributes:
        stopped: the stop string that ended the text, or None.
    """

    def __init__(
        self,
        table: TokenBytes,
        prompt_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        shown: Sequence[str] = (),
        include_stop: bool = False,
    ) -> None:
        """
        Args:
            shown: names of special tokens that stay in the text, such as `<tool_call>`.
            stop: strings that end the text. The first complete one wins. If two end at the same character, the longer one wins.
            include_stop: leave the stop string in the text.
        Raises: InvalidInput for an empty stop string.
        """
        if "" in stop:
            raise InvalidInput("`stop` cannot have an empty string; remove it")
        self.stopped: str | None = None
        self._bytes = table
        self._skipped = frozenset[int]()
        if skip_special_tokens:
            self._skipped = self._bytes.special_ids.difference(map(table.tokenizer.token_to_id, shown))
        self._searches = [_Search(each) for each in sorted(stop, key=len, reverse=True)]
        self._first_chars = frozenset(each[0] for each in stop)
        self._include_stop = include_stop
        self._held = ""  # the end of the text, while it may be the beginning of a stop string
        self._utf8 = _Utf8Decoder("replace")
        self._opening = True  # the text has no token yet
        self._read_prompt(prompt_ids)
        self._texts = self._bytes.texts
        self._is_between = False  # between two characters inside the text, and no stop string may have begun

    def push(self, token_id: int) -> str:
        """Returns the text that this token makes final. It is empty after the stop string."""
        if self._is_between:
            text = self._texts[token_id]
            if text is not None and (not self._first_chars or self._first_chars.isdisjoint(text)):
                return text
        text = self._pushed(token_id)
        self._is_between = not (self._opening or self._held or self._utf8.getstate()[0]) and self.stopped is None
        return text

    def _pushed(self, token_id: int) -> str:
        if self.stopped is not None or token_id in self._skipped:
            return ""
        if self._opening:
            added = self._bytes.opening(token_id)
            self._opening = not self._bytes[token_id]
        else:
            added = self._bytes[token_id]
        return self._until_stop(self._utf8.decode(added))

    def finish(self) -> str:
        """Returns the text that was held back. Then check `stopped`: the last character may complete a stop string.

        An incomplete character becomes the replacement character.
        """
        if self.stopped is not None:
            return ""
        text = self._until_stop(self._utf8.decode(b"", final=True))
        text, self._held = text + self._held, ""
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that the token adds inside a text, special or not: `bytes` of OpenAI's logprobs."""
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """Returns the token as text: `token` of OpenAI's logprobs. Parts of a character become the replacement character."""
        return self._bytes[token_id].decode("utf-8", "replace")

    def _read_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Start after the prompt, with the bytes of its last character if that character is incomplete."""
        last = b""
        for token_id in reversed(prompt_ids):
            if token_id not in self._skipped:
                last = self._bytes[token_id] + last
                self._opening = self._opening and not last
                if len(last) >= _MAX_PARTIAL_BYTES:
                    break
        self._utf8.decode(last[-_MAX_PARTIAL_BYTES:])

    def _until_stop(self, added: str) -> str:
        """Returns the text up to the stop string, without characters that a stop string may still need."""
        if not self._held and self._first_chars.isdisjoint(added):
            return added
        text = self._held + added
        for end, char in enumerate(added, start=len(self._held) + 1):
            # Every search has to see the character. So this is a list, and the longest match is chosen afterwards.
            found = [search.stop for search in self._searches if search.step(char)]
            if found:
                self.stopped, self._held = found[0], ""
                return text[: end if self._include_stop else end - len(found[0])]
        held = max(search.matched for search in self._searches)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


class _Search:
    """Searches for one stop string, character by character (Knuth, Morris and Pratt 1977). No stop string makes the search slow.

    Attributes:
        matched: the number of the stop string's first characters that the text ends with.
    """

    __slots__ = ("_shorter", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop, self.matched = stop, 0
        # For each beginning of the stop string: the longest shorter beginning that it ends with.
        self._shorter = [0] * len(stop)
        for i in range(1, len(stop)):
            self._shorter[i] = self._next(self._shorter[i - 1], stop[i])

    def step(self, char: str) -> bool:
        """Returns whether the text now ends with the stop string. Do not call it again after that."""
        self.matched = self._next(self.matched, char)
        return self.matched == len(self.stop)

    def _next(self, matched: int, char: str) -> int:
        while matched and self.stop[matched] != char:
            matched = self._shorter[matched - 1]
        return matched + (self.stop[matched] == char)


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte that each character stands for in byte-level BPE. Source: `bytes_to_unicode` of GPT-2.

    Printable Latin-1 characters stand for themselves. The other bytes are the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
