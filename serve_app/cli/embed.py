"""`emberforge embed`: computes a corpus of files with a model and writes the results to files."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.markup import escape
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from typer import Argument, Option

from engine.errors import InvalidInput
from engine.model_id import EMBEDDED_MODEL
from engine.packages import install
from serve_app.cli.console import console, say

if TYPE_CHECKING:
    from serve_app.corpus.local import LocalWorker
    from serve_app.corpus.progress import Progress
    from serve_app.corpus.remote import RemoteWorker
    from serve_app.corpus.task import Task

# Seconds between two lines of progress, without a terminal.
_LINE_EVERY_S = 10.0


def embed(
    corpus: Annotated[
        list[str],
        Argument(
            help="Files or folders: parquet, jsonl, csv, or txt with one text per line; or a Hub dataset as hf://datasets/ORG/NAME"
        ),
    ],
    output: Annotated[Path, Option("--output", "-o", help="Folder for the results")],
    model: Annotated[
        str | None,
        Option(
            "--model",
            "-m",
            help=escape(f"Folder or Hub id; with --url a served name [default: {EMBEDDED_MODEL}, or the server's first model]"),
        ),
    ] = None,
    column: Annotated[str, Option("--column", "-c", help="Column with the texts")] = "text",
    file_format: Annotated[
        Literal["parquet", "npy"], Option("--format", help="Format of the results; npy holds only vectors")
    ] = "parquet",
    dimensions: Annotated[int | None, Option(min=1, help=escape("Number of leading dimensions to keep [default: all]"))] = None,
    output_dtype: Annotated[
        Literal["float", "int8", "uint8", "binary", "ubinary"], Option(help="Type of the vectors' numbers")
    ] = "float",
    prompt: Annotated[str | None, Option("--prompt", "-p", help="Prompt before each text")] = None,
    prompt_name: Annotated[str | None, Option(help="Name of a prompt in the model's folder")] = None,
    input_type: Annotated[
        Literal["query", "document"] | None, Option(help="Take the model's prompt for this kind of text")
    ] = None,
    rerank: Annotated[str | None, Option(metavar="COLUMN", help="Column with queries; score each text for its query")] = None,
    max_tokens: Annotated[int, Option(min=1, help="The most tokens of an answer of a generation model")] = 256,
    rows_per_file: Annotated[
        int, Option(min=1, help="Rows of an output file; a kill loses the work on at most three files")
    ] = 8192,
    dtype: Annotated[str, Option(help="auto, float32, bfloat16, or on a GPU float16, float8, int8 or int4")] = "auto",
    url: Annotated[
        str | None, Option(help="Compute on this running server, with its free capacity, instead of this machine")
    ] = None,
    api_key: Annotated[str | None, Option(envvar="EMBERFORGE_API_KEY", help="An API key of that server")] = None,
    in_flight: Annotated[int, Option(min=1, help="Requests in flight to that server")] = 32,
) -> None:
    """Embed a corpus: write a vector for each text, with the corpus's other columns, to files.

    A reranker gives scores (--rerank), a generation model gives answers. The same command resumes an interrupted job.
    """
    try:
        import pyarrow  # noqa: F401
    except ModuleNotFoundError:
        how = install("'emberforge[embed]'")
        raise InvalidInput(f"emberforge embed needs pyarrow: {how}") from None
    from serve_app.corpus.files import Corpus
    from serve_app.corpus.folder import Folder
    from serve_app.corpus.job import Columns, run
    from serve_app.corpus.progress import Progress
    from serve_app.corpus.task import Task, check_options

    if rerank == column:
        raise InvalidInput(f"--rerank and --column are both {column!r}; name a column with queries and another one with texts")
    texts = (column,) if rerank is None else (rerank, column)
    files = Corpus(_paths(corpus), texts)  # before the model, because this check is faster
    task = Task(dimensions, output_dtype, prompt, prompt_name, input_type, max_tokens)
    worker: LocalWorker | RemoteWorker
    if url is None:
        worker = _local(model or EMBEDDED_MODEL, dtype, task, rerank is not None)
    else:
        worker = _remote(url, model, api_key, in_flight, task, rerank is not None)
    check_options(task, worker.kind)
    if worker.kind in files.schema.names:
        raise InvalidInput(f"the corpus already has a column {worker.kind!r}; rename that column")
    if worker.kind == "answer" and file_format == "npy":
        raise InvalidInput("npy holds only numbers, but this model generates text; choose --format parquet")
    job = {"model": worker.model, "revision": worker.revision, "dtype": worker.dtype, "columns": texts, **asdict(task)}
    with closing(Folder(output, file_format, rows_per_file, job | {"corpus": files.fingerprint})) as folder:
        progress = Progress(folder.num_rows, estimated_rows=files.estimated_rows)
        if folder.done:
            say(f"{output} already has {len(folder.done)} files; the job resumes")
        try:
            with _shown(progress) as on_progress:
                run(files, folder, worker, Columns(texts, worker.kind), progress, on_progress)
        except KeyboardInterrupt:
            say(f"stopped at {progress}; the same command resumes from the files in {output}")
            # Threads may still wait for the server's answers. Ending them loses no file: only complete files get their names.
            os._exit(130)
    say(f"{output} is complete: {progress}")
    if progress.num_faults:
        say(f"{progress.num_faults:,} of these rows have no result")


def _paths(inputs: list[str]) -> list[Path]:
    """The files and folders that the command line names. Datasets of the Hub are downloaded."""
    paths: list[Path] = []
    for each in inputs:
        if each.startswith("hf://"):
            from serve_app.corpus.hub import download  # here, because its import takes 0.2 s and local files do not need it

            paths += download(each)
        else:
            paths.append(Path(each).expanduser())
    return paths


def _local(model: str, dtype: Any, task: "Task", ranks: bool) -> "LocalWorker":
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        loading = bar.add_task(f"loading {model}", total=1.0)
        from engine import Engine
        from serve_app.corpus.local import LocalWorker

        engine = Engine.load(model, dtype=dtype, on_progress=lambda share: bar.update(loading, completed=share))
    return LocalWorker(model, engine, task, ranks)


def _remote(url: str, model: str | None, api_key: str | None, in_flight: int, task: "Task", ranks: bool) -> "RemoteWorker":
    from serve_app.corpus.remote import RemoteWorker

    return RemoteWorker(url, model, api_key, in_flight, task, ranks)


@contextmanager
def _shown(progress: "Progress") -> Iterator[Callable[[str], None]]:
    """Shows the progress: a bar on a terminal, elsewhere a line every ten seconds. The function it gives prints a message."""
    if console.is_terminal:
        with Bar(BarColumn(), TextColumn("{task.description}"), console=console, transient=True) as bar:
            shown = bar.add_task(str(progress), total=1.0)

            def on_progress(line: str) -> None:
                if line:
                    say(line)
                bar.update(shown, completed=progress.share, description=str(progress))

            yield on_progress
        return
    told_at = monotonic()

    def tell(line: str) -> None:
        nonlocal told_at
        if line:
            say(line)
        if monotonic() - told_at >= _LINE_EVERY_S:
            told_at = monotonic()
            say(str(progress))

    yield tell
