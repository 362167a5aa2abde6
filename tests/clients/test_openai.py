"""The openai SDK."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from conftest import KEY, Server, close
from material import DIMENSIONS, LONG, TEXTS

MODEL = "all-MiniLM-L6-v2"


@pytest.fixture(scope="module")
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.root}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def vectors(answer: Any) -> list[list[float]]:
    return [item.embedding for item in answer.data]


def test_base64_by_default_floats_where_asked(sdk: openai.OpenAI, reference: dict[str, Any]) -> None:
    answer = sdk.embeddings.create(model=MODEL, input=TEXTS)
    close(vectors(answer), reference["embeddings"])
    assert [item.index for item in answer.data] == [0, 1, 2, 3]
    assert (answer.object, answer.model) == ("list", MODEL)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > 256
    close(vectors(sdk.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")), reference["embeddings"])
    close(vectors(sdk.embeddings.create(model=MODEL, input=TEXTS[0])), reference["embeddings"][:1])


def test_dimensions_and_a_user(sdk: openai.OpenAI, reference: dict[str, Any]) -> None:
    answer = sdk.embeddings.create(model=MODEL, input=TEXTS, dimensions=DIMENSIONS, user="somebody")
    close(vectors(answer), reference["cut"])


def test_token_ids(sdk: openai.OpenAI, reference: dict[str, Any]) -> None:
    ids = reference["token_ids"]
    close(vectors(sdk.embeddings.create(model=MODEL, input=ids)), reference["embeddings"][:2])
    close(vectors(sdk.embeddings.create(model=MODEL, input=ids[0])), reference["embeddings"][:1])


def test_a_prompt_goes_through_extra_body(sdk: openai.OpenAI, reference: dict[str, Any]) -> None:
    answer = sdk.embeddings.create(model=MODEL, input=TEXTS, extra_body={"prompt_name": "query"})
    close(vectors(answer), reference["prompted"])


def test_models(sdk: openai.OpenAI) -> None:
    (model,) = sdk.models.list()
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "emberforge")


def test_async(server: Server, reference: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.root}/v1", api_key=KEY) as client:
            calls = [client.embeddings.create(model=MODEL, input=text) for text in TEXTS]
            close([vectors(answer)[0] for answer in await asyncio.gather(*calls)], reference["embeddings"])
            assert [model.id async for model in client.models.list()] == [MODEL]

    asyncio.run(scenario())


def test_what_is_refused_is_the_sdks_own_error(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.UnprocessableEntityError, match="`dimensions` should be smaller") as wrong:
        sdk.embeddings.create(model=MODEL, input="x", dimensions=1000)
    assert (wrong.value.code, wrong.value.type, wrong.value.param) == (422, "Validation", None)
    with pytest.raises(openai.BadRequestError, match="cannot be empty"):
        sdk.embeddings.create(model=MODEL, input="")
    assert sdk.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="model `other` is not served here") as nothing:
        sdk.models.retrieve("other")
    assert nothing.value.type == "NotFound"
    with pytest.raises(openai.AuthenticationError, match="Bearer KEY"):
        sdk.with_options(api_key="wrong").embeddings.create(model=MODEL, input="x")


def test_overload_is_told_and_the_sdk_comes_back(server: Server, reference: dict[str, Any]) -> None:
    """The server admits eight requests. The SDK repeats the refused requests after the time in Retry-After."""
    many = [LONG] * 16

    async def scenario(max_retries: int) -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.root}/v1", api_key=KEY, max_retries=max_retries) as client:
            calls = [client.embeddings.create(model=MODEL, input=many) for _ in range(12)]
            return await asyncio.gather(*calls, return_exceptions=True)

    answers = asyncio.run(scenario(0))
    refused = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
    assert refused
    assert refused[0].type == "Overloaded"
    assert int(refused[0].response.headers["retry-after"]) >= 1
    for answer in answers:
        if answer not in refused:
            close(vectors(answer)[:1], reference["embeddings"][3:])
    assert [type(answer).__name__ for answer in asyncio.run(scenario(10))] == ["CreateEmbeddingResponse"] * 12
