"""Vectors against sentence-transformers: all-MiniLM-L6-v2 with its real weights, and tiny models with Dense layers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from torch import nn

from engine import Engine, InvalidInput

SCRIPTS = [
    "The quick brown fox jumps over the lazy dog",
    "Größenwahn und Übermut tun selten gut, sagte Jürgen",
    "Съешь же ещё этих мягких французских булок",
    "今日は天気がとても良いので散歩に行きましょう",
    "我能吞下玻璃而不伤身体",
    "나는 유리를 먹을 수 있어요 그래도 아프지 않아요",
    "أنا قادر على أكل الزجاج و هذا لا يؤلمني",
    "मैं काँच खा सकता हूँ और मुझे उससे कोई चोट नहीं पहुंचती",
    "ฉันกินกระจกได้ แต่มันไม่ทำให้ฉันเจ็บ",
    "Μπορώ να φάω σπασμένα γυαλιά χωρίς να πάθω τίποτα",
    "def f(x):\n\treturn x ** 2  # code; with\ttabs",
    "🙂🚀 emoji, numbers 3.14159, e-mail a.b@c.de, https://example.org/?q=1",
]


def varied_texts() -> list[str]:
    """200 texts in many scripts, from one token to far more than the model's limit of 256 tokens."""
    rng = np.random.default_rng(7)
    texts = ["a", "!", "  leading and trailing space  ", "one\n\ntwo"]
    while len(texts) < 196:
        words = " ".join(rng.choice(SCRIPTS) for _ in range(4)).split()
        count = max(1, int(rng.lognormal(3.2, 1.0)))
        texts.append(" ".join(rng.choice(words, size=count)))
    return [*texts, " ".join(SCRIPTS) * 3, "long " * 255, "long " * 254, "word " * 5000]


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reference(minilm: Path) -> np.ndarray:
    model = SentenceTransformer(str(minilm), device="cpu", local_files_only=True)
    return np.asarray(model.encode(varied_texts(), normalize_embeddings=True, show_progress_bar=False))


@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.99999), ("bfloat16", 0.999)])
def test_vectors_equal_sentence_transformers(minilm: Path, reference: np.ndarray, dtype: str, least: float, device: str) -> None:
    every = 8 if (device, dtype) == ("cpu", "bfloat16") else 1  # a CPU without AVX-512 takes minutes for all texts in bf16
    vectors = Engine.load(minilm, dtype=dtype, device=device).embed(varied_texts()[::every])  # type: ignore[arg-type]
    assert vectors.shape == (200 // every, 384)
    cosines = (vectors * reference[::every]).sum(axis=1)
    assert cosines.min() >= least
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


# In bf16 both vectors are rounded, each to a cosine of 0.9999 with float32. A CPU with AMX computes one text differently.
@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.99999), ("bfloat16", 0.9998)])
def test_a_text_alone_equals_the_text_in_company(minilm: Path, dtype: str, least: float, device: str) -> None:
    engine = Engine.load(minilm, dtype=dtype, device=device)  # type: ignore[arg-type]
    texts = varied_texts()[: 12 if (device, dtype) == ("cpu", "bfloat16") else 40]
    together = engine.embed(texts)
    alone = np.concatenate([engine.embed([text]) for text in texts])
    same_length = np.concatenate([engine.embed([text] * 3)[:1] for text in texts])
    assert (together * alone).sum(axis=1).min() >= least
    assert (same_length * alone).sum(axis=1).min() >= least


def test_dimensions_are_cut_then_normalised(minilm: Path, device: str) -> None:
    engine = Engine.load(minilm, dtype="float32", device=device)
    full, cut = engine.embed(["test"], normalize=False), engine.embed(["test"], dimensions=128)
    expected = full[:, :128] / np.linalg.norm(full[:, :128])
    np.testing.assert_allclose(cut, expected, atol=1e-6)


# The Dense layers after a hidden size of 128. A width that is not a multiple of 8 takes another code path.
DENSE: dict[str, list[tuple[int, bool, nn.Module]]] = {
    "as embeddinggemma": [(192, False, nn.Identity()), (48, False, nn.Identity())],
    "as LaBSE": [(64, True, nn.Tanh())],
    "odd": [(21, True, nn.GELU())],
    "others": [(32, True, nn.ReLU()), (40, True, nn.SiLU()), (16, False, nn.Sigmoid())],
}
WORDS = ["w1 w2 w3", "w9", "w200 w5 w77 " * 20, "w17 w4 nothing w8", "w30 " * 7]


