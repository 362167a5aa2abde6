"""`emberforge embed`: input files, output files, and a job that resumes after an interruption."""

import errno
import gzip
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import uvicorn
from byte_tokenizer import byte_tokenizer
from fake_generator import FakeGenerator
from fake_models import WIDTH, FakeBackend, FakeModel, vector
from starlette.types import ASGIApp
from tiny_generators import folder_without_pooling
from typer.testing import CliRunner

from engine import Engine
from engine.errors import InvalidInput
from engine.model.folder import load_model_config
from engine.options import EmbedOptions, EncodeOptions, SamplingOptions
from engine.text.tokenizer import Tokenizer
from loadtests.embed_corpus import COLUMNS, hashed, read_results, start_stub, stub_job, vectors_of, write_corpus
from serve_app.cli.commands import cli
from serve_app.compute.quantize import quantize
from serve_app.corpus import hub
from serve_app.corpus.files import Corpus, CorpusError
from serve_app.corpus.folder import Folder
from serve_app.corpus.job import Results, Row, run
from serve_app.corpus.local import LocalWorker, cut
from serve_app.corpus.progress import Progress
from serve_app.corpus.remote import RemoteWorker
from serve_app.corpus.task import Kind, Task, check_options
from serve_app.corpus.tokens import TokenizerProcess
from serve_app.http.app import Api
from serve_app.observe.metrics import Metrics
from serve_app.settings import Settings

TEXTS = [f"text {number}" for number in range(1000)]


def rows(corpus: Corpus, done: set[int]) -> dict[int, list[str]]:
    return {index: table["text"].to_pylist() for index, table in corpus.tables(300, done)}


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.csv", "a.txt", "a.jsonl.gz", "a.txt.gz", "folder"])
def test_each_kind_of_file_gives_the_same_tables(tmp_path: Path, name: str) -> None:
    path, lines = tmp_path / name, [json.dumps({"id": 1, "text": text}) for text in TEXTS]
    match path.suffixes:
        case [".parquet"]:
            write_corpus(path, TEXTS, row_group=128)
        case [".jsonl"]:
            path.write_text("\n".join(lines))
        case [".jsonl", ".gz"]:
            path.write_bytes(gzip.compress("\n".join(lines).encode()))
        case [".txt", ".gz"]:
            path.write_bytes(gzip.compress("\n".join(TEXTS).encode()))
        case [".csv"]:
            pa.csv.write_csv(pa.table({"text": TEXTS}), path)
        case [".txt"]:
            path.write_text("\n".join(TEXTS))
        case _:
            path.mkdir()
            write_corpus(path / "1.parquet", TEXTS[:450])
            write_corpus(path / "2.parquet", TEXTS[450:])
    corpus = Corpus([path], ["text"])
    whole = {0: TEXTS[:300], 1: TEXTS[300:600], 2: TEXTS[600:900], 3: TEXTS[900:]}
    assert rows(corpus, set()) == whole
    assert corpus.estimated_rows == 1000
    assert rows(corpus, {0, 2}) == {1: whole[1], 3: whole[3]}
    assert rows(corpus, {0, 1, 2}) == {3: whole[3]}
    assert rows(corpus, {0, 1, 2, 3}) == {}


def test_a_csv_text_of_digits_stays_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,text\n1,007\n2,"two\nlines"\n')
    assert rows(Corpus([tmp_path / "a.csv"], ["text"]), set()) == {0: ["007", "two\nlines"]}


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str) -> None:
    content = {"a.txt": "one\ntwo", "a.csv": "text\none\ntwo", "a.jsonl": '{"text": "one"}\n{"text": "two"}'}[name]
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert rows(Corpus([tmp_path / name], ["text"]), set()) == {0: ["one", "two"]}


