"""Rerankers in their published forms: a language model that answers yes or no, and folders saved by sentence-transformers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from engine import Engine, InvalidInput, ModelError
from engine.model.config import WordHeadConfig
from engine.model.folder import load_model_config
from engine.options import EmbedOptions, EncodeOptions

RAW = EmbedOptions(normalize=False)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = ["<think>", "</think>"]  # added tokens that are not special, as in Qwen3
# The pattern of Qwen2 and Qwen3: a space belongs to the word after it, and line ends belong to the text before them.
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PAIRS = [
    ("What is the capital of China?", "The capital of China is Beijing."),
    ("Explain gravity", "Gravity is a force that attracts two bodies towards each other."),
    ("two\nlines ", "  spaces before, and after  \n\n"),
    ("", "no query"),
    ("no document", ""),
    ("größe", "今日は天気 🙂 <|im_end|> yes"),
]


def save_tokenizer(folder: Path, vocab: int) -> None:
    """A small byte-level BPE tokenizer in which yes and no are tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab - 5, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["yes no yes no the document query that"] * 9, trainer)
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.add_tokens(WORDS)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|endoftext|>", "padding_side": "left"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module", params=["tied", "untied", "tied but stored with other values"])
def reranker(request: pytest.FixtureRequest, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as in the first version of Qwen/Qwen3-Reranker-*: a language model. Only the name shows that it reranks."""
    tied = request.param == "tied"
    made = tiny("qwen3_lm", not tied, tie_word_embeddings=tied, max_position_embeddings=1024)
    folder = tmp_path_factory.mktemp("hub") / "models--Qwen--Qwen3-Reranker-0.6B" / "snapshots" / "abc"
    shutil.copytree(made, folder)
    shutil.rmtree(folder / "1_Pooling")
    save_tokenizer(folder, 300)
    if request.param != "untied":
        config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def model_card(folder: Path, pairs: list[tuple[str, str]], task: str | None, limit: int) -> tuple[list[list[int]], np.ndarray]:
    """Returns: (ids, scores), computed with the code of the model card."""
    tokenizer: Any = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    yes, no = (tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
    before = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    after = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    before, after = (tokenizer.encode(text, add_special_tokens=False) for text in (before, after))
    task = task or "Given a web search query, retrieve relevant passages that answer the query"
    texts = [f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}" for query, document in pairs]
    room = limit - len(before) - len(after)
    bodies = tokenizer(texts, padding=False, truncation="longest_first", return_attention_mask=False, max_length=room)
    ids = [before + body + after for body in bodies["input_ids"]]
    scores = []
    for each in ids:
        with torch.inference_mode():
            logits = model.eval()(torch.tensor([each])).logits[0, -1]
        scores.append(torch.nn.functional.log_softmax(torch.stack([logits[no], logits[yes]]), dim=0)[1].exp())
    return ids, np.array(scores)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("task", [None, "Judge by tone"])
def test_scores_are_those_of_the_model_card(reranker: Path, task: str | None) -> None:
    engine = Engine.load(reranker, dtype="float32", device="cpu")
    assert (engine.config.task, engine.config.labels, engine.config.pooling) == ("reranker", ("LABEL_0",), "last_token")
    ids, scores = model_card(reranker, PAIRS, task, 1024)
    sequences = engine.tokenizer.encode_pairs(PAIRS, EncodeOptions(), instruction=task)
    assert [each.tolist() for each in sequences] == ids
    logits = engine.launch(sequences, [RAW] * len(ids)).wait().vectors
    np.testing.assert_allclose(sigmoid(logits[:, 0]), scores, rtol=1e-4, atol=1e-6)
    assert scores.std() > 0.01


def test_the_rows_of_yes_and_no_are_subtracted_in_fp32(reranker: Path) -> None:
    """In bf16 the error of our logits is at most 1.5 times transformers' error. With few pairs the errors differ by chance."""
    pairs = [(f"{query} {number}", document) for number in range(4) for query, document in PAIRS]
    exact, low = (Engine.load(reranker, dtype=dtype, device="cpu") for dtype in ("float32", "bfloat16"))  # type: ignore[arg-type]
    sequences = exact.tokenizer.encode_pairs(pairs, EncodeOptions())
    expected, ours = (engine.launch(sequences, [RAW] * len(pairs)).wait().vectors[:, 0] for engine in (exact, low))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(reranker, dtype=torch.bfloat16, attn_implementation="eager")
    head = exact.config.head
    assert isinstance(head, WordHeadConfig)
    with torch.inference_mode():
        logits = [model.eval()(torch.tensor([ids.tolist()])).logits[0, -1, [head.yes, head.no]] for ids in sequences]
    theirs = np.array([(yes - no).float() for yes, no in logits])
    assert np.linalg.norm(ours - expected) <= 1.5 * np.linalg.norm(theirs - expected)


def test_what_is_too_long_is_cut_and_the_template_is_not(reranker: Path) -> None:
    tokenizer = Engine.load(reranker, dtype="float32", device="cpu", max_input_tokens=900).tokenizer
    pairs = [("what is it", "a " * 2000), ("it " * 1500, "a document"), ("x " * 350, "y " * 350)]
    ids, _ = model_card(reranker, pairs, None, 900)
    assert [each.tolist() for each in tokenizer.encode_pairs(pairs, EncodeOptions())] == ids
    (whole,) = tokenizer.encode_pairs([("what is it", "first " + "a " * 2000 + "last")], EncodeOptions(max_tokens=700))
    (left,) = tokenizer.encode_pairs(
        [("what is it", "first " + "a " * 2000 + "last")], EncodeOptions(truncation_direction="left", max_tokens=700)
    )
    assert len(whole) == len(left) == 700
    texts = tokenizer.decode([whole.tolist(), left.tolist()], False)
    assert [text.count("<Query>: what is it\n<Document>:") for text in texts] == [1, 1]
    assert ["first" in text for text in texts] == [True, False]
    assert ["last<|im_end|>" in text for text in texts] == [False, True]
    assert all(text.endswith("<think>\n\n</think>\n\n") and text.startswith("<|im_start|>system") for text in texts)
    (left,) = tokenizer.encode_pairs([("it " * 1500, "a document")], EncodeOptions(truncation_direction="left"))
    assert len(left) == 900
    with pytest.raises(InvalidInput, match=r"must have less than 900 tokens\. Given: "):
        tokenizer.encode_pairs([("q", "d"), ("what is it", "a " * 2000)], EncodeOptions(truncate=False))
    with pytest.raises(InvalidInput, match="`instruction` must have at most"):
        tokenizer.encode_pairs([("q", "d")], EncodeOptions(), instruction="x" * 8193)
    with pytest.raises(InvalidInput, match="`max_tokens` should be more than"):
        tokenizer.encode_pairs([("q", "d")], EncodeOptions(max_tokens=20))


CHAT = (
    "{%- set query = messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first -%}"
    "{%- set document = messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first -%}"
    "{{- '<|im_start|>system\\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\\n<|im_start|>user\\n<Instruct>: Given a web search query, '
    "retrieve relevant passages that answer the query\\n<Query>: ' + query + '\\n<Document>: ' + document + "
    "'<|im_end|>\\n<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' -}}"
)


@pytest.fixture
def saved(reranker: Path, tmp_path: Path) -> Path:
    """A folder as of later rerankers: it has a LogitScore module, a chat template for pairs, and any name."""
    body = shutil.copytree(reranker, tmp_path / "body")
    (body / "chat_template.jinja").write_text(CHAT)
    theirs = CrossEncoder(str(body), device="cpu", model_kwargs={"attn_implementation": "eager"})
    theirs.save(str(tmp_path / "saved"))
    return tmp_path / "saved"


def test_a_logit_score_module_makes_a_reranker(saved: Path) -> None:
    theirs = CrossEncoder(str(saved), device="cpu", model_kwargs={"attn_implementation": "eager"})
    engine = Engine.load(saved, dtype="float32", device="cpu", pooling="mean")  # as in TEI, the engine ignores this pooling
    assert engine.config.task == "reranker"
    sequences = engine.tokenizer.encode_pairs(PAIRS, EncodeOptions())
    ours = engine.launch(sequences, [RAW] * len(PAIRS)).wait().vectors[:, 0]
    expected = theirs.predict(PAIRS, activation_fn=torch.nn.Identity())
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=3e-5)


