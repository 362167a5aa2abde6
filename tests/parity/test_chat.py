"""The command line with the real weights of the embedded generation model."""

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.model_folder import read_model
from cluster.model_spec import ModelSpec
from engine import Engine, InvalidInput
from engine.errors import ModelError
from engine.model_id import EMBEDDED_GENERATOR
from engine.options import SamplingOptions
from engine.text import grammar
from serve_app.cli.commands import cli

PARIS = "The capital of France is Paris."


@pytest.fixture(scope="module")
def smollm2() -> Engine:
    return Engine.load(EMBEDDED_GENERATOR, device="cpu", dtype="float32")


@pytest.fixture
def loads(smollm2: Engine, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The command gets this engine for any arguments. The fixture returns the arguments of each load."""
    asked: list[dict[str, Any]] = []

    def load(model: str, **options: Any) -> Engine:
        options.pop("on_progress")(1.0)
        asked.append({"model": model, **options})
        return smollm2

    monkeypatch.setattr(Engine, "load", load)
    return asked


def run(*arguments: str, lines: str = "") -> Any:
    return CliRunner().invoke(cli, arguments, input=lines, catch_exceptions=False)


def test_chat_answers_one_question(loads: list[dict[str, Any]]) -> None:
    done = run("chat", "-p", "What is the capital of France?", "-n", "24", "--temp", "0", "-v", "-c", "4096", "-t", "2")
    assert done.stdout == f"{PARIS}\n"
    assert "prompt of 37 tokens, first token after " in done.stderr
    expected = {"model": EMBEDDED_GENERATOR, "devices": ("cpu",), "dtype": "auto", "max_input_tokens": 4096}
    assert loads == [expected | {"kv_cache_dtype": "auto", "num_threads": 2}]


def test_a_chat_remembers_what_was_said(loads: list[dict[str, Any]], smollm2: Engine) -> None:
    lines = "What is the capital of France?\nAnd what language is spoken there?\nquit\nnever read\n"
    done = run("chat", "-n", "24", "--temp", "0", lines=lines)
    first, second = done.stdout.splitlines()
    assert first == PARIS
    assert "French" in second
    assert smollm2.prompts is not None
    messages = [{"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": PARIS}]
    messages.append({"role": "user", "content": "And what language is spoken there?"})
    options = SamplingOptions(max_tokens=24, temperature=0.0, stop_ids=(2,))
    (expected,) = smollm2.generate([smollm2.prompts.encode_chat(messages)], options)
    assert second == smollm2.prompts.tokenizer.decode([token.id for token in expected.tokens])


def test_generate_continues_a_text(loads: list[dict[str, Any]]) -> None:
    done = run("generate", "-p", "1, 2, 3, 4, 5, 6,", "-n", "9", "--temp", "0")
    assert done.stdout.startswith(" 7, 8, 9")
    texts = {run("generate", "-n", "8", "--temp", "1", "--seed", str(seed)).stdout for seed in (1, 1, 2)}
    assert len(texts) == 2


def test_no_ngram_comes_twice(smollm2: Engine) -> None:
    assert smollm2.prompts is not None
    prompt = smollm2.prompts.encode("one two three one two three one two three one two")
    for n, repeats in ((0, True), (3, False)):
        (answer,) = smollm2.generate([prompt], SamplingOptions(max_tokens=24, temperature=0.0, no_repeat_ngram=n))
        ids = [token.id for token in answer.tokens]
        assert (len({tuple(ids[at : at + 3]) for at in range(22)}) < 22) == repeats


def test_an_answer_is_held_to_a_form(smollm2: Engine) -> None:
    assert smollm2.prompts is not None
    schema = {
        "type": "object",
        "properties": {"country": {"type": "string", "maxLength": 20}, "capital": {"enum": ["London", "Paris", "Rome"]}},
        "required": ["country", "capital"],
        "additionalProperties": False,
    }
    prompt = smollm2.prompts.encode_chat([{"role": "user", "content": "What is the capital of France? Answer in JSON."}])
    options = SamplingOptions(max_tokens=60, temperature=0.0, stop_ids=(2,), grammar=grammar.of_schema(schema))
    (answer,) = smollm2.generate([prompt], options)
    said = json.loads(smollm2.prompts.tokenizer.decode([token.id for token in answer.tokens]))
    assert (answer.finish_reason, said) == ("stop", {"country": "FRANCE", "capital": "Paris"})
    with pytest.raises(InvalidInput, match="Invalid type: strin"):
        smollm2.generate([prompt], replace(options, grammar=grammar.of_schema({"type": "strin"})))
    with pytest.raises(InvalidInput, match="too many expressions"):
        smollm2.generate([prompt], replace(options, grammar=grammar.of_regex("(a{1000}){1000}")))


def test_a_model_of_vectors_does_not_chat_and_the_other_way_round(smollm2: Engine) -> None:
    with pytest.raises(ModelError, match="all-MiniLM-L6-v2 does not generate text; `emberforge serve"):
        run("chat", "-m", "all-MiniLM-L6-v2", "-p", "x")
    with pytest.raises(InvalidInput, match="load it with pooling last_token to get vectors, too"):
        smollm2.embed(["x"])
    assert read_model(ModelSpec(name="it", model=EMBEDDED_GENERATOR))[1].task == "generation"
    embedder = Engine.load("all-MiniLM-L6-v2", device="cpu")
    with pytest.raises(InvalidInput, match="this model does not generate"):
        embedder.generate([[5]], SamplingOptions(max_tokens=1))
