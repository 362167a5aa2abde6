"""Measures reranking on a GPU beside transformers, in the shape of Qwen3-Reranker-0.6B: requests of one query and 100 documents.

python -m loadtests.rerank
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
import transformers

from engine import Engine
from engine.loop import EngineLoop
from engine.options import EmbedOptions
from engine.schedule.request import Request
from loadtests import peers
from loadtests.checkpoints import save_random
from loadtests.peers import Ids, padded_batches
from loadtests.report import write
from loadtests.shared_prefix import documents, ids, use

MODEL = "Qwen3-Reranker-0.6B"
DOCUMENTS, QUERIES, ROUNDS = 100, 10, 5
BEFORE, AFTER = 64, 9  # tokens of the template before the query and after the document
SCORES = EmbedOptions(normalize=False)

Score = Callable[[Sequence[Ids]], Any]


def requests(seed: int, queries: int) -> list[list[Ids]]:
    """The documents of each query, in the template."""
    after = ids(np.random.default_rng(0), AFTER)
    texts = [np.concatenate((text, after)) for text in documents(seed, queries, DOCUMENTS, instruction=BEFORE)]
    return [texts[start : start + DOCUMENTS] for start in range(0, len(texts), DOCUMENTS)]


def ours(engine: Engine) -> Callable[[list[list[Ids]]], None]:
    def run(asked: list[list[Ids]]) -> None:
        loop = EngineLoop(engine, engine.max_batch_tokens)
        jobs = [Request(texts, SCORES) for texts in asked]
        loop.submit(jobs)
        for job in jobs:
            job.future.result()
        loop.stop()

    return run


def padded(model: Any, batch_size: int) -> Callable[[list[list[Ids]]], None]:
    """The code of the model card, with padding on the left, but sorted by length, and with logits of the last token only."""

    @torch.inference_mode()
    def run(asked: list[list[Ids]]) -> None:
        for texts in asked:
            for batch in padded_batches(texts, batch_size):
                logits = model(**batch, logits_to_keep=1).logits[:, -1]
                torch.log_softmax(logits[:, [4, 3]].float(), dim=-1)[:, 1].exp().cpu()

    return run


def packed(model: Any) -> Callable[[list[list[Ids]]], None]:
    """Without padding: torch's FlashAttention 2, 16,384 tokens per batch. Does not compute the logits of the two words."""
    encode = peers.packed(model, 16384)
    return lambda asked: encode([text for texts in asked for text in texts])


def seconds(run: Callable[[list[list[Ids]]], None], queries: int) -> float:
    """The median over rounds with new ids, after one round to warm up."""
    took = []
    for seed in range(ROUNDS + 1):
        asked = requests(seed, queries)
        torch.cuda.synchronize()
        start = perf_counter()
        run(asked)
        took.append(perf_counter() - start)
    return median(took[1:])


def main() -> None:
    rows: list[dict[str, Any]] = []

    def measure(name: str, run: Callable[[list[list[Ids]]], None]) -> None:
        one, many = seconds(run, 1), seconds(run, QUERIES)
        tokens = sum(len(text) for texts in requests(0, QUERIES) for text in texts)
        row = {"system": name, "one request, ms": 1e3 * one, f"{QUERIES} at once: documents/s": QUERIES * DOCUMENTS / many}
        rows.append(row | {"k tokens/s": tokens / many / 1e3})
        print(rows[-1], flush=True)

    with tempfile.TemporaryDirectory() as path:
        folder = Path(path) / "qwen3-reranker-0.6b"
        save_random(MODEL, folder)
        engine = Engine.load(folder)
        assert engine.config.task == "reranker"
        sharing = engine.packer
        measure("emberforge", ours(engine))
        use(engine, replace(sharing, shares_prefixes=False))
        measure("emberforge, each document with the query of its own", ours(engine))
        use(engine, sharing)
        torch.cuda.set_per_process_memory_fraction(1.0)  # the peers live in this process too
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="sdpa", device_map="cuda"
        ).eval()
        for size in (32, 100):
            measure(f"transformers SDPA, batches of {size}", padded(model, size))
        del model
        measure("transformers packed, FlashAttention 2", packed(peers.load(folder, "packed_fa2").eval()))
        asked = requests(99, 1)[0]
        loop_scores = engine.launch(asked, [SCORES] * len(asked)).wait().vectors[:, 0]
        alone = np.array([engine.launch([text], [SCORES]).wait().vectors[0, 0] for text in asked])
    best = min(row["one request, ms"] for row in rows if row["system"].startswith("transformers"))
    rate = f"{QUERIES} at once: documents/s"
    most = max(row[rate] for row in rows if row["system"].startswith("transformers"))
    for row in rows:
        row["times the best peer: one request"] = best / row["one request, ms"]
        row["times the best peer: documents/s"] = row[rate] / most
    notes = [
        f"bf16, random weights; {DOCUMENTS} documents of 50 to 400 tokens behind {BEFORE} tokens of template and 20 of query, "
        f"{AFTER} after; token ids in, scores out on the host; median of {ROUNDS} rounds of fresh ids",
        f"in company and with a shared prefix, a document's score differs from the one alone by at most "
        f"{float(np.abs(loop_scores - alone).max()):.3f} (logits of spread {float(alone.std()):.2f}), bf16's rounding",
    ]
    write("rerank", "python -m loadtests.rerank", {"One query, 100 documents": rows}, notes)


if __name__ == "__main__":
    main()
