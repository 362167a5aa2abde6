"""How many gateways a server needs: by the rates of its engines, and by the cores of its machine."""

import math
from collections.abc import Sequence

from cluster.model_spec import ModelSpec
from cluster.nodes import Node
from cluster.plan import dtype_on
from cluster.shared_card import replicas_on_a_card
from cluster.throughput import tokens_per_s
from engine.model.config import ModelConfig

# Requests/s that a gateway can take if each request has one text of `TEXT_TOKENS` tokens. Measured: 760 on the host of an H200,
# up to 1,800 on another machine (loadtests/results/whole_server.md and gateways.md).
REQUESTS_PER_GATEWAY, TEXT_TOKENS = 800, 100
# Cores that gateways leave to Ray and HAProxy, and to the process of each engine.
_RAY_CORES, _ENGINE_CORES = 2, 2
# A model that generates answers few requests, but a gateway takes the work of their streams from the engine's process. The second
# gateway is for the time in which the first one is replaced.
_GENERATING = 2


def needed(tokens_rate: float) -> int:
    """The gateways that feed engines of so many tokens/s together, if each request has one short text."""
    return math.ceil(tokens_rate / TEXT_TOKENS / REQUESTS_PER_GATEWAY)


def gateways_beside_engines(models: Sequence[tuple[ModelSpec, ModelConfig]], node: Node) -> int:
    """The gateways of a server of these models on one machine with cards, each model with one replica.

    The rates are predicted for the card, because Serve starts the gateways while the engines load. 0 stands for no gateway: one
    process takes all requests of a single slow model, and a machine of few cores has no place for more.
    """
    share = replicas_on_a_card(len(models), len(node.cards))
    rate = sum(tokens_per_s(config, dtype_on(spec, node, config), node).tokens_per_s / share for spec, config in models)
    generates = any(config.generation is not None for _, config in models)
    cores = node.num_cpus - _RAY_CORES - _ENGINE_CORES * len(models)
    number = min(cores, max(needed(rate), _GENERATING if generates else 0))
    return number if number > 1 else 0
