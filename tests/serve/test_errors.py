"""Wrong input gets the status, type and text of TEI's contract, in the route's own form. The server keeps running."""

import httpx
import pytest

P = "Input validation error: "
LONG = " ".join(["word"] * 700)


@pytest.fixture(autouse=True)
def _server_is_unharmed(client: httpx.Client):  # type: ignore[no-untyped-def]
    yield
    assert client.post("embed", json={"inputs": "still here"}).status_code == 200
    assert client.get("health").status_code == 200


NATIVE = [
    ("embed", {"inputs": ""}, 400, "Empty", P + "`inputs` cannot be empty"),
    ("embed", {"inputs": []}, 400, "Empty", P + "`inputs` cannot be empty"),
    ("embed", {"inputs": ["fine", ""]}, 400, "Empty", P + "`inputs` cannot be empty"),
    ("embed", {"inputs": ["fine", []]}, 400, "Empty", P + "`inputs` cannot be empty"),
    ("embed", {"inputs": ["x"] * 65}, 422, "Validation", "batch size 65 > maximum allowed batch size 64"),
    ("embed", {"inputs": ["x"] * 60_000}, 422, "Validation", "batch size 60000 > maximum allowed batch size 64"),
    ("embed", {"inputs": LONG, "truncate": False}, 422, "Validation", P + "`inputs` must have less than 256 tokens. Given: 702"),
    ("embed", {"inputs": [7592] * 300, "truncate": False}, 422, "Validation", P + "`inputs` must have less than 256 tokens. Given: 300"),
    ("embed", {"inputs": "x" * 64_001, "truncate": False}, 422, "Validation", P + "`inputs` must have less than 64000 characters. Given: 64001"),
    ("embed", {"inputs": "x", "dimensions": 0}, 422, "Validation", P + "`dimensions` should be positive"),
    ("embed", {"inputs": "x", "dimensions": 385}, 422, "Validation", P + "`dimensions` should be smaller than the maximum embedding dimension."),
    ("embed", {"inputs": "x", "prompt_name": "query"}, 422, "Validation", P + "`default-prompt-name` is set to `query` but no prompts were found in the Sentence Transformers configuration"),
    ("embed", {"inputs": "a\0b"}, 422, "Validation", P + "`inputs` cannot contain NUL characters, input 0 does; remove them"),
    ("embed", {"inputs": [[101, 30522]]}, 422, "Validation", P + "input 0 has token id 30522, the vocabulary ends at 30521"),
    ("embed_all", {"inputs": ""}, 400, "Empty", P + "`inputs` cannot be empty"),
    ("similarity", {"inputs": {"source_sentence": "x", "sentences": []}}, 400, "Empty", "`inputs.sentences` cannot be empty"),
    ("similarity", {"inputs": {"source_sentence": "x", "sentences": ["y"] * 64}}, 422, "Validation", "batch size 65 > maximum allowed batch size 64"),
    ("tokenize", {"inputs": []}, 400, "Empty", "`inputs` cannot be empty"),
    ("tokenize", {"inputs": ["x"] * 65}, 422, "Validation", "batch size 65 > maximum allowed batch size 64"),
    ("decode", {"ids": []}, 400, "Empty", P + "`input_ids` cannot be empty"),
    ("decode", {"ids": [99_999_999]}, 422, "Validation", P + "input 0 has token id 99999999, the vocabulary ends at 30521"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "error_type", "text"), NATIVE)
def test_native_errors(client: httpx.Client, path: str, body: object, status: int, error_type: str, text: str) -> None:
    answer = client.post(path, json=body)
    assert (answer.status_code, answer.json()) == (status, {"error": text, "error_type": error_type})


@pytest.mark.parametrize(
    ("body", "status", "error_type", "text"),
    [
        ({"input": ""}, 400, "Empty", P + "`inputs` cannot be empty"),
        ({"input": []}, 400, "Empty", P + "`inputs` cannot be empty"),
        ({"input": ["x"] * 65}, 422, "Validation", "batch size 65 > maximum allowed batch size 64"),
        ({"input": "x", "dimensions": 0}, 422, "Validation", P + "`dimensions` should be positive"),
        ({"input": "x", "dimensions": -1}, 422, "Validation", None),
        ({"input": "x", "encoding_format": "hex"}, 422, "Validation", None),
        ({"input": {"a": 1}}, 422, "Validation", None),
        ({}, 422, "Validation", None),
        (b"{", 400, "Validation", None),
    ],
)
def test_openai_errors_carry_the_envelope_and_the_flat_fields(
    client: httpx.Client, body: object, status: int, error_type: str, text: str | None
) -> None:
    kind = {"content-type": "application/json"}
    answer = (
        client.post("v1/embeddings", content=body, headers=kind)
        if isinstance(body, bytes)
        else client.post("v1/embeddings", json=body)
    )
    assert answer.status_code == status
    content = answer.json()
    assert {content["type"], content["error"]["type"]} == {error_type}
    assert {content["code"], content["error"]["code"]} == {status}
    assert content["message"] == content["error"]["message"]
    assert text is None or content["message"] == text


