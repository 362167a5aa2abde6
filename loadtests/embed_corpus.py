"""Measures `emberforge embed`: kills at random moments, its rate beside the engine's, and its memory.

A run takes ten minutes on two quiet cores.

python -m loadtests.embed_corpus
python -m loadtests.embed_corpus gpu    # only the rates, two minutes
"""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from engine.model_id import EMBEDDED_MODEL
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


def cpu_s() -> float:
    """Seconds of all cores that this process has used, and the processes that it has started and that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def rates(folder: Path, model: str | Path, texts: list[str], rounds: int, rows_per_file: int) -> list[dict[str, Any]]:
    """Compares the engine, with all texts queued at once, to a job. They take turns, because the machine may have other work.

    The engine alone gets texts on a CPU, and token ids on a GPU: there one thread that tokenises would be slower than the GPU.
    Neither time has the load of the model, nor the start of the process that tokenises.
    """
    from engine import Engine
    from engine.loop import EngineLoop
    from engine.options import EmbedOptions, EncodeOptions, TokenIds
    from engine.schedule.request import Request
    from serve_app.corpus.local import LocalWorker
    from serve_app.corpus.task import Task

    engine = Engine.load(model)
    corpus = write_corpus(folder / "rates.parquet", texts)
    parts = [texts[start : start + 64] for start in range(0, len(texts), 64)]

    def encode(part: list[str]) -> Sequence[TokenIds]:
        return engine.tokenizer.encode(part, EncodeOptions())

    ready = [encode(part) for part in parts] if engine.device.type == "cuda" else None

    def alone(num_parts: int = len(parts)) -> NDArray[np.float32]:
        loop = EngineLoop(engine, engine.max_batch_tokens, max_batch_seqs=engine.max_batch_seqs)
        jobs = []
        for sequences in islice(map(encode, parts) if ready is None else ready, num_parts):
            jobs.append(Request(sequences, EmbedOptions()))
            loop.submit(jobs[-1:])
        vectors = [job.future.result().vectors for job in jobs]
        loop.stop()
        return np.concatenate(vectors)

    def job(worker: LocalWorker, output: Path) -> None:
        files = Corpus([corpus], COLUMNS.texts)
        run(files, Folder(output, "parquet", rows_per_file, {}), worker, COLUMNS, Progress(), lambda _: None)

    engine.embed(texts[:512])
    alone(1 + len(parts) // 8)
    timed = []
    for number in range(rounds):
        worker = LocalWorker(str(model), engine, Task(), ranks=False)
        worker.compute([("a",)])
        start = perf_counter(), cpu_s()
        vectors = alone()
        middle = perf_counter(), cpu_s()
        job(worker, folder / f"rate-{number}")
        end = perf_counter(), cpu_s()
        found = vectors_of(read_results(folder / f"rate-{number}"))
        timed.append(
            {
                "engine alone, texts/s": len(texts) / (middle[0] - start[0]),
                "job, texts/s": len(texts) / (end[0] - middle[0]),
                "engine alone, CPU us a text": 1e6 * (middle[1] - start[1]) / len(texts),
                "job, CPU us a text": 1e6 * (end[1] - middle[1]) / len(texts),
                "lowest cosine of the two": float((vectors * found).sum(axis=1).min()),
            }
        )
    names = list(timed[0])
    best = {name: (min if "cosine" in name else median)(each[name] for each in timed) for name in names}
    shares = [median(each[job] / each[alone] for each in timed) for alone, job in (names[:2], names[2:4])]
    return [{"round": number, **each} for number, each in enumerate(timed)] + [
        {"round": "median", **best, "rate, job : alone": shares[0], "CPU, job : alone": shares[1]}
    ]


def add_tokenizer(folder: Path, pooling: str, hidden_size: int) -> None:
    """Copies the tokenizer of the embedded model into a model's folder, and writes the folder's pooling."""
    from engine.hub import resolve_model  # imports torch; the stub's process does not need it

    shutil.copyfile(resolve_model(EMBEDDED_MODEL) / "tokenizer.json", folder / "tokenizer.json")
    (folder / "1_Pooling").mkdir()
    modes = {"word_embedding_dimension": hidden_size, "pooling_mode": pooling}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))


def save_one_layer(folder: Path) -> None:
    """Saves an encoder of random weights. Its vectors are as wide as the embedded model's."""
    import torch
    import transformers

    config = transformers.BertConfig(hidden_size=384, num_hidden_layers=1, num_attention_heads=12, intermediate_size=384)
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    add_tokenizer(folder, "mean", 384)


def peak(model: Path, corpus: Path, output: Path, num_rows: int) -> dict[str, Any]:
    """Runs the command in a process of its own, and measures the peak of its memory."""
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
    from loadtests.report import write
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
        tables["Rate, all-MiniLM-L6-v2"] = rates(folder, EMBEDDED_MODEL, texts[:RATE_ROWS], ROUNDS, 2048)
    write("embed_corpus", "python -m loadtests.embed_corpus", tables)


def main_gpu() -> None:
    """The rates of a large and a small model, of random weights, with the tokenizer of the embedded model."""
    import torch
    import transformers

    from loadtests.checkpoints import PUBLISHED, Published, save
    from loadtests.report import write
    from loadtests.traces import ragged_texts, short_texts

    small = Published(
        transformers.BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536),
        transformers.BertModel,
        "mean",
    )
    workloads = {
        "Qwen3-Embedding-0.6B, texts of 80 words": (PUBLISHED["Qwen3-Embedding-0.6B"], ragged_texts(32_768, seed=1)),
        "all-MiniLM-L6-v2, short texts": (small, short_texts(200_000, seed=1)),
    }
    tables = {}
    for name, (published, texts) in workloads.items():
        with tempfile.TemporaryDirectory(prefix="ef-") as folder:
            model = Path(folder) / "model"
            save(published, model)
            add_tokenizer(model, "lasttoken" if published.pooling == "last_token" else "mean", published.config.hidden_size)
            tables[f"Rate, {name}"] = rates(Path(folder), model, texts, 2, 8192)
            print(name, *tables[f"Rate, {name}"], sep="\n", flush=True)
        torch.cuda.empty_cache()
    write("embed_corpus_gpu", "python -m loadtests.embed_corpus gpu", tables)


if __name__ == "__main__":
    if sys.argv[1:2] == ["stub"]:
        print("begins", flush=True)
        stub_job(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
    else:
        main_gpu() if sys.argv[1:2] == ["gpu"] else main()
