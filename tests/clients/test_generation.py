"""Text from chat completions and completions: the openai SDK, langchain-openai, litellm and LlamaIndex."""

import asyncio
from typing import Any

import litellm
import openai
import pytest
from conftest import Server
from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

MODEL = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France?"
PARIS = "The capital of France is Paris."
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
COUNT, GOES_ON = "1, 2, 3, 4, 5, 6,", " 7, 8, 9"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


@pytest.fixture(scope="module")
def there(open_server: Server) -> str:
    return f"{open_server.root}/v1"


def test_openai(there: str) -> None:
    with openai.OpenAI(base_url=there, api_key="unused", max_retries=0) as sdk:
        whole = sdk.chat.completions.create(messages=MESSAGES, **GREEDY)
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (PARIS, "stop")
        with sdk.chat.completions.stream(messages=MESSAGES, stream_options={"include_usage": True}, **GREEDY) as stream:
            texts = [event.delta for event in stream if event.type == "content.delta"]
            final = stream.get_final_completion()
        assert "".join(texts) == final.choices[0].message.content == PARIS
        assert len(texts) > 3
        assert final.usage == whole.usage
        completion = sdk.completions.create(prompt=COUNT, max_tokens=9, **GREEDY)
        assert completion.choices[0].text.startswith(GOES_ON)
        chunks = list(sdk.completions.create(prompt=COUNT, max_tokens=9, stream=True, **GREEDY))
        assert "".join(chunk.choices[0].text for chunk in chunks) == completion.choices[0].text
        with pytest.raises(openai.BadRequestError, match="`best_of` is not supported") as wrong:
            sdk.completions.create(prompt=COUNT, best_of=3, **GREEDY)
        assert wrong.value.param == "best_of"


def test_openai_async(there: str) -> None:
    async def scenario() -> None:
        async with openai.AsyncOpenAI(base_url=there, api_key="unused", max_retries=0) as sdk:
            ask = sdk.chat.completions.create
            whole, stream = await asyncio.gather(ask(messages=MESSAGES, **GREEDY), ask(messages=MESSAGES, stream=True, **GREEDY))
            texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(texts) == whole.choices[0].message.content == PARIS
            stopped = await ask(messages=MESSAGES, stream=True, max_tokens=500, **GREEDY | {"temperature": 1})
            await anext(aiter(stopped))
            await stopped.close()  # a client that leaves causes no error
            assert (await ask(messages=MESSAGES, **GREEDY)).choices[0].message.content == PARIS

    asyncio.run(scenario())


def test_langchain(there: str) -> None:
    """langchain-openai sends `max_completion_tokens`, and asks only OpenAI's own server for usage in a stream."""
    chat = ChatOpenAI(base_url=there, api_key="unused", max_tokens=24, **GREEDY)
    answer = chat.invoke(QUESTION)
    assert answer.content == PARIS
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 7
    chunks = list(chat.stream(QUESTION, stream_usage=True))
    assert "".join(str(chunk.content) for chunk in chunks) == PARIS
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 7
    history = [HumanMessage(QUESTION), AIMessage(PARIS), HumanMessage("And what language is spoken there?")]
    assert "French" in str(asyncio.run(chat.ainvoke(history)).content)
    assert chat.bind(stop=["Paris"]).invoke(QUESTION).content == PARIS.partition("Paris")[0]


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(there: str, provider: str) -> None:
    ask = {"model": f"{provider}/{MODEL}", "messages": MESSAGES, "temperature": 0, "api_base": there, "api_key": "unused"}
    whole = litellm.completion(**ask)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (PARIS, "stop")
    chunks = list(litellm.completion(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == PARIS
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 7


def test_litellm_completions(there: str) -> None:
    ask = {"model": f"text-completion-openai/{MODEL}", "api_base": there, "api_key": "unused", "temperature": 0}
    assert litellm.text_completion(prompt=COUNT, max_tokens=9, **ask).choices[0].text.startswith(GOES_ON)


def test_llama_index(there: str) -> None:
    """LlamaIndex sends completions, except if the model is declared as a chat model."""
    known = {"api_base": there, "api_key": "unused", "temperature": 0, "max_tokens": 24}
    chat = OpenAILike(MODEL, is_chat_model=True, **known)
    message = ChatMessage(content=QUESTION)
    assert chat.chat([message]).message.content == PARIS
    assert [each.message.content for each in chat.stream_chat([message])][-1] == PARIS
    assert str(asyncio.run(chat.acomplete(QUESTION))) == PARIS
    text = OpenAILike(MODEL, **known)
    assert str(text.complete(COUNT)).startswith(GOES_ON)
    assert "".join(each.delta or "" for each in text.stream_complete(COUNT)).startswith(GOES_ON)


def test_the_embedding_model_is_beside_it(open_server: Server) -> None:
    with openai.OpenAI(base_url=f"{open_server.root}/v1", api_key="unused", max_retries=0) as sdk:
        assert len(sdk.embeddings.create(model="all-MiniLM-L6-v2", input="x").data[0].embedding) == 384
        with pytest.raises(openai.BadRequestError, match="does not generate text"):
            sdk.chat.completions.create(model="all-MiniLM-L6-v2", messages=MESSAGES)