SHAPES = [
    (b"", 400, "Failed to parse the request body as JSON"),
    (b'{"inputs": ', 400, "Failed to parse the request body as JSON"),
    (b'{"inputs": "\\ud800"}', 400, "Failed to parse the request body as JSON"),
    (b'{"inputs": "\xff"}', 400, "Failed to parse the request body as JSON"),
    (b"[" * 100_000, 400, "Failed to parse the request body as JSON"),
    (b"[]", 422, "target type: body: Input should be an object, got an empty list"),
    (b"{}", 422, "inputs: Field required"),
    (b'{"inputs": null}', 422, "inputs: expected a string, a list of token ids, or a list of these, got null"),
    (b'{"inputs": 7}', 422, "inputs: expected a string"),
    (b'{"inputs": true}', 422, "inputs: expected a string"),
    (b'{"inputs": {"a": 1}}', 422, "inputs: expected a string"),
    (b'{"inputs": ["x", 7]}', 422, "inputs: [1] is the number 7, expected a string or a list of token ids"),
    (b'{"inputs": [1, "x"]}', 422, "inputs: [1] is a string, expected a token id"),
    (b'{"inputs": [[1, -2]]}', 422, "inputs: [0][1] is the number -2, expected a token id"),
    (b'{"inputs": [4294967296]}', 422, "inputs: [0] is the number 4294967296, expected a token id"),
    (b'{"inputs": [1.5]}', 422, "inputs: [0] is the number 1.5, expected a string or a list of token ids"),
    (b'{"inputs": [true]}', 422, "inputs: [0] is true"),
    (b'{"inputs": "x", "dimensions": -1}', 422, "dimensions: Input should be greater than or equal to 0, got the number -1"),
    (b'{"inputs": "x", "dimensions": "8"}', 422, "dimensions: Input should be a valid integer, got '8'"),
    (b'{"inputs": "x", "normalize": "yes"}', 422, "normalize: Input should be a valid boolean, got 'yes'"),
    (b'{"inputs": "x", "truncation_direction": "up"}', 422, "truncation_direction: Input should be 'left' or 'right', got 'up'"),
]


@pytest.mark.parametrize(("body", "status", "text"), SHAPES)
@pytest.mark.parametrize("path", ["embed", ""])
def test_a_body_of_another_shape_is_answered_in_plain_text(
    client: httpx.Client, path: str, body: bytes, status: int, text: str
) -> None:
    answer = client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    assert text in answer.text


def test_a_list_of_many_wrong_items_is_refused_by_its_first(client: httpx.Client) -> None:
    answer = client.post(
        "embed", content=b'{"inputs": [' + b"null," * 99_999 + b"null]}", headers={"content-type": "application/json"}
    )
    assert answer.status_code == 422
    assert len(answer.text) < 200


@pytest.mark.parametrize("path", ["embed", "v1/embeddings", "tokenize", "similarity", "decode"])
def test_wrong_content_type(client: httpx.Client, path: str) -> None:
    answer = client.post(path, content=b'{"inputs": "x"}', headers={"content-type": "text/plain"})
    assert answer.status_code == 415
    assert "Expected request with `Content-Type: application/json`" in answer.text


@pytest.mark.parametrize("path", ["embed", "v1/embeddings"])
def test_ten_megabytes_in_one_string(client: httpx.Client, path: str) -> None:
    answer = client.post(path, json={"inputs": "x" * 10_000_000, "input": "x" * 10_000_000})
    assert answer.status_code == 413
    assert "Failed to buffer the request body: length limit exceeded" in answer.text


def test_a_chunked_body_over_the_limit_is_refused_too(client: httpx.Client) -> None:
    chunks = (b"x" * 100_000 for _ in range(40))
    answer = client.post("embed", content=chunks, headers={"content-type": "application/json"})
    assert answer.status_code == 413


def test_unknown_routes_and_methods(client: httpx.Client) -> None:
    assert client.get("nothing").json() == {
        "error": "there is no route /nothing; GET /docs lists all routes",
        "error_type": "NotFound",
    }
    assert client.get("nothing").status_code == 404
    assert (client.get("embed").status_code, client.get("embed").headers["allow"]) == (405, "POST")
    assert client.put("").headers["allow"] == "GET, HEAD, POST"
    assert client.get("v1/nothing").json()["error"]["type"] == "NotFound"
