"""Token ids: every id that reaches a model has an embedding, and the library takes ids as lists and as arrays."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import EmptyInput, Engine, InvalidInput, ModelError
from engine.model.folder import load_model_config
from engine.options import EncodeOptions
from engine.text.tokenizer import Tokenizer

BOOM = "input 1 has the token '<boom>' (id 300), the model has embeddings up to id 299; remove the token from the text"


def with_boom(folder: Path, copy: Path, around: bool = False) -> Path:
    """A copy of the folder whose tokenizer has one token more than the model: <boom>, after the model's 300 tokens.

    A fine-tune that adds a token and does not resize the embeddings leaves such a folder. `around`: the tokenizer puts <boom>
    in front of each text.
    """
    shutil.copytree(folder, copy)
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    token = {"id": 300, "content": "<boom>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"].append(token | {"special": True})
    if around:
        tokenizer["post_processor"]["single"].insert(0, {"SpecialToken": {"id": "<boom>", "type_id": 0}})
        tokenizer["post_processor"]["special_tokens"]["<boom>"] = {"id": "<boom>", "ids": [300], "tokens": ["<boom>"]}
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    return copy


@pytest.fixture(scope="module")
def engine(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = with_boom(tiny("bert"), tmp_path_factory.mktemp("boom") / "model")
    return Engine.load(folder, dtype="float32", device="cpu")


def test_a_text_with_a_token_that_has_no_embedding_is_refused_by_name(engine: Engine) -> None:
    with pytest.raises(InvalidInput) as caught:
        engine.embed(["w1 w2", "hello <boom> world"])
    assert str(caught.value) == BOOM
    assert engine.embed(["w1 w2"]).shape == (1, engine.config.embedding_size)
    assert [token.id for token in engine.tokenizer.tokens(["<boom>"], False, EncodeOptions())[0]] == [300]  # /tokenize shows it


def test_a_token_that_is_cut_away_is_not_refused(engine: Engine) -> None:
    limit = engine.tokenizer.max_input_length
    (ids,) = engine.tokenizer.encode(["w1 " * limit + "<boom>"], EncodeOptions())
    assert len(ids) == limit
    with pytest.raises(InvalidInput, match="id 300"):
        engine.tokenizer.encode(["w1 " * limit + "<boom>"], EncodeOptions(truncation_direction="left"))


def test_a_chunked_text_with_such_a_token_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidInput, match=r"^input 7 has the token '<boom>' \(id 300\)"):
        engine.tokenizer.chunk(7, "w1 <boom> w2", 2, 0, 9, EncodeOptions())


@pytest.mark.parametrize("kind", ["bert_classifier", "qwen3_classifier"])
def test_a_pair_with_such_a_token_is_refused(kind: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = with_boom(tiny(kind), tmp_path / "model")
    tokenizer = Tokenizer.load(folder, load_model_config(folder))
    for pair in (("w1", "<boom>"), ("<boom>", "w1")):
        with pytest.raises(InvalidInput) as caught:
            tokenizer.encode_pairs([("w1", "w2"), pair], EncodeOptions())
        assert str(caught.value) == BOOM
    assert len(tokenizer.encode_pairs([("w1", "w2")], EncodeOptions())) == 1


def test_a_special_token_without_an_embedding_stops_the_load(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = with_boom(tiny("bert"), tmp_path / "model", around=True)
    with pytest.raises(
        ModelError, match=r"around each text the tokenizer puts the token '<boom>' \(id 300\), .* up to id 299; resize"
    ):
        Tokenizer.load(folder, load_model_config(folder))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64, np.uint64])
def test_arrays_give_what_lists_give(dtype: type[Any], engine: Engine) -> None:
    lists = [[2, 7, 9, 3], [2, 100, 3]]
    expected = engine.embed(lists)
    assert np.array_equal(engine.embed([np.array(ids, dtype=dtype) for ids in lists]), expected)
    assert np.array_equal(engine.embed(np.array([lists[0]] * 2, dtype=dtype)), expected[[0, 0]])  # type: ignore[arg-type]
    strided = np.array(lists[0], dtype=dtype).repeat(2)[::2]
    assert np.array_equal(engine.embed([strided, "w1"])[0], expected[0])
    given = np.array(lists[1], dtype=np.int32)
    (kept,) = engine.tokenizer.encode([given], EncodeOptions())
    given[:] = 0
    assert kept.tolist() == lists[1]


@pytest.mark.parametrize(
    ("ids", "given"),
    [
        (np.array([1.0, 2.0]), "an array of 1 dimensions of float64"),
        (np.array([True, False]), "an array of 1 dimensions of bool"),
        (np.array([[1, 2]]), "an array of 2 dimensions of int64"),
        (np.array(5), "an array of 0 dimensions of int64"),
        (5, "of type int"),
        (b"text", "of type bytes"),
        (None, "of type NoneType"),
        ([1, 2.5], "a list of other things"),
        (["a", "b"], "a list of other things"),
        ([[1], [2, 3]], "a list of other things"),
        ([2**80], "a list of other things"),
    ],
    ids=str,
)
def test_anything_else_is_refused_with_the_way_out(ids: Any, given: str, engine: Engine) -> None:
    with pytest.raises(InvalidInput) as caught:
        engine.embed(["w1", ids])
    assert str(caught.value) == f"input 1 is {given}; give a text, a list of token ids, or a 1-D array of whole numbers"


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([-1], "input 0 has token id -1, the vocabulary begins at 0"),
        ([5, -7], "input 0 has token id -7, the vocabulary begins at 0"),
        ([5, 300], "input 0 has token id 300, the vocabulary ends at 299"),
        ([2**31], f"input 0 has token id {2**31}, the vocabulary ends at 299"),
        ([2**63], f"input 0 has token id {2**63}, the vocabulary ends at 299"),
    ],
)
def test_ids_outside_of_the_table_are_refused(ids: list[int], message: str, engine: Engine) -> None:
    for each in (ids, np.array(ids)):
        with pytest.raises(InvalidInput) as caught:
            engine.embed([each])
        assert str(caught.value) == message
    with pytest.raises(InvalidInput) as caught:
        engine.tokenizer.decode([ids], True)
    assert str(caught.value) == message


@pytest.mark.parametrize("ids", [[], np.array([], dtype=np.int64), np.array([])], ids=repr)
def test_no_ids_are_an_empty_input(ids: Any, engine: Engine) -> None:
    with pytest.raises(EmptyInput):
        engine.embed([ids])
