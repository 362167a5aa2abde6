"""A cluster's models and nodes -> which replica goes where, why, what does not fit, and the Serve config that does it."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from cluster.catalogue import known_model
from cluster.files import ClusterError, read_yaml
from cluster.nodes import GIB, Node
from cluster.placement import Demand, Placement, Slot, place
from cluster.throughput import estimated_tokens_per_s, is_known
from engine.devices import DTYPES, DtypeName
from engine.hub import resolve_model
from engine.memory import Footprint, MemoryKind, footprint
from engine.model_config import ModelConfig, Pooling, load_model_config
from serve_app.settings import DTYPE_ALIASES, Settings, pool_name

# A CPU replica computes with this many cores or more.
_CORES_A_REPLICA = 4


def _dtype(value: Any) -> Any:
    return DTYPE_ALIASES.get(value, value) if isinstance(value, str) else value


class ModelEntry(BaseModel):
    """One model of models.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    model: str = Field(min_length=1)
    dtype: Annotated[Literal["auto"] | DtypeName, BeforeValidator(_dtype)] = "auto"
    min_replicas: int = Field(1, ge=0)
    max_replicas: PositiveInt | None = None  # None: as many as min_replicas, at least one
    aliases: tuple[str, ...] = ()
    pooling: Pooling | None = None
    max_batch_tokens: PositiveInt | None = None
    max_input_tokens: PositiveInt | None = None
    nodes: tuple[str, ...] | None = None
    not_nodes: tuple[str, ...] = ()
    tokens_per_s: dict[str, PositiveFloat] = {}  # measured, by node class

    @model_validator(mode="after")
    def _limits_agree(self) -> "ModelEntry":
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas is {self.max_replicas}, less than min_replicas, {self.min_replicas}")
        return self

    @property
    def most_replicas(self) -> int:
        return self.max_replicas or max(1, self.min_replicas)


class ModelsFile(BaseModel):
    """models.yaml. `default` answers where a request names no model; the first one where none is named here."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    models: tuple[ModelEntry, ...] = Field(min_length=1)
    default: str | None = None
    gateways: PositiveInt = 1  # replicas of the gateway
    asleep: Literal["wait", "refuse"] = "wait"  # what a request hears that wakes a model scaled to zero
    settings: Settings = Settings()

    @model_validator(mode="after")
    def _names_are_distinct(self) -> "ModelsFile":
        names = Counter(name for entry in self.models for name in {entry.name, *entry.aliases})
        twice = next((name for name, count in names.items() if count > 1), None)
        if twice:
            raise ValueError(f"two models are called {twice!r}; names and aliases must differ")
        if self.default is not None and self.default not in names:
            raise ValueError(f"default is {self.default!r}, which no model is called; there is {', '.join(names)}")
        return self


@dataclass(frozen=True, slots=True)
class Assigned:
    """A replica of the plan, with its reason. One that is not `required` is room for autoscaling."""

    model: str
    node: str
    card: int | None  # None on a node without
    needs_bytes: int
    capacity: int
    tokens_per_s: float
    required: bool
    why: str


@dataclass(frozen=True, slots=True)
class Pool:
    """The replicas of one model on one class of nodes: what becomes one Serve application."""

    model: str
    node_class: str
    min_replicas: int
    max_replicas: int
    max_per_node: int
    num_gpus: float
    num_cpus: float
    num_threads: int
    tokens_per_s: float

    @property
    def name(self) -> str:
        return f"{pool_name(self.model)}.{self.node_class}"


@dataclass(frozen=True, slots=True)
class Unplaced:
    """Required replicas without a card, and what would make room for one."""

    model: str
    count: int
    why: str
    ways_out: tuple[str, ...]


def load_models(path: Path) -> ModelsFile:
    """Raises: ClusterError naming the place, the value and what is allowed."""
    return read_yaml(path, ModelsFile)


def shape_of(entry: ModelEntry) -> ModelConfig:
    """The model's shape: from the catalogue, a local folder, or the Hub. Raises: ClusterError, ModelError."""
    config = None if Path(entry.model).expanduser().is_dir() else known_model(entry.model)
    if config is None:
        config = load_model_config(resolve_model(entry.model), entry.pooling)
    if entry.max_input_tokens is None:
        return config
    return replace(config, max_input_length=min(config.max_input_length, entry.max_input_tokens))


