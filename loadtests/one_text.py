"""Measures the CPU time to tokenise one text of 100 tokens, with each method of the library and with the word table.

python -m loadtests.one_text
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import cycle
from statistics import median
from time import process_time, thread_time
from typing import Any

from engine.hub import EMBEDDED_MODEL, resolve_model
from engine.model.folder import load_model_config
from engine.options import EncodeOptions
from engine.text.tokenizer import Tokenizer
from engine.text.word_table import WordTable
from loadtests.report import write
from loadtests.traces import words

# Environments that keep the library from using several threads for one text.
ENVIRONMENTS: dict[str, dict[str, str]] = {
    "as it is": {},
    "TOKENIZERS_PARALLELISM=0": {"TOKENIZERS_PARALLELISM": "0"},
    "RAYON_NUM_THREADS=1": {"RAYON_NUM_THREADS": "1"},
}
ROUNDS, TEXTS, WORDS = 9, 400, 98


def measure(environment: str) -> list[dict[str, Any]]:
    folder = resolve_model(EMBEDDED_MODEL)
    ours = Tokenizer.load(folder, load_model_config(folder))
    library, table, options = ours.shared, WordTable.of(ours.shared), EncodeOptions()
    assert table is not None
    vocabulary, draw = words()[:8000], random.Random(0)
    texts = [" ".join(draw.choices(vocabulary, k=WORDS)) for _ in range(TEXTS)]
    ways: dict[str, Callable[[str], object]] = {
        "encode": lambda text: library.encode(text, add_special_tokens=False).ids,
        "encode_batch": lambda text: library.encode_batch([text], add_special_tokens=False)[0].ids,
        "encode_batch_fast": lambda text: library.encode_batch_fast([text], add_special_tokens=False)[0].ids,
        "word table": lambda text: table.ids([text]),
        "Tokenizer.encode": lambda text: ours.encode([text], options),
        "a loop of 10,000 additions": lambda _: spin(),
    }
    return [{"environment": environment, "way": name} | _us(way, texts) for name, way in ways.items()]


def _us(way: Callable[[str], object], texts: list[str]) -> dict[str, float]:
    """CPU microseconds of a call, for the calling thread and for all threads. The first round warms up."""
    given, rounds = cycle(texts), []
    for _ in range(ROUNDS):
        thread, process = thread_time(), process_time()
        for _ in range(len(texts)):
            way(next(given))
        rounds.append(((thread_time() - thread) / len(texts) * 1e6, (process_time() - process) / len(texts) * 1e6))
    of_thread, of_process = zip(*rounds[1:], strict=True)
    return {"us of the thread": median(of_thread), "us of all threads": median(of_process), "least": min(of_process)}


def spin() -> int:
    total = 0
    for each in range(10_000):
        total += each
    return total


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
        raise SystemExit
    rows = []
    for name, environment in ENVIRONMENTS.items():
        command = [sys.executable, "-m", "loadtests.one_text", name]
        rows += json.loads(
            subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, check=True, text=True).stdout
        )
    notes = [
        f"the embedded model's tokenizer; texts of {WORDS} words of its vocabulary; medians of {ROUNDS - 1} rounds of {TEXTS}"
    ]
    write("one_text", "python -m loadtests.one_text", {"One text of 100 tokens": rows}, notes)
