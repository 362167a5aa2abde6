"""Every route over real HTTP: the answers, their form, and vectors that equal those of the engine."""

import base64
import re
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from engine import Engine
from engine.options import EncodeOptions


@pytest.fixture(scope="module")
def engine(minilm: Path) -> Engine:
    return Engine.load(minilm, dtype="float32")


def close(ours: object, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(ours, dtype=np.float32), theirs, atol=1e-5)


def test_embed_takes_a_string_a_list_ids_and_a_mix(client: httpx.Client, engine: Engine) -> None:
    ids = [101, 7592, 102]
    for inputs in ("one", ["one", "two"], ids, [ids, "one"]):
        answer = client.post("embed", json={"inputs": inputs})
        assert answer.status_code == 200
        as_list = [inputs] if isinstance(inputs, str) or inputs is ids else inputs
        close(answer.json(), engine.embed(as_list))  # type: ignore[arg-type]


def test_token_ids_are_used_as_given(client: httpx.Client, engine: Engine) -> None:
    """TEI decodes the ids and encodes the text again without special tokens, so its vectors differ."""
    window = engine.tokenizer.encode(["hello world"], EncodeOptions())[0].tolist()[1:-1]
    without_specials = client.post("embed", json={"inputs": [window]}).json()
    close(without_specials, engine.embed([window]))
    assert float(np.dot(without_specials[0], engine.embed(["hello world"])[0])) < 0.999


def test_embed_options(client: httpx.Client, engine: Engine) -> None:
    close(client.post("embed", json={"inputs": "x", "normalize": False}).json(), engine.embed(["x"], normalize=False))
    close(client.post("embed", json={"inputs": "x", "dimensions": 128}).json(), engine.embed(["x"], dimensions=128))
    close(client.post("embed", json={"inputs": "x", "dimensions": 384}).json(), engine.embed(["x"]))
    long = " ".join(f"word{i}" for i in range(2000))
    for direction, spelled in (("left", "Left"), ("left", "left"), ("right", "Right"), ("right", "right")):
        answer = client.post("embed", json={"inputs": long, "truncate": True, "truncation_direction": spelled})
        close(answer.json(), engine.embed([long], truncation_direction=direction))  # type: ignore[arg-type]


def test_extra_fields_and_nulls_are_ignored(client: httpx.Client, engine: Engine) -> None:
    body = {"inputs": "x", "model": "m", "parameters": {}, "truncate": None, "prompt_name": None, "dimensions": None}
    close(client.post("embed", json=body).json(), engine.embed(["x"]))


