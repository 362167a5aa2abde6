"""Rerankers, classifiers, sparse and hybrid models, and chunks in the API, with a fake model."""

import asyncio
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fake_models import SPARSE, WIDTH, FakeBackend, FakeModel, tokens, vector, weights
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from engine.errors import InvalidInput
from engine.model.folder import load_model_config
from engine.options import EmbedOptions, EncodeOptions, TokenIds
from engine.text.tokenizer import Tokenizer
from serve_app.cli.serve import _example
from serve_app.compute import scores, service
from serve_app.http.app import Api
from serve_app.observe.metrics import Metrics
from serve_app.settings import Settings

LIMIT = 8


@pytest.fixture(scope="module")
def tokenizer(minilm: Path) -> Tokenizer:
    return Tokenizer.load(minilm, load_model_config(minilm))


class Served:
    def __init__(self, tokenizer: Tokenizer, kind: str) -> None:
        self.model = FakeModel(tokenizer, kind)
        self.app = Api(FakeBackend(self.model), Settings(max_client_batch_size=LIMIT), Metrics("fake")).app

    def send(self, method: str, path: str, body: Any = None) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)  # type: ignore[arg-type]
            async with httpx.AsyncClient(transport=transport, base_url="http://fake") as client:
                return await client.request(method, path, json=body)

        return asyncio.run(send())

    def post(self, path: str, **body: Any) -> Any:
        response = self.send("POST", path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, path: str, **body: Any) -> tuple[int, str, str]:
        response = self.send("POST", path, body)
        return response.status_code, response.json()["error_type"], response.json()["error"]

    def logits(self, *inputs: str | tuple[str, str]) -> np.ndarray:
        tokenizer, options, plain = self.model.tokenizer, EmbedOptions(normalize=False), EncodeOptions()
        ids = [
            tokenizer.encode([each], plain)[0] if isinstance(each, str) else tokenizer.encode_pairs([each], plain)[0]
            for each in inputs
        ]
        return np.stack([vector(each, len(self.model.info.labels), options) for each in ids])

    def vectors(self, *texts: str, **options: Any) -> np.ndarray:
        ids = self.model.tokenizer.encode(texts, EncodeOptions())
        return np.stack([vector(each, WIDTH, EmbedOptions(**options)) for each in ids])


Serve = Callable[[str], Served]


@pytest.fixture
def serve(tokenizer: Tokenizer) -> Serve:
    return lambda kind: Served(tokenizer, kind)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# Scores.


def test_probabilities_are_softmax_or_sigmoid() -> None:
    logits = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32) * 5
    expected = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(scores.probabilities(logits), expected, rtol=1e-6)
    independent = scores.probabilities(logits, multi_label=True)
    np.testing.assert_allclose(independent, np.vectorize(sigmoid)(logits.astype(np.float64)), rtol=1e-6)
    single = logits[:, :1]
    np.testing.assert_allclose(scores.probabilities(single)[:, 0], [sigmoid(float(x)) for x in single[:, 0]], rtol=1e-6)


@pytest.mark.filterwarnings("error")
def test_probabilities_of_logits_of_any_size() -> None:
    """TEI subtracts the logit of largest absolute value, so exp overflows for [-100, 5]. Ours must not."""
    rows = np.array([[-100, 5], [3e38, -3e38], [-3e38, -3e38], [1000, 1000]], dtype=np.float32)
    np.testing.assert_allclose(scores.probabilities(rows), [[0, 1], [1, 0], [0.5, 0.5], [0.5, 0.5]], atol=1e-7)
    np.testing.assert_allclose(scores.probabilities(np.array([[-3e38], [3e38], [0]], dtype=np.float32))[:, 0], [0, 1, 0.5])
    small = scores.probabilities(np.array([[-35], [-60], [-80]], dtype=np.float32))[:, 0]
    np.testing.assert_allclose(small, np.exp([-35.0, -60.0, -80.0]), rtol=1e-6)


def test_of_equal_scores_the_last_comes_first() -> None:
    assert scores.best_first(np.array([0.5, 0.9, 0.5, 0.1, 0.9], dtype=np.float32)) == [4, 1, 2, 0, 3]


def test_lexical_and_late_interaction_scores() -> None:
    rng = np.random.default_rng(1)
    query = np.array([(3, 0.5), (7, 2.0), (9, 1.0)], dtype=SPARSE)
    text = np.array([(1, 4.0), (7, 0.25), (9, 3.0)], dtype=SPARSE)
    none = np.array([], dtype=SPARSE)
    np.testing.assert_allclose(scores.lexical(query, [text, none, query]), [0.5 + 3.0, 0, 0.25 + 4 + 1])
    one, other = (rng.standard_normal((n, 8)).astype(np.float32) for n in (3, 5))
    expected = sum(max(float(a @ b) for b in other) for a in one) / 3
    np.testing.assert_allclose(scores.late_interaction(one, [other, other[:0]]), [expected, 0], rtol=1e-5)


# Classifiers.


