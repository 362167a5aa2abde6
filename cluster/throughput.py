"""Tokens/s of a model on a class of nodes before anybody has measured it, from FLOPs and bytes."""

import re

from cluster.nodes import Node
from engine.memory import body_parameters
from engine.model_config import ModelConfig

# Dense bf16 FLOP/s with fp32 accumulation and bytes/s of memory. H200 measured by us, GB10 by others (GEMM 91-92 TFLOP/s,
# copy 218 GB/s), the rest as published by NVIDIA, memory at 90 %. The first pattern found in the card's name counts.
_CARDS: tuple[tuple[str, float, float], ...] = (
    ("gb10", 92e12, 218e9),
    ("b200", 1600e12, 7.2e12),
    ("h200", 690e12, 4.2e12),
    ("h100", 690e12, 3.0e12),
    ("a100", 312e12, 1.4e12),
    ("l40s", 362e12, 778e9),
    ("l40", 181e12, 778e9),
    ("l4", 121e12, 270e9),
    ("a10g?", 125e12, 540e9),
    ("rtx pro 6000", 500e12, 1.6e12),
    ("rtx 6000 ada", 364e12, 864e9),
    ("rtx 5090", 209e12, 1.6e12),
    ("rtx 5080", 112e12, 864e9),
    ("rtx 5070 ti", 88e12, 806e9),
    ("rtx 5070", 62e12, 605e9),
    ("rtx 5060 ti", 47e12, 403e9),
    ("rtx 4090", 165e12, 907e9),
    ("rtx 4080", 97e12, 645e9),
    ("rtx 3090", 71e12, 842e9),
    ("t4", 65e12, 270e9),
)
_UNKNOWN_CARD = (40e12, 250e9)
_CPU_CORE_FLOPS = 0.1e12  # of a Zen 4 core with bf16; half of it in float32
_CPU_BANDWIDTH = 40e9
_BEFORE_BF16 = re.compile(r"\b(t4|v100|p100|p40|p4|titan|quadro rtx|rtx 20\d\d|gtx)\b")
_GEMM_SHARE = 0.88  # of the peak that the products reach on the H200
_MIG_SLICES = 7  # of a whole GPU, on all that can be sliced like that


def estimated_tokens_per_s(config: ModelConfig, node: Node, itemsize: int = 2) -> float:
    """Of short texts, queued, on a whole card; attention over long texts comes on top.

    Each token is multiplied with every weight and moves its activations through memory once; the two add up, as they do in
    the profiles of our engine (loadtests/results/engine.md).
    """
    flops, bandwidth = speed_of(node)
    flops *= 2 / itemsize  # float32 at half of bf16's rate, on tensor cores (TF32) and on CPUs
    c, wide = config.hidden_size, config.intermediate_size
    heads = (config.n_heads + config.n_kv_heads) * config.head_dim
    moved = itemsize * config.n_layers * (6 * c + 4 * heads + 3 * wide)
    return 1 / (2 * body_parameters(config) / (_GEMM_SHARE * flops) + moved / bandwidth)


def speed_of(node: Node) -> tuple[float, float]:
    """(FLOP/s in bf16, bytes/s) of one card of the node, or of its CPUs."""
    if not node.cards:
        return node.num_cpus * _CPU_CORE_FLOPS, _CPU_BANDWIDTH
    name = node.cards[0].name.lower()
    flops, bandwidth = next((speed for pattern, *speed in _CARDS if re.search(rf"\b{pattern}\b", name)), _UNKNOWN_CARD)
    part = re.search(r"\bmig (\d)g\b", name)
    share = int(part[1]) / _MIG_SLICES if part else 1.0
    return flops * share, bandwidth * share


def has_bf16(node: Node) -> bool:
    """Whether the node's cards multiply bfloat16 themselves: all from Ampere on."""
    return not _BEFORE_BF16.search(node.cards[0].name.lower()) if node.cards else False


def is_known(node: Node) -> bool:
    """Whether the node's speed is more than a cautious guess."""
    return not node.cards or any(re.search(rf"\b{pattern}\b", node.cards[0].name.lower()) for pattern, *_ in _CARDS)
