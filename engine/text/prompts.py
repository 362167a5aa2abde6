"""Texts and messages -> the token ids of a prompt, and the tokens of an answer -> text."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from tokenizers import Tokenizer as HFTokenizer

from engine.errors import InvalidInput
from engine.options import TokenIds
from engine.text.chat import ChatFormat, ChatTemplate, tokenizer_settings
from engine.text.detokenizer import Detokenizer, TokenBytes

# The most tokens of a prompt. No model takes as many, and the library copies all of them in one call that holds the GIL.
_MOST_TOKENS = 1_000_000
_SLICE = 1 << 16


class Prompts:
    """The tokenizer of a generation model. Safe to call from several threads.

    The library's functions for batches release the GIL. Those for one text hold it: a prompt of 8 MB would stop the process for
    20 s.
    """

    def __init__(
        self, tokenizer: HFTokenizer, template: ChatTemplate | None, settings: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """`settings`: `chat.tokenizer_settings` of the model's folder.

        Raises: ModelError for a tokenizer whose decoder is not supported.
        """
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.tokenizer, self.template, self.settings = tokenizer, template, settings
        self._bytes = TokenBytes(tokenizer)  # a decoder that is not supported stops the start

    @classmethod
    def of(cls, folder: Path, tokenizer: HFTokenizer) -> "Prompts":
        """The tokenizer with the folder's settings. Raises: ModelError for a broken chat template, and as `__init__`."""
        return cls(tokenizer, ChatTemplate.load(folder), tokenizer_settings(folder))

    @property
    def chat_format(self) -> ChatFormat:
        """The marks around the parts of answers to `encode_chat`."""
        return ChatFormat() if self.template is None else self.template.format

    def encode(self, text: str, *, add_special_tokens: bool = True) -> TokenIds:
        """The ids of a text to continue, with the tokenizer's special tokens before it.

        Raises: InvalidInput for more than a million tokens.
        """
        return self._ids(text, add_special_tokens)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, add_special_tokens: bool = False, **options: Any) -> TokenIds:
        """The ids of a conversation that the model is to answer. `options` are the options of `ChatTemplate.render`.

        Raises: as `encode`; InvalidInput if there is no chat template, and for messages that the template cannot take.
        """
        if self.template is None:
            raise InvalidInput("this model has no chat template, so it takes no messages; give it a text to continue")
        return self._ids(self.template.render(messages, **options), add_special_tokens)

    def token(self, token_id: int) -> str | None:
        """The token's text in the vocabulary. None: the tokenizer has no such token."""
        token: str | None = self.tokenizer.id_to_token(token_id)
        return token

    def decode(self, prompt: TokenIds) -> str:
        """The text of a prompt, special tokens included."""
        (text,) = self.tokenizer.decode_batch([prompt.tolist()], skip_special_tokens=False)
        return str(text)

    def detokenizer(self, prompt: TokenIds, stop: Sequence[str] = (), **options: Any) -> Detokenizer:
        """The detokenizer of an answer. `options` are the options of `Detokenizer`."""
        return Detokenizer(self._bytes, prompt.tolist(), stop=stop, **options)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds inside a text, special or not."""
        return self._bytes[token_id]

    @property
    def eos_id(self) -> int | None:
        """The id of the tokenizer's token for the end. None: the tokenizer has no such token."""
        text = self.settings.get("eos_token")
        found: int | None = None if text is None else self.tokenizer.token_to_id(text)
        return found

    def _ids(self, text: str, add_special_tokens: bool) -> TokenIds:
        try:
            (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:  # the text cannot be in UTF-8
            raise InvalidInput("the prompt has half of a surrogate pair, which is no character; remove it") from error
        if len(encoding) > _MOST_TOKENS:
            raise InvalidInput(f"the prompt has {len(encoding)} tokens, no model takes more than {_MOST_TOKENS}; shorten it")
        ids = encoding.ids
        # In slices, because numpy holds the GIL while it reads a list.
        return np.concatenate([np.array(ids[i : i + _SLICE], dtype=np.int32) for i in range(0, max(1, len(ids)), _SLICE)])