def test_a_default_prompt_is_the_instruction(saved: Path) -> None:
    """A system message replaces the template's own instruction."""
    web = "Given a web search query, retrieve relevant passages that answer the query"
    system = "messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first | default('Find the trial')"
    path = saved / "chat_template.jinja"
    path.write_text(path.read_text().replace(web, f"' + ({system}) + '"))
    with pytest.raises(ModelError, match="default instruction of the chat template is not Qwen3-Reranker's; give it with --def"):
        load_model_config(saved)
    path = saved / "config_sentence_transformers.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"prompts": {"tone": "Judge by tone"}, "default_prompt_name": "tone"})
    )
    theirs = CrossEncoder(str(saved), device="cpu", model_kwargs={"attn_implementation": "eager"})
    engine = Engine.load(saved, dtype="float32", device="cpu")
    ours = engine.launch(engine.tokenizer.encode_pairs(PAIRS, EncodeOptions()), [RAW] * len(PAIRS)).wait().vectors[:, 0]
    np.testing.assert_allclose(ours, theirs.predict(PAIRS, activation_fn=torch.nn.Identity()), rtol=1e-4, atol=3e-5)
    assert load_model_config(saved, default_prompt="Find").instruction == "Find"


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("chat_template.jinja", "Judge whether", "Say whether", "a chat template that is not Qwen3-Reranker's"),
        ("chat_template.jinja", "<think>", "", "a chat template that is not Qwen3-Reranker's"),
        ("1_LogitScore/config.json", '"true_token_id": ', '"true_token_id": 1000', r"true_token_id is 1000\d+, expected a token"),
        ("1_LogitScore/config.json", "causal_logits", "logits", "module_input_name = 'logits' is not supported"),
        ("modules.json", "transformer.Transformer", "router.Router", r"\['Router', 'LogitScore'\] of Qwen3ForCausalLM"),
        ("config.json", "Qwen3ForCausalLM", "Qwen2ForCausalLM", "Qwen2ForCausalLM is not supported"),
    ],
)
def test_a_logit_score_that_cannot_be_honoured_is_refused(saved: Path, file: str, old: str, new: str, message: str) -> None:
    content = (saved / file).read_text()
    assert old in content
    (saved / file).write_text(content.replace(old, new))
    with pytest.raises(ModelError, match=message):
        load_model_config(saved)