@pytest.mark.parametrize("path", ["v1/embeddings", "embeddings"])
def test_openai_float_and_base64(client: httpx.Client, engine: Engine, path: str) -> None:
    expected = engine.embed(["one", "two words"])
    floats = client.post(path, json={"input": ["one", "two words"], "model": "any"}).json()
    coded = client.post(path, json={"input": ["one", "two words"], "encoding_format": "base64"}).json()
    assert floats["object"] == "list"
    assert floats["model"] == "all-MiniLM-L6-v2"
    assert floats["usage"] == coded["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert [item["index"] for item in floats["data"]] == [0, 1]
    assert {item["object"] for item in floats["data"]} == {"embedding"}
    close([item["embedding"] for item in floats["data"]], expected)
    close([np.frombuffer(base64.b64decode(item["embedding"]), dtype="<f4") for item in coded["data"]], expected)


def test_an_operators_default_prompt_and_quantised_vectors(deployed: Any, engine: Engine) -> None:
    with deployed("/prompted", default_prompt="query: ") as prompted:
        expected = engine.embed(["query: one"])
        close(prompted.post("embed", json={"inputs": "one"}).json(), expected)
        close(prompted.post("embed", json={"inputs": "query: one", "prompt": ""}).json(), expected)
        int8 = np.asarray(prompted.post("embed", json={"inputs": "one", "output_dtype": "int8"}).json())
        assert np.abs(int8 - np.rint(expected * 127 / (8 / 384**0.5))).max() <= 1
        vertex = prompted.post("vertex", json={"instances": [{"inputs": "one"}]}).json()["predictions"]
        close(vertex[0], expected)


def test_root_embeds_or_compares_by_the_shape_of_the_body(client: httpx.Client, engine: Engine) -> None:
    close(client.post("", json={"inputs": ["x"]}).json(), engine.embed(["x"]))
    close(client.post("invocations", json={"inputs": "x"}).json(), engine.embed(["x"]))
    pair = {"inputs": {"source_sentence": "a cat", "sentences": ["a dog", "a cat"]}, "parameters": {}}
    assert client.post("", json=pair).json() == client.post("similarity", json=pair).json()
    text = client.post("", json={"inputs": 'say "source_sentence" twice'})
    assert np.asarray(text.json()).shape == (1, 384)


def test_similarity_is_the_cosine(client: httpx.Client, engine: Engine) -> None:
    answer = client.post("similarity", json={"inputs": {"source_sentence": "a cat", "sentences": ["a dog", "a cat"]}})
    source, dog, cat = engine.embed(["a cat", "a dog", "a cat"])
    close(answer.json(), np.array([source @ dog, source @ cat]))


def test_embed_all_gives_every_token_special_ones_included(client: httpx.Client, engine: Engine) -> None:
    answer = client.post("embed_all", json={"inputs": ["hello world", "x"]}).json()
    assert [len(tokens) for tokens in answer] == [4, 3]
    mean = np.asarray(answer[0]).mean(axis=0)
    close(mean, engine.embed(["hello world"], normalize=False)[0])


def test_tokenize_gives_byte_offsets(client: httpx.Client) -> None:
    tokens = client.post("tokenize", json={"inputs": "é hello"}).json()[0]
    assert tokens[0] == {"id": 101, "text": "[CLS]", "special": True, "start": None, "stop": None}
    assert tokens[2] == {"id": 7592, "text": "hello", "special": False, "start": 3, "stop": 8}
    bare = client.post("tokenize", json={"inputs": ["hello", "x y"], "add_special_tokens": False}).json()
    assert [len(each) for each in bare] == [1, 2]


def test_decode(client: httpx.Client) -> None:
    assert client.post("decode", json={"ids": [101, 7592, 2088, 102]}).json() == ["hello world"]
    both = client.post("decode", json={"ids": [[101, 7592, 102], [2088]], "skip_special_tokens": False}).json()
    assert both == ["[CLS] hello [SEP]", "world"]


def test_info_health_and_models(client: httpx.Client) -> None:
    info = client.get("info").json()
    assert info["model_id"] == info["served_model_name"] == "all-MiniLM-L6-v2"
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert (info["max_input_length"], info["max_client_batch_size"], info["model_dtype"]) == (256, 64, "float32")
    for path in ("health", "ping", ""):
        assert (client.get(path).status_code, client.get(path).content) == (200, b"")
    models = client.get("v1/models").json()
    assert [model["id"] for model in models["data"]] == ["all-MiniLM-L6-v2"]


def test_metrics_count_what_happened(client: httpx.Client) -> None:
    def values() -> list[float]:
        """Values of this server's replica in the metrics of the node. The values may be 0.1 s old."""
        names = ("inputs_total", "tokens_total", "queue_tokens", "requests_in_flight")
        text = client.get("metrics").text
        found = [re.search(rf'^emberforge_{name}{{[^}}]*pool="root"[^}}]*}} (\S+)$', text, re.M) for name in names]
        return [float(each.group(1)) for each in found if each is not None]

    inputs, tokens, *_ = values()
    client.post("embed", json={"inputs": ["hello world", "x"]})
    deadline = time.monotonic() + 10
    while values() != [inputs + 2, tokens + 7, 0, 0]:
        assert time.monotonic() < deadline, values()
        time.sleep(0.02)


def test_headers_tell_what_the_request_cost(client: httpx.Client) -> None:
    headers = client.post("embed", json={"inputs": ["hello world", "x"]}).headers
    assert headers["x-compute-type"] == "gpu+optimized"
    assert headers["x-compute-characters"] == "12"
    assert headers["x-compute-tokens"] == "7"
    for name in ("x-compute-time", "x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time"):
        assert headers[name].isdigit()


def test_openapi_names_every_schema_it_uses(client: httpx.Client) -> None:
    document = client.get("openapi.json").json()
    assert {"/embed", "/v1/embeddings", "/similarity", "/tokenize", "/decode", "/v2/embed", "/vertex"} <= set(document["paths"])
    assert {"output_dtype", "prompt", "input_type"} <= set(document["components"]["schemas"]["EmbedRequest"]["properties"])
    used = set(re.findall(r"#/components/schemas/(\w+)", client.get("openapi.json").text))
    assert used <= set(document["components"]["schemas"])
    page = client.get("docs")
    assert "SwaggerUIBundle" in page.text
    assert "//cdn" not in page.text[-500:]


def test_client_batches_above_the_device_batch_are_split(client: httpx.Client, engine: Engine) -> None:
    texts = [" ".join(["word"] * (20 + i * 3)) for i in range(64)]
    close(client.post("embed", json={"inputs": texts}).json(), engine.embed(texts))
