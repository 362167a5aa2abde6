"""Measures layers in 8 and 4 bits: vectors of all-MiniLM-L6-v2 beside float32, and the rates of BERT models.

Without a GPU only vectors with layers in 4 bits are measured. A CPU computes with the values to which the weights are rounded.

python -m loadtests.eight_bits
"""

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from engine import Engine, devices
from engine.devices import DtypeName
from engine.hub import EMBEDDED_MODEL
from engine.measure.engine_rates import mixed_lengths, through_the_loop
from loadtests.checkpoints import Published, save
from loadtests.engine import tokens_per_s
from loadtests.quantized import DEPTH, QUERIES, docstrings, nearest, recall
from loadtests.report import write

ON_A_GPU: tuple[DtypeName, ...] = ("bfloat16", "int8", "float8", "int4")
ON_A_CPU: tuple[DtypeName, ...] = ("bfloat16", "int4")
TIMED: tuple[DtypeName, ...] = ("bfloat16", "float8", "int8")
TOKENS, BUDGET, TURNS = 600_000, 16_384, 3
SHAPES = {  # hidden size, layers, heads
    "MiniLM, 6 layers": (384, 6, 12),
    "MiniLM, 12 layers": (384, 12, 12),
    "BERT, 8 layers of 512": (512, 8, 8),
    "BERT-base": (768, 12, 12),
    "BERT-large": (1024, 24, 16),
}


def closeness() -> list[dict[str, Any]]:
    texts = docstrings()
    whole = Engine.load(EMBEDDED_MODEL, dtype="float32").embed(texts)
    exact = nearest(whole)
    rows: list[dict[str, Any]] = []
    for dtype in ON_A_GPU if torch.cuda.is_available() else ON_A_CPU:
        vectors = Engine.load(EMBEDDED_MODEL, dtype=dtype).embed(texts)
        cosines = (whole * vectors).sum(axis=1)
        overlap = recall(exact, nearest(vectors))
        found = {"mean cosine": float(cosines.mean()), "least cosine": float(cosines.min()), f"top-{DEPTH} overlap": overlap}
        rows.append({"dtype": dtype} | {key: round(value, 5) for key, value in found.items()})
    return rows


def rates(name: str) -> dict[str, Any]:
    """Thousand tokens/s of random weights. The dtypes take turns."""
    size, layers, heads = SHAPES[name]
    config = transformers.BertConfig(
        hidden_size=size, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * size
    )
    lengths = mixed_lengths(TOKENS, seed=0, most=512)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path) / "model"
        save(Published(config, transformers.BertModel, "mean"), folder)
        engines = {each: Engine.load(folder, pooling="mean", dtype=each, max_batch_tokens=BUDGET) for each in TIMED}
    torch.cuda.set_per_process_memory_fraction(1.0)  # each engine has limited this process to its own needs
    found: dict[str, list[float]] = {dtype: [] for dtype in TIMED}
    for _ in range(TURNS):
        for dtype, engine in engines.items():
            rate = tokens_per_s(lambda texts: through_the_loop(engine, texts, BUDGET), lengths, rounds=1)  # noqa: B023
            found[dtype].append(rate / 1e3)
    row: dict[str, Any] = {"model": name} | {f"{dtype}, k tokens/s": median(found[dtype]) for dtype in TIMED}
    row |= {f"{dtype} / bfloat16": median(found[dtype]) / median(found["bfloat16"]) for dtype in TIMED[1:]}
    print(row, found, flush=True)
    return row


def main() -> None:
    has_gpu = torch.cuda.is_available()
    notes = [
        f"closeness: the texts are Python's docstrings, the first {QUERIES:,} of them the queries, the others what is searched",
        "overlap: share of a query's ten nearest in float32 that are among its ten nearest in the dtype, both sides in it",
    ]
    if not has_gpu:
        devices.LEAST_CAPABILITY.clear()  # otherwise a CPU refuses int4
        write("four_bits_cpu", "python -m loadtests.eight_bits", {"Beside float32": closeness()}, notes)
        return
    tables = {"Beside float32": closeness(), "BERT models": [rates(name) for name in SHAPES]}
    notes.append(
        f"BERT models: random weights, mixed texts of 8 to 512 tokens, {BUDGET:,} tokens a pass, token ids in, vectors out; "
        f"the dtypes take turns, medians of {TURNS}"
    )
    write("eight_bits", "python -m loadtests.eight_bits", tables, notes)


if __name__ == "__main__":
    main()
