"""Log-probabilities of prompts, tokens of texts, and decisions, with a fake model that generates the test's text."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import exp, inf
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer
from fake_generator import CONTEXT, EOS, TEMPLATE, FakeGenerator, events
from fake_models import FakeBackend, FakeModel
from starlette.testclient import TestClient
from test_generation_api import CHAT, COMPLETIONS, LIMITS, post

from engine.errors import BackendError, DeadlineOutOfReach, EngineStopped, InvalidInput
from engine.model.folder import load_model_config
from engine.text.prompts import Prompts
from engine.text.tokenizer import Tokenizer
from serve_app.admission.key_file import add_key
from serve_app.http import openapi
from serve_app.http.app import Api
from serve_app.observe.metrics import Metrics
from serve_app.settings import Settings

EVERY = [-0.5, -0.5, -0.5]  # the fake's log-probabilities


def choice(answer: Any) -> Any:
    assert answer.status_code == 200, answer.text
    (only,) = answer.json()["choices"]
    return only


def test_an_echo_has_the_prompt_s_logprobs_before_the_answer_s(tmp_path: Path) -> None:
    model = FakeGenerator(tmp_path, "c")
    told = choice(post(model, COMPLETIONS, prompt="aé", echo=True, logprobs=1, max_tokens=1))
    assert told["text"] == "aéc"
    assert told["logprobs"] == {
        "tokens": ["a", "\ufffd", "\ufffd", "c"],
        "token_logprobs": [None, *EVERY],
        "top_logprobs": [None, {"\ufffd": -0.5}, {"\ufffd": -0.5}, {"c": -0.5}],
        "text_offset": [0, 1, 1, 2],
    }
    assert model.streams[0].options.prompt_logprobs == 1


def test_a_prompt_is_scored_without_an_answer(tmp_path: Path) -> None:
    model = FakeGenerator(tmp_path, "never")
    answer = post(model, COMPLETIONS, prompt=[[72, 105], [97]], echo=True, logprobs=0, max_tokens=0)
    first, second = answer.json()["choices"]
    assert (first["text"], first["finish_reason"], first["logprobs"]["token_logprobs"]) == ("Hi", "length", [None, -0.5])
    assert (second["text"], second["logprobs"]["token_logprobs"]) == ("a", [None])
    assert answer.json()["usage"]["completion_tokens"] == 0
    assert choice(post(FakeGenerator(tmp_path, "x"), COMPLETIONS, echo=True, max_tokens=0))["logprobs"] is None
    assert choice(post(FakeGenerator(tmp_path, "x"), COMPLETIONS, prompt="x" * CONTEXT, echo=True, max_tokens=0))["text"]


def test_a_short_answer_is_never_taken_for_the_prompt(tmp_path: Path) -> None:
    """lm-eval asks for one token and drops the last one of the response, even if that token ends the answer."""
    told = choice(post(FakeGenerator(tmp_path, ""), COMPLETIONS, prompt="ab", echo=True, logprobs=1, max_tokens=1))
    assert told["logprobs"]["tokens"] == ["a", "b", "<|end|>"]
    assert told["text"] == "ab"


def test_every_choice_echoes_its_prompt(tmp_path: Path) -> None:
    answer = post(FakeGenerator(tmp_path, "1", "2", "3", "4"), COMPLETIONS, prompt=["a", "bc"], n=2, echo=True, logprobs=0)
    told = [each["logprobs"]["tokens"] for each in answer.json()["choices"]]
    assert told == [["a", "1", "<|end|>"], ["a", "2", "<|end|>"], ["b", "c", "3", "<|end|>"], ["b", "c", "4", "<|end|>"]]


def test_a_stream_echoes_first(tmp_path: Path) -> None:
    for max_tokens, texts in ((0, ["ab", ""]), (1, ["ab", "x", ""])):
        answer = post(
            FakeGenerator(tmp_path, "x"), COMPLETIONS, prompt="ab", echo=True, logprobs=0, max_tokens=max_tokens, stream=True
        )
        *chunks, _ = events(answer.text)
        choices = [json.loads(each)["choices"][0] for each in chunks]
        assert [each["text"] for each in choices] == texts
        assert choices[0]["logprobs"]["token_logprobs"] == [None, -0.5]
        offsets = [at for each in choices if each["logprobs"] for at in each["logprobs"]["text_offset"]]
        assert offsets == [0, 1, 2][: 2 + max_tokens]


def test_a_character_of_prompt_and_answer_is_echoed_once(tmp_path: Path) -> None:
    asked = {"prompt": [[65, 0xC3], [0xC3]], "echo": True}
    whole = post(FakeGenerator(tmp_path, b"\xa9!"), COMPLETIONS, **asked).json()["choices"]
    assert [each["text"] for each in whole] == ["Aé!", "é!"]
    ended = post(FakeGenerator(tmp_path, "x"), COMPLETIONS, max_tokens=0, **asked).json()["choices"]
    assert [each["text"] for each in ended] == ["A\ufffd", "\ufffd"]


def test_a_stream_has_the_logprobs_of_a_prompt_without_text(tmp_path: Path) -> None:
    """The prompt is a part of a character. The answer has the character."""
    model = FakeGenerator(tmp_path, b"\xa9")
    *chunks, _ = events(post(model, COMPLETIONS, prompt=[0xC3], echo=True, logprobs=0, stream=True).text)
    choices = [json.loads(each)["choices"][0] for each in chunks]
    assert [each["text"] for each in choices] == ["", "é", ""]
    assert [each["logprobs"]["token_logprobs"] for each in choices] == [[None], [-0.5], [-0.5]]


def test_prompt_logprobs_are_by_token_id(tmp_path: Path) -> None:
    expected = [
        None,
        {
            "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
            "2": {"logprob": -1.0, "rank": 2, "decoded_token": "\x02"},
        },
    ]
    told = choice(post(FakeGenerator(tmp_path, "x"), COMPLETIONS, prompt="ab", prompt_logprobs=2))
    assert (told["prompt_logprobs"], told["logprobs"]) == (expected, None)
    both = choice(post(FakeGenerator(tmp_path, "x"), COMPLETIONS, prompt="ab", prompt_logprobs=0, logprobs=3, echo=True))
    assert both["prompt_logprobs"] == [None, {"98": {"logprob": -0.5, "rank": None, "decoded_token": "b"}}]
    assert len(both["logprobs"]["top_logprobs"][1]) == 3
    chat = post(FakeGenerator(tmp_path, "x"), CHAT, prompt_logprobs=0, n=2).json()
    assert len(chat["prompt_logprobs"]) == len("<user>Hi<a>")
    assert "prompt_logprobs" not in post(FakeGenerator(tmp_path, "x"), CHAT).json()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_prompt_logprobs_are_not_streamed(tmp_path: Path, path: str) -> None:
    answer = post(FakeGenerator(tmp_path, "x"), path, prompt_logprobs=1, stream=True)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_logprobs")


# Tokens in vLLM's form.


def client_of(model: Any) -> TestClient:
    return TestClient(Api(FakeBackend(model), Settings(payload_limit=10_000), Metrics("fake")).app)


def test_a_text_and_its_tokens(tmp_path: Path) -> None:
    client = client_of(FakeGenerator(tmp_path, "x"))
    told = client.post("/tokenize", json={"prompt": "Hi!", "return_token_strs": True}).json()
    assert told == {"count": 3, "max_model_len": CONTEXT, "tokens": [72, 105, 33], "token_strs": ["H", "i", "!"]}
    assert client.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": "Hi!"}
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    special = client.post("/tokenize", json={"prompt": "<|end|>", "add_special_tokens": False}).json()
    assert (special["tokens"], special["token_strs"]) == ([EOS], None)


def test_a_conversation_is_counted_as_a_chat_is(tmp_path: Path) -> None:
    client, messages = client_of(FakeGenerator(tmp_path, "x")), [{"role": "user", "content": "Hi"}]

    def text(**fields: Any) -> str:
        return bytes(client.post("/tokenize", json={"messages": messages} | fields).json()["tokens"]).decode()

    assert (text(), text(add_generation_prompt=False)) == ("<user>Hi<a>", "<user>Hi")
    assert text(add_generation_prompt=False, continue_final_message=True) == "<user>Hi"


def test_tokenize_tells_tei_s_form_from_vllm_s(minilm: Path, tmp_path: Path) -> None:
    """TEI's form has `inputs`, and its `prompt` is the text before each input."""
    folder = load_model_config(minilm)
    model = FakeGenerator(tmp_path, "x")
    model.tokenizer = Tokenizer.load(minilm, folder)  # type: ignore[assignment]
    client = client_of(model)
    (tokens,) = client.post("/tokenize", json={"inputs": "hello", "prompt": "say "}).json()
    assert [each["text"] for each in tokens] == ["[CLS]", "say", "hello", "[SEP]"]
    both = client.post("/tokenize", json={"prompt": "x", "messages": []})
    assert (both.status_code, both.text.endswith("send one of `prompt` and `messages`")) == (422, True)
    assert "inputs: Field required" in client.post("/tokenize", json={}).text
    vectors = client_of(FakeModel(Tokenizer.load(minilm, folder), "embedding"))
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        refused = vectors.post(path, json=body)
        assert (refused.status_code, "`fake` does not generate text" in refused.text) == (400, True)
    assert vectors.get("/tokenizer_info").json()["error"]["type"] == "BadRequestError"


