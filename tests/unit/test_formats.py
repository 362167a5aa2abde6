"""Answers that TEI and OpenAI do not have: quantised vectors, Cohere's form, prompts and Vertex's wrapper.

The API has a fake model that maps the sum of a text's ids to a vector. So a prompt changes the answer, and the tests are fast.
"""

import asyncio
import base64
import json
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fake_models import FakeBackend

from engine.model.folder import load_model_config
from engine.options import EmbedOptions, EncodeOptions, TokenIds
from engine.results import Embeddings
from engine.text.tokenizer import Tokenizer
from serve_app.admission.qos import Qos
from serve_app.compute.quantize import quantize
from serve_app.http.app import Api
from serve_app.models import ModelInfo
from serve_app.observe.metrics import Metrics
from serve_app.settings import Settings

PROMPTS = {"query": "query: ", "passage": "passage: ", "Clustering": "cluster: "}
WIDTH = 64


class FakeModel:
    """Vectors of 64 dimensions that depend only on the ids, and `int8_ranges` for 64 dimensions."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.load(folder, load_model_config(folder))
        ranges = {WIDTH: np.tile(np.float32([[-0.3], [0.4]]), WIDTH)}
        self.info = ModelInfo("fake", "fake", "float32", "cpu", "mean", WIDTH, 256, 1000, 0, int8_ranges=ranges)

    async def embed(self, sequences: Sequence[TokenIds], options: EmbedOptions, qos: Qos) -> Embeddings:
        return Embeddings(np.stack([vector(ids, options) for ids in sequences]), {}, 0.0, 0.0)


def vector(ids: TokenIds, options: EmbedOptions) -> np.ndarray:
    whole = np.random.default_rng(int(ids.sum()) + len(ids)).standard_normal(WIDTH).astype(np.float32)
    cut = whole[: options.dimensions]
    return cut / np.linalg.norm(cut) if options.normalize else cut


@pytest.fixture(scope="module")
def model(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> FakeModel:
    folder = tmp_path_factory.mktemp("prompted") / "model"
    shutil.copytree(minilm, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    return FakeModel(folder)


@pytest.fixture(scope="module")
def app(model: FakeModel) -> Any:
    return Api(FakeBackend(model), Settings(max_client_batch_size=8), Metrics("fake")).app


Post = Callable[[str, Any], httpx.Response]


@pytest.fixture
def post(app: Any) -> Post:
    async def send(path: str, body: Any) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://fake") as client:
            return await client.post(path, json=body)

    return lambda path, body: asyncio.run(send(path, body))


@pytest.fixture
def expected(model: FakeModel) -> Callable[..., np.ndarray]:
    """The vector of a text that already contains its prompt."""

    def compute(*texts: str, dimensions: int | None = None, **encoding: Any) -> np.ndarray:
        ids = model.tokenizer.encode(texts, EncodeOptions(**encoding))
        return np.stack([vector(each, EmbedOptions(dimensions=dimensions)) for each in ids])

    return compute


DTYPES = ["int8", "uint8", "binary", "ubinary"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed_quantises_what_it_would_have_answered(post: Post, expected: Any, model: FakeModel, dtype: Any) -> None:
    answer = post("/embed", {"inputs": ["one", "two"], "output_dtype": dtype})
    assert answer.json() == quantize(expected("one", "two"), dtype, model.info.int8_ranges).tolist()
    assert answer.headers["x-compute-tokens"] == "6"
    cut = post("/embed", {"inputs": "one", "dimensions": 16, "output_dtype": dtype}).json()
    assert cut == quantize(expected("one", dimensions=16), dtype, {}).tolist()
    assert np.shape(cut) == (1, 2 if "binary" in dtype else 16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
def test_openai_numbers_and_base64_of_their_bytes(post: Post, expected: Any, model: FakeModel, dtype: Any, path: str) -> None:
    wanted = quantize(expected("one"), dtype, model.info.int8_ranges)
    numbers = post(path, {"input": "one", "output_dtype": dtype}).json()["data"][0]["embedding"]
    assert numbers == wanted[0].tolist()
    coded = post(path, {"input": "one", "output_dtype": dtype, "encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert base64.b64decode(coded) == wanted.tobytes()


def test_without_a_type_nothing_changes(post: Post, expected: Any) -> None:
    for extra in ({}, {"output_dtype": "float"}, {"output_dtype": None}):
        np.testing.assert_array_equal(np.float32(post("/embed", {"inputs": "one"} | extra).json()), expected("one"))


def test_types_that_cannot_be_are_refused_before_anything_is_computed(post: Post) -> None:
    odd = post("/embed", {"inputs": "x", "dimensions": 12, "output_dtype": "binary"})
    assert (odd.status_code, odd.json()["error_type"]) == (422, "Validation")
    assert "`binary` packs 8 dimensions into a byte, and 12 is not a multiple of 8" in odd.json()["error"]
    long = post("/embed", {"inputs": "x", "dimensions": 32, "normalize": False, "output_dtype": "int8"})
    assert long.status_code == 422
    assert "not normalised" in long.json()["error"]
    unknown = post("/v1/embeddings", {"input": "x", "output_dtype": "int4"})
    assert (unknown.status_code, unknown.json()["type"]) == (422, "Validation")
    assert "output_dtype" in unknown.json()["message"]


def test_cohere_answers_every_type_at_once(post: Post, expected: Any, model: FakeModel) -> None:
    types = ["float", *DTYPES, "base64"]
    body = {"model": "any", "texts": ["one", "two"], "input_type": "search_query", "embedding_types": types}
    answer = post("/v2/embed", body).json()
    wanted = expected("query: one", "query: two")
    assert set(answer) == {"id", "response_type", "embeddings", "texts", "meta"}
    assert uuid.UUID(answer["id"])
    assert answer["response_type"] == "embeddings_by_type"
    assert answer["texts"] == ["one", "two"]
    assert answer["meta"] == {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 10}}
    assert list(answer["embeddings"]) == types
    np.testing.assert_array_equal(np.float32(answer["embeddings"]["float"]), wanted)
    assert [base64.b64decode(row) for row in answer["embeddings"]["base64"]] == [row.tobytes() for row in wanted]
    for dtype in DTYPES:
        assert answer["embeddings"][dtype] == quantize(wanted, dtype, model.info.int8_ranges).tolist()  # type: ignore[arg-type]


def test_cohere_versions_differ_without_types(post: Post, expected: Any) -> None:
    old, new = (post(path, {"texts": ["one"]}).json() for path in ("/v1/embed", "/v2/embed"))
    assert (old["response_type"], old["meta"]["api_version"]) == ("embeddings_floats", {"version": "1"})
    np.testing.assert_array_equal(np.float32(old["embeddings"]), expected("one"))
    assert (new["response_type"], list(new["embeddings"])) == ("embeddings_by_type", ["float"])
    typed = post("/v1/embed", {"texts": ["one"], "embedding_types": ["int8"]}).json()
    assert (typed["response_type"], list(typed["embeddings"])) == ("embeddings_by_type", ["int8"])


def test_cohere_inputs_are_texts_too(post: Post, expected: Any) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    answer = post("/v2/embed", {"inputs": [{"content": parts}, {"content": parts[:1]}]}).json()
    np.testing.assert_array_equal(np.float32(answer["embeddings"]["float"]), expected("one\ntwo", "one"))
    assert "texts" not in answer


def test_a_request_without_a_side_is_cut_on_the_models_own(
    post: Post, expected: Any, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.tokenizer, "_truncation_side", "left")
    long = " ".join(f"word{i}" for i in range(400))
    left, right = (expected(long, truncation_direction=side) for side in ("left", "right"))
    assert not np.array_equal(left, right)
    for own in ({}, {"truncation_direction": "left"}):
        np.testing.assert_array_equal(np.float32(post("/embed", {"inputs": long} | own).json()), left)
    np.testing.assert_array_equal(np.float32(post("/embed", {"inputs": long, "truncation_direction": "Right"}).json()), right)
    answer = post("/v1/embeddings", {"input": long}).json()
    np.testing.assert_array_equal(np.float32([answer["data"][0]["embedding"]]), left)
    for given, vectors in (({}, left), ({"truncate": "END"}, right)):
        answer = post("/v2/embed", {"texts": [long]} | given).json()
        np.testing.assert_array_equal(np.float32(answer["embeddings"]["float"]), vectors)


def test_openai_cuts_as_it_is_told(post: Post, expected: Any) -> None:
    long = " ".join(f"word{i}" for i in range(400))
    for given in (None, True, "END", "START"):
        (entry,) = post("/v1/embeddings", {"input": long, "truncate": given}).json()["data"]
        wanted = expected(long, truncation_direction="left" if given == "START" else None)
        np.testing.assert_array_equal(np.float32([entry["embedding"]]), wanted)
    for given in (False, "NONE"):
        refused = post("/v1/embeddings", {"input": long, "truncate": given})
        assert refused.status_code == 422
        assert "`inputs` must have less than" in refused.json()["message"]
    assert post("/v1/embeddings", {"input": "x", "truncate": "MIDDLE"}).status_code == 422


def test_cohere_cuts_as_it_is_told(post: Post, expected: Any) -> None:
    long = " ".join(f"word{i}" for i in range(400))

    def embedded(**given: Any) -> np.ndarray:
        return np.float32(post("/v2/embed", {"texts": [long]} | given).json()["embeddings"]["float"])

    np.testing.assert_array_equal(embedded(), expected(long))
    np.testing.assert_array_equal(embedded(truncate="END"), expected(long))
    np.testing.assert_array_equal(embedded(truncate="START"), expected(long, truncation_direction="left"))
    np.testing.assert_array_equal(embedded(max_tokens=4), expected(long, max_tokens=4))
    np.testing.assert_array_equal(embedded(output_dimension=16), expected(long, dimensions=16))
    assert not np.array_equal(embedded(max_tokens=4), embedded())
    refused = post("/v2/embed", {"texts": ["one two three"], "truncate": "NONE", "max_tokens": 4})
    assert (refused.status_code, list(refused.json())) == (400, ["message"])
    assert "must have less than 4 tokens. Given: 5" in refused.json()["message"]


@pytest.mark.parametrize("path", ["/v1/embed", "/v2/embed"])
@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        ({}, 400, "either `texts` or `inputs`"),
        ({"texts": []}, 400, "either `texts` or `inputs`"),
        ({"texts": ["x"], "inputs": [{"content": [{"type": "text", "text": "x"}]}]}, 400, "either `texts` or `inputs`"),
        ({"texts": [""]}, 400, "cannot be empty"),
        ({"texts": ["x", 3]}, 400, "texts: [1] is the number 3"),
        ({"texts": ["x"] * 9}, 400, "batch size 9 > maximum allowed batch size 8"),
        ({"images": ["data:image/png;base64,AA=="]}, 400, "this server cannot embed images"),
        ({"texts": ["x"], "input_type": "image"}, 400, "this server cannot embed images"),
        ({"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}, 400, "inputs.0.content.0.type"),
        ({"inputs": [{"content": []}]}, 400, "inputs.0.content"),
        ({"texts": ["x"], "input_type": "query"}, 400, "input_type"),
        ({"texts": ["x"], "embedding_types": ["float16"]}, 400, "embedding_types.0"),
        ({"texts": ["x"], "embedding_types": ["binary"], "output_dimension": 12}, 400, "12 is not a multiple of 8"),
        ({"texts": ["x"], "output_dimension": 65}, 400, "dimensions"),
        ({"texts": ["x"], "truncate": "end"}, 400, "truncate"),
        ({"texts": ["x"], "max_tokens": 2}, 400, "`max_tokens` should be more than 2"),
        ({"texts": ["x"], "model": "missing"}, 404, "`missing` is not served here"),
    ],
)
def test_cohere_errors_are_a_message(post: Post, path: str, body: Any, status: int, part: str) -> None:
    answer = post(path, body)
    assert (answer.status_code, list(answer.json())) == (status, ["message"]), answer.text
    assert part in answer.json()["message"]


@pytest.mark.parametrize(
    ("asked", "before"),
    [
        ({}, ""),
        ({"prompt_name": "passage"}, "passage: "),
        ({"prompt": "say: "}, "say: "),
        ({"prompt": ""}, ""),
        ({"input_type": "query"}, "query: "),
        ({"input_type": "document"}, "passage: "),
        ({"input_type": "query", "prompt_name": "passage"}, "passage: "),
        ({"input_type": "query", "prompt": "say: "}, "say: "),
    ],
)
def test_prompts_on_native_and_openai_routes(post: Post, expected: Any, asked: dict[str, str], before: str) -> None:
    wanted = expected(before + "one")
    np.testing.assert_array_equal(np.float32(post("/embed", {"inputs": "one"} | asked).json()), wanted)
    openai = post("/v1/embeddings", {"input": "one"} | asked).json()["data"][0]["embedding"]
    np.testing.assert_array_equal(np.float32([openai]), wanted)
    tokens = post("/tokenize", {"inputs": "one"} | asked).json()[0]
    assert tokens[-2]["start"] == len(before)
    parameters = post("/similarity", {"inputs": {"source_sentence": "one", "sentences": ["two"]}, "parameters": asked}).json()
    first, second = expected(before + "one", before + "two")
    np.testing.assert_allclose(parameters, [first @ second], atol=1e-6)


def test_a_large_request_is_tokenised_in_pieces(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.compute.embedding._PIECE", 2)
    inputs = [f"number {index}" for index in range(5)]
    vectors = post("/embed", {"inputs": inputs}).json()
    np.testing.assert_allclose(vectors, [post("/embed", {"inputs": each}).json()[0] for each in inputs], atol=1e-6)
    refused = post("/embed", {"inputs": [*inputs, "\0"]})
    assert (refused.status_code, refused.json()["error_type"]) == (422, "Validation")
    assert "input 5 does" in refused.json()["error"]


def test_prompts_that_cannot_be_are_refused(post: Post) -> None:
    both = post("/embed", {"inputs": "x", "prompt": "a", "prompt_name": "query"})
    assert (both.status_code, both.json()["error_type"]) == (422, "Validation")
    assert "`prompt` and `prompt_name` cannot be set together" in both.json()["error"]
    assert post("/embed", {"inputs": "x", "prompt": "a" * 8193}).status_code == 422
    assert "NUL" in post("/embed", {"inputs": "x", "prompt": "a\0"}).json()["error"]
    assert post("/v1/embeddings", {"input": "x", "input_type": "search_query"}).status_code == 422
    unknown = post("/v1/embeddings", {"input": "x", "prompt_name": "nope"}).json()
    assert 'Available prompts: ["query", "passage", "Clustering"]' in unknown["message"]


@pytest.mark.parametrize(
    ("kind", "before"),
    [("search_query", "query: "), ("search_document", "passage: "), ("clustering", "cluster: "), ("classification", "")],
)
def test_cohere_input_types_are_prompts(post: Post, expected: Any, kind: str, before: str) -> None:
    answer = post("/v2/embed", {"texts": ["one"], "input_type": kind}).json()
    np.testing.assert_array_equal(np.float32(answer["embeddings"]["float"]), expected(before + "one"))


def test_vertex_answers_each_instance_as_embed_would(post: Post) -> None:
    instances = [{"inputs": "one"}, {"inputs": ["one", "two"], "dimensions": 16}, {"inputs": "one", "output_dtype": "int8"}]
    answer = post("/vertex", {"instances": instances})
    assert answer.json() == {"predictions": [post("/embed", each).json() for each in instances]}
    assert post("/vertex", {"instances": []}).json() == {"predictions": []}


@pytest.mark.parametrize(
    ("instances", "status", "kind", "part"),
    [
        ([{"inputs": "x"}, {"inputs": ""}], 400, "Empty", "`inputs` cannot be empty"),
        ([{"inputs": "x"}, {}], 422, "Validation", "instances.1: inputs: Field required"),
        ([{"inputs": "x"}, 3], 422, "Validation", "instances.1: instance:"),
        ([{"inputs": "x", "dimensions": 100}], 422, "Validation", "`dimensions` should be smaller"),
        ([{"inputs": ["x"] * 5}] * 2, 422, "Validation", "batch size 10 > maximum allowed batch size 8"),
    ],
)
def test_one_bad_instance_fails_the_vertex_request(post: Post, instances: Any, status: int, kind: str, part: str) -> None:
    answer = post("/vertex", {"instances": instances})
    assert (answer.status_code, answer.json()["error_type"]) == (status, kind)
    assert part in answer.json()["error"]


def test_a_vertex_body_without_instances_is_plain_text(post: Post) -> None:
    answer = post("/vertex", {"inputs": "x"})
    assert (answer.status_code, answer.headers["content-type"]) == (422, "text/plain; charset=utf-8")


@pytest.mark.filterwarnings("ignore")
def test_coheres_own_clients(app: Any, expected: Any) -> None:
    cohere = pytest.importorskip("cohere")

    async def ask() -> tuple[Any, Any, Any]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app)) as http:
            known = {"api_key": "unused", "base_url": "http://fake", "httpx_client": http}
            new, old = cohere.AsyncClientV2(**known), cohere.AsyncClient(**known)
            types = ["float", "int8", "ubinary"]
            with pytest.raises(cohere.BadRequestError) as caught:
                await new.embed(model="fake", texts=["x"], input_type="search_query", output_dimension=100)
            typed = await new.embed(model="fake", texts=["one"], input_type="search_query", embedding_types=types)
            plain = await old.embed(model="fake", texts=["one", "two"], input_type="search_document")
            return typed, plain, caught.value

    typed, plain, error = asyncio.run(ask())
    np.testing.assert_array_equal(np.float32(typed.embeddings.float_), expected("query: one"))
    assert (len(typed.embeddings.int8[0]), len(typed.embeddings.ubinary[0]), typed.texts) == (WIDTH, WIDTH // 8, ["one"])
    assert typed.meta.billed_units.input_tokens == 5
    assert plain.response_type == "embeddings_floats"
    np.testing.assert_array_equal(np.float32(plain.embeddings), expected("passage: one", "passage: two"))
    assert "dimensions" in error.body["message"]
