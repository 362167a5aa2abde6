"""`emberforge generate` and `emberforge chat`: a model answers in the terminal, with no server."""

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, cast

from typer import Option

from engine.errors import InvalidInput
from engine.model_id import EMBEDDED_GENERATOR
from serve_app.cli.check import check as check_model
from serve_app.cli.console import console, say

if TYPE_CHECKING:
    from engine import Engine
    from engine.model.config import GenerationConfig
    from engine.options import SamplingOptions, TokenIds


@dataclass(frozen=True, slots=True)
class Options:
    """The options that `generate` and `chat` share. None takes what the model's authors say, else the default of the help."""

    model: Annotated[str, Option("--model", "-m", help="Folder, GGUF file, Hub id, or the embedded model")] = EMBEDDED_GENERATOR
    n_predict: Annotated[int | None, Option("--n-predict", "-n", help="Tokens of an answer at most [default: 256]")] = None
    temp: Annotated[float | None, Option(help="0 takes the likeliest token [default: the model's, or 0.7]")] = None
    top_p: Annotated[float | None, Option(help="Keep the likeliest tokens of this mass [default: the model's, or 0.9]")] = None
    top_k: Annotated[int | None, Option(help="Keep this number of tokens; 0: all [default: the model's, or 40]")] = None
    repeat_penalty: Annotated[float | None, Option(help="[default: the model's, or 1]")] = None
    presence_penalty: Annotated[float, Option(help="Subtracted from the logit of each token in the answer")] = 0.0
    frequency_penalty: Annotated[float, Option(help="Subtracted once for each time that the token is in the answer")] = 0.0
    seed: Annotated[int | None, Option(help="The same seed gives the same answer [default: a new one each time]")] = None
    ctx_size: Annotated[int | None, Option("--ctx-size", "-c", help="Tokens of prompt and answer [default: the model's]")] = None
    dtype: Annotated[str, Option(help="float32 or bfloat16 [default: what the CPU computes natively]")] = "auto"
    threads: Annotated[int | None, Option("--threads", "-t", help="CPU threads [default: one for each core]")] = None
    verbose: Annotated[bool, Option("--verbose", "-v", help="Say how fast it was")] = False


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer that takes the shared options beside the command's own. It calls `command(options, ...)`."""
    shared = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, annotation=each.type, default=each.default)
        for each in fields(Options)
    ]
    own = list(inspect.signature(command).parameters.values())[1:]

    def run(**values: Any) -> None:
        options = Options(**{each.name: values.pop(each.name) for each in shared})
        command(options, **values)

    run.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in (*own, *shared)}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def generate(
    options: Options,
    *,
    prompt: Annotated[str, Option("--prompt", "-p", help="The text to continue")] = "Hello, my name is",
    interactive: Annotated[bool, Option("--interactive", "-i", help="Open a chat")] = False,
    check: Annotated[bool, Option("--check", help="Compare the model's tokens with those of transformers, in fp32")] = False,
) -> None:
    """Continue a text with a model, on this machine's CPU."""
    if check:
        return check_model(options.model, options.n_predict or 64)
    writer = Writer.load(options)
    if interactive:
        return _chat(writer)
    writer.write(writer.prompts.encode(prompt))


def chat(
    options: Options,
    *,
    prompt: Annotated[str | None, Option("--prompt", "-p", help="Ask this, and end after the answer")] = None,
) -> None:
    """Talk with a model in the terminal, on this machine's CPU. An empty line, `quit` or Ctrl-D ends the chat."""
    writer = Writer.load(options)
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

    def __init__(self, engine: "Engine", sampling: "SamplingOptions", verbose: bool) -> None:
        assert engine.prompts is not None, "the model generates"
        self.prompts = engine.prompts
        self._engine, self._sampling, self._verbose = engine, sampling, verbose

    @classmethod
    def load(cls, options: Options) -> "Writer":
        with console.status(f"loading {options.model}"):
            from engine import Engine, ModelError

            start, dtype = perf_counter(), cast(Any, options.dtype)
            engine = Engine.load(
                options.model, device="cpu", dtype=dtype, max_input_tokens=options.ctx_size, num_threads=options.threads
            )
        if engine.config.generation is None:
            raise ModelError(f"{options.model} gives vectors and no text; `emberforge serve {options.model}` serves it")
        if options.verbose:
            say(f"loaded in {perf_counter() - start:.1f} s, {engine.dtype_name}")
        return cls(engine, _sampling(options, engine.config.generation), options.verbose)

    def write(self, prompt: "TokenIds") -> str:
        """Writes the answer as it comes. Returns: the answer."""
        text = self.prompts.detokenizer(prompt)
        answer, times = "", [perf_counter()]
        for token in self._engine.stream(prompt, self._sampling):
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


def _sampling(options: Options, said: "GenerationConfig") -> "SamplingOptions":
    """What the command line says, else what the model's authors say, else a usual value."""
    from engine.options import SamplingOptions

    def first(*values: Any) -> Any:
        return next(value for value in values if value is not None)

    return SamplingOptions(
        max_tokens=first(options.n_predict, said.max_new_tokens, 256),
        temperature=first(options.temp, said.temperature, 0.7),
        top_p=first(options.top_p, said.top_p, 0.9),
        top_k=first(options.top_k, said.top_k, 40),
        min_p=first(said.min_p, 0.0),
        repetition_penalty=first(options.repeat_penalty, said.repetition_penalty, 1.0),
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        seed=options.seed,
        stop_ids=said.eos_ids,
    )
