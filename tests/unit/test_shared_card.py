"""The KV cache of generation models on a card that several models share."""

from dataclasses import replace

import pytest
import torch

from cluster.catalogue import CATALOGUE
from cluster.files import ClusterError
from cluster.model_spec import ModelSpec
from cluster.nodes import CARD_RESERVE, GIB, Card, Node
from cluster.shared_card import shared_cache_tokens
from engine.errors import ModelError
from engine.model.config import GenerationConfig, ModelConfig
from engine.model.footprint import footprint
from serve_app.cli.serve import _with_cache
from serve_app.settings import Settings

EMBEDDER = CATALOGUE["Qwen/Qwen3-Embedding-0.6B"]
GENERATOR = replace(EMBEDDER, generation=GenerationConfig(tied=True))
PER_TOKEN = 114_688


def node(*free_gib: float | None, total_gib: float = 48) -> Node:
    cards = [Card("NVIDIA L40S", int(total_gib * GIB), None if free is None else int(free * GIB)) for free in free_gib]
    return Node("box", "amd64", 64 * GIB, 8, tuple(cards))


def models(*configs: ModelConfig, **options: int) -> list[tuple[ModelSpec, ModelConfig]]:
    return [(ModelSpec(name=f"m{index}", model="m", **options), config) for index, config in enumerate(configs)]  # type: ignore[arg-type]


def taken(*configs: ModelConfig) -> int:
    return sum(footprint(config, torch.bfloat16, "gpu", cache_tokens=0).total for config in configs)


def test_the_cache_gets_what_the_models_leave() -> None:
    tokens = shared_cache_tokens(node(None), models(EMBEDDER, GENERATOR), 2)
    assert tokens is not None
    left = 48 * GIB - CARD_RESERVE - taken(EMBEDDER, GENERATOR) - tokens * PER_TOKEN
    assert 0 <= left < 128 * PER_TOKEN
    assert tokens % 128 == 0
    fewer = shared_cache_tokens(node(24), models(EMBEDDER, GENERATOR), 2)
    assert fewer is not None
    assert (tokens - fewer) * PER_TOKEN == pytest.approx(24 * GIB, abs=128 * PER_TOKEN)
    both = shared_cache_tokens(node(None), models(GENERATOR, GENERATOR), 2)
    assert both is not None
    assert both == pytest.approx((48 * GIB - CARD_RESERVE - taken(GENERATOR, GENERATOR)) / 2 / PER_TOKEN, abs=128)
    short = replace(GENERATOR, max_input_length=1024)
    assert shared_cache_tokens(node(None), models(EMBEDDER, short), 2) == 16 * 1024


def test_only_the_largest_models_that_can_meet_on_a_card_are_counted() -> None:
    one, two, three = (shared_cache_tokens(node(None, None), models(EMBEDDER, GENERATOR, EMBEDDER), count) for count in (1, 2, 3))
    assert one is not None
    assert two is not None
    assert three is not None
    assert one > two > three


def test_a_card_of_its_own_and_a_size_that_is_given_need_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.inventory.this_node", lambda: node(None))
    two = Settings(models=("a", "b"))
    chosen = _with_cache(two, [EMBEDDER, GENERATOR], 1).cache_tokens
    assert chosen == shared_cache_tokens(node(None), models(EMBEDDER, GENERATOR), 2)
    for settings, configs, num_gpus in (
        (two, [EMBEDDER, GENERATOR], 2),
        (two, [EMBEDDER, GENERATOR], 0),
        (two, [EMBEDDER, EMBEDDER], 1),
        (Settings(models=("a",)), [GENERATOR], 1),
        (Settings(models=("a", "b"), cache_tokens=1024), [EMBEDDER, GENERATOR], 1),
    ):
        assert _with_cache(settings, configs, num_gpus) is settings
    assert shared_cache_tokens(node(None), models(EMBEDDER, GENERATOR, cache_tokens=1024), 2) is None

    def differ() -> Node:
        raise ClusterError("the cards differ")

    monkeypatch.setattr("cluster.inventory.this_node", differ)
    with pytest.raises(ModelError, match="beside 2 models on a card is unknown: the cards differ; give cache_tokens"):
        _with_cache(two, [EMBEDDER, GENERATOR], 1)


def test_models_without_room_for_a_page_are_refused_with_the_numbers() -> None:
    message = r"2 models share a card with 4\.8 GiB for models; they need 6\.\d GiB without .* serve fewer models"
    with pytest.raises(ModelError, match=message):
        shared_cache_tokens(node(5), models(EMBEDDER, GENERATOR), 2)