def test_a_logit_score_without_a_chat_template_takes_pairs_as_the_tokenizer_joins_them(saved: Path) -> None:
    path = saved / "sentence_bert_config.json"
    config = json.loads(path.read_text())
    del config["modality_config"]["message"]
    path.write_text(json.dumps(config))
    theirs = CrossEncoder(str(saved), device="cpu", model_kwargs={"attn_implementation": "eager"})
    engine = Engine.load(saved, dtype="float32", device="cpu")
    sequences = engine.tokenizer.encode_pairs(PAIRS, EncodeOptions())
    ours = engine.launch(sequences, [RAW] * len(PAIRS)).wait().vectors[:, 0]
    np.testing.assert_allclose(ours, theirs.predict(PAIRS, activation_fn=torch.nn.Identity()), rtol=1e-4, atol=3e-5)
    with pytest.raises(InvalidInput, match="`instruction` cannot be set"):
        engine.tokenizer.encode_pairs(PAIRS, EncodeOptions(), instruction="Judge")


def test_the_logit_of_yes_alone(saved: Path) -> None:
    path = saved / "1_LogitScore" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"false_token_id": None}))
    theirs = CrossEncoder(str(saved), device="cpu", model_kwargs={"attn_implementation": "eager"})
    engine = Engine.load(saved, dtype="float32", device="cpu")
    ours = engine.launch(engine.tokenizer.encode_pairs(PAIRS, EncodeOptions()), [RAW] * len(PAIRS)).wait().vectors[:, 0]
    np.testing.assert_allclose(ours, theirs.predict(PAIRS, activation_fn=torch.nn.Identity()), rtol=1e-4, atol=3e-5)


