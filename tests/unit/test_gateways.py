"""The number of gateways that `emberforge serve` starts on one machine."""

from dataclasses import replace

import pytest

from cluster.catalogue import CATALOGUE
from cluster.gateways import gateways_beside_engines
from cluster.model_spec import ModelSpec
from cluster.nodes import GIB, Card, Node
from cluster.settings import ServerSettings
from engine.model.config import GenerationConfig
from serve_app.admission.admission import Admission
from serve_app.cli.serve import _with_gateways, _with_requests
from serve_app.errors import Overloaded
from serve_app.observe.metrics import Metrics
from serve_app.settings import Settings

SMALL = CATALOGUE["Qwen/Qwen3-Embedding-0.6B"]


def machine(card: str, num_cpus: int) -> Node:
    return Node("m", "amd64", 256 * GIB, num_cpus, (Card(card, 80 * GIB),))


@pytest.mark.parametrize(
    ("card", "num_cpus", "number"),
    [
        ("NVIDIA H200", 16, 8),
        ("NVIDIA H200", 10, 6),  # 2 cores are for Ray and HAProxy, 2 for the engine
        ("NVIDIA H200", 5, 0),  # a single gateway would add a hop and take no more requests
        ("Tesla T4", 16, 0),  # the replica's own process takes as many requests as this card
    ],
)
def test_gateways_follow_from_the_card_and_the_cores(card: str, num_cpus: int, number: int) -> None:
    spec = ModelSpec(name="m", model="m")
    assert gateways_beside_engines([(spec, SMALL)], machine(card, num_cpus)) == number


def test_a_slow_model_that_generates_has_two() -> None:
    spec, config = ModelSpec(name="m", model="m"), replace(SMALL, generation=GenerationConfig(tied=True))
    assert gateways_beside_engines([(spec, config)], machine("Tesla T4", 16)) == 2


def test_gateways_share_the_places_for_requests() -> None:
    admission = Admission(ServerSettings(max_concurrent_requests=5), Metrics("m"), lambda _: 0.0, sharing=2)
    with admission.admit(1), admission.admit(1), admission.admit(1), pytest.raises(Overloaded), admission.admit(1):
        pass


def test_a_machine_without_a_card_has_no_gateways() -> None:
    assert _with_gateways(Settings(), [SMALL], num_gpus=0) == Settings()


def test_the_operators_number_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.inventory.this_node", lambda: machine("NVIDIA H200", 16))
    assert _with_gateways(Settings(gateways=0), [SMALL], num_gpus=1).num_gateways == 0
    assert _with_gateways(Settings(), [SMALL], num_gpus=1).num_gateways == 8
    assert _with_gateways(Settings(models=("a/gateway",)), [SMALL], num_gpus=1).num_gateways == 0, "the name is taken"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, 512), ({"gateways": 8}, 1024), ({"gateways": 2}, 512), ({"gateways": 8, "max_concurrent_requests": 512}, 512)],
)
def test_many_gateways_take_more_requests_unless_told(settings: dict[str, int], expected: int) -> None:
    assert _with_requests(Settings.model_validate(settings)).max_concurrent_requests == expected
