"""Measures reranking, classification, sparse and hybrid vectors and late chunking on the CPU, beside other libraries.

All run in one process, with the same texts, in turns. The models have all-MiniLM-L6-v2's size and random weights.

python -m loadtests.tasks
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
import transformers
from sentence_transformers import CrossEncoder, SparseEncoder
from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling
from torch.nn import functional as F

from engine import Engine
from engine.hub import EMBEDDED_MODEL, resolve_model
from engine.loop import EngineLoop
from engine.options import EmbedOptions, EncodeOptions, TokenIds
from engine.schedule.request import Request
from loadtests.report import write
from loadtests.traces import ragged_texts, short_texts

ROUNDS = 5
THREADS = os.cpu_count() or 1
BATCH = 32  # the peers', their default
SHAPE = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536, "vocab_size": 30522}
CHUNK = 128
SCORES, PLAIN = EmbedOptions(normalize=False), EncodeOptions()

System = Callable[[list[str]], None]
Maker = Callable[[Path], dict[str, System]]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def save(model: Any, folder: Path, **files: dict[str, Any]) -> None:
    """Saves a model folder with the embedded model's tokenizer and these files."""
    model.save_pretrained(folder)
    source = resolve_model(EMBEDDED_MODEL)
    for path in source.glob("*token*"):
        shutil.copy(path, folder / path.name)
    shutil.copy(source / "vocab.txt", folder / "vocab.txt") if (source / "vocab.txt").exists() else None
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def in_batches(texts: Sequence[Any], run: Callable[[list[Any]], Any]) -> None:
    """Runs batches of similar lengths, the longest first, as sentence-transformers makes them."""
    ordered = sorted(texts, key=len, reverse=True)
    for start in range(0, len(ordered), BATCH):
        run(ordered[start : start + BATCH])


def engines(folder: Path, encode: Callable[[Engine, list[str]], Sequence[TokenIds]], options: EmbedOptions) -> dict[str, System]:
    def system(engine: Engine) -> System:
        def run(texts: list[str]) -> None:
            job = Request(encode(engine, texts), options)
            loop = EngineLoop(engine, engine.max_batch_tokens, THREADS)
            loop.submit([job])
            job.future.result()
            loop.stop()

        return run

    return {
        f"emberforge {name}": system(Engine.load(folder, dtype=dtype, num_threads=THREADS))
        for name, dtype in (("fp32", "float32"), ("bf16", "bfloat16"))
    }


def plain(engine: Engine, texts: list[str]) -> Sequence[TokenIds]:
    return engine.tokenizer.encode(texts, PLAIN)


def rerank(folder: Path) -> dict[str, System]:
    """The first text is the query."""
    save(transformers.BertForSequenceClassification(transformers.BertConfig(**SHAPE, num_labels=1)), folder)
    peers = {name: CrossEncoder(str(folder), device="cpu", model_kwargs={"dtype": dtype}) for name, dtype in _DTYPES.items()}

    def pairs(texts: list[str]) -> list[tuple[str, str]]:
        return [(texts[0], text) for text in texts[1:]]

    return {
        f"sentence-transformers {name}": lambda texts, peer=peer: peer.predict(pairs(texts), show_progress_bar=False)  # type: ignore[misc]
        for name, peer in peers.items()
    } | engines(folder, lambda engine, texts: engine.tokenizer.encode_pairs(pairs(texts), PLAIN), SCORES)


def predict(folder: Path) -> dict[str, System]:
    save(transformers.BertForSequenceClassification(transformers.BertConfig(**SHAPE, num_labels=3)), folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def peer(dtype: torch.dtype) -> System:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype).eval()

        @torch.inference_mode()
        def run(part: list[str]) -> None:
            model(**tokenizer(part, padding=True, truncation=True, return_tensors="pt")).logits.float().softmax(-1).numpy()

        return lambda texts: in_batches(texts, run)

    peers = {f"transformers {name}": peer(dtype) for name, dtype in _DTYPES.items()}
    return peers | engines(folder, plain, SCORES)


def sparse(folder: Path) -> dict[str, System]:
    save(transformers.BertForMaskedLM(transformers.BertConfig(**SHAPE)), folder / "body")

    def peer(dtype: torch.dtype) -> System:
        body = MLMTransformer(str(folder / "body"), model_kwargs={"dtype": dtype})
        model = SparseEncoder(modules=[body, SpladePooling("max")], device="cpu")
        if dtype == torch.float32:
            model.save_pretrained(str(folder / "splade"))
        return lambda texts: model.encode(texts, batch_size=BATCH, show_progress_bar=False)

    peers = {f"sentence-transformers {name}": peer(dtype) for name, dtype in _DTYPES.items()}
    return peers | engines(folder / "splade", plain, EmbedOptions(normalize=False, pooled=False, outputs=("sparse",)))


