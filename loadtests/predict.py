"""Makes the planner's table, cluster/throughput.json, from the rates of mixed texts in engine.json; predicts other cards' rates.

Also compares the planner's rates of models that generate with generate.json of an H200, and with published rates of other cards.

python -m loadtests.predict
"""

import json
from dataclasses import asdict, replace
from typing import Any

import torch

from cluster.catalogue import CATALOGUE, hub_id
from cluster.generation import decode_tokens_per_s, prefill_tokens_per_s
from cluster.nodes import GIB, Card, Node
from cluster.throughput import TABLE_FILE, Measured, Table, card_speed, predicted_tokens_per_s, speed_of
from engine.codes import Form
from engine.devices import DTYPES
from engine.model.config import ModelConfig
from engine.model.footprint import MemoryKind, body_parameters, footprint, num_quantized
from engine.model.quantized.scheme import Gguf
from loadtests.generate import BATCHES, PREFILL
from loadtests.packed_models import CONTEXT, PUBLISHED, TOKENS
from loadtests.report import RESULTS, write

BODIES = {"BERT-base": "BAAI/bge-base-en-v1.5"}  # published models with the same layers as the measured ones
GB10 = Node("spark", "arm64", 121 * GIB, 20, (Card("NVIDIA GB10", 121 * GIB, unified=True),))
RTX_5080 = Node("pc", "amd64", 64 * GIB, 8, (Card("NVIDIA GeForce RTX 5080", int(15.9 * GIB)),))
NODES = {"GB10 (DGX Spark)": GB10, "RTX 5080 16 GB": RTX_5080}
SOURCES = {
    "GB10 (DGX Spark)": "GEMM and copy as others measured them",
    "RTX 5080 16 GB": "NVIDIA's figures, dense with fp32 accumulation; 90 % of the bandwidth",
}
H200 = Node("h200", "amd64", 512 * GIB, 16, (Card("NVIDIA H200", 140 * GIB),))
# Published decode tokens/s of one stream in bf16, of other engines. For an RTX 5080 and an L40S there are no figures of a model
# without experts, so figures of similar cards stand for them.
PUBLISHED_DECODE = (
    ("NVIDIA GB10", "Qwen/Qwen3-8B", "vLLM", 13.1),
    ("NVIDIA GB10", "Qwen/Qwen3-32B", "vLLM", 3.7),
    ("NVIDIA GeForce RTX 5080", "Qwen/Qwen3-4B", "-", None),
    ("NVIDIA GeForce RTX 5070 Ti", "Qwen/Qwen3-4B", "pegainfer", 81.0),
    ("NVIDIA GeForce RTX 5090", "Qwen/Qwen3-4B", "pegainfer", 172.0),
    ("NVIDIA GeForce RTX 5090", "Qwen/Qwen3-8B", "vLLM", 86.0),
    ("NVIDIA GeForce RTX 4090", "Qwen/Qwen3-4B", "pegainfer", 97.0),
    ("NVIDIA GeForce RTX 4090", "Qwen/Qwen3-8B", "vLLM", 58.7),
    ("NVIDIA L40S", "Qwen/Qwen3-8B", "-", None),
)
_PUBLISHED_LENGTH = 512  # tokens of the stream; most sources do not name the length
# Cards on which the engine was not measured. The last three check the method, because rates of other engines are published.
CARDS_THAT_GENERATE = {
    "GB10 (DGX Spark)": GB10,
    "RTX 5080 16 GB": RTX_5080,
    "RTX 4090 24 GB": Node("pc", "amd64", 64 * GIB, 8, (Card("NVIDIA GeForce RTX 4090", int(23.5 * GIB)),)),
    "RTX 5090 32 GB": Node("pc", "amd64", 64 * GIB, 8, (Card("NVIDIA GeForce RTX 5090", int(31.4 * GIB)),)),
    "L40S 48 GB": Node("server", "amd64", 256 * GIB, 16, (Card("NVIDIA L40S", int(44.4 * GIB)),)),
}
GENERATORS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-14B", "Qwen/Qwen3-32B")
GENERATING_STREAMS, GENERATING_PROMPT = (1, 8, 64), 2048


