"""`emberforge generate` and `emberforge chat`: a model answers in the terminal, with no server."""

import sys
from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.errors import InvalidInput
from engine.model_id import EMBEDDED_GENERATOR
from serve_app.cli.check import check as check_model
from serve_app.cli.console import console, say

if TYPE_CHECKING:
    from engine import Engine
    from engine.options import TokenIds

Model = Annotated[str, typer.Option("--model", "-m", help="Folder, GGUF file, Hub id, or the embedded model")]
NumTokens = Annotated[int | None, typer.Option("--n-predict", "-n", help="Tokens of an answer at most [default: 256]")]
Temperature = Annotated[float | None, typer.Option("--temp", help="0 takes the likeliest token [default: the model's, or 0.7]")]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest tokens of this mass [default: the model's, or 0.9]")]
TopK = Annotated[int | None, typer.Option(help="Keep so many of the likeliest tokens; 0: all [default: the model's, or 40]")]
Repetition = Annotated[float | None, typer.Option("--repeat-penalty", help="[default: the model's, or 1]")]
Presence = Annotated[float, typer.Option(help="Taken from the logit of each token that the answer has")]
Frequency = Annotated[float, typer.Option(help="The same, for each time that the answer has the token")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer [default: a new one each time]")]
Context = Annotated[int | None, typer.Option("--ctx-size", "-c", help="Tokens of prompt and answer [default: the model's]")]
Dtype = Annotated[str, typer.Option(help="float32 or bfloat16 [default: what the CPU computes natively]")]
Threads = Annotated[int | None, typer.Option("--threads", "-t", help="CPU threads [default: one for each core]")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say how fast it was")]


def generate(
    model: Model = EMBEDDED_GENERATOR,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to continue")] = "Hello, my name is",
    interactive: Annotated[bool, typer.Option("--interactive", "-i", help="Open a chat")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Compare the model's tokens with those of transformers, in fp32")
    ] = False,
    n_predict: NumTokens = None,
    temp: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    repeat_penalty: Repetition = None,
    presence_penalty: Presence = 0.0,
    frequency_penalty: Frequency = 0.0,
    seed: Seed = None,
    ctx_size: Context = None,
    dtype: Dtype = "auto",
    threads: Threads = None,
    verbose: Verbose = False,
) -> None:
    """Continue a text with a model, on this machine's CPU."""
    if check:
        return check_model(model, n_predict or 64)
    sampling = (n_predict, temp, top_p, top_k, repeat_penalty, presence_penalty, frequency_penalty, seed)
    writer = Writer.load(model, ctx_size, dtype, threads, verbose, *sampling)
    if interactive:
        return _chat(writer)
    writer.write(writer.prompts.encode(prompt))


def chat(
    model: Model = EMBEDDED_GENERATOR,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Ask this, and end after the answer")] = None,
    n_predict: NumTokens = None,
    temp: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    repeat_penalty: Repetition = None,
    presence_penalty: Presence = 0.0,
    frequency_penalty: Frequency = 0.0,
    seed: Seed = None,
    ctx_size: Context = None,
    dtype: Dtype = "auto",
    threads: Threads = None,
    verbose: Verbose = False,
) -> None:
    """Talk with a model in the terminal, on this machine's CPU. An empty line, `quit` or Ctrl-D ends the chat."""
    sampling = (n_predict, temp, top_p, top_k, repeat_penalty, presence_penalty, frequency_penalty, seed)
    writer = Writer.load(model, ctx_size, dtype, threads, verbose, *sampling)
    if prompt is None:
        return _chat(writer)
    writer.write(writer.prompts.encode_chat([_said("user", prompt)]))


def _said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _chat(writer: "Writer") -> None:
    messages: list[dict[str, str]] = []
    for line in _lines():
        messages.append(_said("user", line))
        try:
            messages.append(_said("assistant", writer.write(writer.prompts.encode_chat(messages))))
        except KeyboardInterrupt:  # ends the answer, not the chat
            messages.pop()
            _written("\n")
        except InvalidInput as error:
            say(f"{error}; the chat begins anew")
            messages.clear()


def _lines() -> Iterator[str]:
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if not line or line == "quit":
            return
        yield line


class Writer:
    """A loaded model that writes answers to stdout."""

    def __init__(self, engine: "Engine", options: Any, verbose: bool) -> None:
        assert engine.prompts is not None, "the model generates"
        self.prompts = engine.prompts
        self._engine, self._options, self._verbose = engine, options, verbose

    @classmethod
    def load(cls, model: str, context: int | None, dtype: str, threads: int | None, verbose: bool, *sampling: Any) -> "Writer":
        with console.status(f"loading {model}"):
            from engine import Engine, ModelError

            start = perf_counter()
            engine = Engine.load(model, device="cpu", dtype=dtype, max_input_tokens=context, num_threads=threads)  # type: ignore[arg-type]
        if engine.config.generation is None:
            raise ModelError(f"{model} gives vectors and no text; `emberforge serve {model}` serves it")
        if verbose:
            say(f"loaded in {perf_counter() - start:.1f} s, {engine.dtype_name}")
        return cls(engine, _options(engine, *sampling), verbose)

    def write(self, prompt: "TokenIds") -> str:
        """Writes the answer as it comes. Returns: the answer."""
        text = self.prompts.detokenizer(prompt)
        answer, times = "", [perf_counter()]
        for token in self._engine.stream(prompt, self._options):
            times.append(perf_counter())
            answer += _written(text.push(token.id))
        answer += _written(text.finish())
        _written("\n")
        if self._verbose and len(times) > 2:
            first, rest = times[1] - times[0], (len(times) - 2) / (times[-1] - times[1])
            say(f"{len(prompt)} tokens of prompt, the first token after {1e3 * first:.0f} ms, then {rest:.1f} tokens/s")
        return answer


def _written(text: str) -> str:
    sys.stdout.write(text)
    sys.stdout.flush()
    return text


def _options(
    engine: "Engine",
    n_predict: int | None,
    temp: float | None,
    top_p: float | None,
    top_k: int | None,
    repeat_penalty: float | None,
    presence_penalty: float,
    frequency_penalty: float,
    seed: int | None,
) -> Any:
    """What the command line says, else what the model's authors say, else a usual value."""
    from engine.options import SamplingOptions

    said = engine.config.generation
    assert said is not None, "the model generates"

    def first(*values: Any) -> Any:
        return next(value for value in values if value is not None)

    return SamplingOptions(
        max_tokens=first(n_predict, said.max_new_tokens, 256),
        temperature=first(temp, said.temperature, 0.7),
        top_p=first(top_p, said.top_p, 0.9),
        top_k=first(top_k, said.top_k, 40),
        min_p=first(said.min_p, 0.0),
        repetition_penalty=first(repeat_penalty, said.repetition_penalty, 1.0),
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop_ids=said.eos_ids,
    )
