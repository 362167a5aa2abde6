"""Measures the accuracy of layers in 8 bits on a GPU: vectors of all-MiniLM-L6-v2 beside float32, for Python's docstrings.

python -m loadtests.eight_bits
"""

from typing import Any

from engine import Engine
from engine.devices import DtypeName
from engine.hub import EMBEDDED_MODEL
from loadtests.quantized import DEPTH, QUERIES, docstrings, nearest, recall
from loadtests.report import write

DTYPES: tuple[DtypeName, ...] = ("bfloat16", "int8", "float8")


def main() -> None:
    texts = docstrings()
    whole = Engine.load(EMBEDDED_MODEL, dtype="float32").embed(texts)
    exact = nearest(whole)
    rows: list[dict[str, Any]] = []
    for dtype in DTYPES:
        vectors = Engine.load(EMBEDDED_MODEL, dtype=dtype).embed(texts)
        cosines = (whole * vectors).sum(axis=1)
        overlap = recall(exact, nearest(vectors))
        found = {"mean cosine": float(cosines.mean()), "least cosine": float(cosines.min()), f"top-{DEPTH} overlap": overlap}
        rows.append({"dtype": dtype} | {key: round(value, 5) for key, value in found.items()})
    notes = [
        f"{len(texts):,} texts, the first {QUERIES:,} of them the queries, the others what is searched",
        "overlap: share of a query's ten nearest in float32 that are among its ten nearest in the dtype, both sides in it",
    ]
    write("eight_bits", "python -m loadtests.eight_bits", {"Beside float32": rows}, notes)


if __name__ == "__main__":
    main()
