"""Measures the accuracy of layers in 8 and 4 bits: vectors of all-MiniLM-L6-v2 beside float32, for Python's docstrings.

Without a GPU only layers in 4 bits are measured. A CPU computes with the values to which the weights are rounded.

python -m loadtests.eight_bits
"""

from typing import Any

import torch

from engine import Engine, devices
from engine.devices import DtypeName
from engine.hub import EMBEDDED_MODEL
from loadtests.quantized import DEPTH, QUERIES, docstrings, nearest, recall
from loadtests.report import write

ON_A_GPU: tuple[DtypeName, ...] = ("bfloat16", "int8", "float8", "int4")
ON_A_CPU: tuple[DtypeName, ...] = ("bfloat16", "int4")


def main() -> None:
    texts = docstrings()
    whole = Engine.load(EMBEDDED_MODEL, dtype="float32").embed(texts)
    exact = nearest(whole)
    rows: list[dict[str, Any]] = []
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        devices.LEAST_CAPABILITY.clear()  # otherwise a CPU refuses int4
    for dtype in ON_A_GPU if has_gpu else ON_A_CPU:
        vectors = Engine.load(EMBEDDED_MODEL, dtype=dtype).embed(texts)
        cosines = (whole * vectors).sum(axis=1)
        overlap = recall(exact, nearest(vectors))
        found = {"mean cosine": float(cosines.mean()), "least cosine": float(cosines.min()), f"top-{DEPTH} overlap": overlap}
        rows.append({"dtype": dtype} | {key: round(value, 5) for key, value in found.items()})
    notes = [
        f"{len(texts):,} texts, the first {QUERIES:,} of them the queries, the others what is searched",
        "overlap: share of a query's ten nearest in float32 that are among its ten nearest in the dtype, both sides in it",
    ]
    write("eight_bits" if has_gpu else "four_bits_cpu", "python -m loadtests.eight_bits", {"Beside float32": rows}, notes)


if __name__ == "__main__":
    main()