def test_tokenizer_info_has_what_a_client_s_tokenizer_needs(tmp_path: Path) -> None:
    config = {"eos_token": {"content": "<|end|>", "special": True}, "bos_token": None, "tokenizer_class": "Fast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    model = FakeGenerator(tmp_path, "x")
    model.prompts = Prompts.of(tmp_path, model.prompts.tokenizer)
    expected = {"tokenizer_class": "Fast", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    told = client_of(model).get("/tokenizer_info").json()
    assert told == expected | dict.fromkeys(("bos_token", "pad_token", "unk_token"))
    assert client_of(model).get("/tokenizer_info", params={"model": "missing"}).status_code == 404


DETOKENIZE: list[tuple[int, dict[str, Any]]] = [
    (400, {"json": {"tokens": [EOS + 1]}}),
    (400, {"json": {"tokens": [-1]}}),
    (404, {"json": {"tokens": [1], "model": "missing"}}),
    (413, {"content": b" " * 10_001, "headers": {"content-type": "application/json"}}),
    (415, {"content": b"{}", "headers": {"content-type": "text/plain"}}),
]


@pytest.mark.parametrize(("status", "sent"), DETOKENIZE)
def test_detokenize_refuses(tmp_path: Path, status: int, sent: dict[str, Any]) -> None:
    answer = client_of(FakeGenerator(tmp_path, "x")).post("/detokenize", **sent)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, status)


def test_the_document_has_the_statuses_of_detokenize() -> None:
    documented = {int(status) for status in openapi.document("")["paths"]["/detokenize"]["post"]["responses"]}
    assert documented == {200, 401, 429} | {status for status, _ in DETOKENIZE}


# Decisions.

DECISIONS = "/v1/decisions"
TICKET = "I was charged twice."
PREDICATE = {"type": "predicate", "instructions": "The customer is angry."}
CHOICE = {
    "type": "choice",
    "name": "kind",
    "instructions": "What is it about?",
    "choices": [{"value": "billing", "description": "Money"}, {"value": "true"}, {"value": True}],
}
SCORE = {"type": "score", "name": "urgency", "instructions": "How urgent?", "levels": [{"label": "low"}, {"label": "high"}]}


def decide(served: FakeGenerator, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    """The response to these questions. The context is long enough for them."""
    served.info = replace(served.info, max_input_length=8000)
    body = {"input": TICKET, "questions": [PREDICATE]} | fields
    return post(served, DECISIONS, headers, raw=body.pop("raw", None) or json.dumps(body).encode())


def prompts_of(model: FakeGenerator) -> list[str]:
    return [bytes(stream.prompt.tolist()).decode() for stream in model.streams]


def share(*logprobs: float) -> list[float]:
    return [exp(each) / sum(map(exp, logprobs)) for each in logprobs]


def test_every_kind_of_question_is_answered(tmp_path: Path) -> None:
    model = FakeGenerator(tmp_path, "x")
    answer = decide(model, questions=[PREDICATE, CHOICE, SCORE], safety_identifier="a", prompt_cache_key="b", model="fake")
    assert answer.status_code == 200, answer.text
    two, three = share(-1, -2), share(-1, -2, -3)
    assert answer.json()["answers"] == [
        {"type": "predicate", "name": None, "probability": pytest.approx(two[1])},
        {
            "type": "choice",
            "name": "kind",
            "choice": "billing",
            "probabilities": [
                {"value": value, "probability": pytest.approx(each)}
                for value, each in zip(["billing", "true", True], three, strict=True)
            ],
            "confidence": pytest.approx(exp(-1)),
        },
        {
            "type": "score",
            "name": "urgency",
            "score": pytest.approx(two[1]),
            "probabilities": [
                {"value": 0, "label": "low", "probability": pytest.approx(two[0])},
                {"value": 1, "label": "high", "probability": pytest.approx(two[1])},
            ],
            "confidence": pytest.approx(exp(-1)),
        },
    ]
    num_tokens = sum(map(len, prompts_of(model)))
    assert answer.json()["usage"] == {
        "input_tokens": num_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_tokens + 3,
    }
    assert prompts_of(model)[1] == (
        f"<user>{TICKET}\n\nChoose the option that fits the text above best.\nWhat is it about?\n\n"
        'A. "billing": Money\nB. "true"\nC. true\n\nReply with the label of one option, and nothing else.<a>'
    )
    assert {stream.options.logprobs_of for stream in model.streams} == {(65, 66, 67)}
    assert {(stream.options.max_tokens, stream.options.stop_ids) for stream in model.streams} == {(1, ())}


@pytest.mark.parametrize(("state", "num_first"), [("x" * 121, 2), ("x" * 122, 1)])
def test_a_state_of_a_page_is_computed_before_the_other_questions(tmp_path: Path, state: str, num_first: int) -> None:
    """The common prefix is `<user>` and the state. The introductions of the questions share no token."""
    model = FakeGenerator(tmp_path, "x")
    submitted: list[int] = []
    submit = model.submit
    model.submit = lambda streams: (submitted.append(len(streams)), submit(streams))[1]  # type: ignore[method-assign]
    questions = [PREDICATE | {"name": "0"}, CHOICE]
    answer = decide(model, input=state[:-2], questions=questions)
    assert [each["name"] for each in answer.json()["answers"]] == ["0", "kind"]
    assert submitted == ([2] if num_first == 2 else [1, 1])
    assert (model.streams[1].limit == inf) == (num_first == 1)  # the server's timeout is for the first delta
    assert decide(FakeGenerator(tmp_path, "x"), input=state * 9).status_code == 200  # one question alone


def test_questions_about_a_long_state_are_one_request(tmp_path: Path) -> None:
    """The key may have one request in flight."""
    key = add_key(tmp_path / "keys", "alice", {"requests_in_flight": "1"})
    model = FakeGenerator(tmp_path, "x", context=8000)
    api = Api(FakeBackend(model), Settings(api_keys_file=str(tmp_path / "keys")), Metrics("fake"))  # type: ignore[arg-type]
    body = {"input": "x" * 500, "questions": [PREDICATE, CHOICE, SCORE]}
    answer = TestClient(api.app).post(DECISIONS, json=body, headers={"authorization": f"Bearer {key}"})
    assert len(answer.json()["answers"]) == 3
    text = api.service.metrics.exposition().decode()
    assert 'emberforge_key_requests_total{key="alice",model="fake",served_model="fake"} 1.0' in text
    assert 'emberforge_queue_seconds_count{model="fake"} 1.0' in text
    assert (
        f'emberforge_key_tokens_total{{key="alice",model="fake",served_model="fake"}} {answer.json()["usage"]["total_tokens"]}.0'
        in text
    )


def test_a_first_question_that_fails_ends_the_others(tmp_path: Path) -> None:
    model = FakeGenerator(tmp_path, "x", error=BackendError("broken"))
    answer = decide(model, input="x" * 500, questions=[PREDICATE, CHOICE])
    assert (answer.status_code, len(model.streams)) == (424, 1)


def test_an_input_of_messages_is_one_text(tmp_path: Path) -> None:
    parts = [{"type": "input_text", "text": "one", "prompt_cache_breakpoint": {"mode": "explicit"}}]
    parts.append({"type": "input_json", "data": {"a": [1, None]}})  # type: ignore[dict-item]
    user = {"role": "user", "content": parts}
    model = FakeGenerator(tmp_path, "x")
    assert decide(model, input=[user, {"role": "user", "content": "two", "type": "message"}]).status_code == 200
    assert prompts_of(model)[0].startswith('<user>one\n{"a": [1, null]}\n\ntwo\n\nIs this')
    model = FakeGenerator(tmp_path, "x")
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "three"}, {"type": "refusal", "refusal": "no"}]}
    assert decide(model, input=[{"role": "user", "content": "two"}, said]).status_code == 200
    assert prompts_of(model)[0].startswith("<user>user: two\n\nassistant: three\nno\n\nIs this")


