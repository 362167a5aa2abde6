"""Measures the recall of int8 and binary vectors: all-MiniLM-L6-v2 on the docstrings of Python's standard library.

Recall is the share of a query's ten nearest texts by float32 that are also among its ten nearest by the type. As in vector
databases, integers are compared by cosine and bits by Hamming distance.

python -m loadtests.quantized
"""

import ast
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine import Engine
from loadtests.report import write
from serve_app.compute import quantize

QUERIES, DEPTH = 1_000, 10


def docstrings() -> list[str]:
    """The first paragraph of every docstring, each once, in random order."""
    texts: dict[str, None] = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        try:
            nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        except (SyntaxError, ValueError):
            continue
        for node in nodes:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = (ast.get_docstring(node) or "").split("\n\n")[0]
                if len(first) > 30:
                    texts[first] = None
    shuffled = list(texts)
    np.random.default_rng(0).shuffle(shuffled)
    return shuffled


def nearest(vectors: NDArray[Any], bits: bool = False) -> NDArray[np.intp]:
    """[QUERIES, DEPTH] rows of the texts nearest to each of the first texts."""
    wide = np.unpackbits(vectors, axis=1).astype(np.float32) * 2 - 1 if bits else vectors.astype(np.float32)
    wide /= np.linalg.norm(wide, axis=1, keepdims=True)
    return np.argsort(-(wide[:QUERIES] @ wide[QUERIES:].T), axis=1, kind="stable")[:, :DEPTH]


def recall(exact: NDArray[np.intp], found: NDArray[np.intp]) -> float:
    return float(np.mean([len(set(a) & set(b)) / DEPTH for a, b in zip(exact, found, strict=True)]))


def main() -> None:
    texts = docstrings()
    whole = Engine.load("all-MiniLM-L6-v2", dtype="float32").embed(texts)
    rows = []
    for dimensions in (384, 128):
        vectors = np.ascontiguousarray(whole[:, :dimensions])
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        exact = nearest(vectors)
        corpus = vectors[QUERIES:]
        ranges = np.stack([corpus.min(axis=0), corpus.max(axis=0)])
        row: dict[str, Any] = {"dimensions": dimensions}
        row["int8, the default range"] = recall(exact, nearest(quantize.quantize(vectors, "int8", {})))
        for reach in (1.0, 0.1):
            fixed = np.tile(np.float32([[-reach], [reach]]), dimensions)
            row[f"int8, ±{reach:g}"] = recall(exact, nearest(quantize.quantize(vectors, "int8", {dimensions: fixed})))
        row["int8, calibrated"] = recall(exact, nearest(quantize.quantize(vectors, "int8", {dimensions: ranges})))
        row["uint8, the default range"] = recall(exact, nearest(quantize.quantize(vectors, "uint8", {})))
        row["binary"] = recall(exact, nearest(quantize.quantize(vectors, "ubinary", {}), bits=True))
        row["largest component, in 1 / sqrt(dimensions)"] = float(np.abs(vectors).max() * dimensions**0.5)
        rows.append(row)
    note = f"{len(texts) - QUERIES:,} texts, {QUERIES:,} queries, recall of the nearest {DEPTH}"
    write("quantized", "python -m loadtests.quantized", {"recall": rows}, [note])


if __name__ == "__main__":
    main()
