"""Log-probabilities of prompts, tokens of texts, and decisions, over a model that generates what the test has written down."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_generator import CONTEXT, EOS, TEMPLATE, FakeGenerator, events
from fake_models import FakeBackend, FakeModel
from starlette.testclient import TestClient
from test_generation_api import CHAT, COMPLETIONS, post

from engine.model.folder import load_model_config
from engine.text.prompts import Prompts
from engine.text.tokenizer import Tokenizer
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
        "text_offset": [0, 1, 2, 3],
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
    """lm-eval asks for one token and leaves out the last one that it is told, also where that token ends the answer."""
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


# Tokens in vLLM's form


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
    """TEI's has `inputs`; its `prompt` is what stands before each of them."""
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
    model.prompts.tokenizer.save(str(tmp_path / "tokenizer.json"))
    model.prompts = Prompts.load(tmp_path)
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
