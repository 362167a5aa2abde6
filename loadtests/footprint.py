"""Compares the memory that `engine/model/footprint.py` estimates for a replica with what torch and NVML report after work.

python -m loadtests.footprint [MODEL ...]
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pynvml
import torch

from engine import Engine
from engine.devices import DtypeName
from engine.measure.engine_rates import sequences, through_the_loop
from engine.model.footprint import footprint
from loadtests.checkpoints import PUBLISHED, save_random
from loadtests.report import write
from loadtests.traces import mixed_lengths

BUDGETS: dict[DtypeName, tuple[int, ...]] = {
    "bfloat16": (2048, 16384, 65536),  # 65536 is more than the longest input of each model
    "float8": (16384,),
    "int8": (16384,),
}
MIB = 1 << 20


def main(names: list[str]) -> None:
    rows = []
    for name in names:
        with tempfile.TemporaryDirectory() as path:
            folder = Path(path) / name
            published = save_random(name, folder)
            torch.cuda.empty_cache()
            for dtype, budgets in BUDGETS.items():
                for budget in budgets:
                    found = in_a_process(folder, published.pooling, dtype, budget, None)
                    rows.append({"model": name, "dtype": dtype, "token budget": budget} | found)
                    print(rows[-1], flush=True)
    notes = [
        "random weights at the real shapes; each engine in a process of its own, after texts of every length up to the "
        "model's longest",
        "graphs up to: where they were found to pay in that process; the estimate has them as large as they may be",
        "reserved: torch.cuda.memory_reserved(); on the card: by NVML, the context included; MiB",
    ]
    whole = set(names) == set(PUBLISHED)
    command = " ".join(["python -m loadtests.footprint", *([] if whole else names)])
    write("footprint" if whole else "footprint_part", command, {"Estimated and reported": rows}, notes)


def in_a_process(folder: Path, pooling: str, dtype: DtypeName, budget: int, longest: int | None) -> dict[str, Any]:
    """Runs `measure` in a new process. `longest`: the longest input in tokens; None for the model's limit."""
    arguments = [str(folder), pooling, dtype, str(budget), str(longest or 0)]
    command = [sys.executable, "-m", "loadtests.footprint", "--one", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(folder: Path, pooling: Any, dtype: Any, budget: int, longest_input: int | None) -> dict[str, Any]:
    before = card_used_bytes()
    engine = Engine.load(folder, pooling=pooling, dtype=dtype, max_batch_tokens=budget, max_input_tokens=longest_input)
    longest = engine.config.max_input_length
    for lengths in (mixed_lengths(200_000, seed=0, most=min(2048, longest)), [32] * 3000, [7] * 9000, list(range(1, 400))):
        through_the_loop(engine, sequences(lengths, 1))
    for length in (*range(1, min(600, longest), 37), longest):
        through_the_loop(engine, sequences([length], 2))
    reserved = torch.cuda.memory_reserved()
    on_card = card_used_bytes() - before
    assert engine.longest_input == longest, "a shorter input is all that fits"
    estimate = footprint(engine.config, engine.dtype, "gpu", budget)
    return {
        "graphs up to, tokens": engine.max_graph_tokens,
        "weights": estimate.weights / MIB,
        "workspace": estimate.workspace / MIB,
        "graphs": estimate.graphs / MIB,
        "estimated reserved": estimate.reserved / MIB,
        "reserved": reserved / MIB,
        "estimate / reserved": estimate.reserved / reserved,
        "estimated total": estimate.total / MIB,
        "on the card": on_card / MIB,
        "estimate / on the card": estimate.total / on_card,
    }


def card_used_bytes() -> int:
    """Returns the bytes in use on the first card, by all processes. This creates no CUDA context."""
    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        given = sys.argv[2:]
        print(json.dumps(measure(Path(given[0]), given[1], given[2], int(given[3]), int(given[4]) or None)))
    else:
        main(sys.argv[1:] or list(PUBLISHED))
