"""Predicts the tokens/s of a model on a node class, before the model has run there.

The rate is measured on one card, predicted for other cards from that measurement, or estimated from FLOPs and bytes.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from cluster.catalogue import CATALOGUE
from cluster.measurement import ModelRate, What
from cluster.nodes import Card, Node
from engine.devices import DTYPES, DtypeName, compute_dtype, is_8_bits
from engine.model.config import ModelConfig
from engine.model.families import family_of
from engine.model.footprint import body_parameters

# Written by `python -m loadtests.predict` from loadtests/results/engine.json.
TABLE_FILE = Path(__file__).parent / "throughput.json"

# The source of a rate. "given": the operator's own value. "measured here": by `emberforge doctor --measure` on a node of this
# class. "measured": our measurement on this card. "predicted": our measurement on another card, scaled to this card.
# "estimated": computed only from FLOPs and bytes.
Basis = Literal["given", "measured here", "measured", "predicted", "estimated"]
_Body = tuple[Any, ...]


class Rate(NamedTuple):
    """Tokens/s of one replica that does not share its card, while texts are queued.

    The texts are short, or of mixed lengths. Longer texts also need time for attention that the rate does not include.
    """

    tokens_per_s: float
    basis: Basis


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of one card, or of a node's CPUs.

    `gemm` is the FLOP/s of dense bf16 GEMMs with fp32 accumulation. `copy` is the bytes/s read and written.
    `mma_sync` is the share of `gemm` that the instruction mma.sync reaches. It is less than 1 on cards whose GEMMs use a faster
    instruction. Our attention kernel uses mma.sync; on cards with `wgmma` there is also one that uses wgmma.
    """

    gemm: float
    copy: float
    mma_sync: float = 1.0
    wgmma: bool = False

    def attention(self, wgmma: bool) -> float:
        """The highest FLOP/s of attention.

        Args:
            wgmma: whether the model's attention uses wgmma on cards that have it.
        """
        return self.gemm * (1.0 if wgmma and self.wgmma else self.mma_sync)


_MMA_SYNC = 0.62  # of the GEMM rate; the highest share on Hopper, and assumed for Blackwell's B200
# We measured the H200 (loadtests/results). Others measured the GB10 (GEMM 91-92 TFLOP/s, copy 218 GB/s). The other values are
# NVIDIA's, with 90 % of the memory bandwidth. The first pattern that occurs in the card's name is used.
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
_CPU_CORE_FLOPS = 0.1e12  # a Zen 4 core in bf16; half of this rate in float32
_CPU_BANDWIDTH = 40e9
_GEMM_SHARE = 0.88  # of `Speed.gemm`, which a model's GEMMs reach on the H200
_MIG_SLICES = 7  # of a whole GPU; the same on every GPU that has MIG

# Compute capability by the card's name, for cards from a file. The first pattern that occurs in the name is used. A card without
# a matching pattern is assumed to be newer than all of these.
_OLDER_CARDS = {
    r"radeon|instinct|mi\d{3}x?|arc|gaudi": (0, 0),  # not NVIDIA's
    r"t4|titan rtx|quadro rtx|rtx 20[678]0|gtx 16\d\d": (7, 5),
    r"v100|titan v": (7, 0),
    r"p100|p40|p4|titan|gtx": (6, 1),  # or lower
    r"a100|a800|a30": (8, 0),
    r"a10g?|a16|a2|a40|rtx a\d{4}|rtx 30[5-9]0": (8, 6),
    r"orin": (8, 7),
}
_NEWER_CARD = (8, 9)  # or higher


@dataclass(frozen=True, slots=True)
class Measured:
    """A measurement of one model on the table's card, with texts of mixed lengths that are all queued.

    `busy` is the share of the time in which the GPU worked. `gemm`, `attention` and `elementwise` are shares of that busy time.
    `gemm_flops` is the FLOP/s that a bf16 GEMM reached in the same run. `wgmma` says that attention used wgmma, not mma.sync.
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
    """The rate of our engine on the node, from the best source there is. `node` must be able to run `dtype`."""
    if here := measured_here(config, dtype, node, "embed"):
        return Rate(here[0].tokens_per_s, "measured here")
    row = _rows_by_body().get((_body(config), dtype)) if node.cards and has_bf16(node) and is_known(node) else None
    if row is None:
        return Rate(estimated_tokens_per_s(config, dtype, node), "estimated")
    if all(_bare(card.name) == _bare(table().card) for card in node.cards):
        return Rate(row.tokens_per_s, "measured")
    return Rate(predicted_tokens_per_s(row, card_speed(table().card), speed_of(node)), "predicted")


def pipeline_tokens_per_s(rates: Sequence[float], layers: Sequence[range]) -> float:
    """The rate of a model over several cards, which compute passes at the same time: the slowest stage decides.

    Args:
        rates: tokens/s of the whole model on each stage's card.
        layers: the layers of each stage.
    """
    n_layers = layers[-1].stop
    return min(rate * n_layers / len(part) for rate, part in zip(rates, layers, strict=True))


def measured_here(config: ModelConfig, dtype: torch.dtype, node: Node, what: What) -> list[ModelRate]:
    """The rates of a model with this body in the node's own measurement."""
    if node.measurement is None:
        return []
    body = _body(config)
    return [
        row
        for row in node.measurement.models
        if row.what == what and DTYPES[row.dtype] == dtype and row.model in CATALOGUE and _body(CATALOGUE[row.model]) == body
    ]


