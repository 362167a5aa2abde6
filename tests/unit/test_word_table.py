"""The word table gives the tokenizer's ids, or leaves the text to the tokenizer."""

import json
from pathlib import Path

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


TOKENIZERS = {"bert": bert(), "qwen": qwen()}
TABLES = {name: WordTable.of(each) for name, each in TOKENIZERS.items()}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=400, deadline=None)
@given(text=TEXTS)
def test_ids_are_those_of_the_tokenizer(name: str, text: str) -> None:
    table = TABLES[name]
    assert table is not None
    ids = table.ids(text)
    assert ids is None or ids == TOKENIZERS[name].encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", TOKENIZERS)
def test_words_are_asked_for_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = WordTable.of(TOKENIZERS[name])
    assert table is not None
    text = "It's the same text, 42 times.\n"
    first = table.ids(text)
    monkeypatch.setattr(table, "_learn", None)
    assert first
    assert table.ids(text) == first


@pytest.mark.parametrize(
    ("name", "text"), [("bert", "a [SEP] b"), ("qwen", "a <think> b"), ("bert", "naïve"), ("qwen", "a\x0bb")]
)
def test_other_texts_are_left_to_the_tokenizer(name: str, text: str) -> None:
    table = TABLES[name]
    assert table is not None
    assert table.ids(text) is None


@pytest.mark.parametrize("token", ["Foo", "[New]"])
def test_added_tokens_are_found_in_any_case(token: str) -> None:
    tokenizer = bert()
    tokenizer.add_tokens([AddedToken(token, normalized=True)])
    table = WordTable.of(tokenizer)
    assert table is not None
    text = f"the {token.lower()} word"
    assert tokenizer.token_to_id(token) in tokenizer.encode(text).ids
    assert table.ids(text) is None


def test_an_added_token_with_accents_leaves_all_texts_to_the_tokenizer() -> None:
    tokenizer = bert()
    tokenizer.add_tokens([AddedToken("\u00e9t\u00e9", normalized=True)])
    assert tokenizer.encode("ete", add_special_tokens=False).ids == [tokenizer.token_to_id("\u00e9t\u00e9")]
    assert WordTable.of(tokenizer) is None


def test_a_full_table_and_long_words_still_give_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_table, "_MOST_WORDS", 3)
    table = WordTable.of(TOKENIZERS["bert"])
    assert table is not None
    for text in ("one two", "three four", f"one {'x' * 40}", "four five one"):
        assert table.ids(text) == TOKENIZERS["bert"].encode(text, add_special_tokens=False).ids
    assert set(table._ids) == {"one", "two"}


def test_an_unknown_kind_of_tokenizer_has_no_table() -> None:
    assert WordTable.of(HFTokenizer(models.WordLevel({"a": 0}, unk_token="a"))) is None