@pytest.mark.parametrize("inputs", ["a text", ["a text"], ["a text", "and another"]], ids=["string", "list", "pair"])
def test_predict_one(serve: Serve, inputs: Any) -> None:
    served = serve("classifier")
    given = inputs if isinstance(inputs, str) else inputs[0] if len(inputs) == 1 else tuple(inputs)
    logits = served.logits(given)[0]
    answer = served.post("/predict", inputs=inputs)
    assert [each["label"] for each in answer] == [("sad", "neutral", "glad")[i] for i in np.argsort(-logits)]
    expected = sorted(np.exp(logits) / np.exp(logits).sum(), reverse=True)
    np.testing.assert_allclose([each["score"] for each in answer], expected, rtol=1e-5)
    raw = served.post("/predict", inputs=inputs, raw_scores=True)
    np.testing.assert_allclose([each["score"] for each in raw], sorted(logits, reverse=True), rtol=1e-6)


def test_predict_a_batch_of_texts_and_pairs_keeps_their_order(serve: Serve) -> None:
    served = serve("classifier")
    answers = served.post("/predict", inputs=[["one"], ["two", "three"], ["four"]], raw_scores=True, parameters={})
    logits = served.logits("one", ("two", "three"), "four")
    for answer, row in zip(answers, logits, strict=True):
        np.testing.assert_allclose([each["score"] for each in answer], sorted(row, reverse=True), rtol=1e-6)


@pytest.mark.parametrize("inputs", [[], ["a", "b", "c"], [[]], [["a", "b", "c"]], [["a"], "b"], 3, [1, 2], None, {}])
def test_predict_refuses_other_shapes(serve: Serve, inputs: Any) -> None:
    response = serve("classifier").send("POST", "/predict", {"inputs": inputs})
    assert response.status_code == 422
    assert "a string, a pair of strings [string, string] or a batch of mixed strings and pairs" in response.text


def test_labels_that_may_hold_at_once_are_scored_one_by_one(serve: Serve) -> None:
    served = serve("classifier")
    served.model.info = replace(served.model.info, multi_label=True)
    answer = {each["label"]: each["score"] for each in served.post("/predict", inputs="a text")}
    expected = map(sigmoid, served.logits("a text")[0].astype(float))
    assert answer == {
        name: pytest.approx(score, rel=1e-5) for name, score in zip(("sad", "neutral", "glad"), expected, strict=True)
    }


def test_values_of_a_regression_stay_as_they_are(serve: Serve) -> None:
    served = serve("classifier")
    served.model.info = replace(served.model.info, regression=True)
    answer = {each["label"]: each["score"] for each in served.post("/predict", inputs="a text")}
    assert answer == pytest.approx(dict(zip(("sad", "neutral", "glad"), served.logits("a text")[0].tolist(), strict=True)))


def test_a_reranker_predicts_its_label(serve: Serve) -> None:
    served = serve("reranker")
    logit = float(served.logits(("a", "b"))[0, 0])
    assert served.post("/predict", inputs=["a", "b"]) == [{"score": pytest.approx(sigmoid(logit), rel=1e-5), "label": "LABEL_0"}]


# Rerankers.

TEXTS = ["first text", "the second one", "a third", "and more"]


def test_rerank_teis_form(serve: Serve) -> None:
    served = serve("reranker")
    logits = served.logits(*[("what?", text) for text in TEXTS])[:, 0]
    order = [int(i) for i in np.argsort(-logits)]
    answer = served.post("/rerank", query="what?", texts=TEXTS)
    assert answer == [{"index": i, "score": pytest.approx(sigmoid(float(logits[i])), rel=1e-5)} for i in order]
    raw = served.post("/rerank", query="what?", texts=TEXTS, raw_scores=True, return_text=True)
    assert raw == [{"index": i, "score": pytest.approx(float(logits[i]), rel=1e-6), "text": TEXTS[i]} for i in order]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_coheres_form(serve: Serve, path: str) -> None:
    served = serve("reranker")
    logits = served.logits(*[("what?", text) for text in TEXTS])[:, 0]
    order = [int(i) for i in np.argsort(-logits)][:2]
    documents: list[Any] = [TEXTS[0], {"text": TEXTS[1], "title": "x"}, *TEXTS[2:]]
    answer = served.post(path, query="what?", documents=documents, top_n=2, model="any", return_documents=True)
    expected = [(i, pytest.approx(sigmoid(float(logits[i])), rel=1e-5), {"text": TEXTS[i]}) for i in order]
    assert [(each["index"], each["relevance_score"], each["document"]) for each in answer["results"]] == expected
    assert answer["model"] == "fake"
    assert answer["meta"]["api_version"]["version"] == ("1" if path == "/v1/rerank" else "2")
    assert "document" not in served.post(path, query="what?", documents=TEXTS)["results"][0]
    assert len(served.post(path, query="what?", documents=TEXTS, top_n=100)["results"]) == len(TEXTS)


