"""Text -> token ids, exactly as the model's own tokenizer gives them. No torch here.

Truncation is done on the ids: special tokens are learned once, when the tokenizer is loaded, and put around the
content after it is cut. The shared `tokenizers.Tokenizer` is therefore never changed by a request, so requests
with different truncation may run in parallel.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
from tokenizers import Encoding
from tokenizers import Tokenizer as HFTokenizer
from tokenizers.processors import TemplateProcessing

from engine.errors import EmptyInput, InvalidInput, ModelError, TokenizerError
from engine.model.config import ModelConfig, named_prompt
from engine.options import EncodeOptions, Input, InputType, TokenIds
from engine.text.ids import checked_ids
from engine.text.pairs import SECOND_SEGMENT, InstructTemplate, PairTemplate

# A text longer than this many characters per allowed token is cut (or refused) before it is tokenised, so that one
# huge string costs no more than the longest legal one. TEI's factor.
_CHARS_PER_TOKEN = 250
# A request's own prompt is put before each of its inputs; longer, 2048 inputs would make far more text than a body may hold.
_MAX_PROMPT_CHARS = 8_192

# Of all pairs of one request that go through a template, in which the query stands again for each document.
_MAX_INSTRUCT_CHARS = 64_000_000

# What published models call the prompt of each kind of input, the first that a model has: sentence-transformers' own names
# (`encode_query`, `encode_document`), then those of models that have none of them.
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


@dataclass(frozen=True, slots=True)
class ChunkedText:
    """A text cut into chunks: `offsets` in characters of the text, `spans` in positions of `token_ids`, both [start, stop)."""

    token_ids: TokenIds
    spans: tuple[tuple[int, int], ...]
    offsets: list[tuple[int, int]]


class Tokenizer:
    """The model's tokenizer with its limits and prompts. Safe to call from several threads."""

    def __init__(self, tokenizer: HFTokenizer, config: ModelConfig) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._config = config
        self._prefix, self._suffix = _special_tokens(tokenizer)
        self._pairs = _pair_template(tokenizer, config)
        self.max_input_length = config.max_input_length
        self.max_chars = config.max_input_length * _CHARS_PER_TOKEN
        num_special = max(self.num_special, self._pairs.num_special if self._pairs else 0)
        if num_special >= self.max_input_length:
            raise ModelError(f"max_input_length {self.max_input_length} leaves no room beside {num_special} special tokens")
        self._check_special_tokens()
        # Such models load: EmbeddingGemma's tokenizer has <image_soft_token>, and the model has no embedding of that token.
        self._exceeds_table = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) >= config.vocab_size

    @classmethod
    def load(cls, folder: Path, config: ModelConfig) -> "Tokenizer":
        """Raises: ModelError when the folder has no tokenizer.json that can be read."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder} has no tokenizer.json (only fast tokenizers are supported)")
        try:
            tokenizer = HFTokenizer.from_file(str(path))
            _add_end_of_text(tokenizer, folder)
            return cls(tokenizer, config)
        except ModelError:
            raise
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelError(f"{path} cannot be loaded: {error}") from error

    @property
    def num_special(self) -> int:
        return len(self._prefix) + len(self._suffix)

    def ids(self, tokens: Sequence[str]) -> list[int]:
        """Of those tokens that the vocabulary has."""
        return [id for token in tokens if (id := self._tokenizer.token_to_id(token)) is not None]

    def encode(self, inputs: Sequence[Input], options: EncodeOptions) -> list[TokenIds]:
        """Encode a request's inputs, in order. Texts get prompt and special tokens; ids are used as they are.

        Returns: one int32 array per input, at least one id each, at most `max_input_length`.
        Raises: EmptyInput, InvalidInput or TokenizerError naming the first input that cannot be encoded.
        """
        prompt = self._prompt_text(options)
        _check_room(options, self.num_special)
        texts = [prompt + self._checked_text(i, text, options) for i, text in enumerate(inputs) if isinstance(text, str)]
        encodings = iter(self._encode_batch(texts, add_special_tokens=False))
        sequences = []
        for index, item in enumerate(inputs):
            if isinstance(item, str):
                ids = self._known(index, self._with_specials(next(encodings).ids, options))
            else:
                ids = self._given_ids(index, item, options)
            sequences.append(self._whole(ids))
        return sequences

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], options: EncodeOptions, instruction: str | None = None
    ) -> list[TokenIds]:
        """Encode pairs of texts for a classifier or a reranker, in order; of two empty texts, one may be.

        Args:
            options: without a prompt; the default one is not for pairs.
            instruction: in place of the model's own, where its template has one.
        Returns: one int32 array per pair, at most `max_input_length` ids; where the model tells the two texts apart,
            SECOND_SEGMENT is set in those of the second.
        Raises: EmptyInput, InvalidInput or TokenizerError naming the first pair that cannot be encoded.
        """
        assert self._pairs is not None, "pairs are for classifiers and rerankers"
        for name in ("prompt_name", "prompt", "input_type"):
            if getattr(options, name) is not None:
                raise InvalidInput(f"`{name}` cannot be set with dual inputs")
        _check_room(options, self._pairs.num_special)
        checked = [self._checked_pair(index, pair, options) for index, pair in enumerate(pairs)]
        if isinstance(self._pairs, InstructTemplate):
            return self._instruct(self._pairs, checked, options, self._instruction(instruction))
        if instruction is not None:
            raise InvalidInput("`instruction` cannot be set: the model has none in its template")
        return self._join(self._pairs, checked, options)

    def prompt(self, options: EncodeOptions) -> str:
        """What a request wants put before its texts, or the default, or nothing.

        Raises: InvalidInput for a prompt that is not there or cannot be used.
        """
        if options.prompt is not None:
            return self._own_prompt(options.prompt, options.prompt_name)
        if options.prompt_name is not None:
            return named_prompt(self._config.prompts, options.prompt_name)
        if options.input_type is not None:
            prompts = self._config.prompts
            return next((prompts[name] for name in _PROMPT_NAMES[options.input_type] if name in prompts), "")
        return self._config.default_prompt or ""

    def tokens(self, texts: Sequence[str], add_special_tokens: bool, options: EncodeOptions) -> list[list[Token]]:
        """The tokens of each text with their byte offsets into prompt + text, never truncated; no prompt by default."""
        asked = (options.prompt, options.prompt_name, options.input_type) != (None, None, None)
        prompt = self.prompt(options) if asked else ""
        whole = [prompt + text for text in texts]
        encodings = self._encode_batch(whole, add_special_tokens, offsets=True)
        return [_tokens_of(text, encoding) for text, encoding in zip(whole, encodings, strict=True)]

    def chunk(self, index: int, text: str, size: int, overlap: int, most: int, whole: EncodeOptions | None) -> ChunkedText:
        """Cut a text into chunks of `size` tokens, the last one of what is left, each beginning with the last `overlap` of the
        one before. A text of no token, white space for some tokenizers, is one chunk.

        Args:
            index: which input of the request it is, for errors.
            most: how many chunks it may make.
            whole: how the text is encoded as one input: what of it is over the limit is in no chunk, or refused. None for its
                bare tokens, however many.
        Raises: as `encode`; InvalidInput for more than `most` chunks.
        """
        prompt, dropped, sound = "", 0, _sound(index, (text,))
        if whole is not None:
            prompt, sound = self._prompt_text(whole), self._cut_texts(sound, whole)
            dropped = len(text) - len(sound[0]) if whole.truncation_direction == "left" else 0
        (encoding,) = self._encode_batch([prompt + self._cased(sound)[0]], add_special_tokens=False, offsets=True)
        ids, at = encoding.ids, encoding.offsets  # each is made anew when it is asked for
        kept, before, after = range(len(ids)), list[int](), list[int]()
        if whole is not None:
            before, after, room = self._prefix, self._suffix, self._limit(whole) - self.num_special
            if len(kept) > room:
                kept = kept[self._cut_to(room, len(kept) + self.num_special, whole)]
        token_ids = self._known(index, np.array(before + ids[kept.start : kept.stop] + after, dtype=np.int32))
        content = [i for i in kept if at[i][1] > max(len(prompt), at[i][0])]
        if not content:
            if whole is not None and not len(token_ids):
                raise EmptyInput("`inputs` cannot be empty")
            return ChunkedText(token_ids, ((0, max(1, len(token_ids))),), [(0, len(text))])
        starts = range(0, max(1, len(content) - overlap), size - overlap)
        if len(starts) > most:
            raise InvalidInput(f"`chunking` makes {len(starts)} chunks of input {index}, {most} at most; take larger ones")
        windows = [(content[start], content[min(start + size, len(content)) - 1]) for start in starts]
        in_text, shift = self._char_offsets(sound[0], len(prompt), dropped), len(before) - kept.start
        return ChunkedText(
            token_ids,
            tuple((first + shift, last + 1 + shift) for first, last in windows),
            [(in_text(at[first][0]), in_text(at[last][1])) for first, last in windows],
        )

    def decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        """Raises: EmptyInput for a sequence without ids, InvalidInput for an id outside the vocabulary."""
        for index, ids in enumerate(sequences):
            if not ids:
                raise EmptyInput("`input_ids` cannot be empty")
            checked_ids(index, ids, self._config.vocab_size)
        return [str(text) for text in self._tokenizer.decode_batch(list(map(list, sequences)), skip_special_tokens)]

    def _own_prompt(self, prompt: str, name: str | None) -> str:
        if name is not None:
            raise InvalidInput("`prompt` and `prompt_name` cannot be set together; leave one out")
        if len(prompt) > _MAX_PROMPT_CHARS:
            raise InvalidInput(f"`prompt` must have at most {_MAX_PROMPT_CHARS} characters. Given: {len(prompt)}")
        if "\0" in prompt:
            raise InvalidInput("`prompt` cannot contain NUL characters; remove them")
        return prompt

    def _prompt_text(self, options: EncodeOptions) -> str:
        return self._cased((self.prompt(options),))[0]

    def _checked_text(self, index: int, text: str, options: EncodeOptions) -> str:
        return self._cased(self._cut_texts(_sound(index, (text,)), options))[0]

    def _checked_pair(self, index: int, pair: tuple[str, str], options: EncodeOptions) -> tuple[str, ...]:
        return self._cased(self._cut_texts(_sound(index, pair), options))

    def _cut_texts(self, texts: tuple[str, ...], options: EncodeOptions) -> tuple[str, ...]:
        """The texts of one input, each cut to its share of the characters where they have too many."""
        num_chars = sum(map(len, texts))
        if num_chars <= self.max_chars:
            return texts
        if not options.truncate:
            raise InvalidInput(f"`inputs` must have less than {self.max_chars} characters. Given: {num_chars}")
        share = self.max_chars // len(texts)
        return tuple(text[-share:] if options.truncation_direction == "left" else text[:share] for text in texts)

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

    def _join(self, template: PairTemplate, pairs: list[tuple[str, ...]], options: EncodeOptions) -> list[TokenIds]:
        texts = list(dict.fromkeys(chain.from_iterable(pairs)))  # a query, which stands in many pairs, once
        ids = {text: each.ids for text, each in zip(texts, self._encode_batch(texts, False), strict=True)}
        room = self._limit(options) - template.num_special
        if not options.truncate:
            self._check_fits((len(ids[a]) + len(ids[b]) for a, b in pairs), room, template.num_special, options)
        joined = (template.join(ids[a], ids[b], room, options.truncation_direction) for a, b in pairs)
        return [self._whole(self._known(index, each)) for index, each in enumerate(joined)]

    def _instruct(
        self, template: InstructTemplate, pairs: list[tuple[str, ...]], options: EncodeOptions, instruction: str
    ) -> list[TokenIds]:
        direction = options.truncation_direction
        if sum(len(query) + len(document) for query, document in pairs) + len(instruction) * len(pairs) > _MAX_INSTRUCT_CHARS:
            raise InvalidInput("query and documents are too long together; send fewer documents or a shorter query")
        heads = [template.head(instruction, query) for query, _ in pairs]
        bodies = [f"{head} {document}" for head, (_, document) in zip(heads, pairs, strict=True)]
        encoded = self._encode_batch(bodies, False, offsets=direction == "left")
        room = self._limit(options) - template.num_special
        if not options.truncate:
            self._check_fits((len(body.ids) for body in encoded), room, template.num_special, options)
        wrapped = (template.wrap(body, len(head), room, direction) for body, head in zip(encoded, heads, strict=True))
        return [self._known(index, each) for index, each in enumerate(wrapped)]

    def _check_fits(self, lengths: Iterable[int], room: int, num_special: int, options: EncodeOptions) -> None:
        for length in lengths:
            if length > room:
                raise self._too_long(length + num_special, options)

    def _char_offsets(self, text: str, before: int, dropped: int) -> Callable[[int], int]:
        """From a position in what was tokenised, `before` characters and then the text in its case, to one in the text as it was
        given, `dropped` characters before this one."""
        if not self._config.lower_case or len(text.lower()) == len(text):
            return lambda position: max(0, position - before) + dropped
        ends = list(accumulate(len(char.lower()) for char in text))
        return lambda position: bisect_right(ends, max(0, position - before)) + dropped

    def _encode_batch(self, texts: list[str], add_special_tokens: bool, offsets: bool = False) -> list[Encoding]:
        encode = self._tokenizer.encode_batch if offsets else self._tokenizer.encode_batch_fast
        try:
            return encode(texts, add_special_tokens=add_special_tokens)
        except UnicodeEncodeError as error:
            raise InvalidInput(f"`inputs` must be valid Unicode: {error.reason}") from error
        except Exception as error:  # tokenizers raises bare Exception
            raise TokenizerError(f"tokenizer error {error}") from error

    def _with_specials(self, content: list[int], options: EncodeOptions) -> TokenIds:
        room = self._limit(options) - self.num_special
        if len(content) > room:
            content = self._cut(content, room, len(content) + self.num_special, options)
        return np.array(self._prefix + content + self._suffix, dtype=np.int32)

    def _given_ids(self, index: int, item: object, options: EncodeOptions) -> TokenIds:
        ids = checked_ids(index, item, self._config.vocab_size)
        if len(ids) > self._limit(options):
            ids = ids[self._cut_to(self._limit(options), len(ids), options)]
        return ids.astype(np.int32)

    def _limit(self, options: EncodeOptions) -> int:
        """Tokens that an input of the request may have, special ones included."""
        return min(self.max_input_length, options.max_tokens or self.max_input_length)

    def _cut(self, ids: list[int], room: int, given: int, options: EncodeOptions) -> list[int]:
        return ids[self._cut_to(room, given, options)]

    def _cut_to(self, room: int, given: int, options: EncodeOptions) -> slice:
        if not options.truncate:
            raise self._too_long(given, options)
        return slice(-room, None) if options.truncation_direction == "left" else slice(room)

    def _too_long(self, given: int, options: EncodeOptions) -> InvalidInput:
        return InvalidInput(f"`inputs` must have less than {self._limit(options)} tokens. Given: {given}")

    def _whole(self, ids: TokenIds) -> TokenIds:
        """An input's ids, without the padding tokens at their end, of which one stays if there is nothing else."""
        if not len(ids):
            raise EmptyInput("`inputs` cannot be empty")
        padding = self._config.padding_id
        if padding is None or ids[-1] != padding:
            return ids
        others = np.flatnonzero(ids != padding)
        return ids[: others[-1] + 1 if len(others) else 1]

    def _known(self, index: int, ids: TokenIds) -> TokenIds:
        """The ids of a tokenised text or pair. Raises: InvalidInput for a token without an embedding."""
        if self._exceeds_table:
            highest = int((ids & ~SECOND_SEGMENT).max(initial=0))
            if highest >= self._config.vocab_size:
                raise InvalidInput(f"input {index} has {self._unknown(highest)}; remove the token from the text")
        return ids

    def _check_special_tokens(self) -> None:
        """Raises: ModelError for a special token without an embedding, as every text would hold the token."""
        special = [*self._prefix, *self._suffix, *(self._pairs.special if self._pairs else ())]
        highest = max((each & ~SECOND_SEGMENT for each in special), default=0)
        if highest >= self._config.vocab_size:
            raise ModelError(
                f"the tokenizer puts around each text {self._unknown(highest)}; resize the model's embeddings to the tokenizer"
            )

    def _unknown(self, token_id: int) -> str:
        name = self._tokenizer.id_to_token(token_id)
        return f"the token {name!r} (id {token_id}), the model has embeddings up to id {self._config.vocab_size - 1}"


