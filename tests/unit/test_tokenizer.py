"""The tokenizer wrapper: the model's own ids, truncation on the requested side, prompts, and no change of state by requests."""

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as HFTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import RobertaProcessing, TemplateProcessing

from engine import EmptyInput, InvalidInput, ModelError
from engine.model.folder import load_model_config
from engine.options import EncodeOptions
from engine.text.tokenizer import Tokenizer

TEXTS = ["a", "Hello, world!", "Größenwahn 今日は  мир", "word " * 400, " \n ", "x" * 3000, "🙂 [SEP] in text"]


def _truncation(direction: str) -> dict[str, Any]:
    return {"truncation": {"direction": direction, "max_length": 256, "strategy": "LongestFirst", "stride": 0}}


@pytest.fixture(scope="module")
def ours(minilm: Path) -> Tokenizer:
    return Tokenizer.load(minilm, load_model_config(minilm))


@pytest.fixture(scope="module")
def theirs(minilm: Path) -> Any:
    import transformers  # takes seconds

    return transformers.AutoTokenizer.from_pretrained(minilm)


def test_an_error_names_the_input_of_the_request(ours: Tokenizer) -> None:
    with pytest.raises(InvalidInput, match="input 257 does"):
        ours.encode(["a", "\0"], EncodeOptions(), first=256)
    with pytest.raises(InvalidInput, match="input 257 has token id"):
        ours.encode(["a", [1 << 30]], EncodeOptions(), first=256)


@pytest.mark.parametrize("lower_case", [False, True])
@pytest.mark.parametrize("direction", ["left", "right"])
def test_texts_at_once_have_the_ids_of_each_alone(ours: Tokenizer, direction: Any, lower_case: bool) -> None:
    tokenizer = copy(ours)
    tokenizer._config = replace(ours._config, lower_case=lower_case)
    tokenizer.limit_to(6)
    for inputs in (["one", "TWO words", "three.", "a\nb"] * 3, [*TEXTS, "plain"], ["one", [5, 6], "two", [7] * 9], [], [[5]]):
        for prompt in (None, "Find: "):
            options = EncodeOptions(truncation_direction=direction, prompt=prompt)
            together = tokenizer.encode(inputs, options)
            alone = [tokenizer.encode([each], options)[0].tolist() for each in inputs]
            assert [ids.tolist() for ids in together] == alone
            assert together.num_tokens == len(together.token_ids) == sum(map(len, alone))
            assert together.token_ids.dtype == np.int32
            assert together.token_ids.flags.writeable


def test_the_first_wrong_input_is_named(ours: Tokenizer) -> None:
    tokenizer = copy(ours)
    tokenizer._config, tokenizer._exceeds_table = replace(ours._config, vocab_size=5000), True
    with pytest.raises(InvalidInput, match="input 2 has the token 'collar'"):
        tokenizer.encode(["the", "the", "collar", "enabled"], EncodeOptions())
    with pytest.raises(EmptyInput):
        tokenizer.encode(["the", "", "\0"], EncodeOptions())
    with pytest.raises(InvalidInput, match="NUL characters, input 1 does"):
        tokenizer.encode(["the", "\0", ""], EncodeOptions())
    with pytest.raises(InvalidInput, match="Given: 302"):
        tokenizer.encode(["the", "the " * 300, "the " * 400], EncodeOptions(truncate=False))


def test_padding_at_the_end_of_a_text_is_left_out(tiny: Callable[..., Path]) -> None:
    folder = tiny("qwen3")
    config, library = load_model_config(folder), HFTokenizer.from_file(str(folder / "tokenizer.json"))
    first, padding, other = library.encode("w0 w1 w2", add_special_tokens=False).ids
    texts = ["w0", "w0 w1 w2", "w1 w0 w1 w1", "w1"]
    (*_, end), *_ = Tokenizer(library, config).encode(texts, EncodeOptions())
    padded = Tokenizer(library, replace(config, padding_id=int(end))).encode(["w0", "w0 w1"], EncodeOptions())
    assert [ids.tolist() for ids in padded] == [[first], [first, padding]]
    library.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    bare = Tokenizer(library, replace(config, padding_id=padding))
    found = bare.encode(texts, EncodeOptions())
    assert [ids.tolist() for ids in found] == [[first], [first, padding, other], [padding, first], [padding]]
    for tokenizer in (bare, Tokenizer(library, config)):
        with pytest.raises(EmptyInput):
            tokenizer.encode(["w0", " "], EncodeOptions())


