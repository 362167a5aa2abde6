"""Chat completions and completions, with a fake model that generates the test's text."""

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_generator import CONTEXT, EOS, FakeGenerator, byte_tokenizer, events
from fake_models import FakeBackend, FakeModel
from llguidance import LLMatcher, LLTokenizer

from engine.errors import BackendError, DeadlineOutOfReach, EngineStopped
from engine.model.folder import load_model_config
from engine.text.tokenizer import Tokenizer
from serve_app.http import openapi
from serve_app.http.app import Api
from serve_app.observe.metrics import Metrics
from serve_app.settings import Settings

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hi"}]}
PROMPT = "<user>Hi<a>"
SCOPE: dict[str, Any] = {
    "type": "http", "method": "POST", "path": COMPLETIONS, "raw_path": COMPLETIONS.encode(), "query_string": b"",
    "headers": [(b"content-type", b"application/json")], "root_path": "", "scheme": "http", "http_version": "1.1",
    "asgi": {"version": "3.0", "spec_version": "2.3"},
}  # fmt: skip


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object"} if parameters is None else parameters},
    }


def minimal(path: str) -> dict[str, Any]:
    return HELLO if path == CHAT else {"prompt": "Hi"}


def post(
    served: Any, path: str, headers: dict[str, str] | None = None, *, raw: bytes | None = None, **fields: Any
) -> httpx.Response:
    """The response to a request with the path's smallest body and these fields."""
    app = Api(FakeBackend(served), Settings(**LIMITS), Metrics("fake")).app

    async def scenario() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://fake") as client:
            content = raw if raw is not None else json.dumps(minimal(path) | fields).encode()
            return await client.post(path, content=content, headers={"content-type": "application/json"} | (headers or {}))

    answer = asyncio.run(scenario())
    for stream in getattr(served, "streams", ()):
        assert stream.future.done()  # no stream stays in the engine
    return answer


LIMITS: dict[str, Any] = {"max_client_batch_size": 8, "payload_limit": 10_000, "request_timeout_s": 20.0}


def text_of(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [each["message"]["content"] if "message" in each else each["text"] for each in answer.json()["choices"]]


# Whole answers


def test_a_chat(tmp_path: Path) -> None:
    model = FakeGenerator(tmp_path, "Grüße")
    answer = post(model, CHAT, model="fake").json()
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "fake")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Grüße", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert bytes(model.streams[0].prompt.tolist()).decode() == PROMPT
    assert answer["usage"] == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 7,
        "total_tokens": len(PROMPT) + 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_completion_of_several_prompts(tmp_path: Path) -> None:
    model = FakeGenerator(tmp_path, "one", "two", "three", "four")
    answer = post(model, COMPLETIONS, prompt=["a", "bc"], n=2, seed=7, echo=True)
    assert text_of(answer) == ["aone", "atwo", "bcthree", "bcfour"]
    assert [each["index"] for each in answer.json()["choices"]] == [0, 1, 2, 3]
    assert answer.json()["usage"]["prompt_tokens"] == 3  # each prompt counts once
    assert [stream.options.seed for stream in model.streams] == [7, 8, 7, 8]


def test_token_ids_are_a_prompt(tmp_path: Path) -> None:
    model = FakeGenerator(tmp_path, "x")
    assert text_of(post(model, COMPLETIONS, prompt=[72, 105], echo=True)) == ["Hix"]
    assert text_of(post(model, COMPLETIONS, prompt=[[72], [105]])) == ["x", "x"]


def test_the_model_s_limit_holds_for_a_request_without_one(tmp_path: Path) -> None:
    """As the documentation of the field says."""
    model = FakeGenerator(tmp_path, "x")
    model.generation = replace(model.generation, max_new_tokens=30)
    post(model, CHAT)
    post(model, COMPLETIONS)
    post(model, COMPLETIONS, max_tokens=None)
    post(model, CHAT, max_tokens=40)
    assert [stream.options.max_tokens for stream in model.streams] == [30, 16, 30, 40]
    schemas = openapi.document("")["components"]["schemas"]
    chat, completion = (schemas[name]["properties"]["max_tokens"] for name in ("ChatRequest", "CompletionRequest"))
    assert "Default: `max_new_tokens` of the model's generation_config.json" in chat["description"]
    assert (completion["default"], completion["nullable"]) == (16, True)
    assert "null: `max_new_tokens` of the model's" in completion["description"]


