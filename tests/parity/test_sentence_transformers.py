"""all-MiniLM-L6-v2, real weights, against sentence-transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from engine import Engine

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
    """200 texts in many scripts, from one token to far over the model's 256."""
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
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
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
    vectors = Engine.load(minilm, dtype=dtype, device=device).embed(varied_texts())  # type: ignore[arg-type]
    assert vectors.shape == (200, 384)
    cosines = (vectors * reference).sum(axis=1)
    assert cosines.min() >= least
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.99999), ("bfloat16", 0.9999)])
def test_a_text_alone_equals_the_text_in_company(minilm: Path, dtype: str, least: float, device: str) -> None:
    engine = Engine.load(minilm, dtype=dtype, device=device)  # type: ignore[arg-type]
    texts = varied_texts()[:40]
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
