"""The tokenizer wrapper: the model's own ids, cut on the side asked for, with prompts, never changed by a request."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from engine import EmptyInput, InvalidInput
from engine.model_folder import load_model_config
from engine.tokenizer import EncodeOptions, Tokenizer

TEXTS = ["a", "Hello, world!", "Größenwahn 今日は  мир", "word " * 400, " \n ", "x" * 3000, "🙂 [SEP] in text"]


@pytest.fixture(scope="module")
def ours(minilm: Path) -> Tokenizer:
    return Tokenizer.load(minilm, load_model_config(minilm))


@pytest.fixture(scope="module")
def theirs(minilm: Path) -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(minilm)


@pytest.mark.parametrize("direction", ["left", "right"])
def test_ids_equal_those_of_transformers(ours: Tokenizer, theirs: transformers.PreTrainedTokenizerBase, direction: str) -> None:
    theirs.truncation_side = direction
    options = EncodeOptions(truncation_direction=direction)  # type: ignore[arg-type]
    for text, ids in zip(TEXTS, ours.encode(TEXTS, options), strict=True):
        assert ids.tolist() == theirs(text, truncation=True, max_length=256)["input_ids"]


def test_special_tokens_of_both_families(tiny: Callable[..., Path]) -> None:
    for kind, expected in (("bert", [2, 5, 3]), ("qwen3", [5, 4])):
        tokenizer = Tokenizer.load(tiny(kind), load_model_config(tiny(kind)))
        assert tokenizer.encode(["w0"], EncodeOptions())[0].tolist() == expected
        long = tokenizer.encode(["w0 " * 1000], EncodeOptions())[0].tolist()
        assert len(long) == tokenizer.max_input_length
        assert long[-1] == expected[-1]  # the pooled token survives truncation


def test_truncation_of_one_request_does_not_touch_another(ours: Tokenizer) -> None:
    with pytest.raises(InvalidInput, match="Given: 402"):
        ours.encode(["word " * 400], EncodeOptions(truncate=False))
    assert len(ours.encode(["word " * 400], EncodeOptions())[0]) == 256
    assert len(ours.tokens(["word " * 400], True, EncodeOptions())[0]) == 402


def test_a_huge_string_is_cut_before_it_is_tokenised(ours: Tokenizer) -> None:
    text = "word " * 100_000
    assert len(ours.encode([text], EncodeOptions())[0]) == 256
    left = ours.encode([text + "tail end"], EncodeOptions(truncation_direction="left"))[0]
    assert left.tolist()[-3:-1] == ours.encode(["tail end"], EncodeOptions())[0].tolist()[1:-1]


def test_prompts(minilm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(minilm, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    prompts = {"query": "query: ", "passage": "passage: "}
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts, "default_prompt_name": "query"}))
    tokenizer = Tokenizer.load(folder, load_model_config(folder))
    plain = Tokenizer.load(minilm, load_model_config(minilm))

    def ids(prompt_name: str | None) -> list[int]:
        return tokenizer.encode(["x"], EncodeOptions(prompt_name=prompt_name))[0].tolist()

    assert ids("passage") == plain.encode(["passage: x"], EncodeOptions())[0].tolist()
    assert ids(None) == ids("query")
    with pytest.raises(InvalidInput) as caught:
        ids("nope")
    assert str(caught.value) == (
        "`default-prompt-name` is set to `nope` but it was not found in the Sentence Transformers prompts. "
        'Available prompts: ["query", "passage"]'
    )


def test_token_ids_are_used_as_they_are(ours: Tokenizer) -> None:
    mixed = ours.encode([[5, 6, 7], "a"], EncodeOptions())
    assert mixed[0].tolist() == [5, 6, 7]
    assert ours.encode([list(range(300))], EncodeOptions())[0].tolist() == list(range(256))
    with pytest.raises(InvalidInput, match="token id 30522"):
        ours.encode(["a", [30522]], EncodeOptions())


def test_empty_inputs(ours: Tokenizer, tiny: Callable[..., Path]) -> None:
    for inputs in ([""], [[]], ["a", ""]):
        with pytest.raises(EmptyInput):
            ours.encode(inputs, EncodeOptions())  # type: ignore[arg-type]


def test_byte_offsets(ours: Tokenizer) -> None:
    text = "é 今 hello"
    for token in ours.tokens([text], False, EncodeOptions())[0]:
        assert token.start is not None
        assert text.encode()[token.start : token.stop].decode() == token.text
