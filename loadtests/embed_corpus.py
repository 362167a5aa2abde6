"""`emberforge embed`: killed at random moments, against the engine alone, and its memory. Ten minutes on two quiet cores.

python -m loadtests.embed_corpus
"""

import hashlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, sleep
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from serve_app.corpus.files import Corpus
from serve_app.corpus.folder import Folder
from serve_app.corpus.job import Columns, Results, Row, run
from serve_app.corpus.progress import Progress

ROWS, SMALL = 200_000, 20_000
KILLS, ROUNDS, RATE_ROWS = 20, 3, 8192
COLUMNS = Columns(("text",), "embedding")


class StubWorker:
    """A worker that computes nothing: a vector is a hash of its text."""

    rows_per_call, num_calls = 64, 8

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s

    def compute(self, rows: Sequence[Row]) -> Results:
        sleep(self._pause_s)
        return Results(hashed([text for (text,) in rows]), len(rows))

    def close(self) -> None:
        pass


def hashed(texts: Sequence[str]) -> NDArray[np.float32]:
    """[n, 4]"""
    digests = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return np.frombuffer(digests, "<u2").astype(np.float32).reshape(-1, 4)


def stub_job(corpus: Path, output: Path, rows_per_file: int, pause_s: float) -> Progress:
    files = Corpus([corpus], COLUMNS.texts)
    folder = Folder(output, "parquet", rows_per_file, {"model": "stub", "corpus": files.fingerprint})
    progress = Progress(estimated_rows=files.estimated_rows)
    try:
        run(files, folder, StubWorker(pause_s), COLUMNS, progress, lambda _: None)
    finally:
        folder.close()
    return progress


def start_stub(corpus: Path, output: Path, rows_per_file: int, pause_s: float) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "loadtests.embed_corpus", "stub", corpus, output, str(rows_per_file), str(pause_s)]
    return subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE)


def write_corpus(path: Path, texts: Sequence[str], row_group: int = 50_000) -> Path:
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), path, row_group_size=row_group)
    return path


def read_results(output: Path) -> pa.Table:
    """All rows, in the order of the files' names."""
    return pa.concat_tables([pq.read_table(path) for path in sorted(output.glob("part-*.parquet"))])


def vectors_of(table: pa.Table) -> NDArray[Any]:
    column = table["embedding"].combine_chunks()
    return np.asarray(column.flatten()).reshape(len(column), -1)


def killed(corpus: Path, output: Path, texts: Sequence[str]) -> dict[str, Any]:
    """Kills a job at random moments, lets it end, and counts rows that are lost, double or wrong."""
    rng, kept = random.Random(0), []
    for _ in range(KILLS):
        process = start_stub(corpus, output, 2048, 0.05)
        assert process.stdout is not None
        process.stdout.readline()  # the job begins
        sleep(rng.uniform(0.0, 3.0))
        process.kill()
        process.wait()
        kept.append(len(list(output.glob("part-*.parquet"))))
    assert start_stub(corpus, output, 2048, 0.0).wait() == 0
    found = read_results(output)
    ids, expected = found["id"].to_numpy(), np.arange(len(texts))
    return {
        "rows": len(texts),
        "kills": KILLS,
        "files after each kill": " ".join(map(str, kept)),
        "rows lost": int(len(texts) - len(np.unique(ids))),
        "rows double": len(ids) - len(np.unique(ids)),
        "in order": bool(np.array_equal(ids, expected)),
        "vectors that differ": int((vectors_of(found) != hashed(texts)).any(axis=1).sum()) if len(found) == len(texts) else -1,
    }


