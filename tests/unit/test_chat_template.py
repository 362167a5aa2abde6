"""Chat templates: the prompts equal those of transformers, and a template's code runs within limits."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import save_tokenizer

import engine.text.chat
from engine.errors import InvalidInput, ModelError
from engine.text.chat import ChatFormat, ChatTemplate

# This template has reasoning since the last question, tools, tool calls with arguments as text or object, and a switch for
# thinking.
THINKING = """\
{%- set ns = namespace(question=-1) -%}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}{% endfor -%}
{%- if tools or messages[0].role == 'system' -%}
    {{- '[system]' ~ (messages[0].content if messages[0].role == 'system' else '') -}}
    {%- for tool in tools or [] %}{{ '\\n' ~ (tool | tojson) }}{% endfor -%}
    {{- '[/]\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{ '[user]' }}{% endif -%}
        {{- '<result>' ~ message.content ~ '</result>' -}}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '[/]\\n' }}{% endif -%}
    {%- elif message.role == 'assistant' -%}
        {%- set said = message.content if message.content is string else '' -%}
        {%- set thought = message.reasoning_content or '' -%}
        {%- if '</think>' in said -%}
            {%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
            {%- set said = said.split('</think>')[-1].lstrip('\\n') -%}
        {%- endif -%}
        {{- '[assistant]' -}}
        {%- if loop.index0 > ns.question and thought %}{{ '<think>' ~ thought ~ '</think>' }}{% endif -%}
        {{- said -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set call = call.function if call.function else call -%}
            {{- '<call>' ~ call.name ~ (call.arguments if call.arguments is string else call.arguments | tojson(indent=1)) -}}
        {%- endfor -%}
        {{- '[/]\\n' -}}
    {%- elif message.role != 'system' or not loop.first -%}
        {{- '[' ~ message.role ~ ']' ~ message.content ~ '[/]\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '[assistant]' -}}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif -%}
{%- endif -%}
"""
CHATML = """\
{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
<|im_start|>system
Be brief.{{ eos_token }}
    {% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + eos_token }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
# This template strips the content, moves the first system message into the first question, and encloses each exchange in bos
# and eos.
BRACKETS = """\
{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = '<<' + messages[0]['content'] + '>>' %}
{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}
{% for message in rest %}
    {%- if message['role'] == 'user' -%}
        {{ bos_token + '[INST] ' + (system if loop.first else '') + message['content'].strip() + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' -%}
        {% generation %}{{ ' ' + message['content'].strip() + eos_token }}{% endgeneration %}
    {%- endif -%}
{% endfor %}
"""
STRICT = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}{% continue %}{% endif %}
    {%- if (message.role == 'user') != (loop.index0 is even) %}
        {{- raise_exception('Roles must alternate: got ' + message.role) }}
    {%- endif %}
    {{- '[' ~ loop.length ~ '|' ~ loop.revindex ~ ']' ~ message.content }}
{%- else %}
    {{- 'nobody' }}
{%- endfor %}
"""
TEMPLATES = {"thinking": THINKING, "chatml": CHATML, "brackets": BRACKETS, "strict": STRICT}
EACH = pytest.mark.parametrize("name", TEMPLATES)
HI = [{"role": "user", "content": "hi"}]

Reference = Callable[..., str]


def folder_with(folder: Path, template: Any = None, **config: Any) -> Path:
    """A model folder with the files that chat templates need."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(folder, 20, encoder=False)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    config |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def both(folder: Path) -> tuple[ChatTemplate, Reference]:
    from transformers import PreTrainedTokenizerFast  # takes seconds

    ours, theirs = ChatTemplate.load(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert ours is not None

    def reference(messages: list[dict[str, Any]], template_kwargs: Mapping[str, Any] = {}, **options: Any) -> str:
        options = {"add_generation_prompt": True} | options
        return theirs.apply_chat_template(messages, tokenize=False, **options, **template_kwargs)

    return ours, reference


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ChatTemplate, Reference]]:
    root = tmp_path_factory.mktemp("chat")
    return {name: both(folder_with(root / name, template)) for name, template in TEMPLATES.items()}


def chat(source: Any, folder: Path) -> ChatTemplate:
    template = ChatTemplate.load(folder_with(folder, source))
    assert template is not None
    return template


# The same text as transformers

TEXT = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(
    [" hi ", "\n", "<think>\nwell\n</think>\n\nyes", "</think>", "{{ 1 }}", "<b>&'\"", "日本 👩‍👧", "x  "]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
)
CALL = st.fixed_dictionaries({"name": TEXT, "arguments": TEXT | st.dictionaries(TEXT, JSON, max_size=2)})
TOOL_CALLS = st.lists(CALL | CALL.map(lambda call: {"type": "function", "function": call}), max_size=2)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXT},
    optional={"tool_calls": st.none() | TOOL_CALLS, "reasoning_content": TEXT, "reasoning": st.none() | TEXT, "thinking": TEXT},
)
# Both libraries leave out a `content` that is None. Templates may then fail or write "None".
CALLS_ONLY = st.fixed_dictionaries({"role": st.just("assistant"), "content": st.none(), "tool_calls": TOOL_CALLS})
TOOL = st.fixed_dictionaries({"type": st.just("function"), "function": st.dictionaries(TEXT, JSON, max_size=3)})


@pytest.mark.slow
@EACH
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_the_prompt_is_that_of_transformers(
    pairs: dict[str, tuple[ChatTemplate, Reference]], name: str, data: st.DataObject
) -> None:
    ours, theirs = pairs[name]
    messages = data.draw(st.lists(MESSAGE | CALLS_ONLY if name == "thinking" else MESSAGE, min_size=1, max_size=5))
    options = {
        "tools": data.draw(st.none() | st.lists(TOOL, max_size=2)),
        "add_generation_prompt": data.draw(st.booleans()),
        "template_kwargs": data.draw(st.fixed_dictionaries({}, optional={"enable_thinking": st.booleans(), "eos_token": TEXT})),
    }
    assert outcome(ours.render, messages, **options) == outcome(theirs, messages, **options)


@pytest.mark.slow
@EACH
@settings(max_examples=80, deadline=None)
@given(messages=st.lists(MESSAGE, min_size=1, max_size=4), final=TEXT)
def test_the_continued_message_ends_the_prompt_as_in_transformers(
    pairs: dict[str, tuple[ChatTemplate, Reference]], name: str, messages: list[dict[str, Any]], final: str
) -> None:
    ours, theirs = pairs[name]
    messages = [*messages, {"role": "assistant", "content": final}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert outcome(ours.render, messages, **options) == outcome(theirs, messages, **options)


def outcome(render: Reference, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """The prompt, or None after an error. The error texts of the two libraries differ."""
    try:
        return render(messages, **options)
    except Exception:
        return None


def test_the_templates_of_these_tests_do_something(pairs: dict[str, tuple[ChatTemplate, Reference]]) -> None:
    """Without this test, the other tests would also pass if both libraries always failed."""
    messages = [{"role": "system", "content": "S"}, *HI, {"role": "assistant", "content": " yes", "reasoning": "hm"}]
    thinking, chatml, brackets, strict = (pairs[name][0] for name in TEMPLATES)
    assert thinking.render(messages) == "[system]S[/]\n[user]hi[/]\n[assistant]<think>hm</think> yes[/]\n[assistant]"
    no_thinking = thinking.render(HI, tools=[{"name": "é<"}], template_kwargs={"enable_thinking": False})
    assert no_thinking == '[system]\n{"name": "é<"}[/]\n[user]hi[/]\n[assistant]<think></think>'
    begin = "<|im_start|>system\nBe brief.</s>\n<|im_start|>user\nhi</s>\n"
    assert chatml.render(HI) == f"{begin}<|im_start|>assistant\n"
    assert brackets.render(messages).strip() == "<s>[INST] <<S>>hi [/INST] yes</s>"
    assert strict.render(HI) == "<s>[1|1]hi"
    for name in TEMPLATES:
        prompt = pairs[name][0].render(
            [*HI, {"role": "assistant", "content": "\nThe sky is "}], add_generation_prompt=False, continue_final_message=True
        )
        assert prompt.endswith("The sky is" if name == "brackets" else "The sky is ")


@pytest.mark.parametrize("given", ["reasoning_content", "thinking", "reasoning"])
def test_a_template_finds_the_reasoning_by_either_name(tmp_path: Path, given: str) -> None:
    ours, theirs = both(folder_with(tmp_path, "{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}"))
    messages = [{"role": "assistant", "content": "", given: "hm"}]
    assert ours.render(messages) == theirs(messages) == "hm|hm"


def test_variables_and_functions_are_those_of_transformers(tmp_path: Path) -> None:
    source = (
        "{{ documents is none }}{{ tools is none }}{{ dict(a=1).a }}{{ dict.fromkeys('a') }}{{ strftime_now('%Y') | length }}"
        "{{ {'b': '<é>', 'a': 1} | tojson }}{{ [1, 2] | tojson(separators=(',', ':')) }}{{ undefined_name }}"
        "{% set ns = namespace(a=1, self=2) %}{% set ns.b = 3 %}{{ ns.a }}{{ ns.self }}{{ ns.b }}"
        "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{% macro twice(x) %}{{ x }}{{ caller() }}{% endmacro %}{% call twice(1) %}c{% endcall %}"
        "{% for x in [[1, [2]]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}"
        "{% generation %}{% set inner = 1 %}g{% endgeneration %}{{ inner is defined }}{{ pad_token }}{{ sep_token is defined }}"
    )
    ours, theirs = both(folder_with(tmp_path, source, pad_token={"content": "<pad>", "__type": "AddedToken"}))
    assert ours.render(HI) == theirs(HI)
    assert "<pad>" in ours.render(HI)


@pytest.mark.parametrize("older", [True, False])
def test_special_tokens_come_from_the_files_that_transformers_reads(tmp_path: Path, older: bool) -> None:
    source = "{{ bos_token }}|{{ eos_token }}|{{ image_token }}|{{ pad_token is defined }}"
    config = {"eos_token": None, "image_token": "<image>", "pad_token": None}
    folder_with(tmp_path, source, **config, **({} if older else {"added_tokens_decoder": {}}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    ours, theirs = both(tmp_path)
    assert ours.render(HI) == theirs(HI) == f"<s>|{'<end>' if older else ''}|<image>|False"


# Where the template is


def test_the_file_goes_before_the_config(tmp_path: Path) -> None:
    folder_with(tmp_path)
    (tmp_path / "chat_template.json").write_text('{"chat_template": "processor"}')
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(HI) == "processor"
    folder_with(tmp_path, "config")
    assert both(tmp_path)[0].render(HI) == "config"
    (tmp_path / "chat_template.jinja").write_text("file é", encoding="utf-8")
    ours, theirs = both(tmp_path)
    assert ours.render(HI) == theirs(HI) == "file é"


@pytest.mark.parametrize("in_files", [True, False])
def test_a_template_for_tools_is_taken_when_there_are_tools(tmp_path: Path, in_files: bool) -> None:
    if in_files:
        folder_with(tmp_path)
        (tmp_path / "chat_template.jinja").write_text("plain")
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    else:
        folder_with(tmp_path, [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}])
    ours, theirs = both(tmp_path)
    for tools in (None, [], [{"name": "f"}]):
        assert ours.render(HI, tools=tools) == theirs(HI, tools=tools) == ("plain" if tools is None else "tools")


def test_a_folder_without_template_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    assert ChatTemplate.load(folder_with(tmp_path)) is None


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% if %}", r"tokenizer_config.json does not compile: Expected an expression"),
        ("{% for a in b %}", r"tokenizer_config.json does not compile: Unexpected end of template"),
        ("{% break %}", r"tokenizer_config.json does not compile: 'break' outside loop"),
        (7, r"tokenizer_config.json: `chat_template` is neither a string nor a list"),
        ([{"name": "default"}], r"tokenizer_config.json: `chat_template` is neither a string nor a list"),
        (
            [{"name": "rag", "template": "x"}],
            r"has the chat templates \['rag'\]; the one for ordinary requests must be 'default'",
        ),
    ],
)
def test_a_template_that_cannot_be_used_stops_the_load(tmp_path: Path, template: Any, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        ChatTemplate.load(folder_with(tmp_path, template))


def test_the_error_names_the_file_that_does_not_compile(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("fine")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{")
    with pytest.raises(ModelError, match=r"additional_chat_templates/tool_use\.jinja does not compile"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja cannot be read"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json must be a JSON object"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is not JSON"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages }}", ChatFormat()),
        ("{{ '<think>' + thought + '</think>' }}", ChatFormat(thinks=True)),
        (r"""{{- "Write <tool_call>\n{\"name\": <name>, \"arguments\": <object>}\n</tool_call>" }}""", ChatFormat(calls="json")),
        ("{{ x }}<tool_call>\n{'arguments': {{ y }}, 'name': {{ z }} }\n</tool_call>", ChatFormat(calls="json")),
        (r"""{{- '</think><tool_call>\n<function=' + name + '>\n' }}""", ChatFormat(thinks=True, calls="xml")),
        ("<tool_call>{{ name }}<arg_key>{{ key }}</arg_key></tool_call>", ChatFormat()),
        ("<tools>{{ tools | tojson }}</tools>", ChatFormat()),
        ([{"name": "default", "template": "</think>"}, {"name": "tool_use", "template": '<tool_call>{"name": '}],
         ChatFormat(thinks=True, calls="json")),
    ],
)  # fmt: skip
def test_the_template_tells_how_answers_are_marked(tmp_path: Path, template: Any, expected: ChatFormat) -> None:
    assert chat(template, tmp_path).format == expected


# Messages


def test_text_parts_become_one_string(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two "}]
    template = chat("{% for m in messages %}[{{ m.content }}]{% endfor %}", tmp_path)
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": []}]
    assert template.render(messages) == "[one\ntwo ][]"
    assert messages[0]["content"] is parts
    assert template.render(messages[:1], add_generation_prompt=False, continue_final_message=True) == "[one\ntwo "


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("hi", "message 1 must be an object with a string `role`"),
        ({"content": "hi"}, "message 1 must be an object with a string `role`"),
        ({"role": 7}, "message 1 must be an object with a string `role`"),
        ({"role": "user"}, "message 1 has no `content`; only messages of the assistant may be without it"),
        ({"role": "tool", "content": None}, "message 1 has no `content`"),
        ({"role": "user", "content": 7}, "message 1: `content` must be a string or a list of parts, not int"),
        ({"role": "user", "content": {"type": "text"}}, "message 1: `content` must be a string or a list of parts, not dict"),
        ({"role": "user", "content": ["hi"]}, "message 1 has a part of type 'str'; only parts of type 'text' are supported"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "message 1 has a part of type 'image_url'; only parts of type"),
        ({"role": "user", "content": [{"type": "text"}]}, "message 1 has a part of type 'text' without a string `text`"),
    ],
)
def test_a_message_that_no_template_takes_is_refused_by_number(tmp_path: Path, message: Any, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        chat("", tmp_path).render([*HI, message])


def test_what_a_request_may_not_ask(tmp_path: Path) -> None:
    template = chat("{{ messages[0].content.upper() }}", tmp_path)
    with pytest.raises(InvalidInput, match="exclude each other; set one of them to false"):
        template.render(HI, continue_final_message=True)
    with pytest.raises(InvalidInput, match="`chat_template_kwargs` cannot have 'tools'"):
        template.render(HI, template_kwargs={"tools": [], "other": 1})
    with pytest.raises(InvalidInput, match="`messages` cannot be empty"):
        template.render([])
    options = {"add_generation_prompt": False, "continue_final_message": True}
    for each in (template, chat("{{ messages[0].content[:2] }}", tmp_path)):
        with pytest.raises(InvalidInput, match="changes or leaves out the content of the final message"):
            each.render(HI, **options)
    with pytest.raises(InvalidInput, match="needs `content` in the final message"):
        template.render([{"role": "assistant", "content": None}], **options)


# The code of a template


def test_the_templates_own_complaint_is_shown(pairs: dict[str, tuple[ChatTemplate, Reference]]) -> None:
    with pytest.raises(InvalidInput, match="cannot render these messages: Roles must alternate: got assistant"):
        pairs["strict"][0].render([{"role": "assistant", "content": "x"}])


def test_a_complaint_is_cut(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        chat("{{ raise_exception('x' * 10000) }}", tmp_path).render(HI)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ missing.field }}", "'missing' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages | tojson(indent=messages) }}", "can't multiply sequence"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update(role='x') }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception.__globals__ }}{{ ''.__class__() }}", "unsafe"),
        ("{{ namespace(_a=1) }}", "begins with an underscore"),
        ("{% set ns = namespace() %}{% set ns.__init__ = 1 %}", "begins with an underscore"),
        ("{{ range(100001) }}", "Range too big"),
        ("{% include 'tokenizer_config.json' %}", "no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_a_fault_of_the_template_is_an_invalid_input(tmp_path: Path, source: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=f"cannot render these messages: .*{says}"):
        chat(source, tmp_path).render(HI)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(1000) %}{% for b in range(1000) %}{% endfor %}{% endfor %}",
        "{% for a in range(1000) if a > 2000 %}{% endfor %}",
        "{% macro f(n) %}{% for _ in [1, 2] %}{% if n %}{{ f(n - 1) }}{% endif %}{% endfor %}{% endmacro %}{{ f(20) }}",
        "{% macro f(n) %}{% if n %}{% set a = f(n - 1) %}{% set a = f(n - 1) %}{% endif %}{% endmacro %}{{ f(20) }}",
    ],
    ids=["loops", "filtered loop", "loops and calls", "calls"],
)
def test_a_template_that_runs_long_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(engine.text.chat, "_MAX_STEPS", 500)
    with pytest.raises(InvalidInput, match="it takes more than 500 steps"):
        chat(source, tmp_path).render(HI)


def test_a_template_cannot_reach_the_count_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.text.chat, "_MAX_STEPS", 10)
    template = chat("{% for a in range(20) %}{% endfor %}", tmp_path)
    with pytest.raises(InvalidInput, match="`chat_template_kwargs` cannot have ' steps'"):
        template.render(HI, template_kwargs={" steps": 1})
    short = chat("{% for a in range(5) %}{{ a }}{% endfor %}", tmp_path)
    assert [short.render(HI) for _ in range(3)] == ["01234"] * 3, "each render has its own count"


def test_a_template_that_writes_much_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.text.chat, "_MAX_CHARS", 1000)
    template = chat("{% for m in messages %}{{ m.content }}{% endfor %}", tmp_path)
    assert len(template.render([{"role": "user", "content": "x" * 100}] * 10)) == 1000
    with pytest.raises(InvalidInput, match="it makes more than 1000 characters; send fewer or shorter messages"):
        template.render([{"role": "user", "content": "x" * 91}] * 11)