def choices(count: int) -> dict[str, Any]:
    return {"type": "choice", "instructions": "Which?", "choices": [{"value": str(each)} for each in range(count)]}


UNDECIDED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"input": " "}, "input", "cannot be empty"),
    ({"input": []}, "input", "at least 1 item"),
    ({"input": 1}, "input", "`input`: Input should be a valid array, got the number 1"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input", "'user', 'developer'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "got 'input_image'"),
    ({"input": [{"type": "function_call", "call_id": "a"}]}, "input", "Field required"),
    ({"questions": []}, "questions", "at least 1 item"),
    ({"questions": [PREDICATE] * 201}, "questions", "at most 200 items"),
    (
        {"questions": [{"type": "essay"}]},
        "questions",
        "`questions.0.type`: Input should be one of 'predicate', 'choice', 'score', got 'essay'",
    ),
    ({"questions": [{"instructions": "Why?"}]}, "questions", "`questions.0.type`: Field required"),
    (
        {"questions": [CHOICE | {"choices": [{"value": 3}, {"value": "a"}]}]},
        "questions",
        "`questions.0.choices.0.value`: Input should be a valid boolean or a valid string, got the number 3",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_json", "data": [3]}]}]},
        "input",
        "`input.0.content.0.data.0`: Input",
    ),
    ({"safety_identifier": "x" * 129}, "safety_identifier", "at most 128 characters, got 129"),
    ({"questions": [PREDICATE | {"weight": 1}]}, "questions", "Extra inputs are not permitted"),
    ({"questions": [choices(1)]}, "questions", "at least 2 items"),
    ({"questions": [choices(256)]}, "questions", "at most 255 items"),
    ({"questions": [choices(27)]}, None, "27 options, but this model's tokenizer has labels for only 26"),
    (
        {"questions": [CHOICE | {"choices": [{"value": "a"}] * 2}]},
        "questions",
        "two choices have the value 'a'; each must be unique",
    ),
    ({"questions": [SCORE | {"levels": [{"label": "a"}] * 11}]}, "questions", "at most 10 items"),
    ({"cache_salt": "x"}, "cache_salt", "Extra inputs are not permitted"),
    ({"temperature": 1}, "temperature", "Extra inputs are not permitted"),
    ({"input": "x" * 7900}, "input_tokens", "maximum context length is 8000 tokens"),
]


