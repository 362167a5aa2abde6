"""Reasoning and tool calls of chat completions, with a fake model that generates the test's text."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_generator import FakeGenerator, events
from fake_models import FakeBackend
from test_generation_api import CHAT, post, tool

from serve_app.http.app import Api
from serve_app.observe.metrics import Metrics
from serve_app.settings import Settings

# Like Qwen3's template. It has tools, calls, results, the reasoning of earlier turns, and a switch for reasoning.
CALLS = """\
{%- for tool in tools or [] %}[{{ tool.function.name }}]{% endfor -%}
{%- for m in messages -%}
<{{ m.role }}>
    {%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif -%}
    {{- m.content or '' -}}
    {%- for call in m.tool_calls or [] -%}
        {{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' -}}
        {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
        {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<a>
    {%- if enable_thinking is defined %}{{ '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}{% endif -%}
{%- endif -%}
"""
# Like Qwen3-Coder's template: no reasoning, calls in XML.
XML_CALLS = """\
{%- for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% endfor %}<a>
{%- if tools %}{{ 'Call so: <tool_call>\\n<function=NAME>\\n</function>\\n</tool_call>' }}{% endif -%}
"""
WEATHER = tool("weather", {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}})
TOOLS = [WEATHER, tool("time")]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>'
ARGUMENTS = '{"city": "Zürich", "days": 2}'
TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n"


def model(folder: Path, *answers: str, template: str = CALLS, **options: Any) -> FakeGenerator:
    return FakeGenerator(folder, *answers, template=template, context=1000, **options)


def choice_of(served: FakeGenerator, **fields: Any) -> dict[str, Any]:
    """The only choice of a response. A streamed response must give the same choice."""
    answer = post(served, CHAT, **fields)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    (streamed,) = joined(post(served, CHAT, stream=True, **fields)).values()
    calls = choice["message"].get("tool_calls", [])
    assert all(call.pop("id").startswith("call_") and call.pop("type") == "function" for call in calls)
    assert streamed["calls"] == [call["function"] for call in calls]
    for name in ("content", "reasoning", "reasoning_content"):
        assert streamed[name] == (choice["message"].get(name) or "")
    assert streamed["finish_reason"] == choice["finish_reason"]
    return choice


def joined(answer: httpx.Response) -> dict[int, dict[str, Any]]:
    """The joined text of the chunks, by the index of the choice."""
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    choices: dict[int, dict[str, Any]] = {}
    for (choice,) in (parsed["choices"] for chunk in chunks if (parsed := json.loads(chunk))["choices"]):
        told = choices.setdefault(
            choice["index"], {"content": "", "reasoning": "", "reasoning_content": "", "calls": [], "finish_reason": None}
        )
        assert told["finish_reason"] is None
        told["finish_reason"] = choice["finish_reason"]
        delta = choice["delta"]
        assert len({name.removesuffix("_content") for name in delta if name != "role"}) <= 1
        for name in ("content", "reasoning", "reasoning_content"):
            told[name] += delta.get(name, "")
        for call in delta.get("tool_calls", []):
            if call["index"] == len(told["calls"]):
                assert call["id"].startswith("call_")
                told["calls"].append(call["function"])
            else:
                assert call.keys() == {"index", "function"}
                told["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return choices


def prompt_of(served: FakeGenerator) -> str:
    return bytes(served.streams[-1].prompt.tolist()).decode()


# Reasoning.


def test_the_reasoning_has_both_names(tmp_path: Path) -> None:
    choice = choice_of(model(tmp_path, f"{THOUGHT}Hi"))
    assert choice["message"] == {
        "role": "assistant", "content": "Hi", "refusal": None, "reasoning": "hm", "reasoning_content": "hm",
    }  # fmt: skip
    assert choice["finish_reason"] == "stop"


def test_the_reasoning_s_tokens_are_counted(tmp_path: Path) -> None:
    usage = post(model(tmp_path, f"{THOUGHT}Hi"), CHAT).json()["usage"]
    # "<think>" is held back until its last byte. "</think>" counts as reasoning, too.
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len(">\nhm\n</think>")}
    answer = post(model(tmp_path, f"{THOUGHT}Hi"), CHAT, stream=True, stream_options={"include_usage": True})
    assert json.loads(events(answer.text)[-2])["usage"] == usage


def test_the_reasoning_can_be_left_out(tmp_path: Path) -> None:
    answer = post(model(tmp_path, f"{THOUGHT}Hi"), CHAT, include_reasoning=False).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Hi", "refusal": None}
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    streamed = joined(post(model(tmp_path, f"{THOUGHT}Hi"), CHAT, stream=True, include_reasoning=False))
    assert (streamed[0]["content"], streamed[0]["reasoning"]) == ("Hi", "")


@pytest.mark.parametrize(
    ("fields", "answer", "reasoning", "content"),
    [
        ({"chat_template_kwargs": {"enable_thinking": True}}, "hm\n</think>\n\nHi", "hm", "Hi"),
        ({"reasoning_effort": "low"}, "hm\n", "hm\n", None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "Hi\n", None, "Hi\n"),
        ({"reasoning_effort": "none"}, "Hi", None, "Hi"),
        ({}, "Hi", None, "Hi"),
        ({}, "", None, ""),
        ({"messages": [{"role": "assistant", "content": "<think>h"}], "add_generation_prompt": False,
          "continue_final_message": True}, "m</think>Hi", "m", "Hi"),
        ({"messages": [{"role": "assistant", "content": "<think>h</think>H"}], "add_generation_prompt": False,
          "continue_final_message": True}, "i", None, "i"),
    ],
)  # fmt: skip
def test_the_prompt_says_where_the_answer_begins(
    tmp_path: Path, fields: dict[str, Any], answer: str, reasoning: str | None, content: str | None
) -> None:
    message = choice_of(model(tmp_path, answer), **fields)["message"]
    assert (message["reasoning"], message["content"]) == (reasoning, content)


def test_a_model_that_does_not_think_has_no_reasoning(tmp_path: Path) -> None:
    answer = post(FakeGenerator(tmp_path, f"{THOUGHT}Hi"), CHAT).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": f"{THOUGHT}Hi", "refusal": None}
    assert "completion_tokens_details" not in answer["usage"]


# Tool calls.


def test_calls(tmp_path: Path) -> None:
    served = model(tmp_path, f"{THOUGHT}Look:\n{CALL}\n{TIME}")
    choice = choice_of(served, tools=TOOLS)
    assert choice == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": "Look:",
            "refusal": None,
            "reasoning": "hm",
            "reasoning_content": "hm",
            "tool_calls": [
                {"function": {"name": "weather", "arguments": ARGUMENTS}},
                {"function": {"name": "time", "arguments": "{}"}},
            ],
        },
        "logprobs": None,
        "finish_reason": "tool_calls",
        "stop_reason": None,
    }
    assert prompt_of(served) == "[weather][time]<user>Hi<a>"
    assert choice_of(model(tmp_path, CALL), tools=TOOLS)["message"]["content"] is None


def test_calls_in_xml(tmp_path: Path) -> None:
    xml = (
        "<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>"
    )
    choice = choice_of(model(tmp_path, f"{xml}\n</tool_call>", template=XML_CALLS), tools=TOOLS)
    assert choice["message"]["tool_calls"] == [{"function": {"name": "weather", "arguments": ARGUMENTS}}]
    assert "reasoning" not in choice["message"]


def test_the_events_of_a_call_in_order(tmp_path: Path) -> None:
    *chunks, _ = events(post(model(tmp_path, f"a {CALL}"), CHAT, stream=True, tools=TOOLS).text)
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[:2] == [{"role": "assistant", "content": ""}, {"content": "a"}]
    (call,) = deltas[2].pop("tool_calls")
    assert call.pop("id").startswith("call_")
    assert call == {"index": 0, "type": "function", "function": {"name": "weather", "arguments": ""}}
    assert deltas[3] == {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}
    assert len(deltas) == 3 + len(ARGUMENTS) + 1
    assert (deltas[-1], choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ({}, "tool_calls", None)


@pytest.mark.parametrize(
    ("fields", "answer", "finish_reason", "num_calls"),
    [
        ({"tool_choice": "auto"}, CALL, "tool_calls", 1),
        ({"tool_choice": "auto"}, "Hi", "stop", 0),
        ({"tool_choice": "none"}, CALL, "stop", 0),
        ({"max_tokens": len(CALL.encode())}, CALL, "length", 1),
        ({"parallel_tool_calls": False}, CALL + TIME, "tool_calls", 1),
        ({"parallel_tool_calls": True}, CALL + TIME, "tool_calls", 2),
        ({"stop": "<tool_call>\n{\"name\": \"t"}, CALL + TIME, "tool_calls", 1),
    ],
)  # fmt: skip
def test_why_an_answer_ends(tmp_path: Path, fields: dict[str, Any], answer: str, finish_reason: str, num_calls: int) -> None:
    choice = choice_of(model(tmp_path, answer), tools=TOOLS, **fields)
    assert choice["finish_reason"] == finish_reason
    assert len(choice["message"].get("tool_calls", [])) == num_calls
    assert ("tool_calls" in choice["message"]) == bool(num_calls)


def test_without_tools_their_tags_are_text(tmp_path: Path) -> None:
    assert choice_of(model(tmp_path, CALL))["message"]["content"] == CALL
    served = model(tmp_path, CALL)
    assert choice_of(served, tools=TOOLS, tool_choice="none")["message"]["content"] == CALL
    assert prompt_of(served) == "<user>Hi<a>"


def test_a_broken_call_is_content(tmp_path: Path) -> None:
    broken = CALL.replace("2}}", "two}}")
    choice = post(model(tmp_path, f"Look: {broken}"), CHAT, tools=TOOLS).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (f"Look: {broken}", "stop")
    assert "tool_calls" not in choice["message"]
    streamed = joined(post(model(tmp_path, f"Look: {broken}"), CHAT, stream=True, tools=TOOLS))[0]
    assert streamed["content"].replace(" ", "") == f"Look: {broken}".replace(" ", "")
    assert streamed["finish_reason"] == "stop"
    second = post(model(tmp_path, f"{broken}\n{CALL}"), CHAT, tools=TOOLS, parallel_tool_calls=False).json()["choices"][0]
    assert [call["function"]["name"] for call in second["message"]["tool_calls"]] == ["weather"]


def test_each_choice_has_a_parser_of_its_own(tmp_path: Path) -> None:
    served = model(tmp_path, CALL, f"{THOUGHT}Hi")
    first, second = post(served, CHAT, tools=TOOLS, n=2).json()["choices"]
    assert (first["finish_reason"], second["finish_reason"]) == ("tool_calls", "stop")
    streamed = joined(post(served, CHAT, tools=TOOLS, n=2, stream=True))
    assert streamed[0]["calls"] == [{"name": "weather", "arguments": ARGUMENTS}]
    assert (streamed[1]["reasoning"], streamed[1]["content"]) == ("hm", "Hi")


def test_a_stop_string_counts_within_reasoning_and_calls(tmp_path: Path) -> None:
    choice = choice_of(model(tmp_path, f"<think>one STOP {CALL}"), stop="STOP", tools=TOOLS)
    assert (choice["message"]["reasoning"], choice["stop_reason"]) == ("one ", "STOP")
    message = choice_of(model(tmp_path, CALL), stop="}\n</tool_call>", tools=TOOLS)["message"]
    assert message["tool_calls"] == [{"function": {"name": "weather", "arguments": ARGUMENTS}}]


def test_every_token_has_its_logprobs(tmp_path: Path) -> None:
    answer = f"{THOUGHT}Hi{TIME}"
    whole = post(model(tmp_path, answer), CHAT, tools=TOOLS, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    *chunks, _ = events(post(model(tmp_path, answer), CHAT, tools=TOOLS, logprobs=True, stream=True).text)
    told = [json.loads(chunk)["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for each in told if each for entry in each["content"]] == whole
    assert bytes(byte for entry in whole for byte in entry["bytes"]).decode() == answer


# A call that the client requires.


NAMED = {"type": "function", "function": {"name": "weather"}}


def grammar_of(served: FakeGenerator, **fields: Any) -> str:
    """The text of the grammar without its schemas."""
    assert post(served, CHAT, tools=TOOLS, **fields).status_code == 200
    grammar = served.streams[-1].options.grammar
    assert grammar is not None
    return str(json.loads(grammar)["grammars"][0]["lark_grammar"])


def test_a_wanted_call_has_a_grammar(tmp_path: Path) -> None:
    served = model(tmp_path, CALL)
    required = grammar_of(served, tool_choice="required")
    assert "weather" in required
    assert "time" in required
    named = grammar_of(served, tool_choice=NAMED)
    assert "weather" in named
    assert "time" not in named
    one = grammar_of(served, tool_choice="required", parallel_tool_calls=False)
    assert "call0 | call1" in one
    assert one.split("\n")[0].endswith("? call")
    assert "<parameter=city>" in grammar_of(model(tmp_path, CALL, template=XML_CALLS), tool_choice="required")
    for choice in ("none", "auto", None):
        post(served, CHAT, tools=TOOLS, tool_choice=choice)
        assert served.streams[-1].options.grammar is None


def test_the_grammar_follows_the_prompt(tmp_path: Path) -> None:
    """The grammar does not limit reasoning. The three prompts open reasoning, close it, or leave it to the model."""
    served = model(tmp_path, CALL)
    starts = [
        grammar_of(served, tool_choice=NAMED, **fields).split("\n")[0]
        for fields in ({"reasoning_effort": "high"}, {"reasoning_effort": "none"}, {})
    ]
    assert starts[0].startswith("start: reasoning_end")
    assert starts[1] == "start: call"
    assert starts[2].startswith('start: ("<think>" reasoning_end')


@pytest.mark.parametrize(("choice", "finish_reason"), [("required", "tool_calls"), (NAMED, "stop")])
def test_why_a_wanted_call_ends(tmp_path: Path, choice: Any, finish_reason: str) -> None:
    served = model(tmp_path, f"{THOUGHT}{CALL}")
    assert choice_of(served, tools=TOOLS, tool_choice=choice)["finish_reason"] == finish_reason
    assert served.streams[0].options.grammar


def test_a_wanted_call_and_another_form_exclude_each_other(tmp_path: Path) -> None:
    form = {"response_format": {"type": "json_object"}}
    refused = post(model(tmp_path, CALL), CHAT, tools=TOOLS, tool_choice="required", **form)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
    assert "cannot be combined with a form" in refused.json()["error"]["message"]


@pytest.mark.parametrize("choice", [None, "auto"])
def test_an_answer_that_may_call_calls_or_answers_in_the_form(tmp_path: Path, choice: str | None) -> None:
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}}
    for answer, num_calls in (("42", 0), (CALL, 1), (f"{THOUGHT}42", 0)):
        served = model(tmp_path, answer)
        told = choice_of(served, tools=TOOLS, tool_choice=choice, **form)
        assert (told["message"]["content"] or "", len(told["message"].get("tool_calls", []))) == (
            "" if num_calls else "42",
            num_calls,
        )
        calls, instead = json.loads(served.streams[0].options.grammar or "")["grammars"]
        assert "weather" in calls["lark_grammar"]
        assert instead["json_schema"]["type"] == "integer"
    alone = model(tmp_path, "42")
    assert post(alone, CHAT, tools=TOOLS, tool_choice="none", **form).status_code == 200
    assert "weather" not in (alone.streams[0].options.grammar or "")


@pytest.mark.parametrize("thinks", [True, False])
def test_a_form_begins_after_the_reasoning_that_the_prompt_opens(tmp_path: Path, thinks: bool) -> None:
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}}
    served = model(tmp_path, "hm\n</think>\n\n42" if thinks else "42")
    message = choice_of(served, chat_template_kwargs={"enable_thinking": thinks}, **form)["message"]
    assert (message.get("reasoning"), message["content"]) == ("hm" if thinks else None, "42")
    grammars = json.loads(served.streams[-1].options.grammar or "")["grammars"]
    assert [each["lark_grammar"].split("\n")[0] for each in grammars if "lark_grammar" in each] == (
        ['start: reasoning_end "\\n\\n"? @instead'] if thinks else []
    )


# Messages.


@pytest.mark.parametrize(("template", "role"), [(CALLS, "system"), (CALLS + "{# developer #}", "developer")])
def test_a_template_without_the_role_developer_gets_it_as_system(tmp_path: Path, template: str, role: str) -> None:
    served = model(tmp_path, "x", template=template)
    choice_of(served, messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert prompt_of(served) == f"<{role}>Be brief.<user>Hi<a>"


def test_a_conversation_with_calls_is_tokenized_as_it_is_computed(tmp_path: Path) -> None:
    served = model(tmp_path, "x")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city":"Zürich","days":2}'}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]
    choice_of(served, messages=messages)
    told = post(served, "/tokenize", raw=json.dumps({"messages": messages}).encode())
    assert told.json()["tokens"] == served.streams[-1].prompt.tolist()


def test_half_of_a_surrogate_pair_in_an_earlier_call_is_refused(tmp_path: Path) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud83d"}'}}]
    refused = post(model(tmp_path, "x"), CHAT, messages=[{"role": "assistant", "tool_calls": calls}])
    assert refused.status_code == 400
    assert "surrogate" in refused.json()["error"]["message"]


@pytest.mark.parametrize("value", ["1e999", '["\\ud83d"]'])
def test_values_that_cannot_be_written_again_stay_as_they_came(tmp_path: Path, value: str) -> None:
    """In XML such a value is a string. A call whose name comes last is content. The arguments behind a name are not parsed."""
    function = tool("f", {"type": "object", "properties": {"c": {"type": ["number", "array"]}}})
    in_xml = f"<tool_call>\n<function=f>\n<parameter=c>\n{value}\n</parameter>\n</function>\n</tool_call>"
    message = choice_of(model(tmp_path, in_xml, template=XML_CALLS), tools=[function])["message"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"c": value}
    arguments = f'{{"c": {value}}}'
    last = f'<tool_call>\n{{"arguments": {arguments}, "name": "f"}}\n</tool_call>'
    assert choice_of(model(tmp_path, last), tools=[function])["message"]["content"] == last
    first = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    (call,) = choice_of(model(tmp_path, first), tools=[function])["message"]["tool_calls"]
    assert call["function"]["arguments"] == arguments


def test_a_conversation_with_calls_and_results(tmp_path: Path) -> None:
    served = model(tmp_path, "x")
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Zürich","days":2}'}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]}
    choice_of(served, tools=TOOLS, messages=[asked | {"reasoning": "hm"}, result])
    expected = f"[weather][time]<assistant><think>hm</think>{CALL}<tool>sunny<a>"
    assert prompt_of(served) == expected
    choice_of(served, tools=TOOLS, messages=[asked | {"reasoning_content": "hm"}, result])
    assert prompt_of(served) == expected


@pytest.mark.parametrize(
    ("arguments", "shown"), [("", "{}"), (None, "{}"), ({"a": 1}, '{"a": 1}'), ('{"a": ', '{"a": '), ("[1]", "[1]"), ("7", "7")]
)
def test_arguments_of_earlier_calls(tmp_path: Path, arguments: Any, shown: str) -> None:
    served = model(tmp_path, "x")
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    choice_of(served, messages=[{"role": "assistant", "tool_calls": calls}])
    assert prompt_of(served) == f'<assistant><tool_call>\n{{"name": "f", "arguments": {shown}}}\n</tool_call><a>'


# A real client.


def with_sdk(served: FakeGenerator, ask: Callable[[openai.AsyncOpenAI], Any]) -> Any:
    app = Api(FakeBackend(served), Settings(), Metrics("fake")).app

    async def scenario() -> Any:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app)) as http:
            return await ask(openai.AsyncOpenAI(base_url="http://fake/v1", api_key="x", http_client=http, max_retries=0))

    return asyncio.run(scenario())


HI: list[Any] = [{"role": "user", "content": "Weather?"}]


def test_the_sdk_calls_a_tool_and_sends_the_result(tmp_path: Path) -> None:
    served = model(tmp_path, f"{THOUGHT}{CALL}")

    async def ask(client: openai.AsyncOpenAI) -> Any:
        first = await client.chat.completions.create(model="fake", messages=HI, tools=TOOLS)  # type: ignore[arg-type]
        message = first.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}  # type: ignore[index]
        await client.chat.completions.create(model="fake", messages=[*HI, message, result], tools=TOOLS)  # type: ignore
        return first

    first = with_sdk(served, ask)
    message = first.choices[0].message
    assert message.reasoning == message.reasoning_content == "hm"
    assert message.tool_calls[0].function.name == "weather"
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Zürich", "days": 2}
    assert first.usage.completion_tokens_details.reasoning_tokens > 0
    assert prompt_of(served).endswith(f"<user>Weather?<assistant><think>hm</think>{CALL}<tool>sunny<a>")


def test_the_sdk_s_stream_adds_up(tmp_path: Path) -> None:
    strict: list[Any] = [{"type": "function", "function": {**WEATHER["function"], "strict": True}}]

    async def ask(client: openai.AsyncOpenAI) -> Any:
        async with client.chat.completions.stream(model="fake", messages=HI, tools=strict) as stream:
            kinds = [event.type async for event in stream]
            return kinds, await stream.get_final_completion()

    kinds, final = with_sdk(model(tmp_path, f"{THOUGHT}Look{CALL}"), ask)
    (choice,) = final.choices
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content, choice.message.reasoning) == ("Look", "hm")
    assert choice.message.tool_calls[0].function.parsed_arguments == {"city": "Zürich", "days": 2}
    assert kinds.count("tool_calls.function.arguments.done") == 1
