"""Log-probabilities of prompts, tokens of texts, and decisions, over a model that generates what the test has written down."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_generator import CONTEXT, FakeGenerator, events
from test_generation_api import CHAT, COMPLETIONS, post

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
