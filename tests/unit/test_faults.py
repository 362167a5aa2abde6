"""Errors of request bodies name the field, the reason and the given value, but no text of the user."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from engine.errors import EmberError
from serve_app.dialects.bodies import parse_body, parse_instance
from serve_app.dialects.cohere import CohereEmbedRequest, CohereRerankRequest
from serve_app.dialects.decision_bodies import DecisionRequest
from serve_app.dialects.fields import Items
from serve_app.dialects.generation_bodies import ChatRequest, CompletionRequest, parse_request
from serve_app.dialects.openai import OpenAIEmbeddingsRequest
from serve_app.dialects.tei import parse_rerank
from serve_app.dialects.tei_bodies import EmbedHybridRequest, EmbedRequest, PredictRequest, RerankRequest, SimilarityRequest

SECRET = "a text of the user"
FAULTS: list[tuple[type[BaseModel], Any, str]] = [
    (EmbedRequest, {"inputs": "x", "dimensions": -1},
     "dimensions: Input should be greater than or equal to 0, got the number -1"),
    (EmbedRequest, {"inputs": "x", "dimensions": float("nan")},
     "dimensions: Input should be a valid integer, got the number NaN"),
    (EmbedRequest, {"inputs": "x", "normalize": None}, "normalize: Input should be a valid boolean, got null"),
    (EmbedRequest, {"inputs": "x", "truncation_direction": ["up"]},
     "truncation_direction: Input should be 'left' or 'right', got a list"),
    (EmbedRequest, {"inputs": "x", "prompt": [SECRET]}, "prompt: Input should be a valid string, got a list"),
    (EmbedRequest, {"inputs": "x", "chunking": SECRET}, "chunking: Input should be an object, got a string"),
    (EmbedRequest, {"inputs": "x", "chunking": {"size": 0}}, "chunking.size: Input should be greater than or equal to 1, "
     "got the number 0"),
    (EmbedRequest, {"inputs": "x", "chunking": {}}, "chunking.size: Field required"),
    (EmbedRequest, [], "body: Input should be an object, got an empty list"),
    (EmbedHybridRequest, {"inputs": "x", "outputs": []}, "outputs: List should have at least 1 item, not 0"),
    (OpenAIEmbeddingsRequest, {"input": "x", "encoding_format": "hex"},
     "encoding_format: Input should be 'float' or 'base64', got 'hex'"),
    (SimilarityRequest, {"inputs": SECRET}, "inputs: Input should be an object, got a string"),
    (PredictRequest, {"inputs": ["a", "b", "c"]}, "inputs: the list has 3 strings, expected a string, a pair of strings"),
    (PredictRequest, {"inputs": [["a"], ["b", 3]]}, "inputs: [1][1] is the number 3, expected a string, a pair of strings"),
    (PredictRequest, {"inputs": [["a"], "b"]}, "inputs: [1] is a string, expected a string, a pair of strings"),
    (PredictRequest, {"inputs": 5}, "[[string], [string, string], ...], got the number 5"),
    (CohereEmbedRequest, {"texts": ["a"], "embedding_types": "float"},
     "embedding_types: Input should be a valid array, got a string"),
    (CohereEmbedRequest, {"inputs": [{"content": [{"type": "image_url"}]}]},
     "inputs.0.content.0.type: Input should be 'text', got 'image_url'"),
    (CohereRerankRequest, {"query": "a", "documents": ["b", 3]},
     "documents.1: Input should be a valid string or an object, got the number 3"),
    (CohereRerankRequest, {"query": "a", "documents": [{"title": "b"}]}, "documents.0.text: Field required"),
    (CohereRerankRequest, {"query": "a", "documents": ["b"], "top_n": 2**80},
     "top_n: Input should be less than or equal to 4294967295, got the number 1208925819614629174706176"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "body", "words"), FAULTS)
def test_an_error_has_the_field_the_reason_and_the_value(schema: type[BaseModel], body: Any, words: str) -> None:
    with pytest.raises(EmberError) as caught:
        parse_body(schema, json.dumps(body).encode())
    assert words in str(caught.value)
    assert SECRET not in str(caught.value)
    with pytest.raises(EmberError) as caught:  # the same words for an instance of /vertex, apart from the name of the whole
        parse_instance(schema, 3, body)
    assert str(caught.value).startswith("instances.3: ")
    assert words.removeprefix("body: ") in str(caught.value)


def test_an_error_of_the_json_has_the_place() -> None:
    for parse in (parse_body, parse_request):
        with pytest.raises(EmberError, match=r"JSON: EOF while parsing a value at line 1 column 10$"):
            parse(ChatRequest, b'{"model": ')
        for half in (rb"\ud83d", rb"\ude42", rb"\ud83dx"):
            with pytest.raises(EmberError, match=r"JSON: .* hex escape at line 1 column \d+; .* are valid only in pairs$"):
                parse(ChatRequest, b'{"model": "%b"}' % half)


def test_nan_in_an_unknown_field_does_not_choose_the_wrong_schema() -> None:
    """The schema of /rerank is chosen by fields. The parser that looked for them refused NaN, which the other one takes."""
    body: Any = None
    content = json.dumps({"query": "a", "documents": ["b"], "unknown": float("nan")}).encode()
    assert isinstance(parse_rerank(body, content), CohereRerankRequest)


def test_a_list_is_checked_up_to_its_first_wrong_item() -> None:
    class Numbers(BaseModel):
        numbers: Items[int]

    with pytest.raises(ValueError, match="1 validation error"):
        Numbers.model_validate({"numbers": ["a", "b"]})


VALUES = st.recursive(
    st.sampled_from([None, True, 0, -1, 2**70, 1.5, 1e300, "", "x", SECRET * 9, "left", "auto", "text"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "role", "size", "1"]), inner),
    max_leaves=4,
)
SCHEMAS = (EmbedRequest, RerankRequest, PredictRequest, CohereEmbedRequest, CohereRerankRequest, SimilarityRequest)
GENERATING = (ChatRequest, CompletionRequest, DecisionRequest)


@given(st.data())
def test_any_body_is_taken_or_refused_in_a_short_sentence(data: st.DataObject) -> None:
    schema = data.draw(st.sampled_from((*SCHEMAS, *GENERATING)))
    names = st.sampled_from(list(schema.model_fields))
    content = json.dumps(data.draw(st.dictionaries(names, VALUES, min_size=1) | VALUES)).encode()
    said = ""
    try:
        (parse_request if schema in GENERATING else parse_body)(schema, content)  # type: ignore[type-var]
    except EmberError as error:
        said = str(error)
    assert len(said) < 500
    assert SECRET * 3 not in said
