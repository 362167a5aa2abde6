"""Tokens/s of a model on a class of nodes before it has run there: as measured on one card, predicted from that, or estimated."""

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from cluster.catalogue import CATALOGUE
from cluster.nodes import Node
from engine.devices import DTYPES, DtypeName, compute_dtype
from engine.model.config import ModelConfig
from engine.model.families import family_of
from engine.model.footprint import body_parameters

# Written by `python -m loadtests.predict` from loadtests/results/engine.json.
TABLE_FILE = Path(__file__).parent / "throughput.json"

# What a rate is: the operator's own figure, ours, ours stretched to another card, or only FLOPs and bytes.
Basis = Literal["given", "measured", "predicted", "estimated"]
_Body = tuple[Any, ...]


class Rate(NamedTuple):
    """Tokens/s of short or mixed texts, queued, on a whole card; attention over long texts comes on top."""

    tokens_per_s: float
    basis: Basis


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one card, or of a node's CPUs: FLOP/s of dense bf16 products with fp32 accumulation, bytes/s read and written.

    `mma_sync` is the share of the products' rate that mma.sync reaches, less than all where products have instructions of
    their own. Our attention is made of it, and on cards with `wgmma` of that.
    """

    gemm: float
    copy: float
    mma_sync: float = 1.0
    wgmma: bool = False

    def attention(self, wgmma: bool) -> float:
        """FLOP/s at best, of a model whose attention uses wgmma where there is one."""
        return self.gemm * (1.0 if wgmma and self.wgmma else self.mma_sync)


_MMA_SYNC = 0.62  # of the products' rate, at best on Hopper, and taken to be so on its successor
# H200 measured by us (loadtests/results), GB10 by others (GEMM 91-92 TFLOP/s, copy 218 GB/s), the rest as published by NVIDIA,
# memory at 90 %. The first pattern found in the card's name counts.
_CARDS = {
    "gb10": Speed(92e12, 218e9),
    "b200": Speed(1600e12, 7.2e12, _MMA_SYNC),
    "h200": Speed(698e12, 4.24e12, _MMA_SYNC, wgmma=True),
    "h100": Speed(698e12, 3.0e12, _MMA_SYNC, wgmma=True),
    "a100": Speed(312e12, 1.4e12),
    "l40s": Speed(362e12, 778e9),
    "l40": Speed(181e12, 778e9),
    "l4": Speed(121e12, 270e9),
    "a10g?": Speed(125e12, 540e9),
    "rtx pro 6000": Speed(500e12, 1.6e12),
    "rtx 6000 ada": Speed(364e12, 864e9),
    "rtx 5090": Speed(209e12, 1.6e12),
    "rtx 5080": Speed(112e12, 864e9),
    "rtx 5070 ti": Speed(88e12, 806e9),
    "rtx 5070": Speed(62e12, 605e9),
    "rtx 5060 ti": Speed(47e12, 403e9),
    "rtx 4090": Speed(165e12, 907e9),
    "rtx 4080": Speed(97e12, 645e9),
    "rtx 3090": Speed(71e12, 842e9),
    "t4": Speed(65e12, 270e9),
}
_UNKNOWN_CARD = Speed(40e12, 250e9)
_CPU_CORE_FLOPS = 0.1e12  # of a Zen 4 core with bf16; half of it in float32
_CPU_BANDWIDTH = 40e9
_GEMM_SHARE = 0.88  # of the peak that the products reach on the H200
_MIG_SLICES = 7  # of a whole GPU, on all that can be sliced like that

# Compute capability by name, for cards that nobody asked. One that no pattern fits is taken for a newer one.
_OLDER_CARDS = {
    r"t4|v100|p100|p40|p4|titan|quadro rtx|rtx 20[678]0|gtx": (7, 5),  # or before
    r"a100|a800|a30": (8, 0),
    r"a10g?|a16|a2|a40|rtx a\d{4}|rtx 30[5-9]0": (8, 6),
    r"orin": (8, 7),
}
_NEWER_CARD = (8, 9)  # or after


@dataclass(frozen=True, slots=True)
class Measured:
    """A model on the table's card, on texts of mixed lengths, all queued.

    `busy` is the share of the time that the GPU worked; `gemm`, `attention` and `elementwise` are shares of that.
    `gemm_flops` is what bf16 products reached in the same run, and `wgmma` says that attention used it and not mma.sync.
    """

    model: str
    dtype: DtypeName
    tokens_per_s: float
    busy: float
    gemm: float
    attention: float
    elementwise: float
    gemm_flops: float
    wgmma: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    card: str
    rows: tuple[Measured, ...]


def tokens_per_s(config: ModelConfig, dtype: torch.dtype, node: Node) -> Rate:
    """Of our engine there, by the best that is known. `node` can run `dtype`."""
    row = _rows_by_body().get((_body(config), dtype)) if has_bf16(node) and is_known(node) else None
    if row is None:
        return Rate(estimated_tokens_per_s(config, dtype, node), "estimated")
    if _bare(node.cards[0].name) == _bare(table().card):
        return Rate(row.tokens_per_s, "measured")
    return Rate(predicted_tokens_per_s(row, card_speed(table().card), speed_of(node)), "predicted")


def predicted_tokens_per_s(row: Measured, there: Speed, here: Speed) -> float:
    """Each part of a token's time stretched by what bounds it; what the GPU waited is the host's, and stays.

    Products of 8 bits run at twice bf16's rate on every card that has them, so the ratio of two cards is bf16's.
    """
    there = replace(there, gemm=row.gemm_flops)
    more = (
        row.gemm * (there.gemm / here.gemm - 1)
        + row.attention * (there.attention(row.wgmma) / here.attention(row.wgmma) - 1)
        + row.elementwise * (there.copy / here.copy - 1)
    )
    return row.tokens_per_s / (1 + row.busy * more)


def estimated_tokens_per_s(config: ModelConfig, dtype: torch.dtype, node: Node) -> float:
    """Each token is multiplied with every weight and moves its activations through memory once; the two add up, as they do
    in the profiles of our engine (loadtests/results/engine.md).
    """
    speed = speed_of(node)
    # float32 at half of bf16's rate, on tensor cores (TF32) and on CPUs; 8 bits at twice of it.
    flops = _GEMM_SHARE * speed.gemm * 2 / dtype.itemsize
    c, wide = config.hidden_size, config.intermediate_size
    heads = (config.n_heads + config.n_kv_heads) * config.head_dim
    moved = compute_dtype(dtype).itemsize * config.n_layers * (6 * c + 4 * heads + 3 * wide)
    return 1 / (2 * body_parameters(config) / flops + moved / speed.copy)


@cache
def table() -> Table:
    """What was measured."""
    content: dict[str, Any] = json.loads(TABLE_FILE.read_text(encoding="utf-8"))
    return Table(content["card"], tuple(Measured(**row) for row in content["rows"]))


@cache
def _rows_by_body() -> dict[tuple[_Body, torch.dtype], Measured]:
    return {(_body(CATALOGUE[row.model]), DTYPES[row.dtype]): row for row in table().rows}


def _body(config: ModelConfig) -> _Body:
    """What a token's time depends on: models that agree in it differ in weights, words, pooling or head."""
    widths = (config.hidden_size, config.intermediate_size, config.n_heads, config.n_kv_heads, config.head_dim)
    scores = (config.causal, family_of(config).biases_scores, getattr(config, "window", None))
    return (type(config), config.n_layers, *widths, *scores, body_parameters(config))


