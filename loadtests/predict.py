"""What other cards should reach, from what one H200 was measured at: predictions, to be replaced by measurements.

python -m loadtests.predict
"""

import json
from dataclasses import dataclass
from typing import Any

from loadtests.checkpoints import PUBLISHED
from loadtests.report import RESULTS, write

# An mma.sync attention reaches this share of the GEMM rate at best on Hopper, whose GEMMs use wgmma; elsewhere all of it.
HOPPER_MMA_SYNC = 0.62
H200_COPY = 4.24e12  # bytes/s, read and written
BESIDE_WEIGHTS = 2e9  # bytes: CUDA's context, a small batch, graphs


@dataclass(frozen=True, slots=True)
class Card:
    gemm: float  # bf16 FLOP/s, fp32 accumulation
    copy: float  # bytes/s, read and written
    memory: float  # bytes
    source: str


CARDS = {
    "GB10 (DGX Spark)": Card(92e12, 218e9, 119e9, "GEMM and copy as others measured them"),
    "RTX 5080 16 GB": Card(
        112e12, 0.9 * 960e9, 15.9 * 2**30, "NVIDIA's figures, dense with fp32 accumulation; 90 % of the bandwidth"
    ),
}


def rate(row: dict[str, Any], card: Card, gemm: float) -> float:
    """Tokens/s: each share of the H200's time, stretched by what bounds it."""
    seconds = row["GPU busy %"] / 100 / (row["k tokens/s"] * 1e3)
    stretch = {
        "GEMM %": gemm / card.gemm,
        "attention %": HOPPER_MMA_SYNC * gemm / card.gemm,
        "elementwise %": H200_COPY / card.copy,
    }
    return 1 / sum(seconds * row[share] / 100 * factor for share, factor in stretch.items())


def main() -> None:
    measured = json.loads((RESULTS / "engine.json").read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = []
    for row in measured["tables"]["Tokens/s"]:
        gemm = row["TFLOP/s"] * 1e12 / (row["% of GEMM"] / 100)
        published = PUBLISHED[row["model"]]
        weights, embeddings = 2 * published.body_parameters, 2 * published.config.vocab_size * published.config.hidden_size
        predicted = {"model": row["model"], "texts": row["texts"], "H200, measured: k tokens/s": row["k tokens/s"]}
        for name, card in CARDS.items():
            fits = weights + embeddings + BESIDE_WEIGHTS < card.memory
            predicted[f"{name}: k tokens/s"] = rate(row, card, gemm) / 1e3 if fits else "does not fit in bf16"
            predicted[f"{name}: ms at least, one query"] = 1e3 * weights / card.copy if fits else "-"
        rows.append(predicted)
    notes = [
        "PREDICTED, not measured, but for the H200's column; our kernels compile for these cards and have not run on them",
        "the H200's time a token, split into GEMM, attention and elementwise as its profile says, each part stretched by the "
        "ratio of GEMM rates, of mma.sync rates, of copy bandwidths; one query: the weights read once",
        *(f"{name}: {card.gemm / 1e12:.0f} TFLOP/s, {card.copy / 1e9:.0f} GB/s ({card.source})" for name, card in CARDS.items()),
    ]
    write("predicted", "python -m loadtests.predict", {"Predicted": rows}, notes)


if __name__ == "__main__":
    main()
