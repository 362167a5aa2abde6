"""Fake models of each kind that compute nothing: their outputs depend only on the ids."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from engine.options import EmbedOptions, TokenIds
from engine.results import Embeddings
from engine.text.tokenizer import Tokenizer
from serve_app.admission.qos import Qos
from serve_app.errors import Unhealthy, UnknownModel
from serve_app.models import ModelInfo, ServedModel

WIDTH = 16
SPARSE = np.dtype([("index", "<i4"), ("value", "<f4")])
KINDS: dict[str, dict[str, Any]] = {
    "embedding": {"outputs": ("tokens", "chunks")},
    "cls": {"pooling": "cls"},
    "splade": {"pooling": "splade", "outputs": ("sparse",)},
    "m3": {"pooling": "cls", "outputs": ("tokens", "sparse", "colbert")},
    "reranker": {"task": "reranker", "labels": ("LABEL_0",), "outputs": ()},
    "classifier": {"task": "classifier", "labels": ("sad", "neutral", "glad"), "outputs": ()},
}


class FakeModel:
    """A model whose results depend only on the ids. It remembers its requests."""

    def __init__(self, tokenizer: Tokenizer, kind: str) -> None:
        labels = KINDS[kind].get("labels", ())
        self.tokenizer = Tokenizer(tokenizer._tokenizer, replace(tokenizer._config, labels=labels)) if labels else tokenizer
        self.info = replace(ModelInfo("fake", "fake", "float32", "cpu", "mean", WIDTH, 256, 1000, 0), **KINDS[kind])
        self.asked: list[EmbedOptions] = []

    async def embed(self, sequences: Sequence[TokenIds], options: EmbedOptions, qos: Qos) -> Embeddings:
        self.asked.append(options)
        width = len(self.info.labels) or WIDTH
        vectors = np.stack([vector(ids, width, options) for ids in sequences]) if options.pooled else None
        makers: dict[str, Callable[[TokenIds], np.ndarray]] = {
            "tokens": lambda ids: tokens(ids),
            "sparse": lambda ids: weights(ids),
            "colbert": lambda ids: tokens(ids[1:]),
            "chunks": lambda ids: np.stack([vector(ids[start:stop], WIDTH, options) for start, stop in options.spans]),
        }
        ragged = {name: [makers[name](ids) for ids in sequences] for name in options.outputs}
        return Embeddings(vectors, ragged, 0.0, 0.0)


def vector(ids: TokenIds, width: int, options: EmbedOptions) -> np.ndarray:
    whole = 3 * np.random.default_rng([int(each) for each in ids]).standard_normal(width).astype(np.float32)
    cut = whole[: options.dimensions]
    return cut / np.linalg.norm(cut) if options.normalize else cut


def tokens(ids: TokenIds) -> np.ndarray:
    drawn = [np.random.default_rng(int(each)).standard_normal(WIDTH) for each in ids]
    rows = np.array(drawn, dtype=np.float32).reshape(-1, WIDTH)  # without ids there are no rows
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def weights(ids: TokenIds) -> np.ndarray:
    return np.array([(index, 0.5 + index % 7) for index in np.unique(ids)], dtype=SPARSE)


class FakeBackend:
    """The backend of one model. Every name except `missing` means this model."""

    def __init__(self, model: ServedModel, healthy: bool = True) -> None:
        self._model, self.healthy = model, healthy

    def get(self, name: str | None, check: Any = None) -> ServedModel:
        if name == "missing":
            raise UnknownModel("model `missing` is not served here; the models are fake")
        return self._model

    def models(self) -> list[dict[str, Any]]:
        return []

    def overview(self) -> list[dict[str, Any]]:
        return [self._model.info.overview() | {"state": "ready", "pools": []}]

    async def check_health(self) -> None:
        if not self.healthy:
            raise Unhealthy("unhealthy")

    def backlog_s(self, name: str | None = None) -> float:
        return 2.5
