"""Computes the number of gateways that a server needs, by the rates of its engines and the cores of its machine."""

import math
from collections.abc import Sequence

from cluster.model_spec import ModelSpec
from cluster.needs import dtype_on
from cluster.nodes import Node
from cluster.shared_card import replicas_on_a_card
from cluster.throughput import tokens_per_s
from engine.model.config import ModelConfig

# Requests/s of a gateway if each request has one text of `TEXT_TOKENS` tokens. Measured: 760 on the host of an H200, up to 1,800
# on another machine (loadtests/results/whole_server.md and gateways.md).
REQUESTS_PER_GATEWAY, TEXT_TOKENS = 800, 100
# Cores that gateways leave to Ray and HAProxy, and to the process of each engine.
_RAY_CORES, _ENGINE_CORES = 2, 2
# A generation model has few requests, but a gateway takes over the work on their streams from the engine's process. The second
# gateway works while the first one is replaced.
_GENERATING = 2


def needed(tokens_rate: float) -> int:
    """The number of gateways for engines with this total of tokens/s, if each request has one short text."""
    return math.ceil(tokens_rate / TEXT_TOKENS / REQUESTS_PER_GATEWAY)


def gateways_beside_engines(models: Sequence[tuple[ModelSpec, ModelConfig]], node: Node) -> int:
    """The number of gateways for a server of these models on one machine with cards, with one replica of each model.

    The rates are predictions for the card, because Serve starts the gateways while the engines load. 0 means no gateway: a single
    slow model needs only its own process for requests, and a machine with few cores has none left for gateways.
    """
    share = replicas_on_a_card(len(models), len(node.cards))
    rate = sum(tokens_per_s(config, dtype_on(spec, node, config), node).tokens_per_s / share for spec, config in models)
    generates = any(config.generation is not None for _, config in models)
    cores = node.num_cpus - _RAY_CORES - _ENGINE_CORES * len(models)
    number = min(cores, max(needed(rate), _GENERATING if generates else 0))
    return number if number > 1 else 0