@pytest.mark.parametrize("direction", ["left", "right"])
def test_ids_equal_those_of_transformers(ours: Tokenizer, theirs: Any, direction: str) -> None:
    theirs.truncation_side = direction
    options = EncodeOptions(truncation_direction=direction)  # type: ignore[arg-type]
    for text, ids in zip(TEXTS, ours.encode(TEXTS, options), strict=True):
        assert ids.tolist() == theirs(text, truncation=True, max_length=256)["input_ids"]


@pytest.mark.parametrize(
    ("files", "side"),
    [
        ({}, "right"),
        ({"tokenizer_config.json": {"truncation_side": "left"}}, "left"),
        ({"tokenizer.json": _truncation("Left")}, "left"),
        ({"tokenizer.json": _truncation("Left"), "tokenizer_config.json": {"truncation_side": "right"}}, "right"),
    ],
)
def test_the_models_own_side_is_cut_unless_a_request_names_one(
    minilm: Path, tmp_path: Path, files: dict[str, dict[str, Any]], side: Any
) -> None:
    import transformers

    folder = shutil.copytree(minilm, tmp_path / "model")
    for name, changes in files.items():
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))
    tokenizer, theirs = Tokenizer.load(folder, load_model_config(folder)), transformers.AutoTokenizer.from_pretrained(folder)
    text = " ".join(f"word{index}" for index in range(400))
    (own,) = tokenizer.encode([text], EncodeOptions())
    assert own.tolist() == theirs(text, truncation=True, max_length=256)["input_ids"]
    left, right = (tokenizer.encode([text], EncodeOptions(truncation_direction=each))[0] for each in ("left", "right"))  # type: ignore[arg-type]
    assert own.tolist() == (left if side == "left" else right).tolist()
    assert left.tolist() != right.tolist()


def test_a_side_that_is_none_is_refused(minilm: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(minilm, tmp_path / "model")
    (folder / "tokenizer_config.json").write_text('{"truncation_side": "up"}')
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: truncation_side = 'up' is not supported"):
        Tokenizer.load(folder, load_model_config(folder))


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
        ("bert", {"tokenizer_class": "LlamaTokenizer", "eos_token": {"content": "[SEP]"}}, [2, 5, 3]),  # the template has it
        ("qwen3", {"auto_map": {"AutoTokenizer": []}, "eos_token": "[SEP]"}, [5, 4, 3]),
        ("qwen3", {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "[SEP]"}, [5, 4]),  # this class ignores the key
        ("qwen3", {"auto_map": {"AutoTokenizer": []}, "eos_token": "[SEP]", "add_eos_token": False}, [5, 4]),
    ],
)
def test_the_end_of_text_is_put_where_the_config_has_it(
    tiny: Callable[..., Path], tmp_path: Path, kind: str, config: dict[str, Any], expected: list[int]
) -> None:
    """The behaviour of gte-Qwen2's tokenizer: tokenizer.json does not append the token, but the model pools it."""
    folder = shutil.copytree(tiny(kind), tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_eos_token": True} | config))
    tokenizer = Tokenizer.load(folder, load_model_config(folder))
    assert tokenizer.encode(["w0"], EncodeOptions())[0].tolist() == expected
    assert [token.id for token in tokenizer.tokens(["w0"], True, EncodeOptions())[0]] == expected
    assert [token.id for token in tokenizer.tokens(["w0"], False, EncodeOptions())[0]] == [5]


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "BertTokenizer"},
        {"do_lower_case": False},
        {"tokenizer_class": "BertTokenizerFast", "do_lower_case": False, "strip_accents": True},
        {
            "tokenizer_class": "DistilBertTokenizer",
            "do_lower_case": True,
            "strip_accents": False,
            "tokenize_chinese_chars": False,
        },
        {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": False},
    ],
)
def test_a_bert_tokenizer_is_the_one_of_transformers(
    minilm: Path, tmp_path: Path, settings: dict[str, Any], lowercase: bool
) -> None:
    """transformers' classes for BERT take tokenizer_config.json where it contradicts tokenizer.json."""
    import transformers  # takes seconds

    folder = shutil.copytree(minilm, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"]["lowercase"] = lowercase
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["Hello World", "naïve CAFÉS", "東京タワー 東", "Größe [SEP] x"]
    found = Tokenizer.load(folder, load_model_config(folder)).encode(texts, EncodeOptions())
    assert [ids.tolist() for ids in found] == [theirs(text).input_ids for text in texts]


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("settings", [{}, {"add_prefix_space": True}, {"add_prefix_space": False}])
def test_a_roberta_tokenizer_is_the_one_of_transformers(
    minilm: Path, tmp_path: Path, settings: dict[str, Any], in_file: bool
) -> None:
    import transformers  # takes seconds

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    vocab = {token: index for index, token in enumerate([*special, *sorted(ByteLevel.alphabet())])}
    tokenizer = HFTokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=in_file)
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = RobertaProcessing(("</s>", 2), ("<s>", 0))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "RobertaTokenizer"} | settings))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    found = Tokenizer.load(tmp_path, load_model_config(minilm)).encode(["ab c", " ab"], EncodeOptions())
    assert [ids.tolist() for ids in found] == [theirs(text).input_ids for text in ("ab c", " ab")]