@pytest.mark.parametrize("content", [b'{"id": 1, "text": "\xff"}', b'{"id": "\xff", "text": "a"}'])
def test_json_lines_that_are_not_utf_8_are_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(CorpusError, match=r"a\.jsonl cannot be read: .*Invalid UTF8"):
        rows(Corpus([tmp_path / "a.jsonl"], ["text"]), set())


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_date_in_json_lines_stays_a_text(tmp_path: Path, name: str) -> None:
    row = {"text": "2024-01-05", "at": "2024-01-05T10:00:00Z", "more": [{"day": "2024-02-30", "on": "2024-02-03", "n": 1.5}]}
    row |= {"id": 1, "none": None, "yes": True}
    content = "\n".join([json.dumps(row), json.dumps(row | {"at": "no date"})]).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    corpus = Corpus([tmp_path / name], ["text"])
    ((_, table),) = corpus.tables(300, set())
    assert table.to_pylist() == [row, row | {"at": "no date"}]
    assert table.schema.types[-3:] == [pa.int64(), pa.null(), pa.bool_()]


@pytest.mark.parametrize(
    ("content", "column", "words"),
    [
        ("id,text\n1,a\n", "body", "no column 'body'; its columns are id, text"),
        ("", "text", "cannot be read"),
        ("text,id,id\na,1,2\n", "text", "two columns with the name 'id'; rename one"),
        ("id,text,text\n1,a,b\n", "text", "two columns with the name 'text'; rename one"),
        ('{"id": 1, "text": "a"}\n', "id", "column 'id' has the type int64, expected text"),
        ('{"id": 1, "text": \n', "text", "cannot be read"),
    ],
)
def test_a_corpus_that_cannot_be_used_is_told(tmp_path: Path, content: str, column: str, words: str) -> None:
    path = tmp_path / ("a.jsonl" if "{" in content else "a.csv")
    path.write_text(content)
    with pytest.raises(CorpusError, match=words):
        Corpus([path], [column])