def test_what_the_request_leaves_out_is_the_model_s(tmp_path: Path) -> None:
    model = FakeGenerator(tmp_path, "x")
    post(model, CHAT)
    post(model, COMPLETIONS)
    post(model, COMPLETIONS, max_tokens=None)
    post(model, CHAT, max_tokens=65535, max_completion_tokens=100_000)
    options = [stream.options for stream in model.streams]
    assert [each.max_tokens for each in options] == [CONTEXT - len(PROMPT), 16, CONTEXT - 2, CONTEXT - len(PROMPT)]
    assert {(each.temperature, each.top_p, each.top_k, each.stop_ids, each.logprobs) for each in options} == {
        (0.5, 1.0, 0, (EOS,), None)
    }


def test_every_option_arrives(tmp_path: Path) -> None:
    model = FakeGenerator(tmp_path, "x")
    fields = {
        "temperature": 1, "top_p": 0.5, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.5, "presence_penalty": 1,
        "frequency_penalty": -1, "logit_bias": {"5": 1, "6": -1000}, "allowed_token_ids": [5, 120], "seed": -3,
        "max_tokens": 9, "min_tokens": 2, "stop_token_ids": [7], "ignore_eos": True, "user": "somebody", "nobody_knows": 1,
        "stop": None, "tools": None, "tool_choice": "none", "response_format": {"type": "text"}, "logprobs": None,
    }  # fmt: skip
    headers = {"x-priority": "batch", "x-request-deadline-ms": "100000"}
    assert post(model, CHAT, headers, **fields).status_code == 200
    (stream,) = model.streams
    options = stream.options
    assert (options.temperature, options.top_p, options.top_k, options.min_p) == (1, 0.5, 0, 0.1)
    assert (options.repetition_penalty, options.presence_penalty, options.frequency_penalty) == (1.5, 1, -1)
    assert (options.logit_bias, options.allowed, options.seed) == (((5, 1), (6, -100)), (5, 120), -3)
    assert (options.max_tokens, options.min_tokens, options.stop_ids) == (9, 2, (7,))
    assert stream.priority == "batch"
    assert stream.deadline - stream.submitted_at == pytest.approx(100, abs=10)


def test_the_template_s_options_arrive(tmp_path: Path) -> None:
    model = FakeGenerator(tmp_path, "x")
    model_prompt = lambda: bytes(model.streams[-1].prompt.tolist()).decode()  # noqa: E731
    post(model, CHAT, add_generation_prompt=False)
    assert model_prompt() == "<user>Hi"
    post(model, CHAT, messages=[{"role": "user", "content": [{"type": "text", "text": "part"}]}])
    assert model_prompt() == "<user>part<a>"
    answered = [*HELLO["messages"], {"role": "assistant", "content": "He"}]
    post(model, CHAT, messages=answered, add_generation_prompt=False, continue_final_message=True)
    assert model_prompt() == "<user>Hi<assistant>He"


@pytest.mark.parametrize(("include", "expected"), [(False, "12"), (True, "12ab")])
def test_a_stop_string_ends_the_answer(tmp_path: Path, include: bool, expected: str) -> None:
    model = FakeGenerator(tmp_path, "12ab34", stall=True)
    answer = post(model, COMPLETIONS, stop=["x", "ab"], include_stop_str_in_output=include, max_tokens=100)
    assert text_of(answer) == [expected]
    (choice,) = answer.json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "ab")
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert model.streams[0].future.cancelled()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stop_token_ends_the_answer(tmp_path: Path, path: str) -> None:
    """As in vLLM: `stop_reason` is the id of the request's token, and null for the model's own end of text."""
    for ids, text, reason in (([ord("b")], "a", ord("b")), ([], "abc", None), ([EOS], "abc", None)):
        model = FakeGenerator(tmp_path, "abc")
        answer = post(model, path, stop_token_ids=ids)
        (choice,) = answer.json()["choices"]
        assert (text_of(answer), choice["finish_reason"], choice["stop_reason"]) == ([text], "stop", reason)
        *chunks, _ = events(post(model, path, stop_token_ids=ids, stream=True).text)
        assert json.loads(chunks[-1])["choices"][0]["stop_reason"] == reason