def rates(folder: Path, texts: Sequence[str]) -> list[dict[str, Any]]:
    """The engine with all texts queued at once, tokenised as they go, and a job. In turns: the machine may have other work."""
    from engine import Engine
    from engine.hub import EMBEDDED_MODEL
    from engine.loop import EngineLoop
    from engine.options import EmbedOptions, EncodeOptions
    from engine.schedule.request import Request
    from serve_app.corpus.local import LocalWorker
    from serve_app.corpus.task import Task

    engine = Engine.load(EMBEDDED_MODEL)
    corpus = write_corpus(folder / "rates.parquet", texts)

    def alone() -> NDArray[np.float32]:
        loop = EngineLoop(engine, engine.max_batch_tokens, max_batch_seqs=engine.max_batch_seqs)
        jobs = []
        for start in range(0, len(texts), 64):
            jobs.append(Request(engine.tokenizer.encode(texts[start : start + 64], EncodeOptions()), EmbedOptions()))
            loop.submit(jobs[-1:])
        vectors = [job.future.result().vectors for job in jobs]
        loop.stop()
        return np.concatenate(vectors)

    def job(output: Path) -> None:
        files = Corpus([corpus], COLUMNS.texts)
        worker = LocalWorker(EMBEDDED_MODEL, engine, Task(), ranks=False)
        run(files, Folder(output, "parquet", 2048, {}), worker, COLUMNS, Progress(), lambda _: None)

    engine.embed(texts[:512])
    rounds = []
    for number in range(ROUNDS):
        start = perf_counter(), process_time()
        vectors = alone()
        middle = perf_counter(), process_time()
        job(folder / f"rate-{number}")
        end = perf_counter(), process_time()
        found = vectors_of(read_results(folder / f"rate-{number}"))
        rounds.append(
            {
                "engine alone, texts/s": len(texts) / (middle[0] - start[0]),
                "job, texts/s": len(texts) / (end[0] - middle[0]),
                "engine alone, CPU ms a text": 1e3 * (middle[1] - start[1]) / len(texts),
                "job, CPU ms a text": 1e3 * (end[1] - middle[1]) / len(texts),
                "lowest cosine of the two": float((vectors * found).sum(axis=1).min()),
            }
        )
    names = list(rounds[0])
    best = {name: (min if "cosine" in name else median)(each[name] for each in rounds) for name in names}
    shares = [median(each[job] / each[alone] for each in rounds) for alone, job in (names[:2], names[2:4])]
    return [{"round": number, **each} for number, each in enumerate(rounds)] + [
        {"round": "median", **best, "rate, job : alone": shares[0], "CPU, job : alone": shares[1]}
    ]


def save_one_layer(folder: Path) -> None:
    """An encoder of random weights with vectors as wide as the embedded model's, and that model's tokenizer."""
    import torch
    import transformers

    from engine.hub import EMBEDDED_MODEL, resolve_model

    config = transformers.BertConfig(hidden_size=384, num_hidden_layers=1, num_attention_heads=12, intermediate_size=384)
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    shutil.copyfile(resolve_model(EMBEDDED_MODEL) / "tokenizer.json", folder / "tokenizer.json")
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 384, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def peak(model: Path, corpus: Path, output: Path, num_rows: int) -> dict[str, Any]:
    """The command itself, in a process of its own."""
    code = (
        "import sys, resource; from serve_app.cli.commands import cli;"
        "cli(sys.argv[1:], standalone_mode=False);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    start = perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, "embed", corpus, "-m", model, "-o", output],
        cwd=Path(__file__).parents[1],
        check=True,
        stdout=subprocess.PIPE,
    )
    return {"rows": num_rows, "peak RSS, MiB": int(done.stdout) / 1024, "seconds, start included": perf_counter() - start}


def main() -> None:
    from loadtests.report import write  # imports torch, which a stub's process needs not
    from loadtests.traces import short_texts

    with tempfile.TemporaryDirectory(prefix="ef-") as name:
        folder = Path(name)
        texts = short_texts(ROWS, seed=1)
        large, small = write_corpus(folder / "large.parquet", texts), write_corpus(folder / "small.parquet", texts[:SMALL])
        tables = {"Killed at random moments, a stub for the engine": [killed(large, folder / "killed", texts)]}
        save_one_layer(folder / "model")
        tables["Memory, a model of one layer"] = [
            peak(folder / "model", small, folder / "s", SMALL),
            peak(folder / "model", large, folder / "l", ROWS),
        ]
        tables["Rate, all-MiniLM-L6-v2"] = rates(folder, texts[:RATE_ROWS])
    write("embed_corpus", "python -m loadtests.embed_corpus", tables)


if __name__ == "__main__":
    if sys.argv[1:2] == ["stub"]:
        print("begins", flush=True)
        stub_job(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
    else:
        main()
