"""Rerankers, classifiers and chunks over real Serve: a gateway gives the same answers as the models themselves."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from servers import Clustered
from test_behaviour import wait_for

from serve_app.replica import pool

QUERY = "w3 w14 w15"
TEXTS = [" ".join(f"w{(7 * i + 3 * j) % 290}" for j in range(1 + i % 23)) for i in range(120)]


@pytest.fixture(scope="module")
def folders(tiny: Callable[..., Path]) -> dict[str, str]:
    return {"ranker": str(tiny("bert_classifier", num_labels=1)), "classes": str(tiny("roberta_classifier", num_labels=3))}


@pytest.fixture(scope="module")
def served(client: httpx.Client, clustered: Clustered, folders: dict[str, str]) -> Iterator[httpx.Client]:
    pools = {
        "mini": {"mini.t": pool.PoolServer},
        "ranker": {"ranker.t": pool.PoolServer, "ranker.u": pool.PoolServer},
        "classes": {"classes.t": pool.PoolServer},
    }
    with clustered("/tasks", pools, folders=folders) as gate:
        wait_for(lambda: {entry["state"] for entry in gate.get("v1/models").json()["data"]} == {"ready"})
        yield gate


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def logits(folder: str, *inputs: Any) -> np.ndarray:
    """Logits of transformers, one input at a time."""
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json")
    with torch.inference_mode():
        rows = [model(**tokenizer(*each, return_tensors="pt", return_token_type_ids=True)).logits[0] for each in inputs]
    return torch.stack(rows).numpy()


def test_rerank(served: httpx.Client, folders: dict[str, str]) -> None:
    expected = logits(folders["ranker"], *[(QUERY, text) for text in TEXTS])[:, 0]
    answer = post(served, "rerank", query=QUERY, texts=TEXTS, model="ranker", raw_scores=True)
    assert sorted(each["index"] for each in answer) == list(range(len(TEXTS)))
    given = [each["score"] for each in answer]
    assert given == sorted(given, reverse=True)
    np.testing.assert_allclose(given, [expected[each["index"]] for each in answer], rtol=1e-4, atol=2e-5)
    best = post(served, "v2/rerank", query=QUERY, documents=TEXTS, model="ranker", top_n=3)["results"]
    assert [each["index"] for each in best] == [each["index"] for each in answer[:3]]
    np.testing.assert_allclose([each["relevance_score"] for each in best], 1 / (1 + np.exp(-np.float64(given[:3]))), rtol=1e-4)


def test_predict(served: httpx.Client, folders: dict[str, str]) -> None:
    inputs = [[text] for text in TEXTS[:5]] + [[TEXTS[7], TEXTS[8]]]
    expected = torch.from_numpy(logits(folders["classes"], *inputs)).softmax(-1).numpy()
    for answer, row in zip(post(served, "predict", inputs=inputs, model="classes"), expected, strict=True):
        scores = {each["label"]: each["score"] for each in answer}
        np.testing.assert_allclose([scores[f"LABEL_{index}"] for index in range(3)], row, rtol=1e-3, atol=1e-5)


def test_the_wrong_task(served: httpx.Client) -> None:
    assert served.post("embed", json={"inputs": "w1", "model": "ranker"}).status_code == 424
    assert served.post("predict", json={"inputs": "x", "model": "mini"}).status_code == 424


def test_late_chunks_are_means_of_the_tokens_of_one_pass(served: httpx.Client) -> None:
    text = "Ray places the replicas, the gateway routes the requests, and the engine packs them into batches of tokens."
    tokens = np.array(post(served, "embed_all", inputs=text)[0])[1:-1]
    chunks = post(served, "embed", inputs=text, chunking={"size": 6, "overlap": 1, "pooling": "late"}, normalize=False)[0]
    assert len(chunks) > 3
    for index, chunk in enumerate(chunks):
        np.testing.assert_allclose(chunk["embedding"], tokens[5 * index : 5 * index + 6].mean(axis=0), rtol=1e-3, atol=1e-5)
    assert text[chunks[0]["start"] : chunks[0]["end"]] == "Ray places the replicas,"