def _transformer(folder: Path, tmp_path: Path) -> Transformer:
    body = shutil.copytree(folder, tmp_path / "body")
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}  # this class rebuilds no tokenizer
    (body / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return Transformer(str(body))


@pytest.fixture(params=DENSE)
def with_dense(request: pytest.FixtureRequest, tiny: Callable[..., Path], tmp_path: Path) -> Callable[[str, str], Path]:
    def save(kind: str, pooling: str) -> Path:
        torch.manual_seed(0)
        modules: list[Any] = [_transformer(tiny(kind, hidden_size=128), tmp_path), Pooling(128, pooling_mode=pooling)]
        width = 128  # four heads of 32: our attention takes them on a GPU
        for out, bias, activation in DENSE[request.param]:
            modules.append(Dense(width, out, bias, activation))
            width = out
        SentenceTransformer(modules=[*modules, Normalize()], device="cpu").save(str(tmp_path / "model"))
        return tmp_path / "model"

    return save


@pytest.mark.parametrize(("kind", "pooling"), [("bert", "mean"), ("bert", "cls"), ("qwen3", "lasttoken")])
def test_dense_layers_equal_sentence_transformers(with_dense: Callable[[str, str], Path], kind: str, pooling: str) -> None:
    folder = with_dense(kind, pooling)
    theirs = SentenceTransformer(str(folder), device="cpu", model_kwargs={"attn_implementation": "eager"})
    engine = Engine.load(folder, dtype="float32", device="cpu")
    width = theirs.get_embedding_dimension()
    assert engine.config.embedding_size == width
    ids = [np.array(each, dtype=np.int32) for each in theirs.tokenizer(WORDS)["input_ids"]]
    np.testing.assert_allclose(engine.embed([each.tolist() for each in ids]), theirs.encode(WORDS), rtol=1e-4, atol=1e-5)
    cut = engine.embed([each.tolist() for each in ids], dimensions=width // 2)
    np.testing.assert_allclose(
        cut, theirs.encode(WORDS, truncate_dim=width // 2, normalize_embeddings=True), rtol=1e-4, atol=1e-5
    )
    with pytest.raises(InvalidInput, match="dimensions"):
        engine.embed(["w1"], dimensions=width + 1)
    tokens = engine.launch(ids, outputs=("tokens",)).wait().ragged["tokens"]
    for row, expected in enumerate(theirs.encode(WORDS, output_value="token_embeddings")):
        np.testing.assert_allclose(tokens[row], expected.numpy(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken", "max", "mean_sqrt_len_tokens", "weightedmean"])
def test_poolings_equal_sentence_transformers(tiny: Callable[..., Path], tmp_path: Path, kind: str, pooling: str) -> None:
    theirs = SentenceTransformer(modules=[_transformer(tiny(kind), tmp_path), Pooling(64, pooling_mode=pooling)], device="cpu")
    theirs.save(str(tmp_path / "model"))
    engine = Engine.load(tmp_path / "model", dtype="float32", device="cpu")
    ids = theirs.tokenizer(WORDS)["input_ids"]
    np.testing.assert_allclose(engine.embed(ids, normalize=False), theirs.encode(WORDS), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("pooling", ["max", "mean_sqrt_len_tokens", "weightedmean"])
def test_poolings_in_bf16(tiny: Callable[..., Path], tmp_path: Path, pooling: str, device: str) -> None:
    folder = shutil.copytree(tiny("qwen3"), tmp_path / "model")
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pooling}))
    texts = [["w1 w2 w3"], WORDS, ["w7"] * 20]
    exact = Engine.load(folder, dtype="float32", device="cpu")
    ours = Engine.load(folder, dtype="bfloat16", device=device)
    for batch in texts:
        assert (ours.embed(batch) * exact.embed(batch)).sum(axis=1).min() > 0.999


@pytest.mark.parametrize(("kind", "pooling"), [("bert", "mean"), ("qwen3", "lasttoken")])
def test_dense_layers_in_bf16(with_dense: Callable[[str, str], Path], kind: str, pooling: str, device: str) -> None:
    folder = with_dense(kind, pooling)
    exact = Engine.load(folder, dtype="float32", device="cpu").embed(WORDS)
    assert (Engine.load(folder, dtype="bfloat16", device=device).embed(WORDS) * exact).sum(axis=1).min() > 0.999
