"""Pairs of texts: ids, types and truncation are those of `tokenizers`, and texts cannot inject special tokens."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models, pre_tokenizers
from tokenizers.processors import BertProcessing, PostProcessor, RobertaProcessing, Sequence, TemplateProcessing

from engine import EmptyInput, InvalidInput, ModelError
from engine.model.config import HeadConfig, ModelConfig
from engine.model.folder import load_model_config
from engine.options import Direction, EncodeOptions
from engine.text.pairs import SECOND_SEGMENT, longest_first
from engine.text.tokenizer import Tokenizer

LIMIT = 24
CONFIG = ModelConfig(
    architecture="BertForSequenceClassification", vocab_size=200, hidden_size=8, intermediate_size=8, n_layers=1, n_heads=1,
    n_kv_heads=1, head_dim=8, norm_eps=1e-5, max_position_embeddings=LIMIT, causal=False, pooling="cls", head=HeadConfig(),
    labels=("LABEL_0",), type_vocab_size=2, max_input_length=LIMIT,
)  # fmt: skip
SPECIALS = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "</s>": 3}


def template(pair: str) -> PostProcessor:
    used = [(name, token) for name, token in SPECIALS.items() if name in pair]
    return TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=[*used, ("[CLS]", 1), ("[SEP]", 2)])


PROCESSORS: dict[str, PostProcessor | None] = {
    "bert": BertProcessing(("[SEP]", 2), ("[CLS]", 1)),
    "roberta": RobertaProcessing(("</s>", 3), ("[CLS]", 1), trim_offsets=True, add_prefix_space=False),
    "xlm-roberta": template("[CLS] $A </s> </s> $B </s>"),
    "types": template("[CLS] $A [SEP] $B:1 [SEP]:1"),
    "sequence": Sequence([template("[CLS] $A [SEP]:1 [CLS]:1 $B:1")]),  # type: ignore[list-item]
    "decoder": template("$A $B:1 </s>:1"),
    "none": None,
}


def vocabulary(processor: PostProcessor | None) -> HFTokenizer:
    words = SPECIALS | {word: 4 + index for index, word in enumerate(["hello", "world", "1", "2", *(f"w{i}" for i in range(99))])}
    tokenizer = HFTokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if processor is not None:
        tokenizer.post_processor = processor
    return tokenizer


def ids_and_types(sequence: np.ndarray) -> tuple[list[int], list[int]]:
    return (sequence & ~SECOND_SEGMENT).tolist(), (sequence // SECOND_SEGMENT).tolist()


WORDS = st.lists(st.sampled_from(["w1", "w2", "w30", "hello", "unknown", "[SEP]"]), max_size=30).map(" ".join)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSORS)
def test_ids_and_types_are_those_of_tokenizers(name: str) -> None:
    ours = Tokenizer(vocabulary(PROCESSORS[name]), CONFIG)
    theirs = vocabulary(PROCESSORS[name])

    @settings(deadline=None, max_examples=150)
    @given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4), st.sampled_from(["left", "right"]))
    def compare(pairs: list[tuple[str, str]], direction: Any) -> None:
        pairs = [pair for pair in pairs if any(pair)]
        theirs.enable_truncation(LIMIT, strategy="longest_first", direction=direction)
        sequences = ours.encode_pairs(pairs, EncodeOptions(truncation_direction=direction))
        for pair, sequence in zip(pairs, sequences, strict=True):
            expected = theirs.encode(*pair)
            assert sequence.dtype == np.int32
            assert ids_and_types(sequence) == (expected.ids, expected.type_ids)

    compare()


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 60))
def test_the_longer_text_gives_until_both_are_half(first: int, second: int, room: int) -> None:
    if first + second > room:
        kept = longest_first(first, second, room)
        assert sum(kept) == room
        assert kept[0] <= first
        assert kept[1] <= second
        assert min(kept) in (first, second, room // 2)


def test_a_real_tokenizer(minilm: Path) -> None:
    config = replace(load_model_config(minilm), labels=("LABEL_0",), head=HeadConfig())
    ours, theirs = Tokenizer.load(minilm, config), HFTokenizer.from_file(str(minilm / "tokenizer.json"))
    theirs.no_padding()
    theirs.enable_truncation(256, strategy="longest_first")
    pairs = [("Größe?", "今日は мир"), ("word " * 300, "short"), ("a b " * 90, "long " * 400), ("", "x"), ("🙂 [SEP]", "")]
    for pair, sequence in zip(pairs, ours.encode_pairs(pairs, EncodeOptions()), strict=True):
        expected = theirs.encode(*pair)
        assert ids_and_types(sequence) == (expected.ids, expected.type_ids)


def test_a_model_without_types_gets_none() -> None:
    for config in (replace(CONFIG, type_vocab_size=1), replace(CONFIG, type_vocab_size=0)):
        (sequence,) = Tokenizer(vocabulary(PROCESSORS["bert"]), config).encode_pairs([("w1", "w2")], EncodeOptions())
        assert ids_and_types(sequence)[1] == [0] * 5


def test_an_embedding_model_needs_no_template_for_pairs() -> None:
    odd = template("[CLS] $B [SEP] $A [SEP]")
    with pytest.raises(ModelError, match="template for pairs was not recognised"):
        Tokenizer(vocabulary(odd), CONFIG)
    Tokenizer(vocabulary(odd), replace(CONFIG, labels=(), head=None))


def test_a_template_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(ModelError, match="max_input_length 3 leaves no room beside 3 special tokens"):
        Tokenizer(vocabulary(PROCESSORS["bert"]), replace(CONFIG, max_input_length=3))


@pytest.fixture
def bert() -> Tokenizer:
    return Tokenizer(vocabulary(PROCESSORS["bert"]), CONFIG)


def test_one_empty_text_is_fine_and_two_are_not(bert: Tokenizer) -> None:
    assert [len(ids) for ids in bert.encode_pairs([("", "w1"), ("w1", "")], EncodeOptions())] == [4, 4]
    with pytest.raises(EmptyInput):
        bert.encode_pairs([("w1", "w2"), ("", "")], EncodeOptions())
    bare = Tokenizer(vocabulary(None), CONFIG)
    with pytest.raises(EmptyInput):  # no text is empty, but the texts give no tokens
        bare.encode_pairs([(" ", "\n")], EncodeOptions())


@pytest.mark.parametrize("option", ["prompt_name", "prompt", "input_type"])
def test_a_prompt_with_a_pair_is_refused(bert: Tokenizer, option: str) -> None:
    with pytest.raises(InvalidInput, match=f"^`{option}` cannot be set with dual inputs$"):
        bert.encode_pairs([("w1", "w2")], EncodeOptions(**{option: "query"}))


def test_a_default_prompt_is_put_before_the_first_text(bert: Tokenizer) -> None:
    """The behaviour of sentence-transformers' CrossEncoder."""
    prompted = Tokenizer(vocabulary(PROCESSORS["bert"]), replace(CONFIG, default_prompt="w9 "))
    expected = bert.encode_pairs([("w9 w1", "w2"), ("w9", "w2")], EncodeOptions())
    ours = prompted.encode_pairs([("w1", "w2"), ("", "w2")], EncodeOptions())
    assert [each.tolist() for each in ours] == [each.tolist() for each in expected]
    with pytest.raises(EmptyInput):
        prompted.encode_pairs([("", "")], EncodeOptions())


