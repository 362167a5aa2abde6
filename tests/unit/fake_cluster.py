"""A server of several kinds of models on a made-up cluster of any number of nodes, for the console."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fake_generator import FakeGenerator
from fake_models import FakeBackend, FakeModel

from cluster.node_live import Seen
from cluster.nodes import GIB, Card, Node
from cluster.router import Report
from cluster.status import ReplicaState
from engine.text.tokenizer import Tokenizer
from serve_app.console.cluster_view import View
from serve_app.models import ModelInfo, ServedModel, replica_overview

KINDS = ("embedding", "reranker", "classifier")
_CARDS = (("NVIDIA H100 80GB HBM3", 80, 2), ("NVIDIA GB10", 119, 1), ("NVIDIA GeForce RTX 5080", 16, 1))


def nodes(number: int) -> tuple[Seen, ...]:
    found = []
    for index in range(number):
        name, gib, count = _CARDS[index % len(_CARDS)]
        cards = tuple(
            Card(name, gib * GIB, int(gib * GIB * (0.35 + 0.08 * card)), uuid=f"GPU-{index}-{card}") for card in range(count)
        )
        node = Node(f"node-{index + 1:02}", "amd64", 256 * GIB, 32, cards)
        labels = {"emberforge-class": node.class_name}
        gpus = {"GPU": float(count), "CPU": 32.0}
        found.append(
            Seen(f"id{index}", node.name, f"10.0.0.{index + 1}", True, labels, gpus, {"GPU": 0.0, "CPU": 27.5}, node, 1000.0)
        )
    return tuple(found)


def lost(seen: Seen) -> Seen:
    return replace(seen, alive=False, problem="The node stopped answering")


class FakeCluster(FakeBackend):
    """Models of several kinds. Each node has a replica of each model."""

    def __init__(self, tokenizer: Tokenizer, folder: Path, number: int) -> None:
        generator = FakeGenerator(folder, *["An answer of the model, a byte a token."] * 100)
        models: dict[str, Any] = {kind: FakeModel(tokenizer, kind) for kind in KINDS} | {"generation": generator}
        for kind, model in models.items():
            model.info = replace(model.info, served_model_name=f"fake-{kind}")
        self._models: dict[str, ServedModel] = {f"fake-{kind}": model for kind, model in models.items()}
        super().__init__(self._models["fake-embedding"])
        self.nodes: tuple[Seen, ...] = nodes(number)

    def get(self, name: str | None, check: Any = None) -> ServedModel:
        return self._models.get(name or "") or super().get(name, check)

    def models(self) -> list[dict[str, Any]]:
        return [{"id": name} for name in self._models]

    def overview(self) -> list[dict[str, Any]]:
        return [self._overview(index, model.info) for index, model in enumerate(self._models.values())]

    def _overview(self, index: int, info: ModelInfo) -> dict[str, Any]:
        running = [
            replica_overview(f"{info.task[:4]}{seen.id}", _report(seen, index))
            for seen in self.nodes
            if seen.alive and seen.node is not None
        ]
        pool = {"name": f"{info.served_model_name}.gpu", "node_class": "gpu", "state": "ready", "queued_tokens": 1200 * index}
        pool |= {"tokens_per_s": 45_000 * len(running), "busy": 0.3 + 0.1 * index, "replicas": running}
        return info.overview() | {"state": "ready", "pools": [pool]}

    def look(self) -> View:
        gateways = [ReplicaState(f"gateway{each}", "gateway", "running", None) for each in range(2)]
        starting = [ReplicaState("new", "fake-embedding.gpu", "starting", seen.id) for seen in self.nodes[:1]]
        return View(1000.0, self.nodes, (*gateways, *starting))


def _report(seen: Seen, index: int) -> Report:
    assert seen.node is not None, "only nodes with a description have replicas here"
    cards: Sequence[Card] = seen.node.cards
    card, share = cards[index % len(cards)], (0.12, 0.1, 0.06, 0.3)[index]
    planned = int(card.total_bytes * share)
    return Report(
        1.0, 300 * index, 45_000.0, busy=0.3 + 0.1 * index, dtype="bfloat16", node=seen.id, card=(card.uuid or "")[4:],
        planned_bytes=planned, used_bytes=int(planned * 0.9),
    )  # fmt: skip