def speed_of(node: Node) -> Speed:
    """Of one card of the node, or of its CPUs."""
    if not node.cards:
        return Speed(node.num_cpus * _CPU_CORE_FLOPS, _CPU_BANDWIDTH)
    return card_speed(node.cards[0].name)


def card_speed(name: str) -> Speed:
    """By the name that the card gives itself."""
    name = name.lower()
    speed = next((speed for pattern, speed in _CARDS.items() if _names(pattern, name)), _UNKNOWN_CARD)
    part = re.search(r"\bmig (\d)g\b", name)
    share = int(part[1]) / _MIG_SLICES if part else 1.0
    return replace(speed, gemm=speed.gemm * share, copy=speed.copy * share)


def capability_of(node: Node) -> tuple[int, int] | None:
    """The compute capability of the node's cards, as they say or, in a plan from a file, by their name; None without."""
    if not node.cards:
        return None
    card = node.cards[0]
    by_name = (capability for pattern, capability in _OLDER_CARDS.items() if _names(pattern, card.name.lower()))
    return card.capability or next(by_name, _NEWER_CARD)


def has_bf16(node: Node) -> bool:
    """Whether the node's cards multiply bfloat16 themselves: all from Ampere on."""
    return (capability_of(node) or (0, 0)) >= (8, 0)


def is_known(node: Node) -> bool:
    """Whether the node's speed is more than a cautious guess."""
    return not node.cards or any(_names(pattern, node.cards[0].name.lower()) for pattern in _CARDS)


def _names(pattern: str, name: str) -> bool:
    return re.search(rf"\b({pattern})\b", name) is not None


def _bare(name: str) -> str:
    return name.lower().removeprefix("nvidia ")