def test_an_instruction_is_for_models_whose_template_has_one(bert: Tokenizer) -> None:
    with pytest.raises(InvalidInput, match="`instruction` cannot be set"):
        bert.encode_pairs([("w1", "w2")], EncodeOptions(), instruction="find")


def test_limits(bert: Tokenizer) -> None:
    with pytest.raises(InvalidInput, match=r"^`inputs` must have less than 24 tokens\. Given: 26$"):
        bert.encode_pairs([("w1", "w2 " * 22)], EncodeOptions(truncate=False))
    assert len(bert.encode_pairs([("w1", "w2 " * 20)], EncodeOptions(truncate=False))[0]) == 24
    assert len(bert.encode_pairs([("w1", "w2 " * 20)], EncodeOptions(max_tokens=7))[0]) == 7
    with pytest.raises(InvalidInput, match="more than 3"):
        bert.encode_pairs([("w1", "w2")], EncodeOptions(max_tokens=3))
    with pytest.raises(InvalidInput, match="NUL"):
        bert.encode_pairs([("w1", "w2\0")], EncodeOptions())
    assert ids_and_types(bert.encode_pairs([("W1", "w1")], EncodeOptions())[0])[0] == [1, 0, 2, 9, 2]
    lower = Tokenizer(vocabulary(PROCESSORS["bert"]), replace(CONFIG, lower_case=True))
    assert ids_and_types(lower.encode_pairs([("W1", "W2")], EncodeOptions())[0])[0] == [1, 9, 2, 10, 2]


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("direction", "kept"), [("right", "w1 w2 w3 w4"), ("left", "w8 w9 w10 w11")])
@pytest.mark.parametrize("instruction", [None, "w20"])
def test_a_document_loses_the_tokens_beyond_its_limit(
    instruction: str | None, direction: Direction, kept: str, truncate: bool
) -> None:
    ours = Tokenizer(vocabulary(PROCESSORS["bert"]), replace(CONFIG, max_input_length=64, instruction=instruction))
    long = [("w30", " ".join(f"w{index}" for index in range(1, 12))), ("w30 w31", "w40")]
    options = EncodeOptions(truncate, direction, max_document_tokens=4)
    found, expected = (ours.encode_pairs(pairs, options) for pairs in (long, [("w30", kept), ("w30 w31", "w40")]))
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]
    assert len(ours.encode_pairs(long, EncodeOptions(truncate, direction))[0]) == len(found[0]) + 7


def test_characters_are_limited_by_half_for_each_text(bert: Tokenizer) -> None:
    limit = LIMIT * 250
    with pytest.raises(InvalidInput, match=f"^`inputs` must have less than {limit} characters. Given: {limit + 3}$"):
        bert.encode_pairs([("w1 ", "w" * limit)], EncodeOptions(truncate=False))
    long = "w1 " + "x" * limit + " w2"
    for direction, kept in (("right", [9, 0]), ("left", [0, 10])):
        (sequence,) = bert.encode_pairs([(long, "w3")], EncodeOptions(truncation_direction=direction))  # type: ignore[arg-type]
        assert ids_and_types(sequence)[0] == [1, *kept, 2, 11, 2]


def test_no_client_can_set_a_tokens_type(bert: Tokenizer) -> None:
    for token in (SECOND_SEGMENT, SECOND_SEGMENT | 5, SECOND_SEGMENT - 1):
        with pytest.raises(InvalidInput, match="vocabulary ends at 199"):
            bert.encode([[5, token]], EncodeOptions())


def test_the_end_of_text_that_a_config_asks_for_is_put_behind_both(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """The behaviour of `LlamaTokenizer`."""
    folder = shutil.copytree(tiny("llama_classifier"), tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text()) | {"post_processor": None}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"add_eos_token": True, "eos_token": "<|endoftext|>", "tokenizer_class": "LlamaTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer.load(folder, load_model_config(folder))
    assert ours.encode_pairs([("w0", "w1 w2")], EncodeOptions())[0].tolist() == [5, 4, 6, 7, 4]