def test_rerank_refuses_in_teis_order(serve: Serve) -> None:
    empty = (400, "Empty", "`texts` cannot be empty")
    assert serve("embedding").refused("/rerank", query="q", texts=[]) == empty
    wrong = (424, "Backend", "Backend error: model is not a re-ranker model")
    for kind in ("embedding", "splade", "classifier", "cls"):
        assert serve(kind).refused("/rerank", query="q", texts=["x"] * 9) == wrong, kind
    many = (422, "Validation", f"batch size 9 > maximum allowed batch size {LIMIT}")
    assert serve("reranker").refused("/rerank", query="q", texts=["x"] * 9) == many
    assert serve("reranker").refused("/rerank", query="q", documents=[])[0] == 400


def test_rerank_needs_texts_or_documents(serve: Serve) -> None:
    for body in ({"query": "q"}, {"texts": ["x"]}, {"query": "q", "texts": "x"}, {"query": "q", "documents": 3}):
        assert serve("reranker").send("POST", "/rerank", body).status_code == 422


def test_coheres_errors_are_coheres(serve: Serve) -> None:
    for body, status in (
        ({"query": "q", "documents": []}, 400),
        ({"query": "q"}, 400),
        ({"query": "q", "documents": ["x"] * 9}, 400),
    ):
        response = serve("reranker").send("POST", "/v2/rerank", body)
        assert (response.status_code, list(response.json())) == (status, ["message"])
    assert serve("embedding").send("POST", "/v2/rerank", {"query": "q", "documents": ["x"]}).status_code == 400


def test_headers_count_query_and_texts(serve: Serve) -> None:
    headers = serve("reranker").send("POST", "/rerank", {"query": "what?", "texts": TEXTS}).headers
    assert int(headers["x-compute-characters"]) == 5 * len(TEXTS) + sum(map(len, TEXTS))


# Models of another task refuse a request in TEI's words.


@pytest.mark.parametrize("path", ["/embed", "/embed_all", "/embed_sparse", "/embed_hybrid"])
def test_a_classifier_embeds_nothing(serve: Serve, path: str) -> None:
    for kind in ("classifier", "reranker"):
        assert serve(kind).refused(path, inputs="x") == (424, "Backend", "Backend error: Model is not an embedding model")