def test_settings_of_the_tokenizer_that_are_not_supported_are_named(minilm: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(minilm, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    for settings, words in (
        ({"split_special_tokens": True}, "split_special_tokens = True is not supported"),
        ({"tokenizer_class": "BertTokenizer", "do_lower_case": "yes"}, "do_lower_case = 'yes' is not supported"),
    ):
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        with pytest.raises(ModelError, match=words):
            Tokenizer.load(folder, load_model_config(folder))


def test_an_end_of_text_of_no_vocabulary_is_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("qwen3"), tmp_path / "model")
    (folder / "tokenizer_config.json").write_text('{"add_eos_token": true, "auto_map": {}, "eos_token": "</s>"}')
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: add_eos_token is true, eos_token '</s>'"):
        Tokenizer.load(folder, load_model_config(folder))


def test_a_template_with_a_token_that_it_does_not_define_is_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """tokenizers panics at the first text."""
    folder = shutil.copytree(tiny("bert"), tmp_path / "model")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["post_processor"]["single"][0]["SpecialToken"]["id"] = "[BOS]"
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be loaded"):
        Tokenizer.load(folder, load_model_config(folder))


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


@pytest.fixture
def prompted(minilm: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the model whose config_sentence_transformers.json has these prompts, and no weights."""

    def make(prompts: dict[str, str], **config: str) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(minilm, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
        (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts} | config))
        return folder

    return make


@pytest.mark.parametrize(
    ("input_type", "names", "taken"),
    [
        ("query", ("document", "query", "web_search_query"), "query"),
        ("query", ("sts_query", "web_search_query"), "web_search_query"),
        ("query", ("passage",), None),
        ("document", ("query", "passage", "corpus"), "passage"),
        ("document", ("passage", "document"), "document"),
        ("document", ("query",), None),
        ("classification", ("Classification", "STS"), "Classification"),
        ("clustering", ("query",), None),
    ],
)
def test_an_input_type_takes_the_models_prompt_for_it(
    prompted: Callable[..., Path], input_type: Any, names: tuple[str, ...], taken: str | None
) -> None:
    folder = prompted({name: f"{name}> " for name in names}, default_prompt_name=names[0])
    tokenizer = Tokenizer.load(folder, load_model_config(folder))
    assert tokenizer.prompt(EncodeOptions(input_type=input_type)) == ("" if taken is None else f"{taken}> ")


def test_the_operators_default_prompt_overrides_the_authors(prompted: Callable[..., Path]) -> None:
    folder = prompted({"query": "query: ", "passage": "passage: "}, default_prompt_name="passage")

    def default(**given: str) -> str:
        return Tokenizer.load(folder, load_model_config(folder, **given)).prompt(EncodeOptions())  # type: ignore[arg-type]

    assert default() == "passage: "
    assert default(default_prompt_name="query") == "query: "
    assert default(default_prompt="say: ") == "say: "
    assert default(default_prompt="") == ""
    with pytest.raises(ModelError, match=r'`nope` but it was not found.*\["query", "passage"\]'):
        default(default_prompt_name="nope")
    with pytest.raises(ModelError, match="no prompts were found"):
        load_model_config(prompted({}), default_prompt_name="query")


def test_prompts_that_nobody_chose_are_named(prompted: Callable[..., Path], minilm: Path) -> None:
    folder = prompted({"query": "query: ", "document": ""})
    assert load_model_config(folder).idle_prompts == ("query",)
    assert load_model_config(folder, default_prompt_name="query").idle_prompts == ()
    assert load_model_config(folder, default_prompt="").idle_prompts == ()
    assert load_model_config(minilm).idle_prompts == ()
    by_authors = prompted({"query": "query: ", "document": ""}, default_prompt_name="document")
    assert load_model_config(by_authors).idle_prompts == ()


def test_max_tokens_is_a_limit_below_the_models(ours: Tokenizer) -> None:
    whole = ours.encode(["one two three four"], EncodeOptions())[0].tolist()
    assert ours.encode(["one two three four"], EncodeOptions(max_tokens=4))[0].tolist() == whole[:3] + whole[-1:]
    assert ours.encode([[5, 6, 7, 8]], EncodeOptions(max_tokens=3))[0].tolist() == [5, 6, 7]
    assert len(ours.encode(["word " * 400], EncodeOptions(max_tokens=1000))[0]) == 256
    with pytest.raises(InvalidInput, match="more than 2"):
        ours.encode(["one"], EncodeOptions(max_tokens=0))


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
    text = "é 今 😀 hello"
    for token in ours.tokens([text], False, EncodeOptions())[0]:
        assert token.start is not None
        assert text.encode()[token.start : token.stop].decode() == token.text


def test_tokens_of_a_model_in_lower_case_are_those_of_an_input(tiny: Callable[..., Path]) -> None:
    """Offsets are those of the text as it was sent. The lower case of "İ" has two characters."""
    config = replace(load_model_config(tiny("bert")), lower_case=True)
    tokenizer = Tokenizer.load(tiny("bert"), config)
    (tokens,) = tokenizer.tokens(["W1 İ W2"], True, EncodeOptions(prompt="W3 "))
    assert [token.id for token in tokens] == tokenizer.encode(["W1 İ W2"], EncodeOptions(prompt="W3 "))[0].tolist()
    assert [token.text for token in tokens] == ["[CLS]", "W3", "W1", "İ", "W2", "[SEP]"]
    assert [token.start for token in tokens] == [None, 0, 3, 6, 9, None]


def test_a_text_of_very_many_tokens_is_not_shown(ours: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.text.tokenizer._MOST_SHOWN_TOKENS", 4)
    assert len(ours.tokens(["many words", "two more"], True, EncodeOptions())) == 2
    with pytest.raises(InvalidInput, match="a text has 5 tokens, the limit is 4"):
        ours.tokens(["a", "many more words"], True, EncodeOptions())


def test_a_card_without_memory_for_the_longest_input_lowers_the_limit(ours: Tokenizer) -> None:
    lowered, text = copy(ours), "many words " * 50
    lowered.limit_to(8)
    assert [len(each.encode([text], EncodeOptions())[0]) for each in (lowered, ours)] == [8, 102]
    with pytest.raises(InvalidInput, match="8"):
        lowered.encode([text], EncodeOptions(truncate=False))


def test_another_process_gets_a_tokenizer_without_torch(ours: Tokenizer) -> None:
    code = "import pickle, sys; pickle.load(sys.stdin.buffer); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(ours), check=True)