def test_a_dataset_of_the_hub_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def snapshot_download(name: str, *, repo_type: str, revision: str | None, allow_patterns: Any, **_: Any) -> str:
        asked.append((name, repo_type, revision, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    for number in (0, 1):
        write_corpus(tmp_path / f"train-{number}.parquet", TEXTS)
    (tmp_path / "README.md").touch()
    assert hub.download("hf://datasets/org/name") == [tmp_path]
    assert hub.download("hf://datasets/org/name@v1/train-*") == [tmp_path / "train-0.parquet", tmp_path / "train-1.parquet"]
    assert asked == [("org/name", "dataset", None, None), ("org/name", "dataset", "v1", ["train-*", "train-*/*"])]
    for wrong, words in (("hf://name", "is not of the form"), ("hf://datasets/org/name/test", "no such files")):
        with pytest.raises(CorpusError, match=words):
            hub.download(wrong)


def test_files_of_one_corpus_have_the_same_columns(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,text\n1,a\n")
    (tmp_path / "b.csv").write_text("number,text\n1,a\n")
    with pytest.raises(CorpusError, match=r"b\.csv does not have the columns of .*a\.csv"):
        rows(Corpus([tmp_path], ["text"]), set())


def test_results_within_the_folder_of_the_corpus_are_not_part_of_it(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a.parquet", TEXTS[:300])
    before = Corpus([tmp_path], ["text"]).fingerprint
    Folder(tmp_path / "vectors", "parquet", 16, {})
    write_corpus(tmp_path / "vectors" / "part-00000.parquet", TEXTS[:16])
    corpus = Corpus([tmp_path], ["text"])
    assert corpus.fingerprint == before
    assert rows(corpus, set()) == {0: TEXTS[:300]}


@pytest.mark.slow
def test_a_job_that_was_killed_twice_loses_no_row(tmp_path: Path) -> None:
    corpus, output = write_corpus(tmp_path / "a.parquet", TEXTS), tmp_path / "out"
    for most in (2, 5):
        with start_stub(corpus, output, 64, 0.05) as process:
            while len(list(output.glob("part-*.parquet"))) < most:
                assert process.poll() is None, "the job ended before it was killed"
            process.kill()
    num_before = len(list(output.glob("part-*.parquet")))
    times = {path: path.stat().st_mtime_ns for path in output.glob("part-*.parquet")}
    assert num_before < 16
    progress = stub_job(corpus, output, 64, 0.0)
    found = read_results(output)
    assert found["id"].to_pylist() == list(range(1000))
    assert np.array_equal(vectors_of(found), hashed(TEXTS))
    assert progress.num_rows == 1000 - 64 * num_before
    assert all(path.stat().st_mtime_ns == at for path, at in times.items()), "complete files are not written again"


def test_a_file_that_is_not_on_the_disk_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, output = write_corpus(tmp_path / "a.parquet", TEXTS), tmp_path / "out"

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(CorpusError, match=r"part-00000\.parquet cannot be written: No space left"):
            stub_job(corpus, output, 500, 0.0)
    assert list(output.glob("part-*.parquet")) == []
    stub_job(corpus, output, 500, 0.0)
    assert read_results(output)["id"].to_pylist() == list(range(1000))


class Picky:
    """Refuses a call with the text "bad"."""

    rows_per_call, num_calls = 4, 2
    closed = False

    def compute(self, rows: Sequence[Row]) -> Results:
        if ("bad",) in rows:
            raise InvalidInput("a bad text")
        return Results(hashed([text for (text,) in rows]), len(rows))

    def close(self) -> None:
        self.closed = True


def pick(tmp_path: Path, texts: Sequence[str | None], form: Any = "parquet") -> tuple[Progress, list[str]]:
    pq.write_table(pa.table({"id": range(len(texts)), "text": pa.array(texts, pa.string())}), tmp_path / "a.parquet")
    progress, told, worker = Progress(), list[str](), Picky()
    corpus = Corpus([tmp_path / "a.parquet"], ["text"])
    try:
        run(corpus, Folder(tmp_path / "out", form, 8, {}), worker, COLUMNS, progress, told.append)
    finally:
        assert worker.closed
    return progress, [each for each in told if each]


def test_a_row_without_a_result_gets_a_null_and_is_told(tmp_path: Path) -> None:
    texts = ["a", None, "b", "", "c", "d", "bad", "e", "f", "bad"]
    progress, told = pick(tmp_path, texts)
    table = read_results(tmp_path / "out")
    assert [row for row, vector in enumerate(table["embedding"].to_pylist()) if vector is None] == [1, 3, 6, 9]
    assert table["embedding"][7].as_py() == hashed(["e"])[0].tolist()
    assert table["id"].to_pylist() == list(range(10))
    assert (progress.num_rows, progress.num_faults) == (10, 4)
    assert told[0] == "row 1 has no result: it has no text"
    assert told[-1] == "row 9 has no result: a bad text"


def test_npy_has_the_vectors_and_no_nulls(tmp_path: Path) -> None:
    pick(tmp_path, list("abcdefghij"), "npy")
    assert np.array_equal(np.load(tmp_path / "out" / "part-00001.npy"), hashed(["i", "j"]))
    (tmp_path / "bad").mkdir()
    with pytest.raises(CorpusError, match="row 2 has no result, and npy has no nulls"):
        pick(tmp_path / "bad", ["a", "b", None], "npy")


def test_a_folder_takes_one_job_at_a_time(tmp_path: Path) -> None:
    job = {"model": "a", "corpus": {"a.parquet": "1 byte"}}
    first = Folder(tmp_path / "out", "parquet", 8, job)
    with pytest.raises(CorpusError, match="another process writes into"):
        Folder(tmp_path / "out", "parquet", 8, job)
    first.close()
    Folder(tmp_path / "out", "parquet", 8, job).close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "b"}, 'model was "a", and is "b" now'),
        ({"corpus": {"a.parquet": "2 bytes"}}, 'corpus: a.parquet was "1 byte", and is "2 bytes" now'),
        ({"dimensions": 8}, "dimensions was null, and is 8 now"),
    ],
)
def test_a_folder_keeps_the_results_of_one_job(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    job = {"model": "a", "corpus": {"a.parquet": "1 byte"}}
    Folder(tmp_path / "out", "parquet", 8, job).close()
    Folder(tmp_path / "out", "parquet", 8, job).close()
    with pytest.raises(CorpusError, match=words):
        Folder(tmp_path / "out", "parquet", 8, job | change)


@pytest.mark.slow
def test_the_command_gives_the_engines_vectors(tmp_path: Path, minilm: Path) -> None:
    write_corpus(tmp_path / "a.parquet", TEXTS[:40])
    engine = Engine.load(minilm)
    options = ["--dimensions", "64", "--prompt", "query: ", "--rows-per-file", "16"]
    for output_dtype in ("float", "int8"):
        arguments = ["embed", str(tmp_path / "a.parquet"), "-o", str(tmp_path / output_dtype), "-m", str(minilm), *options]
        result = CliRunner().invoke(cli, [*arguments, "--output-dtype", output_dtype], catch_exceptions=False)
        assert result.exit_code == 0
    table = read_results(tmp_path / "float")
    vectors = engine.embed([f"query: {text}" for text in TEXTS[:40]], dimensions=64)
    assert table.column_names == ["id", "embedding"]
    assert table["embedding"].type == pa.list_(pa.float32(), 64)
    assert np.allclose(vectors_of(table), vectors, atol=1e-6)
    assert read_results(tmp_path / "int8")["embedding"].type == pa.list_(pa.int8(), 64)


@pytest.mark.slow
def test_a_reranker_scores_each_text_for_its_query(tmp_path: Path, tiny: Callable[..., Path]) -> None:
    folder = tiny("bert_classifier", num_labels=1)
    pq.write_table(pa.table({"id": [7, 8], "text": ["a b", "c"], "q": ["a", "b"]}), tmp_path / "a.parquet")
    arguments = ["embed", str(tmp_path / "a.parquet"), "-o", str(tmp_path / "out"), "-m", str(folder), "--rerank", "q"]
    assert CliRunner().invoke(cli, arguments, catch_exceptions=False).exit_code == 0
    table = read_results(tmp_path / "out")
    engine = Engine.load(folder)
    worker = LocalWorker(str(folder), engine, Task(), ranks=True)
    scores = [worker.compute([row]).values[0] for row in (("a", "a b"), ("b", "c"))]
    worker.close()
    assert table.column_names == ["id", "score"]
    assert np.allclose(table["score"], scores, atol=1e-6)
    with pytest.raises(CorpusError, match="is a reranker: name the column"):
        LocalWorker(str(folder), engine, Task(), ranks=False)


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """The application's address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


class Gate:
    """A layer in front of the API. It records the priorities of requests, and answers the first `num_refused` with 503."""

    def __init__(self, app: ASGIApp, num_refused: int) -> None:
        self._app, self.num_refused, self.priorities = app, num_refused, set[bytes]()
        self.retry_after = b"0"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            self.priorities.add(dict(scope["headers"])[b"x-priority"])
            if self.num_refused:
                self.num_refused -= 1
                await send({"type": "http.response.start", "status": 503, "headers": [(b"retry-after", self.retry_after)]})
                return await send({"type": "http.response.body", "body": b"{}"})
        return await self._app(scope, receive, send)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path]) -> Tokenizer:
    folder = tiny("bert")
    return Tokenizer.load(folder, load_model_config(folder))


def test_another_process_gives_the_tokenizers_ids_and_errors(tokenizer: Tokenizer) -> None:
    process = TokenizerProcess(tokenizer)
    texts = [f"w{number} w{2 * number}" for number in range(9)]
    options = EncodeOptions(prompt="w1 ")
    found = process.encode([(text,) for text in texts], options)
    for ours, expected in zip(found, tokenizer.encode(texts, options), strict=True):
        assert np.array_equal(ours, expected)
    with pytest.raises(InvalidInput, match="input 1 does"):
        process.encode([("w1",), ("\0",)], EncodeOptions())
    assert len(process.encode([("w1",)], EncodeOptions())) == 1, "an error does not end the process"
    process._process.kill()
    with pytest.raises(CorpusError, match="the process that tokenises has ended; the same command resumes"):
        process.encode([("w1",)], EncodeOptions())
    process.close()


@pytest.mark.parametrize(
    ("lengths", "expected"), [([3, 3, 3, 9, 1], [[3, 3], [3], [9], [1]]), ([6, 1], [[6], [1]]), ([1, 2, 3], [[1, 2, 3]])]
)
def test_a_request_of_a_job_has_one_turn_of_the_queue(lengths: list[int], expected: list[list[int]]) -> None:
    sequences = [np.zeros(length, np.int32) for length in lengths]
    assert [[len(ids) for ids in part] for part in cut(sequences, 6)] == expected


def api(tokenizer: Tokenizer, kind: str) -> ASGIApp:
    app: ASGIApp = Api(FakeBackend(FakeModel(tokenizer, kind)), Settings(max_client_batch_size=8), Metrics("fake")).app
    return app


def test_a_server_computes_at_batch_priority(tokenizer: Tokenizer, tmp_path: Path) -> None:
    texts = [f"w{number}" for number in range(40)]
    write_corpus(tmp_path / "a.parquet", texts)
    gate = Gate(api(tokenizer, "embedding"), num_refused=3)
    with served(gate) as address:
        task = Task(dimensions=8, output_dtype="int8", prompt="w99 ")
        worker = RemoteWorker(address, None, "a key", 4, task, ranks=False)
        corpus, folder = Corpus([tmp_path / "a.parquet"], ["text"]), Folder(tmp_path / "out", "parquet", 16, {})
        run(corpus, folder, worker, COLUMNS, Progress(), print)
    found = read_results(tmp_path / "out")
    assert found["embedding"].type == pa.list_(pa.int8(), 8)
    assert found["id"].to_pylist() == list(range(40))
    sequences = tokenizer.encode(texts, EncodeOptions(prompt="w99 "))
    expected = np.stack([vector(ids, WIDTH, EmbedOptions(dimensions=8)) for ids in sequences])
    assert np.array_equal(vectors_of(found), quantize(expected, "int8", {}))
    assert gate.priorities == {b"batch"}
    assert gate.num_refused == 0
    assert (worker.model, worker.dtype, worker.rows_per_call) == ("fake", "float32", 8)


@pytest.mark.parametrize("form", ["parquet", "npy"])
def test_a_job_that_is_complete_has_as_many_rows_as_the_corpus(tokenizer: Tokenizer, tmp_path: Path, form: str) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\ntwo\nthree\nfour\nfive"))
    arguments = ["embed", str(tmp_path / "a.txt.gz"), "-o", str(tmp_path / "out"), "--rows-per-file", "3", "--format", form]
    with served(api(tokenizer, "embedding")) as address:
        results = [CliRunner().invoke(cli, [*arguments, "--url", address], catch_exceptions=False) for _ in range(2)]
        assert ["complete: 5 of 5 rows" in each.output for each in results] == [True, False]
        assert "already has 2 files" in results[1].output
        assert "complete: 5 rows" in results[1].output
        last = tmp_path / "out" / f"part-00001.{form}"
        last.write_bytes(b"")
        result = CliRunner().invoke(cli, [*arguments, "--url", address])
    assert f"{last} cannot be read" in str(result.exception)


def test_a_served_reranker_scores(tokenizer: Tokenizer) -> None:
    with served(api(tokenizer, "reranker")) as address:
        worker = RemoteWorker(address, None, None, 4, Task(), ranks=True)
        whole = worker.compute([("w1", "w2 w3"), ("w4", "w5")])
        assert whole.values[1] == worker.compute([("w4", "w5")]).values[0]
        assert whole.values[0] != whole.values[1]
        with pytest.raises(InvalidInput, match="NUL"):
            worker.compute([("a", "\0")])
        with pytest.raises(CorpusError, match="fake is a reranker"):
            RemoteWorker(address, None, None, 4, Task(), ranks=False)


def test_a_served_model_answers_each_text(tmp_path: Path) -> None:
    model = FakeGenerator(tmp_path, "an answer")
    with served(Api(FakeBackend(model), Settings(), Metrics("fake")).app) as address:  # type: ignore[arg-type]
        worker = RemoteWorker(address, None, None, 4, Task(prompt="is it so? ", max_tokens=20), ranks=False)
        results = worker.compute([("text",)])
    assert results.values.tolist() == ["an answer"]
    (stream,) = model.streams
    assert model.prompts.decode(stream.prompt) == "<user>is it so? text<a>"
    assert (stream.options.max_tokens, stream.options.temperature) == (20, 0.0)
    assert (worker.kind, worker.rows_per_call, results.num_tokens) == ("answer", 1, len(stream.prompt) + 9)


def test_a_generating_model_answers_each_text(tmp_path: Path, tiny: Callable[..., Path]) -> None:
    folder = folder_without_pooling(tiny, "llama_lm", tmp_path / "model")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    write_corpus(tmp_path / "a.parquet", ["one", "two", "three"])
    arguments = [
        "embed",
        str(tmp_path / "a.parquet"),
        "-o",
        str(tmp_path / "out"),
        "-m",
        str(folder),
        "--max-tokens",
        "5",
        "-p",
        "a ",
    ]
    assert CliRunner().invoke(cli, arguments, catch_exceptions=False).exit_code == 0
    engine = Engine.load(folder)
    assert engine.prompts is not None
    prompts = [engine.prompts.encode(f"a {text}") for text in ("one", "two", "three")]
    expected = engine.generate(prompts, SamplingOptions(max_tokens=5, temperature=0.0))
    texts = [engine.prompts.tokenizer.decode([token.id for token in each.tokens]) for each in expected]
    assert read_results(tmp_path / "out")["answer"].to_pylist() == texts


def test_a_date_in_retry_after_is_a_short_wait(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies send a date. The worker then waits as long as without the header."""
    gate = Gate(api(tokenizer, "embedding"), num_refused=1)
    gate.retry_after = b"Wed, 21 Oct 2026 07:28:00 GMT"
    waits: list[float] = []
    with served(gate) as address:
        worker = RemoteWorker(address, None, None, 4, Task(), ranks=False)
        monkeypatch.setattr(worker._stopping, "wait", waits.append)
        assert len(worker.compute([("w1",), ("w2",)]).values) == 2
    assert len(waits) == 1
    assert waits[0] > 0


@pytest.mark.parametrize(
    ("kind", "task", "option"),
    [
        ("score", Task(prompt="a"), "--prompt"),
        ("score", Task(output_dtype="int8"), "--output-dtype"),
        ("answer", Task(dimensions=8), "--dimensions"),
        ("answer", Task(input_type="query"), "--input-type"),
    ],
)
def test_an_option_that_a_job_does_not_use_is_refused(kind: Kind, task: Task, option: str) -> None:
    check_options(Task(), kind)
    with pytest.raises(CorpusError, match=f"^{option} is not used for the result '{kind}'"):
        check_options(task, kind)


@pytest.mark.parametrize("key", [None, "another"])
def test_a_server_that_wants_another_key_is_told(tokenizer: Tokenizer, key: str | None) -> None:
    served_api = Api(FakeBackend(FakeModel(tokenizer, "embedding")), Settings(api_key="the right one"), Metrics("fake")).app
    words = "/info answers 401: Unauthorized; give a valid key with --api-key or EMBERFORGE_API_KEY$"
    with served(served_api) as address, pytest.raises(CorpusError, match=words):
        RemoteWorker(address, None, key, 4, Task(), ranks=False)


@pytest.mark.parametrize("url", ["foo", "", "localhost:8000", "http://", "http://[::1", "file:///etc/hosts"])
def test_a_wrong_url_is_named(url: str) -> None:
    with pytest.raises(CorpusError, match=rf"^--url '{re.escape(url)}' is not the URL of a server"):
        RemoteWorker(url, None, None, 4, Task(), ranks=False)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"<html>", r"/info does not answer with JSON, so it is no emberforge server"),
        (b"[]", r"/info is not the answer of an emberforge server: it is no object"),
        (b'{"model_id": "a", "model_type": {}}', r"it has no `max_client_batch_size`"),
    ],
)
def test_a_server_of_another_kind_is_told(content: bytes, words: str) -> None:
    async def other(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": content})

    with served(other) as address, pytest.raises(CorpusError, match=words):
        RemoteWorker(address, None, None, 4, Task(), ranks=False)


def test_queries_and_texts_are_two_columns(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["embed", str(tmp_path), "-o", str(tmp_path / "out"), "--rerank", "text"])
    assert isinstance(result.exception, InvalidInput)
    assert "--rerank and --column are both 'text'" in str(result.exception)


def test_a_server_that_is_not_there_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    with pytest.raises(CorpusError, match="does not answer"):
        RemoteWorker(address, None, None, 4, Task(), ranks=False)