def test_the_length_ends_the_answer(tmp_path: Path) -> None:
    answer = post(FakeGenerator(tmp_path, "123456"), COMPLETIONS, max_tokens=3)
    assert (text_of(answer), answer.json()["choices"][0]["finish_reason"]) == (["123"], "length")


def test_logprobs_of_a_chat(tmp_path: Path) -> None:
    answer = post(FakeGenerator(tmp_path, "é"), CHAT, logprobs=True, top_logprobs=2).json()
    told = answer["choices"][0]["logprobs"]["content"]
    assert [each["bytes"] for each in told] == [[0xC3], [0xA9]]
    assert told[0]["token"] == "\ufffd"
    assert [(each["logprob"], [top["logprob"] for top in each["top_logprobs"]]) for each in told] == [(-0.5, [-0.5, -1.0])] * 2
    without_top = post(FakeGenerator(tmp_path, "a"), CHAT, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [(each["token"], each["top_logprobs"]) for each in without_top] == [("a", [])]


def test_logprobs_of_a_completion(tmp_path: Path) -> None:
    told = post(FakeGenerator(tmp_path, "ab"), COMPLETIONS, logprobs=2).json()["choices"][0]["logprobs"]
    assert told == {
        "tokens": ["a", "b", "<|end|>"],  # also the token that ended the text
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [{"a": -0.5, "\x02": -1.0}, {"b": -0.5, "\x02": -1.0}, {"<|end|>": -0.5, "\x02": -1.0}],
        "text_offset": [0, 1, 2],
    }
    none_but_the_chosen = post(FakeGenerator(tmp_path, "a"), COMPLETIONS, logprobs=0).json()["choices"][0]["logprobs"]
    assert none_but_the_chosen["top_logprobs"] == [{"a": -0.5}, {"<|end|>": -0.5}]


# Streams


def test_the_events_of_a_chat_in_order(tmp_path: Path) -> None:
    answer = post(FakeGenerator(tmp_path, "aé"), CHAT, stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    parsed = [json.loads(each) for each in chunks]
    assert len({(each["id"], each["created"], each["model"], each["object"]) for each in parsed}) == 1
    assert parsed[0]["object"] == "chat.completion.chunk"
    choices = [each["choices"][0] for each in parsed[:-1]]
    assert [(each["delta"], each["finish_reason"]) for each in choices] == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "a"}, None),
        ({"content": "é"}, None),
        ({}, "stop"),
    ]
    assert choices[-1]["stop_reason"] is None
    assert ["usage" in each for each in parsed] == [False] * 4 + [True]
    assert parsed[-1]["choices"] == []
    assert parsed[-1]["usage"]["completion_tokens"] == 3


def test_the_events_of_a_completion_in_order(tmp_path: Path) -> None:
    model = FakeGenerator(tmp_path, "ab", "c")
    answer = post(
        model, COMPLETIONS, stream=True, n=2, echo=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    parsed = [json.loads(each) for each in chunks]
    by_index: dict[int, list[Any]] = {0: [], 1: []}
    for each in parsed[:-1]:
        (choice,) = each["choices"]
        by_index[choice["index"]].append((choice["text"], choice["finish_reason"]))
    assert by_index == {
        0: [("Hi", None), ("a", None), ("b", None), ("", "stop")],
        1: [("Hi", None), ("c", None), ("", "stop")],
    }
    counts = [each["usage"]["completion_tokens"] for each in parsed]
    assert counts == sorted(counts)
    assert counts[-1] == 3


def test_every_chunk_has_its_tokens_logprobs(tmp_path: Path) -> None:
    """The first byte of a character also has a chunk. The character's text comes with the second byte."""
    *chunks, _ = events(post(FakeGenerator(tmp_path, "éa"), COMPLETIONS, stream=True, logprobs=1).text)
    told = [choice["logprobs"] for each in chunks for choice in json.loads(each)["choices"]]
    assert [None if each is None else each["text_offset"] for each in told] == [[0], [0], [1], [2]]


def test_a_stop_string_over_several_tokens_is_never_sent(tmp_path: Path) -> None:
    *chunks, _ = events(post(FakeGenerator(tmp_path, "12ab34", held=True), COMPLETIONS, stream=True, stop="ab").text)
    choices = [json.loads(each)["choices"][0] for each in chunks]
    assert "".join(each["text"] for each in choices) == "12"
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "ab")