@pytest.mark.parametrize(("fields", "param", "text"), UNDECIDED, ids=[text for *_, text in UNDECIDED])
def test_what_cannot_be_decided_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], param: str | None, text: str
) -> None:
    monkeypatch.setitem(LIMITS, "payload_limit", 100_000)
    monkeypatch.setitem(LIMITS, "max_client_batch_size", 1000)
    model = FakeGenerator(tmp_path, "x")
    answer = decide(model, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("BadRequestError", param)
    assert text in error["message"]
    assert not model.streams


def test_a_model_that_does_not_chat_decides_nothing(tmp_path: Path) -> None:
    model = FakeGenerator(tmp_path, "x")
    model.prompts = Prompts(model.prompts.tokenizer, None)
    answer = decide(model)
    assert (answer.status_code, "no chat template" in answer.json()["message"]) == (400, True)


FAILING: list[tuple[int, Callable[[Path], Any], dict[str, Any]]] = [
    (400, lambda folder: FakeGenerator(folder, "x"), {"headers": {"x-priority": "now"}}),
    (404, lambda folder: FakeGenerator(folder, "x"), {"model": "missing"}),
    (413, lambda folder: FakeGenerator(folder, "x"), {"raw": b" " * 10_001}),
    (415, lambda folder: FakeGenerator(folder, "x"), {"headers": {"content-type": "text/plain"}}),
    (424, lambda folder: FakeGenerator(folder, "x", error=BackendError("it fell over")), {}),
    (429, lambda folder: FakeGenerator(folder, "x", error=DeadlineOutOfReach(9.0, 1.0)), {}),
    (503, lambda folder: FakeGenerator(folder, "x", error=EngineStopped("over")), {}),
    (504, lambda folder: FakeGenerator(folder, "x", late_s=5.0), {"headers": {"x-request-deadline-ms": "20"}}),
]


@pytest.mark.parametrize(("status", "make", "sent"), FAILING)
def test_decisions_fail_as_generation_does(
    tmp_path: Path, status: int, make: Callable[[Path], Any], sent: dict[str, Any]
) -> None:
    answer = decide(make(tmp_path), **sent)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, status), answer.text


