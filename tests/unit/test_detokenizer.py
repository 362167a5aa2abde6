"""Incremental detokenisation gives the text of all ids, never changes earlier text, and ends at the first stop string."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from engine.errors import InvalidInput, ModelError
from engine.text.detokenizer import Detokenizer, TokenBytes
from engine.text.prompts import Prompts

CORPUS = [
    "The quick brown fox jumps over the lazy dog. ",
    "日本語のテキスト、漢字とかな。",
    "한국어 문장 ",
    "ça va? naïve café — “quotes” ",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 é ก็ ",
    "  def f(x):\n\treturn x\n\n",
]
HARD = [
    "👩‍👩‍👧‍👦",
    "🏳️‍🌈",
    "é",
    "ก็",
    "क्षि",
    "日本",
    "\ufffd",
    " ",
    "  ",
    "\n",
    "\t",
    "a",
    "the",
    "▁",
    "Ġ",
    "\x00",
    "\U0010ffff",
    "<0x0A>",
]
TEXTS = st.lists(st.sampled_from(HARD) | st.text(st.characters(codec="utf-8"), max_size=8), max_size=12).map("".join)


def byte_level() -> Tokenizer:
    """The form of GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("日 本", special=False)])
    return tokenizer


def byte_fallback(decoder: decoders.Decoder) -> Tokenizer:
    """SentencePiece's form, as in Llama 2 and Gemma: "▁" for a space, and byte tokens for characters without a token."""
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=first, limit_alphabet=60, show_progress=False)
    trained.train_from_iterator(CORPUS[:2] * 3, trainer)
    model = trained.model
    model.byte_fallback = True
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def words(decoder: decoders.Decoder | None, mark: str) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, f"{mark}one": 1, f"{mark}two": 2, "x": 3, mark: 4}, unk_token="<s>"))
    tokenizer.add_special_tokens(["<s>"])
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


def space_or_byte(*after: decoders.Decoder) -> decoders.Decoder:
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *after])


BYTE_LEVEL = byte_level()
LLAMA = byte_fallback(space_or_byte(decoders.Strip(" ", 1, 0)))
GEMMA = byte_fallback(space_or_byte())
METASPACE = words(decoders.Metaspace(), "▁")
WORDS = words(None, "")
ALL = pytest.mark.parametrize(
    "tokenizer", [BYTE_LEVEL, LLAMA, GEMMA, METASPACE, WORDS], ids=["byte-level", "llama", "gemma", "metaspace", "words"]
)


