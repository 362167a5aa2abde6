"""Computes the size of the KV cache of generation models that share a card with other models of one server."""

from collections.abc import Sequence

from cluster.model_spec import ModelSpec
from cluster.needs import as_loaded, dtype_on, memory_kind
from cluster.nodes import GIB, Node
from engine.devices import compute_dtype
from engine.errors import ModelError
from engine.model.config import ModelConfig
from engine.model.footprint import footprint
from engine.run.kv_cache import PAGE_SIZE, bytes_per_token, most_default_tokens


def replicas_on_a_card(num_models: int, num_gpus: int) -> int:
    """The most replicas on one card; each model has one replica."""
    return -(-num_models // num_gpus)


def shared_cache_tokens(node: Node, models: Sequence[tuple[ModelSpec, ModelConfig]], count: int) -> int | None:
    """Tokens for the KV cache of each generation model without `cache_tokens`; None if all generation models have it.

    A model that does not share its card chooses its cache by the free memory at its load. Replicas that share a card load at the
    same time, and the first would take the memory of the others.

    Args:
        node: a node with cards.
        count: replicas of different models on one card. Ray chooses them, so the largest models are assumed to share a card.
    Raises: ModelError with the numbers if there is no memory for a single page.
    """
    told = [(spec, config) for spec, config in models if config.generation is not None and spec.cache_tokens is None]
    if not told:
        return None
    kind = memory_kind(node)
    needs = [
        footprint(
            as_loaded(config, node),
            dtype_on(spec, node, config),
            kind,
            spec.max_batch_tokens,
            cache_tokens=spec.cache_tokens or 0,
        ).total
        for spec, config in models
    ]
    per_token = [bytes_per_token(config, compute_dtype(dtype_on(spec, node, config))) for spec, config in told]
    free = [card.free_bytes for card in node.cards if card.free_bytes is not None]
    usable = min([node.usable_bytes, *(each - node.reserved for each in free)])
    taken = sum(sorted(needs)[-count:])
    tokens = (usable - taken) // sum(sorted(per_token)[-count:]) // PAGE_SIZE * PAGE_SIZE
    if tokens < PAGE_SIZE:
        raise ModelError(
            f"{count} models share a card with {usable / GIB:.1f} GiB for models; they need {taken / GIB:.1f} GiB without the "
            "KV cache; serve fewer models, or lower max_batch_tokens or max_input_tokens, or choose a smaller dtype"
        )
    return min(tokens, max(most_default_tokens(config) for _, config in told))