@pytest.mark.parametrize(
    ("error", "status", "type", "message"),
    [
        (BackendError("the device fell over"), 424, "Backend", "Backend error: the device fell over"),
        (EngineStopped("over"), 503, "Unhealthy", "unhealthy"),
        (RuntimeError("a bug"), 500, "Backend", "internal error; the server's log has the details"),
    ],
)
def test_an_error_mid_stream_is_an_event(tmp_path: Path, error: Exception, status: int, type: str, message: str) -> None:
    answer = post(FakeGenerator(tmp_path, "abcd", error=error, fail_after=2), CHAT, stream=True)
    assert answer.status_code == 200
    *chunks, last, done = events(answer.text)
    assert done == "[DONE]"
    assert "".join(json.loads(each)["choices"][0]["delta"]["content"] for each in chunks) == "ab"
    assert json.loads(last) == {"error": {"message": message, "type": type, "code": status, "param": None}}


def test_a_client_that_leaves_ends_the_streams(tmp_path: Path) -> None:
    model = FakeGenerator(tmp_path, "x", stall=True)
    metrics = Metrics("fake")
    app = Api(FakeBackend(model), Settings(), metrics).app
    body = json.dumps({"prompt": "Hi", "stream": True, "n": 3, "max_tokens": None}).encode()

    async def leave() -> None:
        """Read a few events, then disconnect."""
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        has_read = asyncio.Event()
        sent = 0

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await has_read.wait()
            return {"type": "http.disconnect"}

        async def send(_message: Any) -> None:
            nonlocal sent
            sent += 1
            if sent == 5:
                has_read.set()
            await asyncio.sleep(0)

        await asyncio.wait_for(app(dict(SCOPE), receive, send), 10)

    asyncio.run(leave())
    assert len(model.streams) == 3
    assert all(stream.future.cancelled() for stream in model.streams)
    assert 'emberforge_requests_in_flight{model="fake"} 0.0' in metrics.exposition().decode()
    assert 'emberforge_cancelled_requests_total{model="fake"} 1.0' in metrics.exposition().decode()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_request_that_is_cancelled_ends_its_streams(tmp_path: Path, path: str) -> None:
    """Without `stream`: Ray Serve cancels the request of a client that has left."""
    model = FakeGenerator(tmp_path, "x", stall=True)
    metrics = Metrics("fake")
    app = Api(FakeBackend(model), Settings(), metrics).app

    async def cancel() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://fake") as client:
            request = asyncio.create_task(client.post(path, json=minimal(path) | {"max_tokens": None}))
            while not (model.streams and model.streams[0].answer):
                await asyncio.sleep(0.001)
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request

    asyncio.run(cancel())
    assert model.streams[0].future.cancelled()
    assert 'emberforge_requests_in_flight{model="fake"} 0.0' in metrics.exposition().decode()
    assert 'emberforge_cancelled_requests_total{model="fake"} 1.0' in metrics.exposition().decode()