def test_a_classifier_embeds_nothing_on_openais_and_coheres_routes(serve: Serve) -> None:
    answer = serve("classifier").send("POST", "/v1/embeddings", {"input": "x"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (424, "Backend error: Model is not an embedding model")
    assert serve("classifier").send("POST", "/v2/embed", {"texts": ["x"]}).status_code == 400


def test_an_embedding_model_predicts_nothing(serve: Serve) -> None:
    assert serve("embedding").refused("/predict", inputs="x") == (
        424,
        "Backend",
        "Backend error: Model is not a classifier model",
    )
    sparse = (424, "Backend", "Backend error: Model is not an embedding model with SPLADE pooling")
    assert serve("embedding").refused("/embed_sparse", inputs="x") == sparse


def test_what_splade_refuses(serve: Serve) -> None:
    served = serve("splade")
    assert served.refused("/embed", inputs="x")[2] == "Backend error: `normalize` is not available for SPLADE models"
    assert served.refused("/embed_all", inputs="x")[2] == "Backend error: `embed_all` is not available for SPLADE models"
    assert len(served.post("/embed", inputs="x", normalize=False)[0]) == WIDTH


# Sparse and hybrid.


def as_sparse(ids: TokenIds) -> list[dict[str, Any]]:
    return [{"index": int(index), "value": float(value)} for index, value in weights(ids)]


@pytest.mark.parametrize("kind", ["splade", "m3"])
def test_embed_sparse(serve: Serve, kind: str) -> None:
    served = serve(kind)
    ids = served.model.tokenizer.encode(["one", "and two"], EncodeOptions())
    assert served.post("/embed_sparse", inputs=["one", "and two"]) == [as_sparse(each) for each in ids]
    assert served.post("/embed_sparse", inputs="one") == [as_sparse(ids[0])]
    assert not any(asked.pooled for asked in served.model.asked), "the answer has no pooled vectors"


@pytest.mark.parametrize("wanted", [None, ["dense"], ["sparse", "colbert"], ["colbert", "dense"]])
def test_embed_hybrid_gives_any_subset_of_one_pass(serve: Serve, wanted: list[str] | None) -> None:
    served = serve("m3")
    answers = served.post("/embed_hybrid", inputs=["one", "and two"], outputs=wanted, dimensions=8)
    assert len(served.model.asked) == 1
    ids = served.model.tokenizer.encode(["one", "and two"], EncodeOptions())
    for answer, each, dense in zip(answers, ids, served.vectors("one", "and two", dimensions=8), strict=True):
        assert set(answer) == set(wanted or ["dense", "sparse", "colbert"])
        if "dense" in answer:
            np.testing.assert_allclose(answer["dense"], dense, rtol=1e-6)
        if "sparse" in answer:
            assert answer["sparse"] == as_sparse(each)
        if "colbert" in answer:
            np.testing.assert_allclose(answer["colbert"], tokens(each[1:]), rtol=1e-6)


def test_embed_hybrid_names_what_the_model_lacks(serve: Serve) -> None:
    message = "Backend error: the model has no colbert output; its outputs are dense"
    assert serve("embedding").refused("/embed_hybrid", inputs="x", outputs=["dense", "colbert"])[2] == message
    assert serve("embedding").send("POST", "/embed_hybrid", {"inputs": "x", "outputs": []}).status_code == 422


def test_a_rerank_of_hybrid_scores_takes_what_the_model_has(serve: Serve) -> None:
    served = serve("m3")
    served.model.info = replace(served.model.info, outputs=("tokens", "sparse"))
    served.post("/rerank", query="what?", texts=TEXTS)
    assert served.model.asked[-1].outputs == ("sparse",)
    assert "are 0 for all" in served.refused("/rerank", query="q", texts=["x"], weights={"dense": 0, "sparse": 0})[2]
    for weight in (-1, 1e7, "Infinity"):
        assert served.send("POST", "/rerank", {"query": "q", "texts": ["x"], "weights": {"dense": weight}}).status_code == 422
    assert served.refused("/rerank", query="q", texts=["x"], instruction="find it")[0] == 422


@pytest.mark.parametrize("kind", ["reranker", "m3"])
def test_rerank_shortens_documents(serve: Serve, kind: str) -> None:
    """Cohere's `max_tokens_per_doc`. The words of these documents are one token each."""
    served = serve(kind)
    short = served.post("/v2/rerank", query="what?", documents=["the first", "second one"])
    long = served.post(
        "/v2/rerank", query="what?", documents=["the first of many texts", "second one " + "and more " * 40], max_tokens_per_doc=2
    )
    assert long["results"] == short["results"]
    assert long["usage"] == short["usage"]
    assert served.send("POST", "/v2/rerank", {"query": "q", "documents": ["x"], "max_tokens_per_doc": 0}).status_code == 400


def test_the_default_prompt_is_not_put_before_what_is_ranked(serve: Serve) -> None:
    served = serve("m3")
    plain = served.post("/rerank", query="what?", texts=TEXTS)
    tokenizer = served.model.tokenizer
    served.model.tokenizer = Tokenizer(tokenizer._tokenizer, replace(tokenizer._config, default_prompt="query: "))
    assert served.post("/rerank", query="what?", texts=TEXTS) == plain


def test_splade_gives_the_same_weights_as_hybrid(serve: Serve) -> None:
    served = serve("splade")
    served.post("/embed_hybrid", inputs="one", dimensions=8)
    assert (served.model.asked[-1].normalize, served.model.asked[-1].dimensions) == (False, None)


def test_vectors_of_too_many_tokens_are_refused(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_MOST_ANSWER_BYTES", 10 * WIDTH * 4)
    assert len(serve("m3").post("/embed_all", inputs="one two three")[0]) == 5
    refused = serve("m3").refused("/embed_all", inputs=["one two three"] * 3)
    assert (
        refused[2]
        == f"Input validation error: 15 token vectors of {WIDTH} numbers are too many for one answer; send fewer inputs"
    )


@pytest.mark.parametrize("given", [None, {"dense": 0.4, "sparse": 0.2, "colbert": 0.4}, {"dense": 0, "colbert": 0}])
def test_rerank_with_the_weighted_scores_of_a_hybrid_model(serve: Serve, given: dict[str, float] | None) -> None:
    served = serve("m3")
    by_index = {each["index"]: each["score"] for each in served.post("/rerank", query="what?", texts=TEXTS, weights=given)}
    weight = {"dense": 1.0, "sparse": 0.3, "colbert": 1.0} | (given or {})
    dense = served.vectors("what?", *TEXTS)
    ids = served.model.tokenizer.encode(["what?", *TEXTS], EncodeOptions())
    for index, text in enumerate(ids[1:]):
        shared = dict(weights(text).tolist())
        lexical = sum(value * shared.get(token, 0) for token, value in weights(ids[0]).tolist())
        late = (tokens(ids[0][1:]) @ tokens(text[1:]).T).max(axis=1).mean()
        total = weight["dense"] * dense[0] @ dense[index + 1] + weight["sparse"] * lexical + weight["colbert"] * late
        assert by_index[index] == pytest.approx(total / sum(weight.values()), rel=1e-4)
    assert len(served.model.asked) == 1
    assert served.refused("/rerank", query="q", texts=["x"], weights=dict.fromkeys(weight, 0))[0] == 422


# One address for all tasks.


@pytest.mark.parametrize("kind", ["embedding", "splade", "reranker", "classifier"])
def test_the_example_of_a_start_is_answered(serve: Serve, kind: str) -> None:
    served = serve(kind)
    path, body = _example(served.model.info, "fake")  # type: ignore[arg-type]
    answer = served.post(path, **json.loads(body))
    assert len(answer) >= 1


def test_the_bare_path_does_what_the_model_is_for(serve: Serve) -> None:
    inputs = ["one", "and two"]
    np.testing.assert_allclose(serve("embedding").post("/", inputs=inputs), serve("embedding").vectors(*inputs), rtol=1e-6)
    assert serve("splade").post("/", inputs="one") == serve("splade").post("/embed_sparse", inputs="one")
    assert serve("classifier").post("/", inputs=inputs) == serve("classifier").post("/predict", inputs=inputs)
    ranking = {"query": "q", "texts": TEXTS}
    assert serve("reranker").post("/invocations", **ranking) == serve("reranker").post("/rerank", **ranking)
    sentences = {"source_sentence": "one", "sentences": inputs}
    assert serve("embedding").post("/", inputs=sentences) == serve("embedding").post("/similarity", inputs=sentences)
    assert serve("embedding").refused("/", **ranking)[0] == 424
    assert serve("classifier").post("/", inputs="one", model="fake") == serve("classifier").post("/predict", inputs="one")


def test_vertex_takes_the_bodies_of_each_task(serve: Serve) -> None:
    ranking, pair = {"query": "q", "texts": TEXTS}, {"inputs": ["a", "b"]}
    served = serve("reranker")
    assert served.post("/vertex", instances=[ranking, pair])["predictions"] == [
        served.post("/rerank", **ranking),
        served.post("/predict", **pair),
    ]
    assert serve("splade").post("/vertex", instances=[{"inputs": "one"}])["predictions"] == [
        serve("splade").post("/embed_sparse", inputs="one")
    ]
    assert serve("embedding").refused("/vertex", instances=[{"inputs": "x"}, ranking])[0] == 424
    assert serve("embedding").refused("/vertex", instances=[3])[0] == 422
    assert served.refused("/vertex", instances=[ranking, ranking, pair])[2].startswith("batch size 9 >")


def test_info_names_the_task(serve: Serve) -> None:
    assert serve("embedding").send("GET", "/info").json()["model_type"] == {"embedding": {"pooling": "mean"}}
    names = {"id2label": {"0": "sad", "1": "neutral", "2": "glad"}, "label2id": {"sad": 0, "neutral": 1, "glad": 2}}
    assert serve("classifier").send("GET", "/info").json()["model_type"] == {"classifier": names}
    assert list(serve("reranker").send("GET", "/info").json()["model_type"]) == ["reranker"]


def test_teis_metrics_tell_predictions_from_embeddings(serve: Serve) -> None:
    served = serve("reranker")
    served.post("/rerank", query="q", texts=TEXTS)
    served.post("/predict", inputs="one")
    served.refused("/embed", inputs="x")
    lines = served.send("GET", "/metrics").text.splitlines()
    assert {"te_predict_count 5", "te_predict_success 5", "te_embed_count 0", "te_predict_duration_count 5"} <= set(lines)
    assert {'te_request_success{method="single"} 1', 'te_request_success{method="batch"} 1'} <= set(lines)
    assert 'te_request_failure{err="model_type"} 1' in lines


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    ("kind", "path", "body", "wrong"),
    [
        ("reranker", "/rerank", {"query": "q", "texts": ["a", "b", "c", "\0"]}, 3),
        ("m3", "/rerank", {"query": "q", "texts": ["a", "b", "c", "\0"]}, 3),
        ("m3", "/rerank", {"query": "\0", "texts": ["a", "b"]}, 0),
        ("classifier", "/predict", {"inputs": [["a"], ["b", "c"], ["d"], ["e", "\0"]]}, 3),
        ("classifier", "/predict", {"inputs": [["a", "b"], ["c", "d"], ["\0"]]}, 2),
    ],
)
def test_errors_name_the_input_by_its_number_in_the_request(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, large: bool, kind: str, path: str, body: Any, wrong: int
) -> None:
    if large:
        monkeypatch.setattr("serve_app.compute.embedding._PIECE", 2)
        monkeypatch.setattr(service, "_INLINE_CHARS", 0)
    assert f"NUL characters, input {wrong} does" in serve(kind).refused(path, **body)[2]


@pytest.mark.parametrize(("kind", "num_turns"), [("classifier", 3), ("reranker", 3), ("m3", 4)])
def test_a_large_request_is_scored_as_its_parts_are_and_tokenised_in_turns(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, kind: str, num_turns: int
) -> None:
    served, texts = serve(kind), [f"number {index}" for index in range(5)]
    path, body = "/rerank", {"query": "q", "texts": texts}
    if kind == "classifier":
        path, body = "/predict", {"inputs": [[texts[0]], texts[:2], texts[1:3], [texts[3]], texts[3:]]}
    expected = served.post(path, **body)
    turn, turns = service.Service.turn, list[Any]()
    monkeypatch.setattr("serve_app.compute.embedding._PIECE", 2)
    monkeypatch.setattr(service, "_INLINE_CHARS", 0)
    monkeypatch.setattr(service.Service, "turn", lambda *args: turns.append(args) or turn(*args))
    assert served.post(path, **body) == expected
    assert len(turns) == num_turns


def test_a_template_s_limit_of_characters_is_of_all_pairs_of_a_request(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve("reranker")
    tokenizer = served.model.tokenizer
    served.model.tokenizer = Tokenizer(tokenizer._tokenizer, replace(tokenizer._config, instruction="find"))
    monkeypatch.setattr("serve_app.compute.embedding._PIECE", 2)
    monkeypatch.setattr("engine.text.tokenizer._MAX_INSTRUCT_CHARS", 100)
    assert len(served.post("/rerank", query="q" * 15, texts=["text"] * 4)) == 4
    assert "send fewer documents or a shorter query" in served.refused("/rerank", query="q" * 15, texts=["text"] * 5)[2]


# Tokens.


def test_tokens_of_too_many_characters_are_not_shown(serve: Serve) -> None:
    answer = serve("embedding").send("POST", "/tokenize", {"inputs": ["a", "a" * 500_000]})
    assert (answer.status_code, answer.text) == (
        413,
        "the inputs have 500001 characters, the limit is 500000; send them in parts",
    )


# Chunks.

LONG = "Serving models on the GPUs you have. Größe, 東京 and naïve cafés: the tokenizer's offsets are characters, not bytes!"


@pytest.mark.parametrize(("size", "overlap"), [(8, 0), (8, 3), (5, 3), (300, 0), (300, 299)])
def test_chunks_cover_the_text(tokenizer: Tokenizer, size: int, overlap: int) -> None:
    chunked = tokenizer.chunk(0, LONG, size, overlap, 1000, None)
    content = tokenizer.encode([LONG], EncodeOptions())[0][1:-1]
    np.testing.assert_array_equal(chunked.token_ids, content)
    spans = chunked.spans
    assert spans[0][0] == 0
    assert spans[-1][1] == len(content)
    assert all(stop - start == size for start, stop in spans[:-1])
    assert spans[-1][1] - spans[-1][0] <= size
    assert all(later[0] == sooner[1] - overlap for sooner, later in itertools.pairwise(spans))
    assert len({stop for _, stop in spans}) == len(spans), "no chunk is a part of another one"
    whole = tokenizer.tokens([LONG], False, EncodeOptions())[0]  # offsets in bytes
    for (start, stop), (first, end) in zip(spans, chunked.offsets, strict=True):
        assert len(LONG[:first].encode()) == whole[start].start
        assert len(LONG[:end].encode()) == whole[stop - 1].stop


@given(
    st.lists(st.sampled_from(["unbelievably", "tokenisations", "xyzzyx", "a", "the", "Größe", "東京", "🙂🙃", " ", "\n", "-"])),
    st.integers(2, 9),
    st.integers(0, 8),
)
def test_no_chunk_has_more_tokens_as_a_text_of_its_own(tokenizer: Tokenizer, words: list[str], size: int, overlap: int) -> None:
    """A chunk that begins or ends within a word may have other tokens than the whole text has there."""
    text, overlap = "".join(words), min(overlap, size - 1)
    assume(text)
    chunked = tokenizer.chunk(0, text, size, overlap, 1000, None)
    for (start, stop), (first, last) in zip(chunked.spans, chunked.offsets, strict=True):
        ids = tokenizer.encode([text[first:last]], EncodeOptions())[0]
        assert len(ids) - tokenizer.num_special <= max(size, 3 * (stop - start == 1))
    assert chunked.spans[0][0] == 0
    assert chunked.spans[-1][1] == max(1, len(chunked.token_ids))
    for sooner, later in itertools.pairwise(chunked.spans):
        assert sooner[0] < later[0] <= sooner[1] < later[1]


def test_a_text_whose_chunks_all_end_earlier_is_tokenised_a_few_times(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each emoji has four tokens. A chunk of 30 tokens begins or ends within one, and would have 32 tokens alone."""
    library = HFTokenizer(BPE({char: index for index, char in enumerate(sorted(ByteLevel.alphabet()))}, []))
    library.pre_tokenizer = ByteLevel(add_prefix_space=False)
    of_bytes, text = Tokenizer(library, tokenizer._config), "🙂" * 3000
    num_chars, contents = [0], Tokenizer._contents

    def counted(self: Tokenizer, texts: list[str]) -> list[bytes]:
        num_chars[0] += sum(map(len, texts))
        return contents(self, texts)

    monkeypatch.setattr(Tokenizer, "_contents", counted)
    chunked = of_bytes.chunk(0, text, 30, 0, 1000, None)
    assert {end - start for start, end in chunked.offsets[:-1]} == {7}
    assert num_chars[0] < 5 * len(text)


def test_chunks_of_a_whole_text_lie_behind_prompt_and_special_tokens(tokenizer: Tokenizer) -> None:
    prompt = "query: "
    options = EncodeOptions(prompt=prompt)
    chunked = tokenizer.chunk(0, LONG, 10, 0, 1000, options)
    (whole,) = tokenizer.encode([LONG], options)
    np.testing.assert_array_equal(chunked.token_ids, whole)
    before = len(tokenizer.encode([prompt], EncodeOptions())[0]) - 1
    assert chunked.spans[0][0] == before
    assert chunked.spans[-1][1] == len(whole) - 1
    assert chunked.offsets[0][0] == 0
    assert chunked.offsets[-1][1] == len(LONG)


@pytest.mark.parametrize("direction", ["left", "right"])
def test_chunks_of_a_text_over_the_limit(tokenizer: Tokenizer, direction: Any) -> None:
    options = EncodeOptions(truncation_direction=direction, max_tokens=12)
    chunked = tokenizer.chunk(0, LONG, 4, 0, 1000, options)
    np.testing.assert_array_equal(chunked.token_ids, tokenizer.encode([LONG], options)[0])
    assert [stop - start for start, stop in chunked.spans] == [4, 4, 2]
    kept = LONG[chunked.offsets[0][0] : chunked.offsets[-1][1]]
    assert LONG.startswith(kept) if direction == "right" else LONG.endswith(kept)
    np.testing.assert_array_equal(tokenizer.encode([kept], EncodeOptions())[0], chunked.token_ids)


def test_offsets_are_of_the_text_as_it_was_sent(tokenizer: Tokenizer) -> None:
    """Lower case may be longer than the original text: "İ" becomes two characters."""
    lower = Tokenizer(tokenizer._tokenizer, replace(tokenizer._config, lower_case=True))
    text = "İİİ İstanbul WORDS"
    chunked = lower.chunk(0, text, 1, 0, 1000, None)
    assert text[slice(*chunked.offsets[-1])] == "WORDS"
    assert chunked.offsets[0][0] == 0
    # Here a token ends after the first of the two characters, because this tokenizer drops the accent.
    assert lower.chunk(0, "a İ b", 1, 0, 1000, None).offsets == [(0, 1), (2, 3), (4, 5)]
    assert [(each.text, each.start, each.stop) for each in lower.tokens(["İ"], False, EncodeOptions())[0]] == [("İ", 0, 2)]


@pytest.mark.parametrize("path", ["/embed", "/v1/embeddings"])
def test_each_chunk_has_the_vector_of_its_text(serve: Serve, path: str) -> None:
    served = serve("cls")
    texts = [LONG, "short"]
    chunking = {"size": 10, "overlap": 2}
    if path == "/embed":
        answer = served.post(path, inputs=texts, chunking=chunking)
    else:
        answer = [[], []]
        for entry in served.post(path, input=texts, chunking=chunking)["data"]:
            assert entry["chunk"]["index"] == len(answer[entry["index"]])
            answer[entry["index"]].append(entry["chunk"] | {"embedding": entry["embedding"]})
    assert len(answer[0]) > 3
    assert len(answer[1]) == 1
    for text, chunks in zip(texts, answer, strict=True):
        pieces = [text[each["start"] : each["end"]] for each in chunks]
        np.testing.assert_allclose([each["embedding"] for each in chunks], served.vectors(*pieces), rtol=1e-6)


@pytest.mark.parametrize("prompt", ["", "query: "])
def test_the_longest_chunk_loses_no_token(serve: Serve, prompt: str) -> None:
    served = serve("cls")
    text, size = "word " * 300, served.model.tokenizer.longest_text(EncodeOptions(prompt=prompt))
    (chunks,) = served.post("/embed", inputs=[text], chunking={"size": size}, prompt=prompt, truncate=False)
    (ids,) = served.model.tokenizer.encode([prompt + text[: chunks[0]["end"]]], EncodeOptions(truncate=False))
    assert len(ids) == served.model.tokenizer.max_input_length


@pytest.mark.parametrize("normalize", [True, False])
def test_the_mean_of_chunks_counts_tokens(serve: Serve, normalize: bool) -> None:
    served = serve("cls")
    body = {"inputs": [LONG, "short"], "normalize": normalize, "dimensions": 8}
    answer = served.post("/embed", **body, chunking={"size": 25, "pooling": "mean"})
    chunked = served.model.tokenizer.chunk(0, LONG, 25, 0, 1000, None)
    pieces = [LONG[start:stop] for start, stop in chunked.offsets]
    vectors = served.vectors(*pieces, normalize=normalize, dimensions=8)
    counts = np.array([stop - start for start, stop in chunked.spans])
    assert counts[-1] < 25
    mean = (vectors * counts[:, None]).sum(axis=0) / counts.sum()
    np.testing.assert_allclose(answer[0], mean / np.linalg.norm(mean) if normalize else mean, rtol=1e-5)
    np.testing.assert_allclose(answer[1], served.vectors("short", normalize=normalize, dimensions=8)[0], rtol=1e-5)


def test_late_chunks_come_from_one_pass_over_each_text(serve: Serve) -> None:
    served = serve("embedding")
    answer = served.post("/embed", inputs=[LONG, "short"], chunking={"size": 10, "pooling": "late"})
    assert [(asked.outputs, asked.pooled) for asked in served.model.asked] == [(("chunks",), False)] * 2
    chunked = served.model.tokenizer.chunk(0, LONG, 10, 0, 1000, EncodeOptions())
    assert [(each["start"], each["end"]) for each in answer[0]] == chunked.offsets
    expected = [vector(chunked.token_ids[start:stop], WIDTH, EmbedOptions()) for start, stop in chunked.spans]
    np.testing.assert_allclose([each["embedding"] for each in answer[0]], expected, rtol=1e-6)


@pytest.mark.parametrize("pooling", ["none", "mean", "late"])
def test_a_text_without_tokens_is_one_chunk(serve: Serve, pooling: str) -> None:
    served = serve("embedding")
    first, blank = served.post("/embed", inputs=["x", "  "], chunking={"size": 8, "pooling": pooling}, normalize=False)
    if pooling == "mean":
        np.testing.assert_allclose([first, blank], served.vectors("x", "  ", normalize=False), rtol=1e-6)
    else:
        assert [(each["start"], each["end"]) for each in first + blank] == [(0, 1), (0, 2)]


class _Counted:
    """An encoding that counts how often each of its lists is made."""

    def __init__(self, encoding: Any) -> None:
        self._encoding, self.made = encoding, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.made[name] += 1
        return getattr(self._encoding, name)


def test_cutting_takes_time_in_proportion(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tokenizers` makes a new list at each access. Windows from each start of a long text would take gigabytes."""
    encode, encodings = Tokenizer._encode_batch, list[_Counted]()

    def counted(*args: Any, **kwargs: Any) -> list[_Counted]:
        found = [_Counted(each) for each in encode(*args, **kwargs)]
        encodings.extend(found)
        return found

    monkeypatch.setattr(Tokenizer, "_encode_batch", counted)
    text = "word " * 10_000
    chunked = tokenizer.chunk(0, text, 5_000, 4_900, 1000, None)
    assert len(chunked.offsets) == 51
    with pytest.raises(InvalidInput, match="makes 5001 chunks of input 3, 1000 at most"):
        tokenizer.chunk(3, text, 5_000, 4_999, 1000, None)
    assert {name for each in encodings for name in each.made} >= {"ids", "offsets"}
    assert max(count for each in encodings for count in each.made.values()) == 1


def test_texts_are_cut_in_turns_until_there_are_too_many_chunks(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve("cls")
    turn, chunk, done = service.Service.turn, Tokenizer.chunk, list[Any]()
    monkeypatch.setattr("serve_app.compute.chunks._PIECE_CHARS", len(LONG))
    monkeypatch.setattr(service, "_INLINE_CHARS", 0)
    monkeypatch.setattr(service.Service, "turn", lambda *args: done.append("turn") or turn(*args))
    monkeypatch.setattr(Tokenizer, "chunk", lambda *args: done.append(args[1]) or chunk(*args))
    assert served.refused("/embed", inputs=[LONG] * 3, chunking={"size": 7})[2].startswith("at least 10 chunks")
    assert done == ["turn", 0, "turn", 1]


def test_chunking_refuses_what_it_cannot_do(serve: Serve) -> None:
    served = serve("cls")
    assert "one token of a text (cls)" in served.refused("/embed", inputs=LONG, chunking={"size": 10, "pooling": "late"})[2]
    assert "input 1 is a list of token ids" in served.refused("/embed", inputs=["x", [5, 6]], chunking={"size": 10})[2]
    many = served.refused("/embed", inputs=LONG, chunking={"size": 2})
    assert many[0] == 422
    assert many[2].endswith(f"chunks of input 0, {LIMIT} at most; take larger ones")
    several = served.refused("/embed", inputs=[LONG] * 3, chunking={"size": 8})
    assert several[2].endswith(f"at least 12 chunks > maximum allowed batch size {LIMIT}; use larger chunks or send fewer texts")
    long = served.refused("/embed", inputs=["x", "a" * 500_001], chunking={"size": 10})
    assert long[2].endswith("`chunking` takes 500000 characters of a text, input 1 has 500001; send it in parts")
    assert "must be at most 254" in served.refused("/embed", inputs=LONG, chunking={"size": 255})[2]
    prompted = served.refused("/embed", inputs=LONG, chunking={"size": 253}, prompt="query: ")
    assert "must be at most 252, the model's limit minus special tokens and the prompt" in prompted[2]
    wrapped = served.refused("/vertex", instances=[{"inputs": LONG, "chunking": {"size": 8}}])
    assert wrapped == (422, "Validation", "instances.0: `chunking` is not available here; send it to /embed")
    for chunking in ({"size": 0}, {"size": 4, "overlap": 4}, {"overlap": 1}, {"size": 4, "pooling": "max"}, 3):
        assert served.send("POST", "/embed", {"inputs": LONG, "chunking": chunking}).status_code == 422