class Plan:
    """Where everything goes. Everything else is read off the placement."""

    def __init__(self, file: ModelsFile, nodes: Sequence[Node]) -> None:
        """Raises: ClusterError for a pin to a node that is not there, or a model that cannot be looked up."""
        self.file, self.nodes = file, tuple(nodes)
        self.entries = {entry.name: entry for entry in file.models}
        self.shapes = {name: shape_of(entry) for name, entry in self.entries.items()}
        self.classes = _classes(nodes)
        self.slots = _slots(nodes, self.classes)
        _check_pins(file.models, {node.name for node in nodes})
        self.placement: Placement = place([self._demand(entry) for entry in file.models], self.slots)

    def footprint(self, name: str, node_class: str, **changes: Any) -> Footprint:
        """Bytes of one replica there. `changes` are fields of the model's entry to imagine otherwise."""
        entry = self.entries[name].model_copy(update=changes)
        config = self.shapes[name]
        if entry.max_input_tokens:
            config = replace(config, max_input_length=min(config.max_input_length, entry.max_input_tokens))
        kind = _kind(self.classes[node_class])
        return footprint(config, _dtype_on(entry, kind), kind, entry.max_batch_tokens)

    def tokens_per_s(self, name: str, node_class: str) -> float:
        entry, node = self.entries[name], self.classes[node_class]
        itemsize = _dtype_on(entry, _kind(node)).itemsize
        return entry.tokens_per_s.get(node_class) or estimated_tokens_per_s(self.shapes[name], node, itemsize)

    @cached_property
    def assigned(self) -> tuple[Assigned, ...]:
        found = []
        for each in self.placement.replicas:
            slot = each.slot
            node = self.classes[slot.node_class]
            found.append(
                Assigned(
                    each.model,
                    slot.node,
                    slot.index if node.cards else None,
                    self.footprint(each.model, slot.node_class).total,
                    slot.capacity,
                    self.tokens_per_s(each.model, slot.node_class),
                    each.required,
                    self._why(each.model, slot),
                )
            )
        return tuple(found)

    @cached_property
    def unplaced(self) -> tuple[Unplaced, ...]:
        return tuple(
            Unplaced(name, count, self._why_not(name), self._ways_out(name)) for name, count in self.placement.missing.items()
        )

    @cached_property
    def pools(self) -> tuple[Pool, ...]:
        """Largest replicas first: Ray then finds the arrangement that was planned."""
        groups: dict[tuple[str, str], list[Any]] = {}
        for each in self.placement.replicas:
            groups.setdefault((each.model, each.slot.node_class), []).append(each)
        pools = [self._pool(name, node_class, replicas) for (name, node_class), replicas in groups.items()]
        return tuple(sorted(pools, key=lambda pool: (-pool.num_gpus, -pool.min_replicas, pool.name)))

    def _demand(self, entry: ModelEntry) -> Demand:
        classes = list(self.classes)
        return Demand(
            entry.name,
            {each: self.footprint(entry.name, each).total for each in classes},
            {each: self.tokens_per_s(entry.name, each) for each in classes},
            entry.min_replicas,
            entry.most_replicas,
            None if entry.nodes is None else frozenset(entry.nodes),
            frozenset(entry.not_nodes),
        )

    def _pool(self, name: str, node_class: str, replicas: Sequence[Any]) -> Pool:
        node = self.classes[node_class]
        # Rounded down: what fits to the byte must not fail for the fourth decimal, which is all that Ray counts.
        share = self.footprint(name, node_class).total / node.usable_bytes
        places = _places(node)
        return Pool(
            name,
            node_class,
            sum(each.required for each in replicas),
            len(replicas),
            max(Counter(each.slot.node for each in replicas).values()),
            max(1e-4, int(share * 1e4) / 1e4) if node.cards else 0.0,
            0.5 if node.cards else max(0.1, round(node.num_cpus / places / 2 - 0.05, 2)),
            1 if node.cards else max(1, node.num_cpus // places),
            self.tokens_per_s(name, node_class),
        )

    def _why(self, name: str, slot: Slot) -> str:
        possible = [each for each in self.classes if self._fits_empty(name, each)]
        rate = self.tokens_per_s(name, slot.node_class)
        if self.entries[name].nodes is not None:
            return "pinned there"
        if len(possible) == 1:
            return "no other class of node can hold it"
        best = max(possible, key=lambda each: self.tokens_per_s(name, each))
        measured = "measured" if slot.node_class in self.entries[name].tokens_per_s else "estimated"
        if best == slot.node_class:
            return f"fastest class that holds it ({measured})"
        return f"{rate / self.tokens_per_s(name, best):.0%} of {best}'s speed, where it would share or lacks room ({measured})"

    def _fits_empty(self, name: str, node_class: str) -> bool:
        return self.footprint(name, node_class).total <= self.classes[node_class].usable_bytes

    def _why_not(self, name: str) -> str:
        allowed = [slot for slot in self.slots if _may(self.entries[name], slot.node)]
        if not allowed:
            return "its pins and exclusions leave no node"
        used: Counter[Slot] = Counter()
        for each in self.placement.replicas:
            used[each.slot] += self.footprint(each.model, each.slot.node_class).total
        largest = max(allowed, key=lambda slot: slot.capacity - used[slot])
        needs = self.footprint(name, largest.node_class).total
        free = largest.capacity - used[largest]
        where = f"{largest.node}:{largest.index}"
        if free == largest.capacity:
            return f"a replica needs {_gib(needs)}, and the largest card, {where}, has {_gib(free)} for models"
        return f"a replica needs {_gib(needs)}, and the most that is left is {_gib(free)} of {_gib(largest.capacity)}, on {where}"

    def _ways_out(self, name: str) -> tuple[str, ...]:
        """Changes that would place everything, smallest first, each tried."""
        found: list[str] = []
        entry = self.entries[name]
        tries: list[tuple[str, dict[str, Any]]] = []
        if any(_dtype_on(entry, _kind(node)) == torch.float32 for node in self.classes.values()):
            tries.append(("dtype: bfloat16", {"dtype": "bfloat16"}))
        longest = self.shapes[name].max_input_length
        for tokens in (16384, 8192, 4096, 2048, 512):
            if tokens < longest:
                budget = min(tokens, entry.max_batch_tokens or tokens)
                change = {"max_input_tokens": tokens, "max_batch_tokens": budget}
                tries.append((f"max_input_tokens: {tokens} and max_batch_tokens: {budget}", change))
        if entry.min_replicas > 1:
            fewer = entry.min_replicas - self.placement.missing[name]
            tries.append((f"min_replicas: {fewer}", {"min_replicas": fewer, "max_replicas": max(1, fewer)}))
        for text, changes in tries:
            if len(found) < 2 and self._would_fit(name, changes):
                found.append(text)
        needs = min((self.footprint(name, each).total for each in self.classes if self.classes[each].cards), default=0)
        if not needs:
            needs = footprint(self.shapes[name], _dtype_on(entry, "gpu"), "gpu", entry.max_batch_tokens).total
        found.append(f"another node with a card of {_gib(needs + GIB // 4)} or more")
        return tuple(found)

    def _would_fit(self, name: str, changes: dict[str, Any]) -> bool:
        changed = self.entries[name].model_copy(update=changes)
        models = tuple(changed if entry.name == name else entry for entry in self.file.models)
        return name not in Plan(self.file.model_copy(update={"models": models}), self.nodes).placement.missing

    def serve_config(self) -> dict[str, Any]:
        """The Serve config of the plan: a pool a model and class, and the gateway in front, as plain data for YAML."""
        settings = self.file.settings
        applications = [self._pool_application(pool) for pool in self.pools]
        return {
            "proxy_location": "EveryNode",
            "http_options": {"host": settings.host, "port": settings.port},
            "applications": [*applications, self._gateway_application()],
        }

    def _pool_application(self, pool: Pool) -> dict[str, Any]:
        entry = self.entries[pool.model]
        given = {"dtype": entry.dtype, "pooling": entry.pooling, "num_threads": pool.num_threads}
        given |= {"max_batch_tokens": entry.max_batch_tokens, "max_input_tokens": entry.max_input_tokens}
        settings = self.file.settings.model_copy(
            update={"models": (entry.model,), "served_model_name": (entry.name,)} | {k: v for k, v in given.items() if v}
        )
        options: dict[str, Any] = {"num_cpus": pool.num_cpus}
        if pool.num_gpus:
            options["num_gpus"] = pool.num_gpus
        options["label_selector"] = {"emberforge-class": pool.node_class}
        if entry.nodes is not None:
            options["label_selector"]["emberforge-node"] = f"in({','.join(entry.nodes)})"
        elif entry.not_nodes:
            options["label_selector"]["emberforge-node"] = f"!in({','.join(entry.not_nodes)})"
        return {
            "name": pool.name,
            "route_prefix": None,
            "import_path": "serve_app.pool:build",
            "args": {
                "model": entry.model,
                "name": entry.name,
                "settings": _plain(settings),
                "min_replicas": pool.min_replicas,
                "max_replicas": pool.max_replicas,
            },
            "deployments": [
                {"name": "Engine", "max_replicas_per_node": pool.max_per_node, "ray_actor_options": options},
            ],
        }

    def _gateway_application(self) -> dict[str, Any]:
        models = []
        for name, entry in self.entries.items():
            pools = [
                {"name": pool.name, "node_class": pool.node_class, "tokens_per_s": round(pool.tokens_per_s)}
                | {"min_replicas": pool.min_replicas, "max_replicas": pool.max_replicas}
                for pool in self.pools
                if pool.model == name
            ]
            if pools:
                models.append({"name": name, "model": entry.model, "aliases": list(entry.aliases), "pools": pools})
        default = self.file.default or self.file.models[0].name
        return {
            "name": "gateway",
            "route_prefix": "/",
            "import_path": "serve_app.gateway:build",
            "args": {
                "models": models,
                "default": default,
                "asleep": self.file.asleep,
                "settings": _plain(self.file.settings),
            },
            "deployments": [{"name": "Gateway", "num_replicas": self.file.gateways, "ray_actor_options": {"num_cpus": 0.5}}],
        }

    def guesses(self) -> tuple[str, ...]:
        """Classes whose speed is a cautious guess, because nobody knows their card."""
        return tuple(name for name, node in self.classes.items() if not is_known(node))


def _plain(settings: Settings) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(settings.model_dump_json(exclude_defaults=True))
    return content


def _classes(nodes: Iterable[Node]) -> dict[str, Node]:
    """A node of each class, the one with the least for models: what fits there fits on all of them."""
    classes: dict[str, Node] = {}
    for node in sorted(nodes, key=lambda node: node.name):
        known = classes.get(node.class_name)
        if known is None or node.usable_bytes < known.usable_bytes:
            classes[node.class_name] = node
    return classes


def _slots(nodes: Iterable[Node], classes: dict[str, Node]) -> list[Slot]:
    slots = []
    for node in nodes:
        capacity = classes[node.class_name].usable_bytes
        if node.cards:
            slots += [Slot(node.name, index, node.class_name, capacity) for index in range(len(node.cards))]
        else:
            slots.append(Slot(node.name, 0, node.class_name, capacity, _places(node)))
    return slots


def _places(node: Node) -> int:
    """Replicas that a node without a card may compute with."""
    return max(1, node.num_cpus // _CORES_A_REPLICA)


def _kind(node: Node) -> MemoryKind:
    return "cpu" if not node.cards else "unified" if node.cards[0].unified else "gpu"


def _dtype_on(entry: ModelEntry, kind: MemoryKind) -> torch.dtype:
    """What "auto" will take there; on a CPU it depends on the chip, so the larger one is counted with."""
    if entry.dtype != "auto":
        return DTYPES[entry.dtype]
    return torch.float32 if kind == "cpu" else torch.bfloat16


def _may(entry: ModelEntry, node: str) -> bool:
    return (entry.nodes is None or node in entry.nodes) and node not in entry.not_nodes


def _check_pins(entries: Iterable[ModelEntry], nodes: set[str]) -> None:
    for entry in entries:
        for name in (*(entry.nodes or ()), *entry.not_nodes):
            if name not in nodes:
                raise ClusterError(
                    f"model {entry.name} names node {name!r}, which is not there; there is {', '.join(sorted(nodes))}"
                )


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