def test_a_slow_reader_holds_up_nobody_and_loses_nothing(tmp_path: Path) -> None:
    """The engine ends long before the reader. The reader then still gets every token."""
    model = FakeGenerator(tmp_path, "abcdefgh")
    app = Api(FakeBackend(model), Settings(), Metrics("fake")).app
    sent: list[bytes] = []

    async def read() -> None:
        async def send(message: Any) -> None:
            if model.streams:
                await asyncio.to_thread(model.streams[0].future.result, 10)
            sent.append(message.get("body", b""))

        body = json.dumps({"prompt": "Hi", "stream": True}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        await asyncio.wait_for(app(dict(SCOPE), receive, send), 10)

    asyncio.run(read())
    *chunks, done = events(b"".join(sent).decode())
    assert done == "[DONE]"
    assert "".join(json.loads(each)["choices"][0]["text"] for each in chunks) == "abcdefgh"


# Forms

NUMBER = {"type": "integer", "minimum": 10, "maximum": 99}
OBJECT = {"type": "object", "properties": {"a": {"type": "array"}}}
FORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}}, '{"a": [1]}', "[1]"),
    ({"response_format": {"type": "json_object", "schema": NUMBER}}, "42", "9"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": NUMBER}}}, "42", "9"),
    ({"structured_outputs": {"json": NUMBER, "regex": None}}, "42", "9"),
    ({"structured_outputs": {"json": json.dumps(NUMBER), "disable_any_whitespace": False}}, "42", "9"),
    ({"structured_outputs": {"json": OBJECT, "disable_any_whitespace": True}}, '{"a":[1,2]}', '{"a": [1,2]}'),
    ({"structured_outputs": {"regex": "^[a-c]+/$"}}, "ab/", "b"),
    ({"structured_outputs": {"choice": ["yes", 'n"o']}}, 'n"o', "no"),
    ({"structured_outputs": {"grammar": 'start: "a" B\nB: /b+/'}}, "abb", "a"),
    ({"guided_json": NUMBER, "guided_regex": None}, "42", "9"),
    ({"guided_regex": "x?"}, "", "y"),
    ({"guided_choice": ["a", "ab"]}, "ab", "b"),
    ({"guided_grammar": 'start: "a"'}, "a", "b"),
    ({"json_schema": NUMBER, "response_format": {"type": "text"}}, "42", "9"),
    ({"regex": "a|b"}, "b", "c"),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("fields", "within", "outside"), FORMS)
def test_a_form_becomes_the_grammar_of_its_texts(
    tmp_path: Path, path: str, fields: dict[str, Any], within: str, outside: str
) -> None:
    model = FakeGenerator(tmp_path, "x")
    assert post(model, path, **fields).status_code == 200
    (stream,) = model.streams
    assert stream.options.grammar is not None
    for text, matches in ((within, True), (outside, False)):
        matcher = LLMatcher(LLTokenizer(byte_tokenizer().to_str(), eos_token=EOS), stream.options.grammar)
        ids = list(text.encode())
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == matches


# Errors

