"""Predicted tokens/s: measured on one card, predicted from that for other cards, estimated for all others."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.catalogue import CATALOGUE
from cluster.nodes import GIB, Card, Node
from cluster.throughput import Measured, Rate, Speed, predicted_tokens_per_s, table, tokens_per_s
from engine.model.footprint import body_parameters
from loadtests.predict import table_of
from loadtests.report import RESULTS

QWEN3 = CATALOGUE["Qwen/Qwen3-Embedding-0.6B"]
BF16, FLOAT8, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
CPU = Node("cpu", "amd64", 64 * GIB, 16)


def card(name: str) -> Node:
    return Node("n", "amd64", 64 * GIB, 8, (Card(name, 80 * GIB),))


H200, GB10, RTX_5080 = map(card, ("NVIDIA H200", "NVIDIA GB10", "NVIDIA GeForce RTX 5080"))
# Published, or measured by others: dense bf16 TFLOP/s with fp32 accumulation, GB/s of memory.
PUBLISHED = {"NVIDIA GB10": (92, 273), "NVIDIA GeForce RTX 5080": (112.6, 960)}


def test_the_table_is_what_the_engine_was_measured_at() -> None:
    """If this test fails, run python -m loadtests.predict."""
    assert table() == table_of(json.loads((RESULTS / "engine.json").read_text()))


@pytest.mark.parametrize("row", table().rows, ids=lambda row: f"{row.model} {row.dtype}")
def test_where_it_was_measured_the_figure_is_the_tables(row: Measured) -> None:
    dtype = {"bfloat16": BF16, "float8": FLOAT8, "int8": INT8}[row.dtype]
    assert tokens_per_s(CATALOGUE[row.model], dtype, H200) == Rate(row.tokens_per_s, "measured")


@pytest.mark.parametrize(
    ("measured", "alike"),
    [
        ("Qwen/Qwen3-Embedding-0.6B", ["Qwen/Qwen3-Reranker-0.6B"]),
        ("Qwen/Qwen3-Embedding-8B", ["Qwen/Qwen3-Reranker-8B"]),
        ("BAAI/bge-base-en-v1.5", ["intfloat/e5-base-v2", "thenlper/gte-base", "intfloat/multilingual-e5-base"]),
    ],
)
def test_a_model_with_a_measured_body_was_measured(measured: str, alike: list[str]) -> None:
    rate = tokens_per_s(CATALOGUE[measured], BF16, H200)
    assert rate.basis == "measured"
    for model in alike:
        assert tokens_per_s(CATALOGUE[model], BF16, H200) == rate
    shorter = replace(CATALOGUE[measured], max_input_length=128, prompts={"query": "q: "})
    assert tokens_per_s(shorter, BF16, H200) == rate


@pytest.mark.parametrize(
    "model",
    [
        "BAAI/bge-large-en-v1.5",  # more layers
        "sentence-transformers/all-mpnet-base-v2",  # BERT's shape, and a bias by distance
        "naver/splade-v3",  # each token is multiplied with the vocabulary
        "Alibaba-NLP/gte-base-en-v1.5",  # another family
    ],
)
def test_another_body_is_estimated(model: str) -> None:
    assert tokens_per_s(CATALOGUE[model], BF16, H200).basis == "estimated"


def test_another_mask_or_dtype_was_not_measured() -> None:
    assert tokens_per_s(replace(QWEN3, causal=False), BF16, H200).basis == "estimated"
    assert tokens_per_s(QWEN3, torch.float32, H200).basis == "estimated"


@pytest.mark.parametrize("node", [CPU, card("Some GPU"), card("Tesla T4")], ids=["CPU", "unknown", "without bf16"])
def test_what_the_table_says_nothing_of_is_estimated(node: Node) -> None:
    assert tokens_per_s(QWEN3, BF16, node).basis == "estimated"


@pytest.mark.parametrize("row", table().rows, ids=lambda row: f"{row.model} {row.dtype}")
@pytest.mark.parametrize("name", PUBLISHED)
def test_predictions_lie_where_products_put_them(row: Measured, name: str) -> None:
    """The peak is the rate with only products. A prediction lies between the peak and half of it (in 8 bits 0.3 of it)."""
    tflops, _ = PUBLISHED[name]
    bits8 = 1 if row.dtype == "bfloat16" else 2
    peak = bits8 * tflops * 1e12 / (2 * body_parameters(CATALOGUE[row.model]))
    dtype = {"bfloat16": BF16, "float8": FLOAT8, "int8": INT8}[row.dtype]
    rate = tokens_per_s(CATALOGUE[row.model], dtype, card(name))
    assert rate.basis == "predicted"
    assert (0.5 if bits8 == 1 else 0.3) * peak < rate.tokens_per_s < peak


def test_each_part_is_stretched_by_what_bounds_it() -> None:
    """1,000 tokens took 1 s: 0.1 s idle, and 0.9 s of products (60 %), attention (20 %), memory (10 %) and the rest (10 %)."""
    row = Measured("m", "bfloat16", 1000.0, busy=0.9, gemm=0.6, attention=0.2, elementwise=0.1, gemm_flops=400e12)
    there, here = Speed(500e12, 4e12, mma_sync=0.5, wgmma=True), Speed(100e12, 1e12)
    # Products take 4 times as long, attention by mma.sync twice (200, then 100 TFLOP/s), memory 4 times. The rest stays.
    seconds = 0.1 + 0.9 * (0.6 * 4 + 0.2 * 2 + 0.1 * 4 + 0.1)
    assert predicted_tokens_per_s(row, there, here) == pytest.approx(1000 / seconds)
    on_wgmma = 0.1 + 0.9 * (0.6 * 4 + 0.2 * 4 + 0.1 * 4 + 0.1)
    assert predicted_tokens_per_s(replace(row, wgmma=True), there, here) == pytest.approx(1000 / on_wgmma)
    same = replace(there, gemm=row.gemm_flops)
    for wgmma in (False, True):
        assert predicted_tokens_per_s(replace(row, wgmma=wgmma), there, same) == pytest.approx(1000)


def test_a_slice_of_the_measured_card_is_predicted() -> None:
    rate = tokens_per_s(QWEN3, BF16, card("NVIDIA H200 MIG 1g.18gb"))
    whole = tokens_per_s(QWEN3, BF16, H200)
    assert rate.basis == "predicted"
    # The slice is predicted from the usual speed of its kind. The whole card was measured. Cards of a kind differ by 4 %.
    assert rate.tokens_per_s == pytest.approx(whole.tokens_per_s / 7, rel=0.1)


def test_8_bits_halve_the_products_and_not_the_activations() -> None:
    model = CATALOGUE["BAAI/bge-large-en-v1.5"]
    bf16, float8, int8 = (tokens_per_s(model, dtype, RTX_5080).tokens_per_s for dtype in (BF16, FLOAT8, INT8))
    products = 2 * body_parameters(model) / (0.88 * 112e12)
    assert 1 / bf16 - 1 / float8 == pytest.approx(products / 2)
    assert float8 == int8


def test_engine_results_may_have_rows_of_other_dtypes() -> None:
    results = json.loads((RESULTS / "engine.json").read_text())
    rows = [row for row in results["tables"]["Tokens/s"] if row.get("dtype", "bfloat16") == "bfloat16"]
    faster = [row | {"dtype": "float8", "k tokens/s": 1.5 * row["k tokens/s"], "% of GEMM": 1.0} for row in rows]
    found = table_of(results | {"tables": {"Tokens/s": [*rows, *faster]}}).rows
    bf16, float8 = ([row for row in found if row.dtype == dtype] for dtype in ("bfloat16", "float8"))
    assert [row.model for row in bf16] == [row.model for row in float8]
    for slow, fast in zip(bf16, float8, strict=True):
        assert fast.tokens_per_s == pytest.approx(1.5 * slow.tokens_per_s, rel=1e-4)
        assert fast.gemm_flops == slow.gemm_flops, "of bf16"


def test_the_table_is_in_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert "throughput.json" in project["tool"]["setuptools"]["package-data"]["cluster"]