def test_the_document_has_the_statuses_of_decisions() -> None:
    documented = {int(status) for status in openapi.document("")["paths"][DECISIONS]["post"]["responses"]}
    assert documented == {200, 401} | {status for status, *_ in FAILING}


def test_a_long_prompt_is_encoded_in_slices_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Prompts(byte_tokenizer(), None)
    text = "a long prompt"
    expected = whole.encode(text).tolist()
    monkeypatch.setattr("engine.text.prompts._SLICE", 4)
    assert whole.encode(text).tolist() == expected
    assert whole.encode("").tolist() == []
    monkeypatch.setattr("engine.text.prompts._MOST_TOKENS", len(expected) - 1)
    with pytest.raises(
        InvalidInput, match=f"the prompt has {len(expected)} tokens, no model takes more than {len(expected) - 1}"
    ):
        whole.encode(text)


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_other_threads_run_beside_a_large_prompt(work: str) -> None:
    """tokenizers' functions for one text hold the GIL. Then the event loop would stop for seconds."""
    prompts, text = Prompts(byte_tokenizer(), None), "a large prompt " * 20_000
    ids = prompts.encode(text)
    turns = 0
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(prompts.encode, text) if work == "encode" else pool.submit(prompts.decode, ids)
        while not waiting.done():
            sleep(0.001)
            turns += 1
    assert turns > 10