def predicted_tokens_per_s(row: Measured, there: Speed, here: Speed) -> float:
    """Tokens/s on the card `here`, from a measurement on the card `there`.

    Each part of the GPU's time is scaled by the ratio of the rates that limit the part: GEMM, attention or memory copy. The time
    in which the GPU waited does not change, because the host causes the waiting. The bf16 ratio also holds for 8-bit GEMMs: they
    run at twice the bf16 rate on every card that has them.
    """
    there = replace(there, gemm=row.gemm_flops)
    more = (
        row.gemm * (there.gemm / here.gemm - 1)
        + row.attention * (there.attention(row.wgmma) / here.attention(row.wgmma) - 1)
        + row.elementwise * (there.copy / here.copy - 1)
    )
    return row.tokens_per_s / (1 + row.busy * more)


def estimated_tokens_per_s(config: ModelConfig, dtype: torch.dtype, node: Node) -> float:
    """Tokens/s from FLOPs and bytes.

    Each token is multiplied with every weight, and its activations move through memory once. The two times are added, because
    they add up in the profiles of our engine (loadtests/results/engine.md).
    """
    speed = speed_of(node)
    # float32 has half the bf16 rate, on tensor cores (TF32) and on CPUs. 8-bit dtypes have twice the bf16 rate.
    flops = _GEMM_SHARE * speed.gemm * 2 / (1 if is_8_bits(dtype) else compute_dtype(dtype).itemsize)
    c, wide = config.hidden_size, config.intermediate_size
    heads = (config.n_heads + config.n_kv_heads) * config.head_dim
    moved = compute_dtype(dtype).itemsize * config.n_layers * (6 * c + 4 * heads + 3 * wide)
    return 1 / (2 * body_parameters(config) / flops + moved / speed.copy)


@cache
def table() -> Table:
    """Our measurements, from `TABLE_FILE`."""
    content: dict[str, Any] = json.loads(TABLE_FILE.read_text(encoding="utf-8"))
    return Table(content["card"], tuple(Measured(**row) for row in content["rows"]))


@cache
def _rows_by_body() -> dict[tuple[_Body, torch.dtype], Measured]:
    return {(_body(CATALOGUE[row.model]), DTYPES[row.dtype]): row for row in table().rows}


def _body(config: ModelConfig) -> _Body:
    """All values on which the time per token depends. Equal bodies differ only in weights, vocabulary, pooling or head."""
    widths = (config.hidden_size, config.intermediate_size, config.n_heads, config.n_kv_heads, config.head_dim)
    scores = (config.causal, family_of(config).biases_scores, getattr(config, "window", None))
    return (type(config), config.n_layers, *widths, *scores, body_parameters(config))


def speed_of(node: Node) -> Speed:
    """The speed of the node's slowest card, or of the CPUs of a node without cards. The node's own measurement has precedence."""
    speed = Speed(node.num_cpus * _CPU_CORE_FLOPS, _CPU_BANDWIDTH)
    if node.cards:
        speeds = (card_speed(name) for name in {card.name for card in node.cards})
        speed = min(speeds, key=lambda speed: (speed.gemm, speed.copy))
    if node.measurement is None:
        return speed
    measured = node.measurement
    gemm = measured.gemm_per_s("bfloat16") or measured.gemm_per_s("float16")
    if gemm is None and (wide := measured.gemm_per_s("float32")) is not None:
        gemm = 2 * wide  # because a plan gives float32 half the rate of bf16
    return replace(speed, gemm=gemm or speed.gemm, copy=measured.copy_per_s or speed.copy)


def card_speed(name: str) -> Speed:
    """The speed of a card, by the name that its driver reports. An unknown card gets a cautious guess, a MIG slice its share."""
    name = name.lower()
    speed = next((speed for pattern, speed in _CARDS.items() if _names(pattern, name)), _UNKNOWN_CARD)
    part = re.search(r"\bmig (\d)g\b", name)
    share = int(part[1]) / _MIG_SLICES if part else 1.0
    return replace(speed, gemm=speed.gemm * share, copy=speed.copy * share)


def capability_of(node: Node) -> tuple[int, int] | None:
    """The least compute capability of the node's cards: as read from the card, else by its name. None without cards."""
    return min(map(_capability_of_card, set(node.cards)), default=None)


def _capability_of_card(card: Card) -> tuple[int, int]:
    by_name = (capability for pattern, capability in _OLDER_CARDS.items() if _names(pattern, card.name.lower()))
    return card.capability or next(by_name, _NEWER_CARD)


def has_bf16(node: Node) -> bool:
    """Whether the node's cards have bfloat16 instructions, or its CPUs if it has no card. All cards from Ampere on have them."""
    capability = capability_of(node)
    return node.cpu_bf16 if capability is None else capability >= (8, 0)


def is_known(node: Node) -> bool:
    """Whether the node's speed is known. If not, the speed is a cautious guess."""
    names = {card.name.lower() for card in node.cards}
    return node.measurement is not None or all(any(_names(pattern, name) for pattern in _CARDS) for name in names)


def _names(pattern: str, name: str) -> bool:
    return re.search(rf"\b({pattern})\b", name) is not None


def _bare(name: str) -> str:
    return name.lower().removeprefix("nvidia ")