def stream(detokenizer: Detokenizer, ids: Sequence[int]) -> str:
    return "".join([detokenizer.push(each) for each in ids] + [detokenizer.finish()])


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids: incomplete characters, bytes that are not UTF-8, special tokens in the middle, an id without a token."""
    texts = TEXTS.map(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    return st.lists(texts | st.lists(st.integers(0, tokenizer.get_vocab_size()), max_size=6), max_size=4).map(
        lambda many: [each for ids in many for each in ids]
    )


def is_utf8(tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    table = TokenBytes(tokenizer)
    try:
        b"".join(table[each] for each in ids if each not in table.special_ids).decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.slow
@ALL
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_text_is_that_of_decoding_all_ids_at_once(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids, skip = data.draw(ids_of(tokenizer)), data.draw(st.booleans())
    # Consecutive byte tokens that are not UTF-8 have their own test, because the text of `tokenizers` changes with each token.
    if tokenizer not in (LLAMA, GEMMA) or is_utf8(tokenizer, ids):
        assert stream(Detokenizer(TokenBytes(tokenizer), [], skip_special_tokens=skip), ids) == tokenizer.decode(
            ids, skip_special_tokens=skip
        )


@pytest.mark.slow
@ALL
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_answer_continues_the_prompt_wherever_it_ends(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids, skip = data.draw(ids_of(tokenizer)), data.draw(st.booleans())
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    if tokenizer in (LLAMA, GEMMA) and not is_utf8(tokenizer, ids):
        return
    for split in range(len(ids) + 1):
        before = tokenizer.decode(ids[:split], skip_special_tokens=skip)
        answer = stream(Detokenizer(TokenBytes(tokenizer), ids[:split], skip_special_tokens=skip), ids[split:])
        if "\ufffd" not in before:
            assert before + answer == whole
        elif "\ufffd" not in whole:  # the prompt ends within a character, and the answer completes it
            starts = (tokenizer.decode(ids[:end], skip_special_tokens=skip) for end in range(split, -1, -1))
            # Byte-level BPE then has one replacement character. Byte fallback has one for each byte since the last other token.
            start = before[:-1] if tokenizer is BYTE_LEVEL else next(each for each in starts if "\ufffd" not in each)
            assert start + answer == whole
        else:
            assert whole.endswith(answer)


@pytest.mark.parametrize("tokenizer", [LLAMA, GEMMA], ids=["llama", "gemma"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_whole_characters_among_bad_byte_tokens_stay(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids, table = [tokenizer.token_to_id("a"), *data.draw(ids_of(tokenizer))], TokenBytes(tokenizer)
    whole = b"".join(table[each] for each in ids if each not in table.special_ids)
    assert stream(Detokenizer(TokenBytes(tokenizer), []), ids) == whole.decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("tokenizer", "ids"),
    [(BYTE_LEVEL, BYTE_LEVEL.encode("x👩‍👧 ก็").ids), (GEMMA, GEMMA.encode("x👩‍👧 ก็").ids)],
    ids=["byte-level", "byte fallback"],
)
def test_a_character_comes_whole_and_as_soon_as_it_is_complete(tokenizer: Tokenizer, ids: list[int]) -> None:
    detokenizer, table, given = Detokenizer(TokenBytes(tokenizer), []), TokenBytes(tokenizer), ""
    for num, each in enumerate(ids, start=1):
        given += detokenizer.push(each)
        assert given == b"".join(table[each] for each in ids[:num]).decode("utf-8", "ignore")


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, LLAMA], ids=["byte-level", "llama"])
def test_a_bad_byte_shows_with_the_next_token_and_half_a_character_at_the_end(tokenizer: Tokenizer) -> None:
    name = (lambda byte: f"<0x{byte:02X}>") if tokenizer is LLAMA else (lambda byte: {0xC3: "Ã", 0xE6: "æ"}[byte])
    half, other, a = (tokenizer.token_to_id(token) for token in (name(0xC3), name(0xE6), "a"))
    detokenizer = Detokenizer(TokenBytes(tokenizer), [a])
    assert [detokenizer.push(each) for each in (half, a, half, other)] == ["", "\ufffda", "", "\ufffd"]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_a_special_token_may_be_shown_nevertheless() -> None:
    ids = [BYTE_LEVEL.token_to_id(each) for each in ("<s>", "a", "<|end|>")]
    assert stream(Detokenizer(TokenBytes(BYTE_LEVEL), [], shown=["<|end|>", "<tool_call>"]), ids) == "a<|end|>"
    assert stream(Detokenizer(TokenBytes(BYTE_LEVEL), []), ids) == "a"


def test_the_space_between_prompt_and_answer_is_the_answers() -> None:
    the, fox = (LLAMA.token_to_id(token) for token in ("▁the", "▁qu"))
    begin = LLAMA.token_to_id("<s>")
    assert Detokenizer(TokenBytes(LLAMA), [begin, the]).push(fox) == " qu"
    assert Detokenizer(TokenBytes(LLAMA), [begin]).push(fox) == "qu"
    assert Detokenizer(TokenBytes(LLAMA), []).push(fox) == "qu"
    assert Detokenizer(TokenBytes(LLAMA), [begin], skip_special_tokens=False).push(fox) == " qu"
    detokenizer = Detokenizer(TokenBytes(LLAMA), [])
    assert [detokenizer.push(each) for each in (begin, the, begin, fox)] == ["", "the", "", " qu"]


# Stop strings


def expected(pieces: Sequence[str], stop: Sequence[str], include_stop: bool) -> tuple[str, str | None]:
    """The rule in its simplest form: the shortest beginning of the text that ends with a stop string."""
    text = "".join(pieces)
    for end in range(1, len(text) + 1):
        found = max((each for each in stop if text[:end].endswith(each)), key=len, default=None)
        if found is not None:
            return text[: end if include_stop else end - len(found)], found
    return text, None


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, LLAMA], ids=["byte-level", "llama"])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_the_text_ends_at_the_first_stop_string(tokenizer: Tokenizer, data: st.DataObject) -> None:
    few = st.text("ab日é", min_size=1)
    text = data.draw(TEXTS | few)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    text = tokenizer.decode(ids)
    part = st.builds(lambda start, length: text[start : start + length], st.integers(0, len(text)), st.integers(1, 6)).filter(
        bool
    )
    stop = data.draw(st.lists((part if text else few) | few, max_size=4))
    include_stop = data.draw(st.booleans())
    detokenizer = Detokenizer(TokenBytes(tokenizer), [], stop=stop, include_stop=include_stop)
    assert (stream(detokenizer, ids), detokenizer.stopped) == expected(text, stop, include_stop)


@settings(max_examples=100, deadline=None)
@given(text=st.text("ab", max_size=30), stop=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_only_what_a_stop_string_may_need_is_held_back(text: str, stop: list[str]) -> None:
    detokenizer, given = Detokenizer(TokenBytes(BYTE_LEVEL), [], stop=stop), ""
    token = {char: BYTE_LEVEL.token_to_id(char) for char in "ab"}
    for so_far in accumulate(text):
        given += detokenizer.push(token[so_far[-1]])
        if detokenizer.stopped is None:
            held = so_far[len(given) :]
            beginnings = {each[:length] for each in stop for length in range(len(each))}
            assert held in beginnings
            assert not any(so_far[-length:] in beginnings for length in range(len(held) + 1, len(so_far) + 1))


def test_the_text_does_not_depend_on_how_it_is_cut_into_tokens() -> None:
    text = "abcab日本abcd"
    whole = BYTE_LEVEL.encode(text).ids
    alphabet = {byte: token for token, byte in _letters().items()}
    single = [BYTE_LEVEL.token_to_id(alphabet[byte]) for byte in text.encode()]
    assert whole != single
    for stop in (["本a"], ["abcd", "bc"], ["d"], ["日"], ["x"], ["b日本", "本"]):
        results = set()
        for ids in (whole, single):
            detokenizer = Detokenizer(TokenBytes(BYTE_LEVEL), [], stop=stop)
            results.add((stream(detokenizer, ids), detokenizer.stopped))
        assert results == {expected(text, stop, False)}


def _letters() -> dict[str, int]:
    table = TokenBytes(BYTE_LEVEL)
    letters = pre_tokenizers.ByteLevel.alphabet()
    return {letter: table[BYTE_LEVEL.token_to_id(letter)][0] for letter in letters}


def test_nothing_comes_after_the_stop_string() -> None:
    ids = BYTE_LEVEL.encode("one. two. three.").ids
    detokenizer = Detokenizer(TokenBytes(BYTE_LEVEL), [], stop=["."])
    assert "".join(detokenizer.push(each) for each in ids) == "one"
    assert (detokenizer.push(ids[0]), detokenizer.finish(), detokenizer.stopped) == ("", "", ".")


def test_half_a_character_at_the_end_may_complete_a_stop_string() -> None:
    a, half = BYTE_LEVEL.token_to_id("a"), BYTE_LEVEL.token_to_id("Ã")
    detokenizer = Detokenizer(TokenBytes(BYTE_LEVEL), [], stop=["a\ufffd"])
    assert [detokenizer.push(a), detokenizer.push(half), detokenizer.finish()] == ["", "", ""]
    assert detokenizer.stopped == "a\ufffd"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidInput, match="`stop` cannot have an empty string"):
        Detokenizer(TokenBytes(BYTE_LEVEL), [], stop=["a", ""])


# Tokens


@pytest.mark.parametrize(
    ("tokenizer", "token", "added", "text"),
    [
        (BYTE_LEVEL, "Ġthe", b" the", " the"),
        (BYTE_LEVEL, "Ã", b"\xc3", "\ufffd"),
        (BYTE_LEVEL, "<|end|>", b"<|end|>", "<|end|>"),
        (BYTE_LEVEL, "日 本", "日 本".encode(), "日 本"),
        (LLAMA, "▁the", b" the", " the"),
        (LLAMA, "<0x0A>", b"\n", "\n"),
        (LLAMA, "<0xE6>", b"\xe6", "\ufffd"),
        (METASPACE, "▁one", b" one", " one"),
        (WORDS, "one", b" one", " one"),
    ],
)
def test_a_token_has_bytes_and_text(tokenizer: Tokenizer, token: str, added: bytes, text: str) -> None:
    detokenizer, token_id = Detokenizer(TokenBytes(tokenizer), []), tokenizer.token_to_id(token)
    assert (detokenizer.token_bytes(token_id), detokenizer.token_text(token_id)) == (added, text)


def test_all_byte_tokens_are_their_byte() -> None:
    assert sorted(_letters().values()) == list(range(256))
    table = TokenBytes(GEMMA)
    assert all(table[GEMMA.token_to_id(f"<0x{byte:02X}>")] == bytes([byte]) for byte in range(256))


def test_each_model_makes_its_table_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tokenizer] = []
    make = TokenBytes.__init__

    def counted(table: TokenBytes, tokenizer: Tokenizer) -> None:
        made.append(tokenizer)
        make(table, tokenizer)

    monkeypatch.setattr(TokenBytes, "__init__", counted)
    served = [Prompts(words(None, ""), None) for _ in range(6)]
    for prompts in served * 2:
        prompts.detokenizer(prompts.encode("one"))
        assert prompts.token_bytes(3) == b" x"
    assert len(made) == len(served)


@pytest.mark.parametrize("decoder", [decoders.BPEDecoder, decoders.CTC])
def test_a_decoder_that_needs_later_tokens_is_refused(decoder: Callable[[], decoders.Decoder]) -> None:
    with pytest.raises(ModelError, match=f"has the decoder {decoder.__name__}; text generation does not support it"):
        TokenBytes(words(decoder(), ""))