def _sound(index: int, texts: tuple[str, ...]) -> tuple[str, ...]:
    """The texts of one input. Raises: EmptyInput where all are empty, InvalidInput for NUL."""
    if not any(texts):
        raise EmptyInput("`inputs` cannot be empty")
    if any("\0" in text for text in texts):
        raise InvalidInput(f"`inputs` cannot contain NUL characters, input {index} does; remove them")
    return texts


def _check_room(options: EncodeOptions, num_special: int) -> None:
    if options.max_tokens is not None and options.max_tokens <= num_special:
        raise InvalidInput(f"`max_tokens` should be more than {num_special}, the special tokens around an input")


def _pair_template(tokenizer: HFTokenizer, config: ModelConfig) -> PairTemplate | InstructTemplate | None:
    """How the model's pairs are put together; None for what only embeds."""
    if config.task == "embedding":
        return None
    if config.instruction is not None:
        return InstructTemplate(tokenizer)
    return PairTemplate.learn(tokenizer, config.tells_segments)


def _special_tokens(tokenizer: HFTokenizer) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text, found by encoding one with and without."""
    for probe in ("a", "hello world", "1"):
        bare = tokenizer.encode(probe, add_special_tokens=False).ids
        full = tokenizer.encode(probe).ids
        for start in range(len(full) - len(bare) + 1):
            if bare and full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
    raise ModelError("the tokenizer's special tokens could not be told from its content: its tokenizer.json is not supported")


def _add_end_of_text(tokenizer: HFTokenizer, folder: Path) -> None:
    """Where tokenizer_config.json has it put there and tokenizer.json does not, as gte-Qwen2's: last-token pooling reads it.

    Done for those whose tokenizer, Llama's or one of the folder's own code, heeds `add_eos_token`.
    """
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    heeds = "auto_map" in config or str(config.get("tokenizer_class")).startswith(("Llama", "Gemma"))
    if not heeds or config.get("add_eos_token") is not True:
        return
    end = config.get("eos_token")
    end = str(end["content"] if isinstance(end, dict) else end)
    end_id = tokenizer.token_to_id(end)
    if end_id is None:
        raise ModelError(f"{path}: add_eos_token is true, eos_token {end!r} is not in the vocabulary")
    prefix, suffix = _special_tokens(tokenizer)
    if end_id in suffix:
        return
    names = {each: str(tokenizer.id_to_token(each)) for each in (*prefix, *suffix, end_id)}
    parts = [*(names[each] for each in prefix), "$A", *(names[each] for each in (*suffix, end_id))]
    pair = [*parts, *(f"{'$B' if part == '$A' else part}:1" for part in parts)]
    specials = [(name, each) for each, name in names.items()]
    tokenizer.post_processor = TemplateProcessing(single=parts, pair=pair, special_tokens=specials)


def _tokens_of(text: str, encoding: Encoding) -> list[Token]:
    """`tokenizers` gives offsets in characters, TEI answers bytes; `text` is the slice of the input."""
    byte_at = np.cumsum([0, *(len(char.encode("utf-8", "replace")) for char in text)])
    tokens = []
    for token_id, name, (start, stop), special in zip(
        encoding.ids, encoding.tokens, encoding.offsets, encoding.special_tokens_mask, strict=True
    ):
        if special:
            tokens.append(Token(token_id, name, True, None, None))
        else:
            tokens.append(Token(token_id, text[start:stop], False, int(byte_at[start]), int(byte_at[stop])))
    return tokens
