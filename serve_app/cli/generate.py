"""`emberforge generate` and `emberforge chat`: generate text in the terminal, without a server."""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

from rich.markup import escape
from rich.progress import Progress
from typer import Option

from engine.errors import InvalidInput
from engine.model.config import KvCacheDtype
from engine.model_id import EMBEDDED_GENERATOR
from serve_app.cli.check import check as check_model
from serve_app.cli.console import console, say
from serve_app.cli.devices import chosen_devices

if TYPE_CHECKING:
    from engine import Engine
    from engine.model.config import GenerationConfig
    from engine.options import SamplingOptions, TokenIds


def _option(*flags: str, text: str, default: str) -> Any:
    """An option whose help text names its default. rich would read unescaped brackets as markup."""
    return Option(*flags, help=escape(f"{text} [default: {default}]"), show_default=False)


@dataclass(frozen=True, slots=True)
class Options:
    """The options of both `generate` and `chat`. None means the value of the model's authors, else the default of the help."""

    model: Annotated[str, Option("--model", "-m", help="Folder, GGUF file, Hub id, or the embedded model")] = EMBEDDED_GENERATOR
    n_predict: Annotated[
        int | None, _option("--n-predict", "-n", text="The most tokens of an answer", default="the model's, or 256")
    ] = None
    temp: Annotated[float | None, _option(text="Temperature; 0 takes the likeliest token", default="the model's, or 0.7")] = None
    top_p: Annotated[
        float | None, _option(text="Sample from the likeliest tokens with this total probability", default="the model's, or 0.9")
    ] = None
    top_k: Annotated[
        int | None, _option(text="Sample from this number of likeliest tokens; 0 means all", default="the model's, or 40")
    ] = None
    repeat_penalty: Annotated[
        float | None, _option(text="Divide the logits of all tokens in prompt and answer by this", default="the model's, or 1")
    ] = None
    presence_penalty: Annotated[float, Option(help="Subtract this from the logits of all tokens in the answer")] = 0.0
    frequency_penalty: Annotated[
        float, Option(help="Subtract this from a token's logit for each time that the token is in the answer")
    ] = 0.0
    no_repeat_ngram: Annotated[int, Option(help="Never repeat a sequence of this many tokens; 0 allows repetition")] = 0
    seed: Annotated[int | None, _option(text="The same seed gives the same answer", default="a new one each time")] = None
    ctx_size: Annotated[
        int | None, _option("--ctx-size", "-c", text="The most tokens of prompt and answer together", default="the model's")
    ] = None
    devices: Annotated[
        str | None,
        _option(text="Number of the GPU, or cpu; several GPUs (0,1) share the model's layers", default="0, else cpu"),
    ] = None
    dtype: Annotated[
        str,
        _option(
            text="float32, bfloat16, or on a GPU float16, float8, int8 or int4",
            default="auto: bfloat16 if the device supports it",
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        str, Option(help="auto, fp8 or int8; fp8 and int8 keep keys and values in 8 bits, for twice the tokens in the KV cache")
    ] = "auto"
    threads: Annotated[int | None, _option("--threads", "-t", text="CPU threads", default="one for each core")] = None
    verbose: Annotated[bool, Option("--verbose", "-v", help="Print times and tokens/s")] = False


# Options of Ember's command line that are refused, and why. Each takes any value, or none.
_REFUSED = {
    "--memory-fraction": "a model takes the free memory of its devices",
    "--phase-aware": "each device computes both prompts and answers",
    "--prefill-chunk-len": "the engine itself divides long prompts into chunks",
    "--no-prefill-overlap": "several devices always compute chunks of prompts at the same time",
    "--dump-layer": "--check compares with transformers in one run, and writes no files",
    "--dump-dir": "--check compares with transformers in one run, and writes no files",
}


def check_refused(arguments: Sequence[str]) -> None:
    """Refuses options of Ember that `generate` and `chat` do not have. Raises: InvalidInput with the option's name."""
    if not arguments or arguments[0] not in ("generate", "chat"):
        return
    for flag in (argument.partition("=")[0] for argument in arguments[1:]):
        if flag in _REFUSED:
            raise InvalidInput(f"{flag} is not supported: {_REFUSED[flag]}; leave it out")


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer with the shared options and the command's own options. It calls `command(options, ...)`."""
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
    check: Annotated[bool, Option("--check", help="Compare the generated tokens with those of transformers, in fp32")] = False,
) -> None:
    """Continue a text with a model, on this machine's GPU or CPU."""
    if check:
        return check_model(options.model, 64 if options.n_predict is None else options.n_predict)
    writer = Writer.load(options)
    if interactive:
        return _chat(writer)
    writer.write(writer.prompts.encode(prompt))