def hybrid(folder: Path) -> dict[str, System]:
    """BGE-M3's three outputs."""
    config = transformers.XLMRobertaConfig(**SHAPE, max_position_embeddings=514, pad_token_id=0, type_vocab_size=1)
    save(transformers.XLMRobertaModel(config), folder)
    heads = {
        name: torch.nn.Linear(SHAPE["hidden_size"], width) for name, width in (("sparse", 1), ("colbert", SHAPE["hidden_size"]))
    }
    for name, head in heads.items():
        torch.save(head.state_dict(), folder / f"{name}_linear.pt")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def peer(dtype: torch.dtype) -> System:
        model = transformers.XLMRobertaModel.from_pretrained(folder, dtype=dtype).eval()
        sparse_head, colbert_head = (
            torch.nn.Linear(each.in_features, each.out_features).to(dtype).eval() for each in heads.values()
        )

        @torch.inference_mode()
        def run(part: list[str]) -> None:
            inputs = tokenizer(part, padding=True, truncation=True, max_length=512, return_tensors="pt")
            hidden = model(**inputs).last_hidden_state
            F.normalize(hidden[:, 0], dim=-1).float().numpy()
            weights = torch.relu(sparse_head(hidden)).squeeze(-1).float().numpy()
            F.normalize(colbert_head(hidden[:, 1:]), dim=-1).float().numpy()
            for ids, row, mask in zip(inputs["input_ids"].numpy(), weights, inputs["attention_mask"].numpy(), strict=True):
                best: dict[int, float] = {}
                for token, weight in zip(ids[mask > 0], row[mask > 0], strict=True):
                    best[int(token)] = max(best.get(int(token), 0.0), float(weight))

        return lambda texts: in_batches(texts, run)

    peers = {f"transformers {name}": peer(dtype) for name, dtype in _DTYPES.items()}
    return peers | engines(folder, plain, EmbedOptions(outputs=("sparse", "colbert")))


def late(folder: Path) -> dict[str, System]:
    """Late chunking of texts of up to 2,048 tokens, with a vector for every 128 tokens."""
    config = transformers.BertConfig(**SHAPE, max_position_embeddings=2048)
    save(transformers.BertModel(config), folder, tokenizer_config={"model_max_length": 2048})
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, model_max_length=2048)

    def peer(dtype: torch.dtype) -> System:
        model = transformers.AutoModel.from_pretrained(folder, dtype=dtype).eval()

        @torch.inference_mode()
        def run(part: list[str]) -> None:
            inputs = tokenizer(part, padding=True, truncation=True, return_tensors="pt")
            hidden = model(**inputs).last_hidden_state
            for row, length in zip(hidden, inputs["attention_mask"].sum(1).tolist(), strict=True):
                spans = [row[start : min(start + CHUNK, length - 1)].mean(0) for start in range(1, length - 1, CHUNK)]
                F.normalize(torch.stack(spans), dim=-1).float().numpy()

        return lambda texts: in_batches(texts, run)

    def ours(engine: Engine) -> System:
        def run(texts: list[str]) -> None:
            cut = [engine.tokenizer.chunk(index, text, CHUNK, 0, 10_000, PLAIN) for index, text in enumerate(texts)]
            jobs = [Request([each.token_ids], EmbedOptions(pooled=False, outputs=("chunks",), spans=each.spans)) for each in cut]
            loop = EngineLoop(engine, engine.max_batch_tokens, THREADS)
            loop.submit(jobs)
            for job in jobs:
                job.future.result()
            loop.stop()

        return run

    peers = {f"transformers {name}": peer(dtype) for name, dtype in _DTYPES.items()}
    return peers | {
        f"emberforge {name}": ours(Engine.load(folder, dtype=dtype, num_threads=THREADS))
        for name, dtype in (("fp32", "float32"), ("bf16", "bfloat16"))
    }


def documents(seed: int) -> list[str]:
    """A query and 100 documents."""
    return short_texts(1, seed) + ragged_texts(100, seed)


def long_texts(seed: int) -> list[str]:
    return ragged_texts(16, seed, median_words=600)


TASKS: dict[str, tuple[Maker, Callable[[int], list[str]]]] = {
    "rerank, 1 query and 100 documents": (rerank, documents),
    "predict, 100 texts": (predict, lambda seed: ragged_texts(100, seed)),
    "sparse, 100 texts": (sparse, lambda seed: ragged_texts(100, seed)),
    "hybrid, 100 texts": (hybrid, lambda seed: ragged_texts(100, seed)),
    "late chunking, 16 long texts": (late, long_texts),
}


def measure(task: str, make: Maker, texts_of: Callable[[int], list[str]]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as path:
        systems = make(Path(path) / "model")
        seconds: dict[str, list[float]] = {name: [] for name in systems}
        for seed in range(ROUNDS + 1):
            texts = texts_of(seed)
            for name, run in systems.items():
                start = perf_counter()
                run(texts)
                if seed:  # the first round warms up
                    seconds[name].append(perf_counter() - start)
    base = {dtype: next(each for each in seconds if each.endswith(dtype)) for dtype in _DTYPES}
    return [
        {
            "task": task,
            "system": name,
            "ms a request": 1e3 * median(taken),
            "times the peer's speed in the same dtype": _ratio(seconds[base[name[-4:]]], taken),
            "times the peer's speed in fp32, its default": _ratio(seconds[base["fp32"]], taken),
        }
        for name, taken in seconds.items()
    ]


def _ratio(theirs: list[float], ours: list[float]) -> float:
    return float(np.median(np.array(theirs) / np.array(ours)))


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    rows = []
    for task, (make, texts_of) in TASKS.items():
        rows += measure(task, make, texts_of)
        print(*rows[-4:], sep="\n", flush=True)
    notes = [
        f"texts in, scores or vectors out, tokenised inside; lognormal, median 80 words, sigma 0.6 (late chunking: 600 words, a "
        f"vector of every {CHUNK} tokens); median of {ROUNDS} rounds of fresh texts, {THREADS} threads",
        f"peers sort by length and pad batches of {BATCH}, their default",
        "sparse: half of the work is the projection to 30,522 words, in one matrix product whoever computes it",
    ]
    write("tasks", "python -m loadtests.tasks", {"One request, all-MiniLM-L6-v2's size, random weights": rows}, notes)


if __name__ == "__main__":
    main()
