"""Classifiers and rerankers against transformers on tiny random checkpoints: the logits of single texts and of pairs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from engine import Engine
from engine.options import EmbedOptions, EncodeOptions
from engine.text.pairs import SECOND_SEGMENT

ONE = {"id2label": {"0": "relevant"}, "label2id": {"relevant": 0}}
THREE = {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
EIGHT = {"id2label": {str(label): f"l{label}" for label in range(8)}, "label2id": {f"l{label}": label for label in range(8)}}
PADDED = {"pad_token_id": 4}  # the token at the end of a text: transformers skips padding, so it skips this token
CHECKPOINTS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "bert": ("bert", False, ONE),
    "bert sharded": ("bert", True, THREE),
    "bert without names": ("bert", False, {}),
    "bert no types": ("bert", False, {"type_vocab_size": 1} | THREE),
    "roberta": ("roberta", False, ONE),
    "xlm-roberta": ("xlm_roberta", True, THREE),
    "camembert": ("camembert", False, {"type_vocab_size": 1} | ONE),
    "distilbert": ("distilbert", False, ONE),
    "distilbert sharded": ("distilbert", True, THREE),
    "mpnet": ("mpnet", False, THREE),
    "deberta": ("deberta", True, ONE),
    "deberta tanh": ("deberta", False, {"pooler_hidden_act": "tanh"} | THREE),
    "modernbert": ("modernbert", False, ONE),
    "modernbert mean": ("modernbert", True, {"classifier_pooling": "mean"} | THREE),
    "modernbert biases": (
        "modernbert",
        False,
        {"norm_bias": True, "classifier_bias": True, "classifier_activation": "relu"} | ONE,
    ),
    "nomic": ("nomic_bert", False, THREE),
    "gte": ("gte", False, ONE),
    "gte sharded": ("gte", True, THREE),
    "gte no types": ("gte", False, {"type_vocab_size": 0} | ONE),
    "gte ntk": ("gte_ntk", False, ONE),
    "jina": ("jina_bert", False, ONE),
    "jina sharded": ("jina_bert", True, THREE),
    "qwen3": ("qwen3", False, PADDED | ONE),
    "qwen3 sharded": ("qwen3", True, THREE),
    "qwen2": ("qwen2", False, PADDED | THREE),
    "mistral": ("mistral", False, ONE),
    "llama": ("llama", False, THREE),
    "gemma3": ("gemma3", False, PADDED | ONE),
}
RAW = EmbedOptions(normalize=False)


def words(rng: np.random.Generator, most: int) -> str:
    return " ".join(f"w{index}" for index in rng.integers(0, 290, rng.integers(1, most)))


def texts() -> list[str]:
    rng = np.random.default_rng(1)
    return ["w7", *(words(rng, most) for most in (4, 60, 90, 9, 120))]


def pairs() -> list[tuple[str, str]]:
    rng = np.random.default_rng(2)
    long = [(words(rng, 20), words(rng, most)) for most in (3, 80, 7, 40)]
    return [("w7", "w8"), ("w7", ""), ("", "w8"), *long]


@pytest.fixture(params=CHECKPOINTS.values(), ids=CHECKPOINTS.keys(), scope="module")
def folder(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> Path:
    kind, sharded, config = request.param
    made = tiny(f"{kind}_classifier", sharded, **config)
    assert (made / "model.safetensors.index.json").exists() == sharded
    return made


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def theirs(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Callable[..., np.ndarray]:
    """A function that gives transformers' logits of one text or one pair. `tokenizers` gives the ids and types."""
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    model = model.eval().to(device)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    typed = getattr(model.config, "type_vocab_size", 0) > 1

    def logits(*texts: str) -> np.ndarray:
        encoded = tokenizer.encode(*texts)
        inputs = {"input_ids": torch.tensor([encoded.ids], device=device)}
        if typed:
            inputs["token_type_ids"] = torch.tensor([encoded.type_ids], device=device)
        with torch.inference_mode():
            return np.asarray(model(**inputs).logits[0].float().cpu())

    return logits


def ours(engine: Engine, sequences: list[np.ndarray]) -> np.ndarray:
    return engine.launch(sequences, [RAW] * len(sequences)).wait().vectors


@pytest.mark.parametrize("device", DEVICES)
def test_logits_equal_transformers_alone_and_in_company(folder: Path, device: str) -> None:
    engine = Engine.load(folder, dtype="float32", device=device)
    reference = theirs(folder)
    expected = np.stack([*(reference(text) for text in texts()), *(reference(*pair) for pair in pairs())])
    assert expected.shape[1] == len(engine.config.labels) == engine.config.embedding_size
    assert engine.config.task == ("reranker" if expected.shape[1] == 1 else "classifier")
    of_texts, of_pairs = (
        engine.tokenizer.encode(texts(), EncodeOptions()),
        engine.tokenizer.encode_pairs(pairs(), EncodeOptions()),
    )
    sequences = [*of_texts, *of_pairs]
    np.testing.assert_allclose(ours(engine, sequences), expected, rtol=1e-4, atol=3e-5)
    for ids, row in zip(sequences, expected, strict=True):
        np.testing.assert_allclose(ours(engine, [ids])[0], row, rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "sharded", "config"), CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def test_bf16_error_is_that_of_transformers_in_bf16(
    tiny: Callable[..., Path], kind: str, sharded: bool, config: dict[str, Any], device: str
) -> None:
    """Our error against fp32, over all inputs and labels, is at most 1.5 times the error of transformers in bf16.

    The models have eight labels. With one label chance decides, because most of a label's error is the same for all inputs.
    """
    folder = tiny(f"{kind}_classifier", sharded, **(config | EIGHT))
    engine = Engine.load(folder, dtype="bfloat16", device=device)
    exact, low = theirs(folder), theirs(folder, torch.bfloat16, device)
    rng = np.random.default_rng(3)
    many = [(words(rng, 30), words(rng, 60)) for _ in range(24)]
    expected, rounded = (np.stack([reference(*pair) for pair in many]) for reference in (exact, low))
    mine = ours(engine, engine.tokenizer.encode_pairs(many, EncodeOptions()))
    assert np.linalg.norm(mine - expected) <= 1.5 * np.linalg.norm(rounded - expected)


@pytest.mark.parametrize("kind", ["bert", "roberta", "nomic_bert", "gte", "jina_bert"])
def test_the_second_text_is_told_from_the_first(tiny: Callable[..., Path], kind: str) -> None:
    engine = Engine.load(tiny(f"{kind}_classifier", **ONE), dtype="float32", device="cpu")
    (ids,) = engine.tokenizer.encode_pairs([("w1 w2", "w3")], EncodeOptions())
    assert (ids & SECOND_SEGMENT > 0).tolist() == [False] * 4 + [True] * 2
    assert not np.allclose(ours(engine, [ids]), ours(engine, [ids & ~SECOND_SEGMENT]), atol=1e-3)


def test_an_input_of_padding_alone_keeps_a_token(tiny: Callable[..., Path]) -> None:
    folder = tiny("qwen3_classifier", **(PADDED | ONE))
    engine = Engine.load(folder, dtype="float32", device="cpu")
    sequences = engine.tokenizer.encode(["<|endoftext|> <|endoftext|>", [4, 4], [7, 4, 9, 4]], EncodeOptions())
    assert [ids.tolist() for ids in sequences] == [[4], [4], [7, 4, 9]]
    np.testing.assert_allclose(
        ours(engine, sequences[:1])[0], theirs(folder)("<|endoftext|> <|endoftext|>"), rtol=1e-4, atol=3e-5
    )