def test_only_a_silent_folder_of_the_name_is_a_reranker(reranker: Path, tmp_path: Path) -> None:
    def task(name: str, pooling: Any = None) -> str:
        folder = tmp_path / name
        if not folder.exists():
            shutil.copytree(reranker, folder)
        return load_model_config(folder, pooling).task

    assert task("qwen3-reranker-tuned") == task("My_Qwen3_Reranker") == "reranker"
    assert task("Qwen3-Reranker-4B", "last_token") == "embedding"
    assert task("zerank-1") == "generation"
    embedding = tmp_path / "Qwen3-Reranker-Embedding"
    shutil.copytree(reranker, embedding)
    (embedding / "1_Pooling").mkdir()
    (embedding / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    assert load_model_config(embedding).task == "embedding"
    (reranker.parent / "other").mkdir(exist_ok=True)
    vocabulary = json.loads((tmp_path / "My_Qwen3_Reranker" / "tokenizer.json").read_text())
    vocabulary["model"]["merges"] = []
    vocabulary["model"]["vocab"] = {word: i for i, word in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    (tmp_path / "My_Qwen3_Reranker" / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(ModelError, match=r"tokenizer\.json: no token 'yes'"):
        task("My_Qwen3_Reranker")


@pytest.fixture
def cross_encoder(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    body = shutil.copytree(tiny("bert_classifier", id2label={"0": "relevant"}, label2id={"relevant": 0}), tmp_path / "body")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}
    config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]  # the names of BertTokenizer
    (body / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = CrossEncoder(str(body), device="cpu", model_kwargs={"attn_implementation": "eager"}, max_length=64)
    theirs.save(str(tmp_path / "saved"))
    return tmp_path / "saved"


def test_a_saved_cross_encoder_scores_as_it_does(cross_encoder: Path) -> None:
    theirs = CrossEncoder(str(cross_encoder), device="cpu", model_kwargs={"attn_implementation": "eager"})
    engine = Engine.load(cross_encoder, dtype="float32", device="cpu")
    assert (engine.config.task, engine.config.labels, engine.config.max_input_length) == ("reranker", ("relevant",), 64)
    pairs = [("w1 w2", "w3"), ("w9 " * 20, "w4 w5 " * 40), ("w9 " * 90, "w4"), ("w1", "w2 nothing w3")]
    ours = engine.launch(engine.tokenizer.encode_pairs(pairs, EncodeOptions()), [RAW] * len(pairs)).wait().vectors[:, 0]
    np.testing.assert_allclose(sigmoid(ours), theirs.predict(pairs), rtol=1e-4, atol=1e-5)


def test_a_cross_encoder_of_older_times_loads(cross_encoder: Path) -> None:
    (cross_encoder / "modules.json").unlink()
    config = json.loads((cross_encoder / "config.json").read_text())
    for key in ({"sbert_ce_default_activation_function": "torch.nn.Identity"}, {"sentence_transformers": {"activation_fn": "x"}}):
        (cross_encoder / "config.json").write_text(json.dumps(config | key))
        assert load_model_config(cross_encoder).task == "reranker"


def test_modules_after_a_classifier_are_refused(cross_encoder: Path) -> None:
    modules = json.loads((cross_encoder / "modules.json").read_text())
    (cross_encoder / "modules.json").write_text(
        json.dumps([*modules, {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}])
    )
    with pytest.raises(ModelError, match=r"modules\.json: modules \['Transformer', 'Pooling'\] are not supported for Bert"):
        load_model_config(cross_encoder)


def test_a_classifier_whose_pairs_go_through_a_chat_template(cross_encoder: Path) -> None:
    """A folder as of a Qwen3-Reranker that is converted to a classification head."""
    path = cross_encoder / "sentence_bert_config.json"
    path.write_text(json.dumps({"modality_config": {"text": {}, "message": {"format": "flat"}}}))
    with pytest.raises(ModelError, match="pairs go through a chat template that is not Qwen3-Reranker's"):
        load_model_config(cross_encoder)
    (cross_encoder / "chat_template.jinja").write_text(CHAT)
    assert (load_model_config(cross_encoder).instruction or "").startswith("Given a web search query")
