"""Text -> token ids, exactly as the model's own tokenizer gives them. No torch here.

This module truncates ids, not texts: it learns the special tokens once, at load, and puts them around the ids that stay. No
request changes the shared `tokenizers.Tokenizer`, so requests with different truncation run in parallel.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding
from tokenizers import Tokenizer as HFTokenizer
from tokenizers.processors import TemplateProcessing

from engine.errors import EmptyInput, InvalidInput, ModelError, TokenizerError
from engine.model.config import ModelConfig, named_prompt
from engine.model.keys import Keys
from engine.options import Direction, EncodeOptions, Input, InputType, TokenIds
from engine.sequences import Sequences
from engine.text.chunks import ChunkedText, original_span, windows
from engine.text.ids import checked_ids
from engine.text.pairs import SECOND_SEGMENT, InstructTemplate, PairTemplate, truncated
from engine.text.tokenizer_settings import override
from engine.text.word_table import WordTable

# The most characters of a text for each token of the limit. A longer text is truncated or refused before it is tokenised, so a
# huge string costs no more than the longest valid one. TEI has the same factor.
_CHARS_PER_TOKEN = 250
# Texts of up to this many characters together get their ids from the word table. Each of its steps holds the GIL, for at most
# 0.3 ms with this many characters. The library releases the GIL, and tokenises several texts at once.
_WORD_TABLE_CHARS = 1 << 15
_ID_BYTES = 4
# A request's prompt is put before each input. With 2,048 inputs a longer prompt would make far more text than a body may have.
_MAX_PROMPT_CHARS = 8_192
# The most tokens of one text that `Tokenizer.tokens` returns. The library copies each list of an encoding in one call that holds
# the GIL, for about 10 ms with this many tokens.
_MOST_SHOWN_TOKENS = 1 << 16
# The most characters of all pairs of one request. The template repeats the query for each document.
_MAX_INSTRUCT_CHARS = 64_000_000

# Names of the prompt for each kind of input in published models. The first name that a model has is used. The names of
# sentence-transformers (`encode_query`, `encode_document`) come first.
_PROMPT_NAMES: dict[InputType, tuple[str, ...]] = {
    "query": ("query", "retrieval.query", "search_query", "web_search_query", "s2p_query"),
    "document": ("document", "passage", "corpus", "retrieval.passage", "search_document"),
    "classification": ("classification", "Classification"),
    "clustering": ("clustering", "Clustering"),
}


@dataclass(frozen=True, slots=True)
class Token:
    """One token of `/tokenize`. `start` and `stop` are byte offsets; None for special tokens."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class Tokenizer:
    """The model's tokenizer, limits and prompts. Safe to call from several threads."""

    def __init__(self, tokenizer: HFTokenizer, config: ModelConfig) -> None:
        self._truncation_side: Direction = (tokenizer.truncation or {}).get("direction", "right")
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._words = WordTable.of(tokenizer)
        self._config = config
        self._prefix, self._suffix = _special_tokens(tokenizer)
        self._special = array("i", self._prefix).tobytes(), array("i", self._suffix).tobytes()
        self._may_end_with_padding = config.padding_id is not None and self._suffix[-1:] in ([], [config.padding_id])
        self._pairs = _pair_template(tokenizer, config)
        self.limit_to(config.max_input_length)
        num_special = max(self.num_special, self._pairs.num_special if self._pairs else 0)
        if num_special >= self.max_input_length:
            raise ModelError(f"max_input_length {self.max_input_length} leaves no room beside {num_special} special tokens")
        self._check_special_tokens()
        # Such models may load: EmbeddingGemma's tokenizer has <image_soft_token>, for which the model has no embedding.
        self._exceeds_table = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) >= config.vocab_size

    @classmethod
    def load(cls, folder: Path, config: ModelConfig) -> "Tokenizer":
        """Raises: ModelError if the folder has no readable tokenizer.json, or a special token without an embedding."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder} has no tokenizer.json (only fast tokenizers are supported)")
        try:
            tokenizer = HFTokenizer.from_file(str(path))
            as_given = tokenizer.post_processor
            settings = Keys.read(folder / "tokenizer_config.json")
            override(tokenizer, settings)
            if config.generation is None or config.embeds:
                _add_end_of_text(tokenizer, settings)
            made = cls(tokenizer, config)
            settings.refuse("truncation_side", ("left", "right", None), "only left and right")
            # tokenizer_config.json overrides tokenizer.json, as in transformers.
            made._truncation_side = settings.get("truncation_side") or made._truncation_side
            if config.generation is not None:  # with the token, a prompt would already have ended before the answer
                tokenizer.post_processor = as_given
            return made
        except ModelError:
            raise
        except BaseException as error:  # tokenizers raises bare Exception; a panic of its Rust code is not even that
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ModelError(f"{path} cannot be loaded: {error}") from error

    def __getstate__(self) -> dict[str, Any]:
        """The state for another process, with the config's fields that all families share. A family's own class imports torch."""
        config = ModelConfig(**{each.name: getattr(self._config, each.name) for each in fields(ModelConfig)})
        return vars(self) | {"_config": config}

    @property
    def shared(self) -> HFTokenizer:
        """The library's tokenizer, for other code to encode with. No code may change it."""
        return self._tokenizer

    @property
    def num_special(self) -> int:
        return len(self._prefix) + len(self._suffix)

    def ids(self, tokens: Sequence[str]) -> list[int]:
        """Returns the ids of the tokens that are in the vocabulary."""
        return [id for token in tokens if (id := self._tokenizer.token_to_id(token)) is not None]

    def limit_to(self, max_input_length: int) -> None:
        """Cut or refuse inputs of more tokens from now on, special tokens included."""
        self.max_input_length = max_input_length
        self.max_chars = max_input_length * _CHARS_PER_TOKEN

    def encode(self, inputs: Sequence[Input], options: EncodeOptions, first: int = 0) -> Sequences:
        """Encode inputs of a request, in order. Texts get the prompt and special tokens. Ids are used unchanged.

        Args:
            first: the number of the first of these inputs in its request, for errors.
        Returns: a sequence per input, at least one id each, at most `max_input_length`.
        Raises: EmptyInput, InvalidInput or TokenizerError naming the first input that cannot be encoded. InvalidInput also for a
            text with a token that has no embedding.
        """
        prompt = self._prompt_text(options)
        _check_room(options, self.num_special)
        texts = [each for each in inputs if isinstance(each, str)]
        if not self._are_plain(texts):
            texts = [self._checked_text(i, text, options) for i, text in enumerate(inputs, first) if isinstance(text, str)]
        elif self._config.lower_case:
            texts = list(map(str.lower, texts))
        encoded = self._with_specials(self._contents([prompt + text for text in texts] if prompt else texts), options)
        if len(texts) == len(inputs) and self._are_whole(encoded):
            return encoded
        of_texts, sequences = iter(encoded), []
        for index, item in enumerate(inputs, first):
            ids = self._known(index, next(of_texts)) if isinstance(item, str) else self._given_ids(index, item, options)
            sequences.append(self._without_padding(ids))
        return Sequences.of(sequences)

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], options: EncodeOptions, instruction: str | None = None, first: int = 0
    ) -> list[TokenIds]:
        """Encode pairs of texts for a classifier or a reranker, in order. One text of a pair may be empty.

        Args:
            options: options without a prompt. The default prompt is put before the first text, as in sentence-transformers.
            instruction: replaces the model's instruction, if the model's template has one.
            first: the number of the first of these pairs in its request, for errors.
        Returns: one int32 array per pair, at most `max_input_length` ids. If the model has segment types, SECOND_SEGMENT is set
            in the ids of the second text.
        Raises: EmptyInput, InvalidInput or TokenizerError naming the first pair that cannot be encoded.
        """
        assert self._pairs is not None, "pairs are for classifiers and rerankers"
        for name in ("prompt_name", "prompt", "input_type"):
            if getattr(options, name) is not None:
                raise InvalidInput(f"`{name}` cannot be set with dual inputs")
        _check_room(options, self._pairs.num_special)
        checked = [self._checked_pair(index, pair, options) for index, pair in enumerate(pairs, first)]
        if isinstance(self._pairs, InstructTemplate):
            self.check_total(checked, instruction)
            return self._instruct(self._pairs, checked, options, self._instruction(instruction), first)
        if instruction is not None:
            raise InvalidInput("`instruction` cannot be set: the model has none in its template")
        prompt = self._prompt_text(options)
        return self._join(self._pairs, [(prompt + one, other) for one, other in checked], options, first)

    def check_total(self, pairs: Sequence[tuple[str, ...]], instruction: str | None) -> None:
        """Raises: InvalidInput if the pairs of a request have too many characters for a template that repeats the query."""
        if isinstance(self._pairs, InstructTemplate):
            num_chars = sum(min(len(query) + len(document), self.max_chars) for query, document in pairs)
            if num_chars + len(self._instruction(instruction)) * len(pairs) > _MAX_INSTRUCT_CHARS:
                raise InvalidInput("query and documents are too long together; send fewer documents or a shorter query")

    def prompt(self, options: EncodeOptions) -> str:
        """Returns the text before a request's texts: the request's prompt, otherwise the default prompt, otherwise "".

        Raises: InvalidInput for a prompt that the model does not have, or that cannot be used.
        """
        if options.prompt is not None:
            return self._given_prompt(options.prompt, options.prompt_name)
        if options.prompt_name is not None:
            return named_prompt(self._config.prompts, options.prompt_name)
        if options.input_type is not None:
            prompts = self._config.prompts
            return next((prompts[name] for name in _PROMPT_NAMES[options.input_type] if name in prompts), "")
        return self._config.default_prompt or ""

    def tokens(self, texts: Sequence[str], add_special_tokens: bool, options: EncodeOptions) -> list[list[Token]]:
        """Returns all tokens of each text, with byte offsets into prompt + text. The default prompt is not added.

        Raises: as `encode`; InvalidInput for a text of too many tokens.
        """
        asked = (options.prompt, options.prompt_name, options.input_type) != (None, None, None)
        prompt = self.prompt(options) if asked else ""
        whole = [prompt + text for text in texts]
        encodings = self._encode_batch(list(self._cased(tuple(whole))), add_special_tokens, offsets=True)
        longest = max(map(len, encodings), default=0)
        if longest > _MOST_SHOWN_TOKENS:
            raise InvalidInput(f"a text has {longest} tokens, the limit is {_MOST_SHOWN_TOKENS}; send it in parts")
        spans = [original_span(text, self._config.lower_case, before=0, dropped=0) for text in whole]
        return [_tokens_of(*each) for each in zip(whole, encodings, spans, strict=True)]

    def chunk(self, index: int, text: str, size: int, overlap: int, most: int, whole: EncodeOptions | None) -> ChunkedText:
        """Split a text into chunks of `size` tokens. The last chunk may have fewer. A text without a token is one chunk.

        Without `whole` each chunk becomes a text of its own, and `windows` says when it has fewer tokens.

        Args:
            index: number of the input in its request, for errors.
            overlap: each chunk begins with the last `overlap` tokens of the chunk before.
            most: the most chunks of the text.
            whole: the options to encode the text as one input. Text beyond the limit is in no chunk, or it is refused. None: all
                tokens of the text count, without prompt and special tokens.
        Raises: as `encode`; InvalidInput for more than `most` chunks.
        """
        prompt, dropped, texts = "", 0, _checked(index, (text,))
        if whole is not None:
            prompt, texts = self._prompt_text(whole), self._truncate_texts(texts, whole)
            dropped = len(text) - len(texts[0]) if self._direction(whole) == "left" else 0
        (encoding,) = self._encode_batch([prompt + self._cased(texts)[0]], add_special_tokens=False, offsets=True)
        ids, at = encoding.ids, encoding.offsets  # `tokenizers` builds a new list at each access
        kept, prefix, suffix = range(len(ids)), list[int](), list[int]()
        if whole is not None:
            prefix, suffix, room = self._prefix, self._suffix, self._limit(whole) - self.num_special
            kept = kept[self._kept(len(ids), room, self.num_special, whole)]
        token_ids = self._known(index, np.array(prefix + ids[kept.start : kept.stop] + suffix, dtype=np.int32))
        content = [i for i in kept if at[i][1] > max(len(prompt), at[i][0])]
        if not content:
            if whole is not None and not len(token_ids):
                raise EmptyInput("`inputs` cannot be empty")
            return ChunkedText(token_ids, ((0, max(1, len(token_ids))),), [(0, len(text))])
        shift = len(prefix) - kept.start
        span = original_span(texts[0], self._config.lower_case, len(prompt), dropped)

        def offsets(chunks: list[tuple[int, int]]) -> list[tuple[int, int]]:
            return [span(at[content[start]][0], at[content[stop - 1]][1]) for start, stop in chunks]

        def alone(chunks: list[tuple[int, int]]) -> list[int]:
            contents = self._contents(list(self._cased(tuple(text[start:stop] for start, stop in offsets(chunks)))))
            return [len(each) // _ID_BYTES for each in contents]

        chunks = windows(len(content), size, overlap, most, index, alone if whole is None else None)
        spans = tuple((content[start] + shift, content[stop - 1] + 1 + shift) for start, stop in chunks)
        return ChunkedText(token_ids, spans, offsets(chunks))

    def longest_text(self, options: EncodeOptions) -> int:
        """Returns the most tokens of a text that no truncation cuts: the limit minus special tokens and the prompt's tokens."""
        (prompt,) = self._encode_batch([self._prompt_text(options)], add_special_tokens=False)
        return self._limit(options) - self.num_special - len(prompt)

    def decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        """Each sequence's text. Raises: EmptyInput for a sequence without ids, InvalidInput for ids outside the vocabulary."""
        for index, ids in enumerate(sequences):
            if not ids:
                raise EmptyInput("`input_ids` cannot be empty")
            checked_ids(index, ids, self._config.vocab_size)
        return [str(text) for text in self._tokenizer.decode_batch(list(map(list, sequences)), skip_special_tokens)]

    def _given_prompt(self, prompt: str, name: str | None) -> str:
        if name is not None:
            raise InvalidInput("`prompt` and `prompt_name` cannot be set together; leave one out")
        if len(prompt) > _MAX_PROMPT_CHARS:
            raise InvalidInput(f"`prompt` must have at most {_MAX_PROMPT_CHARS} characters. Given: {len(prompt)}")
        if "\0" in prompt:
            raise InvalidInput("`prompt` cannot contain NUL characters; remove them")
        return prompt

    def _prompt_text(self, options: EncodeOptions) -> str:
        return self._cased((self.prompt(options),))[0]

    def _are_plain(self, texts: list[str]) -> bool:
        """Whether `_checked_text` would accept all of these texts, and truncate none of them."""
        return all(texts) and max(map(len, texts), default=0) <= self.max_chars and "\0" not in "".join(texts)

    def _are_whole(self, encoded: Sequences) -> bool:
        """Whether `_known` and `_without_padding` would accept all of these sequences, and shorten none of them."""
        return (
            (bool(self.num_special) or encoded.first_empty() is None)
            and not self._may_end_with_padding
            and (not self._exceeds_table or int(encoded.token_ids.max(initial=0)) < self._config.vocab_size)
        )

    def _checked_text(self, index: int, text: str, options: EncodeOptions) -> str:
        return self._cased(self._truncate_texts(_checked(index, (text,)), options))[0]

    def _checked_pair(self, index: int, pair: tuple[str, str], options: EncodeOptions) -> tuple[str, ...]:
        return self._cased(self._truncate_texts(_checked(index, pair), options))

    def _truncate_texts(self, texts: tuple[str, ...], options: EncodeOptions) -> tuple[str, ...]:
        """Returns the texts of one input. If they have too many characters together, each is truncated to an equal share."""
        num_chars = sum(map(len, texts))
        if num_chars <= self.max_chars:
            return texts
        if not options.truncate:
            raise InvalidInput(f"`inputs` must have less than {self.max_chars} characters. Given: {num_chars}")
        share = self.max_chars // len(texts)
        return tuple(text[-share:] if self._direction(options) == "left" else text[:share] for text in texts)

    def _cased(self, texts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(str.lower, texts)) if self._config.lower_case else texts

    def _instruction(self, given: str | None) -> str:
        if given is None:
            return self._config.instruction or ""
        if len(given) > _MAX_PROMPT_CHARS:
            raise InvalidInput(f"`instruction` must have at most {_MAX_PROMPT_CHARS} characters. Given: {len(given)}")
        if "\0" in given:
            raise InvalidInput("`instruction` cannot contain NUL characters; remove them")
        return given

    def _join(self, template: PairTemplate, pairs: list[tuple[str, ...]], options: EncodeOptions, first: int) -> list[TokenIds]:
        texts = list(dict.fromkeys(chain.from_iterable(pairs)))  # the query of many pairs is tokenised only once
        ids = {text: each.ids for text, each in zip(texts, self._encode_batch(texts, False), strict=True)}
        room, direction, most = self._limit(options) - template.num_special, self._direction(options), options.max_document_tokens
        of_pairs = [(ids[a], ids[b] if most is None else truncated(ids[b], most, direction)) for a, b in pairs]
        if not options.truncate:
            self._check_fits((len(a) + len(b) for a, b in of_pairs), room, template.num_special, options)
        joined = (template.join(a, b, room, direction) for a, b in of_pairs)
        return [self._without_padding(self._known(index, each)) for index, each in enumerate(joined, first)]

    def _instruct(
        self, template: InstructTemplate, pairs: list[tuple[str, ...]], options: EncodeOptions, instruction: str, first: int
    ) -> list[TokenIds]:
        direction, most = self._direction(options), options.max_document_tokens
        heads = [template.head(instruction, query) for query, _ in pairs]
        bodies = [f"{head} {document}" for head, (_, document) in zip(heads, pairs, strict=True)]
        encoded = self._encode_batch(bodies, False, offsets=direction == "left" or most is not None)
        room, ids = self._limit(options) - template.num_special, [body.ids for body in encoded]
        kept = [  # the tokens of each head, where they are read
            template.head_tokens(body, len(head)) if most is not None or (direction == "left" and len(each) > room) else 0
            for each, body, head in zip(ids, encoded, heads, strict=True)
        ]
        if most is not None:
            ids = [each[:head] + truncated(each[head:], most, direction) for each, head in zip(ids, kept, strict=True)]
        if not options.truncate:
            self._check_fits(map(len, ids), room, template.num_special, options)
        wrapped = (template.wrap(each, head, room, direction) for each, head in zip(ids, kept, strict=True))
        return [self._known(index, each) for index, each in enumerate(wrapped, first)]

    def _check_fits(self, lengths: Iterable[int], room: int, num_special: int, options: EncodeOptions) -> None:
        for length in lengths:
            if length > room:
                raise self._too_long(length + num_special, options)

    def _contents(self, texts: list[str]) -> list[bytes]:
        """Returns the ids of each text without special tokens, as the bytes of int32."""
        if not texts:
            return []
        if self._words is not None and sum(map(len, texts)) <= _WORD_TABLE_CHARS:
            contents = self._words.ids(texts)
            if contents is not None:
                return contents
        encodings = self._encode_batch(texts, add_special_tokens=False)
        return [array("i", encoding.ids).tobytes() for encoding in encodings]

    def _encode_batch(self, texts: list[str], add_special_tokens: bool, offsets: bool = False) -> list[Encoding]:
        encode = self._tokenizer.encode_batch if offsets else self._tokenizer.encode_batch_fast
        try:
            return encode(texts, add_special_tokens=add_special_tokens)
        except UnicodeEncodeError as error:
            raise InvalidInput(f"`inputs` must be valid Unicode: {error.reason}") from error
        except Exception as error:  # tokenizers raises bare Exception
            raise TokenizerError(f"tokenizer error {error}") from error

    def _with_specials(self, contents: Sequence[bytes], options: EncodeOptions) -> Sequences:
        """Returns the ids of each text with special tokens around them."""
        if not contents:
            return Sequences.of([])
        room = self._limit(options) - self.num_special
        if max(map(len, contents)) > room * _ID_BYTES:
            contents = [self._cut(content, room, options) for content in contents]
        prefix, suffix = self._special
        whole = bytearray(prefix)  # an array of `bytes` would be read-only
        whole += (suffix + prefix).join(contents)
        whole += suffix
        lengths = [len(content) // _ID_BYTES + self.num_special for content in contents]
        return Sequences(np.frombuffer(whole, dtype=np.int32), list(accumulate(lengths, initial=0)))

    def _cut(self, content: bytes, room: int, options: EncodeOptions) -> bytes:
        ids = np.frombuffer(content, dtype=np.int32)
        return ids[self._kept(len(ids), room, self.num_special, options)].tobytes()

    def _given_ids(self, index: int, item: object, options: EncodeOptions) -> TokenIds:
        ids = checked_ids(index, item, self._config.vocab_size)
        return ids[self._kept(len(ids), self._limit(options), 0, options)].astype(np.int32)

    def _limit(self, options: EncodeOptions) -> int:
        """Returns the number of tokens that an input of the request may have, special tokens included."""
        return min(self.max_input_length, options.max_tokens or self.max_input_length)

    def _direction(self, options: EncodeOptions) -> Direction:
        """Returns the side of an input that loses tokens."""
        return options.truncation_direction or self._truncation_side

    def _kept(self, length: int, room: int, num_special: int, options: EncodeOptions) -> slice:
        """Returns the part of `length` tokens that stays in `room`. Raises: InvalidInput for too many without truncation."""
        if length <= room:
            return slice(None)
        if not options.truncate:
            raise self._too_long(length + num_special, options)
        return slice(length - room, None) if self._direction(options) == "left" else slice(room)

    def _too_long(self, given: int, options: EncodeOptions) -> InvalidInput:
        return InvalidInput(f"`inputs` must have less than {self._limit(options)} tokens. Given: {given}")

    def _without_padding(self, ids: TokenIds) -> TokenIds:
        """Returns an input's ids without the padding tokens at the end. One padding token stays if there is no other token."""
        if not len(ids):
            raise EmptyInput("`inputs` cannot be empty")
        padding = self._config.padding_id
        if padding is None or ids[-1] != padding:
            return ids
        others = np.flatnonzero(ids != padding)
        return ids[: others[-1] + 1 if len(others) else 1]

    def _known(self, index: int, ids: TokenIds) -> TokenIds:
        """Returns the ids of a tokenised text or pair. Raises: InvalidInput for a token without an embedding."""
        if self._exceeds_table:
            highest = int((ids & ~SECOND_SEGMENT).max(initial=0))
            if highest >= self._config.vocab_size:
                raise InvalidInput(f"input {index} has {self._unknown(highest)}; remove the token from the text")
        return ids

    def _check_special_tokens(self) -> None:
        """Raises: ModelError for a special token without an embedding, because every text would contain the token."""
        special = [*self._prefix, *self._suffix, *(self._pairs.special if self._pairs else ())]
        highest = max((each & ~SECOND_SEGMENT for each in special), default=0)
        if highest >= self._config.vocab_size:
            raise ModelError(
                f"around each text the tokenizer puts {self._unknown(highest)}; resize the model's embeddings to the tokenizer"
            )

    def _unknown(self, token_id: int) -> str:
        name = self._tokenizer.id_to_token(token_id)
        return f"the token {name!r} (id {token_id}), the model has embeddings up to id {self._config.vocab_size - 1}"


def _checked(index: int, texts: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the texts of one input. Raises: EmptyInput if all are empty, InvalidInput for NUL."""
    if not any(texts):
        raise EmptyInput("`inputs` cannot be empty")
    for text in texts:  # a generator for `any` would take longer than all other checks of a short text
        if "\0" in text:
            raise InvalidInput(f"`inputs` cannot contain NUL characters, input {index} does; remove them")
    return texts


def _check_room(options: EncodeOptions, num_special: int) -> None:
    if options.max_tokens is not None and options.max_tokens <= num_special:
        raise InvalidInput(f"`max_tokens` should be more than {num_special}, the special tokens around an input")


def _pair_template(tokenizer: HFTokenizer, config: ModelConfig) -> PairTemplate | InstructTemplate | None:
    """Returns the template that makes one input of two texts. None for a model that only embeds."""
    if config.task == "embedding":
        return None
    if config.instruction is not None:
        return InstructTemplate(tokenizer)
    return PairTemplate.learn(tokenizer, config.tells_segments)


def _special_tokens(tokenizer: HFTokenizer) -> tuple[list[int], list[int]]:
    """Returns the special tokens before and after a text. They are found by encoding a text with and without them."""
    for probe in ("a", "hello world", "1"):
        bare = tokenizer.encode(probe, add_special_tokens=False).ids
        full = tokenizer.encode(probe).ids
        for start in range(len(full) - len(bare) + 1):
            if bare and full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
    raise ModelError("the tokenizer's special tokens were not recognised: this tokenizer.json is not supported")


def _add_end_of_text(tokenizer: HFTokenizer, config: Keys) -> None:
    """Let the tokenizer end each text with the end-of-text token, if tokenizer_config.json says so and tokenizer.json does not.

    gte-Qwen2 is such a model, and last-token pooling reads this token. Only the Llama and Gemma tokenizers, and tokenizers with
    code in the folder, obey `add_eos_token`.
    """
    heeds = "auto_map" in config.values or str(config.get("tokenizer_class")).startswith(("Llama", "Gemma"))
    if not heeds or config.get("add_eos_token") is not True:
        return
    end = config.get("eos_token")
    end = str(end["content"] if isinstance(end, dict) else end)
    end_id = tokenizer.token_to_id(end)
    if end_id is None:
        raise ModelError(f"{config.path}: add_eos_token is true, eos_token {end!r} is not in the vocabulary")
    prefix, suffix = _special_tokens(tokenizer)
    if end_id in suffix:
        return
    names = {each: str(tokenizer.id_to_token(each)) for each in (*prefix, *suffix, end_id)}
    parts = [*(names[each] for each in prefix), "$A", *(names[each] for each in (*suffix, end_id))]
    pair = [*parts, *(f"{'$B' if part == '$A' else part}:1" for part in parts)]
    specials = [(name, each) for each, name in names.items()]
    tokenizer.post_processor = TemplateProcessing(single=parts, pair=pair, special_tokens=specials)


def _tokens_of(text: str, encoding: Encoding, span: Callable[[int, int], tuple[int, int]]) -> list[Token]:
    """Returns an encoding's tokens. `tokenizers` gives offsets in characters, TEI answers with bytes.

    Args:
        span: gives the span of `text` for a span of the tokenised text, which may be in lower case.
    """
    code_points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    num_bytes = 1 + sum((code_points >= least).astype(np.int64) for least in (0x80, 0x800, 0x10000))
    byte_at = np.concatenate(([0], np.cumsum(num_bytes)))
    tokens = []
    # Each list is read by a separate call, because the interpreter lets other threads run only between calls.
    columns = [getattr(encoding, name) for name in ("ids", "tokens", "offsets", "special_tokens_mask")]
    for token_id, name, offsets, special in zip(*columns, strict=True):
        if special:
            tokens.append(Token(token_id, name, True, None, None))
        else:
            start, stop = span(*offsets)
            tokens.append(Token(token_id, text[start:stop], False, int(byte_at[start]), int(byte_at[stop])))
    return tokens
