"""Measures a model on one GPU, and in two processes with a GPU each. On two nodes a network is between such processes.

python -m loadtests.ring [MODEL ...]

Each engine has a process of its own, one after the other. Needs two GPUs.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from engine import Engine
from engine.options import SamplingOptions
from loadtests.checkpoints import save
from loadtests.generate import CACHE_TOKENS, MODELS, TEMPERATURES, Measured
from loadtests.later_stages import spawned
from loadtests.report import write
from serve_app.garbage import collect_seldom

STREAMS = (1, 8, 64, 256)
PROMPT, SHORT, LONG = 128, 32, 128  # tokens of a prompt, and of the answers of the two runs whose difference is decode


def rates(engine: Engine) -> dict[str, float]:
    """Tokens/s of decode by the number of streams, and of a whole run."""
    measured, found = Measured(engine), {}
    for count in STREAMS:
        given = measured.prompts(count, PROMPT)
        seconds = {}
        for most in (SHORT, SHORT, LONG, SHORT, LONG):  # the first run captures graphs and fills the cache
            start = perf_counter()
            measured.run(given, [SamplingOptions(most, 0.0)] * count)
            seconds[most] = perf_counter() - start
        found[str(count)] = count * (LONG - SHORT) / (seconds[LONG] - seconds[SHORT])
    measured.whole_run(TEMPERATURES["0.6"])  # other prompts, so those of the next run are not in the cache
    tokens, whole_s = measured.whole_run(TEMPERATURES["0"])
    measured.stop()
    return found | {"whole run": tokens / whole_s}


def measure(folder: Path, is_ring: bool) -> dict[str, Any]:
    collect_seldom()  # as a replica does
    with spawned(*["cuda:1"] * is_ring) as later:
        engine = Engine.load(folder, dtype="bfloat16", device="cuda:0", cache_tokens=CACHE_TOKENS, speculate=False, later=later)
        found = {"rates": rates(engine), "layers": [len(engine.stages[0].config.layers), *(len(each.layers) for each in later)]}
        engine.close()
    return found


def in_a_process(folder: Path, is_ring: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "loadtests.ring", "--one", str(folder), str(int(is_ring))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(name: str) -> list[dict[str, Any]]:
    """The rows of one model."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        save(MODELS[name], Path(path))
        alone, ring = (in_a_process(Path(path), is_ring) for is_ring in (False, True))
    return [
        {
            "model": name,
            "layers": " + ".join(map(str, ring["layers"])),
            "streams": case,
            "one GPU, tokens/s": alone["rates"][case],
            "two processes, tokens/s": ring["rates"][case],
            "two processes / one GPU": ring["rates"][case] / alone["rates"][case],
        }
        for case in alone["rates"]
    ]


def main(names: Sequence[str]) -> None:
    rows = [row for name in names for row in measured(name)]
    notes = [
        f"random weights, bf16, a cache of {CACHE_TOKENS:,} tokens",
        f"{torch.cuda.device_count()} GPUs of one host; the processes exchange everything over gloo, through the host's memory",
        f"decode: prompts of {PROMPT} tokens; the difference between answers of {LONG} and of {SHORT} tokens",
        "whole run: as in loadtests.generate, greedy",
    ]
    write("ring", f"python -m loadtests.ring {' '.join(names)}", {"Tokens/s": rows}, notes)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(Path(sys.argv[2]), sys.argv[3] == "1")))
    elif torch.cuda.device_count() < 2:
        sys.exit("this benchmark needs two GPUs")
    else:
        main(sys.argv[1:] or ["Qwen3-4B", "Qwen3-8B"])
