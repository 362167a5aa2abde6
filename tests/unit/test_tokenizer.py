"""The tokenizer wrapper: the model's own ids, cut on the side asked for, with prompts, never changed by a request."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from engine import EmptyInput, InvalidInput, ModelError
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


@pytest.mark.parametrize(
    ("kind", "config", "expected"),
    [
        ("bert", {"tokenizer_class": "LlamaTokenizer", "eos_token": "<|endoftext|>"}, [2, 5, 3, 4]),
        ("bert", {"tokenizer_class": "LlamaTokenizer", "eos_token": {"content": "[SEP]"}}, [2, 5, 3]),  # it is there already
        ("qwen3", {"auto_map": {"AutoTokenizer": []}, "eos_token": "[SEP]"}, [5, 4, 3]),
        ("qwen3", {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "[SEP]"}, [5, 4]),  # it does not heed the key
        ("qwen3", {"auto_map": {"AutoTokenizer": []}, "eos_token": "[SEP]", "add_eos_token": False}, [5, 4]),
    ],
)
def test_the_end_of_text_is_put_where_the_config_has_it(
    tiny: Callable[..., Path], tmp_path: Path, kind: str, config: dict[str, Any], expected: list[int]
) -> None:
    """As gte-Qwen2's tokenizer does: it is not in tokenizer.json, and the model pools it."""
    folder = shutil.copytree(tiny(kind), tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_eos_token": True} | config))
    tokenizer = Tokenizer.load(folder, load_model_config(folder))
    assert tokenizer.encode(["w0"], EncodeOptions())[0].tolist() == expected
    assert [token.id for token in tokenizer.tokens(["w0"], True, None)[0]] == expected
    assert [token.id for token in tokenizer.tokens(["w0"], False, None)[0]] == [5]


def test_an_end_of_text_of_no_vocabulary_is_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("qwen3"), tmp_path / "model")
    (folder / "tokenizer_config.json").write_text('{"add_eos_token": true, "auto_map": {}, "eos_token": "</s>"}')
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: add_eos_token is true, eos_token '</s>'"):
        Tokenizer.load(folder, load_model_config(folder))


def test_truncation_of_one_request_does_not_touch_another(ours: Tokenizer) -> None:
    with pytest.raises(InvalidInput, match="Given: 402"):
        ours.encode(["word " * 400], EncodeOptions(truncate=False))
    assert len(ours.encode(["word " * 400], EncodeOptions())[0]) == 256
    assert len(ours.tokens(["word " * 400], True, None)[0]) == 402


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
    for token in ours.tokens([text], False, None)[0]:
        assert token.start is not None
        assert text.encode()[token.start : token.stop].decode() == token.text
