"""The word table gives the tokenizer's ids, or leaves the text to the tokenizer."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, trainers
from tokenizers import Tokenizer as HFTokenizer

from engine.hub import EMBEDDED_MODEL, resolve_model
from engine.text import word_table
from engine.text.word_table import WordTable

TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            ["the", " The", "'s", "'LL", "[SEP]", "[sep]", "<think>", "\r\n", "\n\n", "  ", "x" * 120, "42", "...", "é"]
        ),
        st.characters(max_codepoint=127),
    ),
    max_size=40,
).map("".join)


def bert() -> HFTokenizer:
    tokenizer = HFTokenizer.from_file(str(resolve_model(EMBEDDED_MODEL) / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def qwen() -> HFTokenizer:
    """A small vocabulary with the steps of Qwen's tokenizers."""
    made = json.loads(HFTokenizer(models.BPE()).to_str())
    made["normalizer"] = {"type": "NFC"}
    made["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": word_table.QWEN_STEPS}
    tokenizer = HFTokenizer.from_str(json.dumps(made))
    alphabet = [chr(code) for code in range(256, 324)] + [chr(code) for code in range(33, 127)]  # as ByteLevel writes bytes
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([Path(__file__).read_text(encoding="utf-8")] * 3, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def ids(table: WordTable, *texts: str) -> list[list[int]] | None:
    found = table.ids(texts)
    return None if found is None else [np.frombuffer(each, dtype=np.int32).tolist() for each in found]


def expected(name: str, *texts: str) -> list[list[int]]:
    return [TOKENIZERS[name].encode(text, add_special_tokens=False).ids for text in texts]


TOKENIZERS = {"bert": bert(), "qwen": qwen()}
TABLES = {name: WordTable.of(each) for name, each in TOKENIZERS.items()}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=400, deadline=None)
@given(text=TEXTS)
def test_ids_are_those_of_the_tokenizer(name: str, text: str) -> None:
    table = TABLES[name]
    assert table is not None
    found = ids(table, text)
    assert found is None or found == expected(name, text)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=400, deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=6))
def test_texts_at_once_have_the_ids_of_each_alone(name: str, texts: list[str]) -> None:
    table = TABLES[name]
    assert table is not None
    found = ids(table, *texts)
    assert found is None or found == expected(name, *texts)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    "texts",
    [
        ["one", "", " two", "three ", " ", ""],
        ["two  spaces", "and  more   ", "   "],
        ["a line\n", "\n\nand a second\r\n", "\ta tab \n b"],
        ["it's", "'s", "s", "'", "'S x'LL"],
        ["2024-01-02 03:04", "3.14", " 5"],
    ],
)
def test_the_end_of_a_text_parts_words(name: str, texts: list[str]) -> None:
    table = TABLES[name]
    assert table is not None
    assert ids(table, *texts) == expected(name, *texts)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_words_are_asked_for_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = WordTable.of(TOKENIZERS[name])
    assert table is not None
    text = "It's the same text, 42 times.\n"
    first = ids(table, text)
    monkeypatch.setattr(table, "_learn", None)
    assert first
    assert ids(table, text) == first


def test_threads_may_learn_the_same_words() -> None:
    table = WordTable.of(TOKENIZERS["bert"])
    assert table is not None
    assert table._learn(["one", "two"], table._ids)
    assert table._learn(["two", "one"], table._ids)  # the second of two threads that both missed a word
    texts = [f"number {each % 97} of some, in {each % 13}" for each in range(400)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda text: ids(table, text), texts))
    assert [each for each in found if each] == [expected("bert", text) for text in texts]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_string_of_known_words_needs_no_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = WordTable.of(TOKENIZERS[name])
    assert table is not None
    ids(table, "one, two. three (four)")
    monkeypatch.setattr(table, "_tokenizer", None)
    assert ids(table, "one. two, three", "one") == expected(name, "one. two, three", "one")


@pytest.mark.parametrize(
    ("name", "text"),
    [("bert", "a [SEP] b"), ("qwen", "a <think> b"), ("bert", "naïve"), ("qwen", "a\x0bb"), ("bert", "a\0b"), ("qwen", "a\1b")],
)
def test_other_texts_are_left_to_the_tokenizer(name: str, text: str) -> None:
    table = TABLES[name]
    assert table is not None
    assert ids(table, text) is None
    assert ids(table, "first", text, "last") is None


@pytest.mark.parametrize("token", ["Foo", "[New]"])
def test_added_tokens_are_found_in_any_case(token: str) -> None:
    tokenizer = bert()
    tokenizer.add_tokens([AddedToken(token, normalized=True)])
    table = WordTable.of(tokenizer)
    assert table is not None
    text = f"the {token.lower()} word"
    assert tokenizer.token_to_id(token) in tokenizer.encode(text).ids
    assert ids(table, text) is None


@pytest.mark.parametrize("text", ["machine\nlearning is", "is machine\tlearning", "MACHINE learning"])
@pytest.mark.parametrize("token", ["machine learning", "machine\tlearning", " machine learning"])
def test_white_space_of_an_added_token_may_be_other_white_space(token: str, text: str) -> None:
    tokenizer = bert()
    tokenizer.add_tokens([AddedToken(token, normalized=True)])
    table = WordTable.of(tokenizer)
    assert table is not None
    found = ids(table, text, f"a\n{text}")
    assert found in (None, [tokenizer.encode(each, add_special_tokens=False).ids for each in (text, f"a\n{text}")])


def test_an_added_token_with_accents_leaves_all_texts_to_the_tokenizer() -> None:
    tokenizer = bert()
    tokenizer.add_tokens([AddedToken("\u00e9t\u00e9", normalized=True)])
    assert tokenizer.encode("ete", add_special_tokens=False).ids == [tokenizer.token_to_id("\u00e9t\u00e9")]
    assert WordTable.of(tokenizer) is None


def test_a_full_table_hands_its_words_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_table, "_MOST_CHARS", 20)
    table = WordTable.of(TOKENIZERS["bert"])
    assert table is not None
    for text in ("one two", "three four", f"one {'x' * 40}", "four five one", "six seven"):
        assert ids(table, text) == expected("bert", text)
    assert len(table._ids) < 6
    monkeypatch.setattr(table, "_tokenizer", None)  # words of the full table need no library
    assert ids(table, "one six five") == expected("bert", "one six five")


def test_texts_with_many_new_words_are_left_to_the_tokenizer_until_their_words_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_table, "_MOST_NEW", 2)
    table = WordTable.of(TOKENIZERS["bert"])
    assert table is not None
    texts = "one two three", "four five"
    assert [ids(table, *texts) for _ in range(3)] == [None, None, expected("bert", *texts)]


def test_an_unknown_kind_of_tokenizer_has_no_table() -> None:
    assert WordTable.of(HFTokenizer(models.WordLevel({"a": 0}, unk_token="a"))) is None