def chat(
    options: Options,
    *,
    prompt: Annotated[str | None, Option("--prompt", "-p", help="Ask this question, print the answer and end")] = None,
) -> None:
    """Talk with a model in the terminal, on this machine's GPU or CPU. An empty line, `quit` or Ctrl-D ends the chat."""
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
            say(f"{error}; the chat starts again without the earlier messages")
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
        for flag, value in {"-n": options.n_predict, "--ctx-size": options.ctx_size, "--threads": options.threads}.items():
            if value is not None and value < 1:
                raise InvalidInput(f"{flag} is {value}, expected 1 or more")
        if options.kv_cache_dtype not in get_args(KvCacheDtype):
            raise InvalidInput(f"--kv-cache-dtype is {options.kv_cache_dtype!r}, expected {', '.join(get_args(KvCacheDtype))}")
        start, dtype = perf_counter(), cast(Any, options.dtype)
        devices = chosen_devices([] if options.devices is None else [name.strip() for name in options.devices.split(",")])
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task(f"loading {options.model}", total=1.0)
            from engine import Engine, ModelError

            engine = Engine.load(
                options.model,
                devices=devices,
                dtype=dtype,
                max_input_tokens=options.ctx_size,
                kv_cache_dtype=cast(Any, options.kv_cache_dtype),
                num_threads=options.threads,
                on_progress=lambda share: progress.update(task, completed=share),
            )
        if engine.config.generation is None:
            raise ModelError(f"{options.model} does not generate text; `emberforge serve {options.model}` serves it")
        if options.verbose:
            say(f"loaded in {perf_counter() - start:.1f} s, {engine.dtype_name} on {', '.join(_placed(engine))}")
        return cls(engine, _sampling(options, engine.config.generation), options.verbose)

    def write(self, prompt: "TokenIds") -> str:
        """Writes each token of the answer at once. Returns: the answer."""
        text = self.prompts.detokenizer(prompt)
        answer, times = "", [perf_counter()]
        for token in self._engine.stream(prompt, self._sampling):
            times.append(perf_counter())
            answer += _written(text.push(token.id))
        answer += _written(text.finish())
        _written("\n")
        if self._verbose and len(times) > 2:
            first, rest = times[1] - times[0], (len(times) - 2) / (times[-1] - times[1])
            say(f"prompt of {len(prompt)} tokens, first token after {1e3 * first:.0f} ms, then {rest:.1f} tokens/s")
        return answer


def _written(text: str) -> str:
    sys.stdout.write(text)
    sys.stdout.flush()
    return text


def _placed(engine: "Engine") -> list[str]:
    """The name of each device; with several devices also its number of layers."""
    if engine.num_stages == 1:
        return [str(engine.device)]
    return [f"{stage.device} ({len(stage.config.layers)} layers)" for stage in engine.stages]


def _sampling(options: Options, said: "GenerationConfig") -> "SamplingOptions":
    """The sampling options of the command line, else those of the model's authors, else our defaults."""
    from engine.options import SamplingOptions

    return SamplingOptions(max_tokens=256, temperature=0.7, top_p=0.9, top_k=40).chosen(
        said,
        max_tokens=options.n_predict,
        temperature=options.temp,
        top_p=options.top_p,
        top_k=options.top_k,
        repetition_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        no_repeat_ngram=options.no_repeat_ngram,
        seed=options.seed,
    )