BOTH = (CHAT, COMPLETIONS)
REFUSED: list[tuple[tuple[str, ...], dict[str, Any], str, str]] = [
    (BOTH, {"temperature": 2.5}, "temperature", "less than or equal to 2, got the number 2.5"),
    (BOTH, {"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.001, got the number 0"),
    (BOTH, {"stream_options": {"include_usage": "x" * 99}}, "stream_options",
     f"`stream_options.include_usage`: Input should be a valid boolean, got '{'x' * 40}...'"),
    (BOTH, {"allowed_token_ids": [1, 10**4000]}, "allowed_token_ids", f"got the number 1{'0' * 39}..."),
    (BOTH, {"model": ["a"]}, "model", "a valid string, got a list"),
    (BOTH, {"temperature": "hot"}, "temperature", "valid number"),
    (BOTH, {"top_p": 0}, "top_p", "greater than 0"),
    (BOTH, {"presence_penalty": -3}, "presence_penalty", "greater than or equal to -2"),
    (BOTH, {"frequency_penalty": 3}, "frequency_penalty", "less than or equal to 2"),
    (BOTH, {"n": 0}, "n", "greater than or equal to 1"),
    (BOTH, {"seed": 2**63}, "seed", "less than or equal to"),
    (BOTH, {"stop": ""}, "stop", "has 0 characters, it must have from 1 to 1000"),
    (BOTH, {"stop": list("abcde")}, "stop", "the limit is 4"),
    (BOTH, {"stop": [1]}, "stop", "[0] is the number 1, expected a string"),
    ((CHAT,), {"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ((COMPLETIONS,), {"max_tokens": 0}, "max_tokens", "for requests with `echo`"),
    (BOTH, {"prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
    (BOTH, {"prompt_logprobs": -1}, "prompt_logprobs", "greater than or equal to 0"),
    (BOTH, {"max_tokens": 3, "min_tokens": 4}, "min_tokens", "at most `max_tokens`, 3"),
    (BOTH, {"min_tokens": 1, "stop": "a"}, "min_tokens", "together with `stop`"),
    (BOTH, {"logit_bias": {"a": 1}}, "logit_bias", "'a' is not a token id"),
    (BOTH, {"logit_bias": {"1": "b"}}, "logit_bias", "token 1 is a string, expected a number"),
    (BOTH, {"logit_bias": {"257": 1}}, "logit_bias", "the vocabulary ends at 256"),
    (BOTH, {"allowed_token_ids": [999]}, "allowed_token_ids", "the vocabulary ends at 256"),
    (BOTH, {"stop_token_ids": [257]}, "stop_token_ids", "the vocabulary ends at 256"),
    (BOTH, {"stream_options": {"include_usage": True}}, "stream_options", "for requests with `stream`"),
    ((COMPLETIONS,), {"tools": [{"type": "function"}]}, "tools", "`tools` is not supported"),
    ((COMPLETIONS,), {"tool_choice": "required"}, "tool_choice", "not supported"),
    ((CHAT,), {"functions": [{"name": "f"}]}, "functions", "`functions` is not supported"),
    ((CHAT,), {"function_call": {"name": "f"}}, "function_call", "`function_call` is not supported"),
    ((CHAT,), {"tools": [tool("f")]}, "tools", "the chat template of model `fake` does not write tool calls"),
    ((CHAT,), {"tools": []}, "tools", "at least one tool"),
    ((CHAT,), {"tools": [{"type": "search"}]}, "tools", '[0] must be an object with `type`: "function"'),
    ((CHAT,), {"tools": [tool("f"), tool("two words")]}, "tools", "[1] has the name 'two words'; a name has from 1 to 64"),
    ((CHAT,), {"tools": [tool("f" * 65)]}, "tools", "[0] has the name 'ffff"),
    ((CHAT,), {"tools": [tool("f"), tool("f")]}, "tools", "[1] has the name 'f' of an earlier tool"),
    ((CHAT,), {"tools": [tool("f", [])]}, "tools", "[0] 'f': `parameters` must be a JSON schema"),
    ((CHAT,), {"tools": [tool("f", {"type": "string"})]}, "tools", "[0] 'f': `parameters` must be a JSON schema"),
    ((CHAT,), {"tools": [tool("f", {"properties": {"a": 1}})]}, "tools", "[0] 'f': `parameters.properties.a` is 1"),
    ((CHAT,), {"tools": [tool("f", {"required": "a"})]}, "tools", "`parameters.required` is 'a', expected a list of names"),
    ((CHAT,), {"tool_choice": "required"}, "tool_choice", "there are no `tools`"),
    ((CHAT,), {"tool_choice": "any"}, "tool_choice", "{\"name\": ...}}, got 'any'"),
    ((CHAT,), {"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice",
     "names 'g', which is not in `tools`"),
    ((CHAT,), {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages", "an item of `tool_calls`"),
    ((CHAT,), {"messages": [{"role": "assistant", "tool_calls": {"id": "x"}}]}, "messages", "`tool_calls` must be a list"),
    (BOTH, {"response_format": {"type": "structural_tag"}}, "response_format", "got the type 'structural_tag'"),
    (BOTH, {"response_format": "json"}, "response_format", "should be an object"),
    (BOTH, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "with a `schema`"),
    (BOTH, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}}, "response_format",
     "`response_format.json_schema.schema.type` is 'strin', expected one of array"),
    (BOTH, {"structured_outputs": {}}, "structured_outputs", "an object with one of json, regex, choice, grammar"),
    (BOTH, {"structured_outputs": {"choice": ["a"], "regex": "a"}}, "structured_outputs", "got choice and regex"),
    (BOTH, {"structured_outputs": {"structural_tag": {}}}, "structured_outputs", "`structured_outputs.structural_tag` is not"),
    (BOTH, {"structured_outputs": {"json": {}, "whitespace_pattern": " ?"}}, "structured_outputs", "whitespace_pattern` is not"),
    (BOTH, {"structured_outputs": {"json": {}, "disable_additional_properties": True}}, "structured_outputs", "is not supported"),
    (BOTH, {"structured_outputs": {"choice": []}}, "structured_outputs", "`structured_outputs.choice`: expected a list"),
    (BOTH, {"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs", "look-around"),
    (BOTH, {"structured_outputs": {"regex": "a"}, "guided_json": {}}, "guided_json", "both set the answer's form"),
    (BOTH, {"guided_json": "{"}, "guided_json", "is not JSON"),
    (BOTH, {"guided_json": [1]}, "guided_json", "expected a JSON schema"),
    (BOTH, {"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    (BOTH, {"guided_choice": ["a", ""]}, "guided_choice", "strings that are not empty, got an empty string at [1]"),
    (BOTH, {"guided_regex": ""}, "guided_regex", "a string that is not empty, got an empty string"),
    (BOTH, {"stop": 1}, "stop", "a string or a list of strings, got the number 1"),
    (BOTH, {"guided_grammar": 'root ::= "a"'}, "guided_grammar", "GBNF, which is not supported"),
    (BOTH, {"guided_grammar": "start: x"}, "guided_grammar", "does not compile"),
    (BOTH, {"grammar": 'root ::= "a"'}, "grammar", "send a Lark grammar as `structured_outputs`"),
    (BOTH, {"ebnf": 'root ::= "a"'}, "ebnf", "send a Lark grammar as `structured_outputs`"),
    (BOTH, {"structural_tag": "x"}, "structural_tag", "not supported"),
    (BOTH, {"bad_words": ["x"]}, "bad_words", "not supported"),
    (BOTH, {"priority": 1}, "priority", "send the header `x-priority`"),
    (BOTH, {"n": 1000}, "n", "less than or equal to 128"),
    (BOTH, {"n": 9}, "", "batch size 9 > maximum allowed batch size 8"),
    ((CHAT,), {"chat_template": "x"}, "chat_template", "the model's own template is used"),
    ((CHAT,), {"messages": []}, "messages", "at least 1 item, not 0"),
    ((CHAT,), {"messages": [{"content": "x"}]}, "", "message 0 must be an object with a string `role`"),
    ((CHAT,), {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "", "only parts of type 'text'"),
    ((CHAT,), {"messages": None}, "messages", "valid array, got null"),
    ((CHAT,), {"messages": ["my secret"] * 2}, "messages", "`messages.0`: Input should be an object, got a string"),
    ((CHAT,), {"top_logprobs": 2}, "top_logprobs", "`logprobs`: true"),
    ((CHAT,), {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ((CHAT,), {"continue_final_message": True}, "", "exclude each other"),
    ((CHAT,), {"echo": True}, "echo", "not supported"),
    ((CHAT,), {"messages": [{"role": "user", "content": "x" * CONTEXT}]}, "input_tokens", "maximum context length is 200 tokens"),
    ((COMPLETIONS,), {"prompt": "x" * CONTEXT}, "input_tokens", "your prompt contains 200 input tokens"),
    ((COMPLETIONS,), {"prompt": ""}, "prompt", "the prompt has no tokens"),
    ((COMPLETIONS,), {"prompt": []}, "prompt", "the prompt has no tokens"),
    ((COMPLETIONS,), {"prompt": [999]}, "", "token id 999, the vocabulary ends at 256"),
    ((COMPLETIONS,), {"prompt": {"a": 1}}, "prompt", "expected a string"),
    ((COMPLETIONS,), {"prompt": ["x"] * 9}, "", "batch size 9"),
    ((COMPLETIONS,), {"logprobs": 21}, "logprobs", "less than or equal to 20"),
    ((COMPLETIONS,), {"suffix": "x"}, "suffix", "not supported"),
    ((COMPLETIONS,), {"best_of": 2}, "best_of", "not supported"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "param", "text"),
    [
        pytest.param(path, fields, param, text, id=f"{path} {json.dumps(fields)[:60]}")
        for paths, fields, param, text in REFUSED
        for path in paths
    ],
)
def test_a_bad_field_is_refused_by_name(
    tmp_path: Path, path: str, fields: dict[str, Any], param: str, text: str, stream: bool
) -> None:
    """The status is 400, also if the answer would be a stream."""
    model = FakeGenerator(tmp_path, "x")
    if stream and "stream_options" in fields:
        return
    answer = post(model, path, **fields, **({"stream": True} if stream else {}))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("BadRequestError", 400, param or None)
    assert text in error["message"]
    assert len(error["message"]) < 700
    assert not model.streams


STATUSES: list[tuple[int, str, Callable[[Path], Any], dict[str, Any]]] = [
    (400, "BadRequestError", lambda folder: FakeGenerator(folder, "x"), {"raw": b'{"messages'}),
    (400, "BadRequestError", lambda folder: FakeGenerator(folder, "x"), {"headers": {"x-priority": "now"}}),
    (404, "NotFound", lambda folder: FakeGenerator(folder, "x"), {"model": "missing"}),
    (413, "Validation", lambda folder: FakeGenerator(folder, "x"), {"raw": b" " * 10_001}),
    (415, "Validation", lambda folder: FakeGenerator(folder, "x"), {"headers": {"content-type": "text/plain"}}),
    (424, "Backend", lambda folder: FakeGenerator(folder, "x", error=BackendError("it fell over")), {}),
    (429, "Overloaded", lambda folder: FakeGenerator(folder, "x", error=DeadlineOutOfReach(9.0, 1.0)), {}),
    (503, "Unhealthy", lambda folder: FakeGenerator(folder, "x", error=EngineStopped("over")), {}),
    (504, "Timeout", lambda folder: FakeGenerator(folder, "x", stall=True),
     {"max_tokens": None, "headers": {"x-request-deadline-ms": "20"}}),
    (500, "Backend", lambda folder: FakeGenerator(folder, "x", error=RuntimeError("a bug")), {}),
]  # fmt: skip


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(("status", "type", "make", "sent"), STATUSES)
def test_every_status(
    tmp_path: Path, path: str, status: int, type: str, make: Callable[[Path], Any], sent: dict[str, Any]
) -> None:
    answer = post(make(tmp_path), path, **sent)
    assert answer.status_code == status, answer.text
    assert (answer.json()["error"]["type"], answer.json()["error"]["code"]) == (type, status)
    if status == 429:
        assert answer.headers["retry-after"] == "8"


@pytest.mark.parametrize("path", BOTH)
def test_the_document_has_these_statuses(path: str) -> None:
    documented = {int(status) for status in openapi.document("")["paths"][path]["post"]["responses"]}
    assert documented == {200, 401} | {status for status, *_ in STATUSES} - {500}


@pytest.mark.slow
def test_a_deadline_ends_a_stream_with_an_event(tmp_path: Path) -> None:
    model = FakeGenerator(tmp_path, "x", stall=True)
    answer = post(model, COMPLETIONS, {"x-request-deadline-ms": "600"}, stream=True, max_tokens=None)
    *_, last, done = events(answer.text)
    assert (json.loads(last)["error"]["code"], done) == (504, "[DONE]")


def test_the_server_s_timeout_ends_with_the_first_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CONTEXT tokens of 1 ms take longer than the timeout, but the first token does not."""
    monkeypatch.setitem(LIMITS, "request_timeout_s", 0.1)
    answer = post(FakeGenerator(tmp_path, "x", held=True), COMPLETIONS, max_tokens=None)
    assert answer.json()["choices"][0]["finish_reason"] == "length"


def test_a_stream_that_would_begin_after_the_timeout_may_be_refused_on_arrival(tmp_path: Path) -> None:
    model = FakeGenerator(tmp_path, "x")
    assert post(model, COMPLETIONS).status_code == 200
    (stream,) = model.streams
    assert stream.deadline == math.inf, "after the first token there is no deadline"
    assert 0 < stream.limit - stream.submitted_at <= LIMITS["request_timeout_s"]


@pytest.mark.parametrize("path", BOTH)
def test_a_model_of_vectors_is_refused_by_name(minilm: Path, path: str) -> None:
    model = FakeModel(Tokenizer.load(minilm, load_model_config(minilm)), "embedding")
    answer = post(model, path)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert "model `fake` does not generate text" in answer.json()["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "x"}),
        ("/embed", {"inputs": "x"}),
        ("/", {"inputs": "x"}),
        ("/embed_sparse", {"inputs": "x"}),
        ("/v1/embed", {"texts": ["x"]}),
    ],
)
def test_a_model_that_generates_gives_no_vectors(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    answer = post(FakeGenerator(tmp_path, "x"), path, raw=json.dumps(body).encode())
    assert answer.status_code == 400, answer.text
    assert "model `fake` generates text and gives no vectors" in answer.text