def generated(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Each rate of generate.json beside the planner's for an H200."""
    rows = []
    for row in results["tables"]["Decode"]:
        length = row["prompts of"] + BATCHES[row["streams"]] // 2
        rate = decode_tokens_per_s(CATALOGUE[f"Qwen/{row['model']}"], torch.bfloat16, H200, row["streams"], length)
        what = f"decode behind {row['prompts of']}, temperature {row['temperature']}"
        rows.append(_compared(row["model"], what, row["streams"], row["tokens/s"], rate))
    for row in results["tables"]["Prompts"]:
        rate = prefill_tokens_per_s(CATALOGUE[f"Qwen/{row['model']}"], torch.bfloat16, H200, PREFILL)
        rows.append(_compared(row["model"], f"prefill of {PREFILL}", 1, row[f"prefill of {PREFILL}, tokens/s"], rate))
    return rows


def in_codes(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Each decode rate of packed_models.json of a published form beside the planner's for an H200."""
    rows = []
    for title, measured in results["tables"].items():
        model = title.removesuffix(", random weights")
        for row in measured:
            form = next((form for form in PUBLISHED.values() if row["layers"].startswith(f"{form}, as")), None)
            if form is not None:
                config = _with_form(CATALOGUE[model], form)
                for streams, tokens in TOKENS.items():
                    rate = decode_tokens_per_s(config, torch.bfloat16, H200, streams, CONTEXT + tokens // 2)
                    rows.append(_compared(model, row["layers"], streams, row[f"{streams} streams, tokens/s"], rate))
    return rows


def _with_form(config: ModelConfig, form: Form) -> ModelConfig:
    """The model with all matrices of its layers in this form."""
    values = num_quantized(config)
    layers = tuple(((form, values // config.n_layers),) for _ in range(config.n_layers))
    return replace(config, quantization=Gguf((str(form),), values, layers))


def _compared(model: str, what: str, streams: int, measured_rate: float, rate: float) -> dict[str, Any]:
    found = {"model": model, "what": what, "streams": streams, "measured tokens/s": measured_rate, "planner's": rate}
    return found | {"planner's / measured": rate / measured_rate}


def elsewhere() -> list[dict[str, Any]]:
    """The planner's decode and prefill rates on cards that we have not measured, of the models that fit in bf16."""
    rows = []
    for card, node in CARDS_THAT_GENERATE.items():
        kind: MemoryKind = "unified" if node.cards[0].unified else "gpu"
        for model in GENERATORS:
            config = CATALOGUE[model]
            needs = footprint(config, torch.bfloat16, kind, cache_tokens=_PUBLISHED_LENGTH)
            if needs.total > node.usable_bytes:
                continue
            row = {"card": card, "model": model.removeprefix("Qwen/")}
            for streams in GENERATING_STREAMS:
                fits = needs.total + (streams - 1) * needs.cache <= node.usable_bytes
                rate = decode_tokens_per_s(config, torch.bfloat16, node, streams, _PUBLISHED_LENGTH)
                row[f"decode of {streams}, tokens/s"] = rate if fits else "does not fit"
            prefill = prefill_tokens_per_s(config, torch.bfloat16, node, GENERATING_PROMPT)
            weights = 2 * (body_parameters(config) + config.vocab_size * config.hidden_size)
            row[f"prefill of {GENERATING_PROMPT:,}, tokens/s"] = prefill
            row["weights over the bandwidth, ms"] = 1e3 * weights / speed_of(node).copy
            rows.append(row)
    return rows


def published() -> list[dict[str, Any]]:
    """The planner's decode rates beside those of other engines, on cards that we have not measured."""
    rows = []
    for name, model, engine, theirs in PUBLISHED_DECODE:
        node = Node("n", "amd64", 64 * GIB, 8, (Card(name, 32 * GIB),))
        rate = decode_tokens_per_s(CATALOGUE[model], torch.bfloat16, node, 1, _PUBLISHED_LENGTH)
        found = {"card": name.removeprefix("NVIDIA "), "model": model.removeprefix("Qwen/"), "planner's tokens/s": rate}
        rows.append(found | {"engine": engine, "theirs": theirs or "-", "planner's / theirs": rate / theirs if theirs else "-"})
    return rows


def measured(rows: list[dict[str, Any]]) -> list[Measured]:
    """The rows of engine.json's table of tokens/s."""
    return [_measured(row, _gemm_flops(row["model"], rows)) for row in rows]


def table_of(results: dict[str, Any]) -> Table:
    """The planner's table: the rates of engine.json for texts of mixed lengths."""
    rows = results["tables"]["Tokens/s"]
    mixed = [each for each, row in zip(measured(rows), rows, strict=True) if row["texts"] == "mixed"]
    card = results["machine"]["gpu"].split(", ")[0]  # one of several rows, which are all alike
    return Table(card, tuple(mixed))


def main() -> None:
    results = json.loads((RESULTS / "engine.json").read_text(encoding="utf-8"))
    table = table_of(results)
    content = {"command": "python -m loadtests.predict"} | asdict(table)
    TABLE_FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    rows = results["tables"]["Tokens/s"]
    predicted = [_predicted(row, each, table.card) for row, each in zip(rows, measured(rows), strict=True)]
    speeds = {name: speed_of(node) for name, node in NODES.items()}
    notes = [
        "PREDICTED, not measured, but for the H200's column; our kernels compile for these cards and have not run on them",
        "the H200's time a token, split into GEMM, attention and elementwise as its profile says, each part stretched by the "
        "ratio of GEMM rates, of attention's instructions' rates, of copy bandwidths (cluster/throughput.py, which the planner "
        "goes by too); one query: the weights read once",
        *(
            f"{name}: {speed.gemm / 1e12:.0f} TFLOP/s, twice that in 8 bits, {speed.copy / 1e9:.0f} GB/s ({SOURCES[name]})"
            for name, speed in speeds.items()
        ),
    ]
    notes += [
        "models that generate: cluster/generation.py, which the planner goes by; its constants are fitted to the H200's figures, "
        "so the table shows how well one formula fits them, and does not test a prediction",
        f"cards that we have not measured: bf16, streams of {_PUBLISHED_LENGTH} tokens, the same formula with each card's GEMM "
        "rate and bandwidth; the models that fit",
        *(
            f"{name}: {speed_of(node).gemm / 1e12:.0f} TFLOP/s, {speed_of(node).copy / 1e9:.0f} GB/s"
            for name, node in CARDS_THAT_GENERATE.items()
            if name not in NODES
        ),
        f"other engines: one stream of {_PUBLISHED_LENGTH} tokens, bf16; the figures are their users' and authors', not ours",
    ]
    generation = json.loads((RESULTS / "generate.json").read_text(encoding="utf-8"))
    packed = json.loads((RESULTS / "packed_models.json").read_text(encoding="utf-8"))
    tables = {
        "Predicted": predicted,
        "Generation on an H200": generated(generation),
        "Decode with weights in codes on an H200": in_codes(packed),
        "Generation on cards that we have not measured": elsewhere(),
        "Decode beside other engines": published(),
    }
    write("predicted", "python -m loadtests.predict", tables, notes)


def _gemm_flops(model: str, rows: list[dict[str, Any]]) -> float:
    """FLOP/s of the bf16 product that was measured in the same run as the model."""
    row = next(row for row in rows if row["model"] == model and _dtype(row) == "bfloat16")
    return float(row["TFLOP/s"] * 1e12 / (row["% of GEMM"] / 100))


def _measured(row: dict[str, Any], gemm_flops: float) -> Measured:
    model = BODIES.get(row["model"]) or hub_id(row["model"])
    if model is None:
        raise SystemExit(f"{row['model']} is not in cluster/catalogue.py; name a published model with its body in BODIES")
    return Measured(
        model=model,
        dtype=_dtype(row),
        tokens_per_s=round(row["k tokens/s"] * 1e3),
        busy=_share(row, "GPU busy %"),
        gemm=_share(row, "GEMM %"),
        attention=_share(row, "attention %"),
        elementwise=_share(row, "elementwise %"),
        gemm_flops=round(gemm_flops),
        wgmma=row.get("attention on") == "wgmma",
    )


def _dtype(row: dict[str, Any]) -> Any:
    return row.get("dtype", "bfloat16")


def _share(row: dict[str, Any], column: str) -> float:
    return float(round(row[column] / 100, 4))


def _predicted(row: dict[str, Any], of: Measured, card: str) -> dict[str, Any]:
    config, dtype = CATALOGUE[of.model], DTYPES[of.dtype]
    weights = body_parameters(config) * dtype.itemsize
    found = {"model": row["model"], "dtype": of.dtype, "texts": row["texts"], "H200, measured: k tokens/s": row["k tokens/s"]}
    for name, node in NODES.items():
        kind = "unified" if node.cards[0].unified else "gpu"
        fits = footprint(config, dtype, kind).total <= node.usable_bytes
        rate = predicted_tokens_per_s(of, card_speed(card), speed_of(node)) / 1e3
        found[f"{name}: k tokens/s"] = rate if fits else "does not fit"
        found[f"{name}: ms at least, one query"] = 1e3 * weights / speed_of(node).copy if fits else "-"
    return found


if __name__ == "__main__":
    main()
