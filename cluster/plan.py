"""Plans a cluster: from its models and nodes to the node of each replica, the reasons, and the models that do not fit."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from cluster.cache_shares import more_pages
from cluster.files import ClusterError
from cluster.groups import Group, choose_group, free_members
from cluster.model_spec import pool_name
from cluster.models_file import ModelEntry, ModelsFile
from cluster.needs import AUTO, Needs, Pipeline, in_dtype, may_have, memory_kind, runs
from cluster.node_classes import least_cards
from cluster.nodes import HOST_RESERVE, Node
from cluster.pipelines import arrange
from cluster.placement import EXACT_STEPS, Replica, Slot
from cluster.plan_reasons import Reasons
from cluster.ray_room import RayRoom
from cluster.slots import CARD_REPLICA_CPUS, cores_of, cpus_of, empty_slots, places_of
from cluster.throughput import Basis, is_known
from cluster.ways_out import WaysOut
from engine.devices import DTYPES, DtypeName, compute_dtype
from engine.errors import ModelError
from engine.model.families import family_of
from engine.model.footprint import HOST_BYTES, MOST_STREAMS, Footprint
from engine.run.kv_cache import PAGE_SIZE, bytes_per_token, whole_pages
from engine.run.stages import why_on_one_device


@dataclass(frozen=True, slots=True)
class Assigned:
    """A replica of the plan, and the reason for its place. A replica that is not `required` is reserved for autoscaling.

    A generation model gets `more_cache_bytes` in addition to its least cache. A pipeline has `more_cards` besides its first one.
    A pipeline over several nodes has `members` instead, a card for each stage, as `pc1:0`; `node` then names all of them.
    """

    model: str
    node: str
    card: int | None  # None on a node without cards
    more_cards: tuple[int, ...]
    needs_bytes: int
    more_cache_bytes: int
    capacity: int
    tokens_per_s: float
    basis: Basis  # the source of tokens_per_s
    required: bool
    why: str
    members: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedPool:
    """The replicas of one model on one node class. They become one Serve application."""

    model: str
    node_class: str
    dtype: DtypeName
    min_replicas: int
    max_replicas: int
    max_per_node: int
    num_gpus: float
    num_cpus: float
    num_threads: int
    tokens_per_s: float
    cache_tokens: int | None  # for a generation model
    streams: int | None  # the number of longest streams that this cache holds at once
    num_stages: int  # of each replica: whole cards of its node, or parts of a node's CPUs
    sleeps: bool  # without requests, in the host's memory
    bundles: tuple[str, ...] = ()  # for stages on several nodes: the node class of each
    nodes: tuple[str, ...] = ()  # the only nodes of their classes for it, where Ray may not choose freely (`RayRoom.bound`)

    @property
    def name(self) -> str:
        return f"{pool_name(self.model)}.{self.node_class}"

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of a replica with several stages. Ray shows a replica only the cards that it reserves."""
        if self.num_stages == 1 or self.bundles:
            return ()
        return tuple(f"cuda:{index}" if self.num_gpus else "cpu" for index in range(self.num_stages))


@dataclass(frozen=True, slots=True)
class GenerationRates:
    """Tokens/s of a generation model on one node class, with half of its context full."""

    decode_alone: float  # of one stream
    decode: float  # of all `streams` of the model's entry together
    prefill: float
    decode_basis: Basis
    prefill_basis: Basis


@dataclass(frozen=True, slots=True)
class Unplaced:
    """Required replicas without a card, and the changes with which they would fit.

    `count` is 0 for a model scaled to zero that has no card for its start.
    """

    model: str
    count: int
    why: str
    ways_out: tuple[str, ...]


class Plan:
    """The place of every replica. All other properties derive from the placement."""

    def __init__(self, file: ModelsFile, nodes: Sequence[Node], steps: int = EXACT_STEPS) -> None:
        """
        Args:
            steps: bounds the search for an arrangement.
        Raises: ClusterError for an unknown node in an entry, or for an unsupported dtype; ModelError for a model that cannot be
            read.
        """
        self.file, self.nodes = file, tuple(nodes)
        self.needs = Needs(file, nodes)
        self.written, self.shapes, self.given = self.needs.written, self.needs.shapes, self.needs.given
        self.classes = self.needs.classes
        self.class_of = {node.name: node.class_name for node in nodes}
        self.gateways_a_node = math.ceil(file.gateways / max(1, len(nodes)))
        most = sum(entry.most_replicas for entry in file.models)
        self.empty_slots = [
            slot if slot.node_places is None or slot.node_places < most else replace(slot, node_places=None)
            for slot in empty_slots(nodes, self.classes, self.gateways_a_node)
        ]
        _check_pins(file.models, {node.name for node in nodes})
        for entry in file.models:
            if entry.dtype == "float16" and family_of(self.shapes[entry.name]).overflows_float16:
                raise ClusterError(f"model {entry.name} overflows float16; use dtype bfloat16 or float32")
        # The entries with one dtype instead of "auto" (docs/decisions/037).
        self.dtypes = {name: self.choose_dtype(entry) for name, entry in self.given.items()}
        self.entries = {name: in_dtype(entry, self.dtypes[name]) for name, entry in self.given.items()}
        self.demands = {name: self.needs.demand(entry, self.dtypes[name]) for name, entry in self.given.items()}
        self.groups: dict[str, Group] = {}  # by the name of the node that stands for it
        self.why_no_group: dict[str, str] = {}
        grouped = self._group_all()
        self.rates = {
            (name, each): self.needs.rate(self.entries[name], each)
            for name, demand in self.demands.items()
            for each in demand.bytes_on
        }
        alone = [demand for name, demand in self.demands.items() if name not in {each.model for each in grouped}]
        placed, slots = arrange(alone, self.empty_slots, steps)
        lacking = Counter(each.model for each in grouped)
        missing = {name: lack for name, count in lacking.items() if (lack := self.entries[name].min_replicas - count)}
        self.placement = replace(placed, replicas=(*grouped, *placed.replicas), missing={**placed.missing, **missing})
        self.slots = [*slots, *(each.slot for each in grouped)]
        self.ray_room = RayRoom(self)

    def changed(self, name: str, changes: Mapping[str, Any], steps: int) -> "Plan":
        """The plan if the fields of a model's entry were replaced by `changes`. `steps` is as for a plan."""
        models = tuple(each.model_copy(update=changes) if each.name == name else each for each in self.file.models)
        return Plan(self.file.model_copy(update={"models": models}), self.nodes, steps)

    def _group_all(self) -> list[Replica]:
        """The replicas of models that no node holds. Their cards are no longer free for other models."""
        found = list[Replica]()
        for name, entry in self.entries.items():
            if not entry.min_replicas or entry.pipeline == 1 or why_on_one_device(self.shapes[name]) or self._node_holds(name):
                continue
            # Ray chooses a node of a class, so each one counts as one with the least memory. It cannot choose among unlike cards.
            nodes = [
                replace(least := self.classes[node.class_name], name=node.name, cards=least_cards(node, least))
                for node in self.nodes
                if may_have(entry, node.name) and runs(entry.dtype, node) and not node.is_mixed
            ]
            if len(nodes) < 2:
                continue
            others = [each for each in self.entries.values() if each.name != name]
            named = {node for each in others for node in each.nodes or ()}
            for _ in range(entry.min_replicas):
                taken = {(each.node.name, each.index) for group in self.groups.values() for each in group.members}
                try:
                    group = choose_group(free_members(nodes, taken, named), entry.pipeline, partial(self._check_group, entry))
                except ModelError as error:
                    self.why_no_group[name] = str(error)
                    break
                found.append(self._grouped(name, group))
        return found

    def _node_holds(self, name: str) -> bool:
        """Whether an empty node holds a replica, as the entry asks for it."""
        entry = self.entries[name]
        allowed = self.needs.allowed_classes(entry)
        return any(
            isinstance(self.needs.pipeline(entry, self.classes[each]), Pipeline) or needs <= self.classes[each].usable_bytes
            for each, needs in self.demands[name].bytes_on.items()
            if each in allowed
        )

    def _check_group(self, entry: ModelEntry, node: Node) -> None:
        if isinstance(found := self.needs.pipeline(entry, node), str):
            raise ModelError(found)

    def _grouped(self, name: str, group: Group) -> Replica:
        """Adds a group to the plan. The group is a node class on which the model alone runs."""
        node, entry = group.node, self.entries[name]
        pipeline = self.needs.pipeline(entry, node)
        assert isinstance(pipeline, Pipeline), "the group was checked"
        key = "+".join(group.places)
        self.groups[key], self.classes[node.class_name] = group, node
        self.class_of[key] = node.class_name
        demand, groups = self.demands[name], {each.node.class_name for each in self.groups.values()}

        def and_earlier(of_classes: Mapping[str, Any], value: Any) -> dict[str, Any]:
            """The model's earlier groups may be of other classes. On the classes of nodes the model does not run."""
            return {each: known for each, known in of_classes.items() if each in groups} | {node.class_name: value}

        self.demands[name] = replace(
            demand,
            bytes_on=and_earlier(demand.bytes_on, sum(pipeline.needs_bytes)),
            tokens_per_s=and_earlier(demand.tokens_per_s, self.needs.rate(entry, node.class_name).tokens_per_s),
            cards_on=and_earlier(demand.cards_on, len(group.members)),
        )
        used = {(each.node.name, each.index) for each in group.members}
        on_node = Counter(each.node.name for each in group.members)
        self.empty_slots = [
            slot if slot.node_places is None else replace(slot, node_places=max(0, slot.node_places - on_node[slot.node]))
            for slot in self.empty_slots
            if (slot.node, slot.index) not in used
        ]
        more = tuple(range(1, len(group.members)))
        return Replica(name, Slot(key, 0, node.class_name, node.usable_bytes, None, None, more), True)

    def footprint(self, name: str, node_class: str, **changes: Any) -> Footprint:
        """The bytes of one replica on a node class. `changes` replaces fields of the model's entry."""
        return self.needs.footprint(self.entries[name].model_copy(update=changes), self.classes[node_class])

    def pipeline_on(self, name: str, node_class: str) -> Pipeline | None:
        """The pipeline of a replica on a node class. None for a replica on one card, or on CPUs."""
        found = self.needs.pipeline(self.entries[name], self.classes[node_class])
        return found if isinstance(found, Pipeline) else None

    def generation_rates(self, name: str) -> dict[str, GenerationRates]:
        """The rates of a generation model, by node class that can hold it. Empty for any other model."""
        entry, found = self.entries[name], {}
        allowed = self.needs.allowed_classes(entry)
        for each, needs in self.demands[name].bytes_on.items():
            node = self.classes[each]
            holds = needs <= node.usable_bytes or self.pipeline_on(name, each) is not None
            if entry.streams is not None and (each in allowed or node.members) and holds:
                alone, prefill = self.needs.decode(entry, node, 1), self.needs.prefill(entry, node)
                decode = self.rates[name, each]
                found[each] = GenerationRates(
                    alone.tokens_per_s, decode.tokens_per_s, prefill.tokens_per_s, decode.basis, prefill.basis
                )
        return found

    @cached_property
    def more_cache_tokens(self) -> dict[tuple[str, str], int]:
        """The tokens that each replica's cache gets in addition to its least size, by model and node class.

        A model with `cache_tokens` in its entry gets no more. No cache holds more streams than a pass computes. In a host's
        memory the plan leaves the reserve free a second time, because the engine leaves the reserve free beside the part that the
        system uses. Ray chooses the cards: if larger replicas might not all find a card, the caches get three quarters of the
        additional tokens, three quarters of those, and so on.
        """
        left = {slot: slot.capacity - self._kept_of_host(slot.node_class) for slot in self.slots}
        growing: dict[Slot, Counter[tuple[str, str]]] = {}
        page_bytes, most = dict[tuple[str, str], int](), dict[tuple[str, str], int]()
        for each in self.placement.replicas:
            left[each.slot] -= self.demands[each.model].bytes_on[each.slot.node_class]
            entry, pool = self.entries[each.model], (each.model, each.slot.node_class)
            if each.slot.more:
                continue
            if entry.context is None or entry.cache_tokens is None or self.written[each.model].cache_tokens is not None:
                continue
            growing.setdefault(each.slot, Counter())[pool] += 1
            page_bytes[pool] = PAGE_SIZE * self._bytes_per_token(each.model)
            most[pool] = (MOST_STREAMS * whole_pages(entry.context) - entry.cache_tokens) // PAGE_SIZE
        pages = more_pages(left, growing, page_bytes, most)
        for node_class in {node_class for _, node_class in pages}:
            here = {pool: count for pool, count in pages.items() if pool[1] == node_class}
            pages |= self.ray_room.cut_to_room(node_class, here, page_bytes)
        of_pipelines = {pool: self._more_of_pipeline(*pool) for pool in self.by_pool}
        return of_pipelines | {pool: count * PAGE_SIZE for pool, count in pages.items()}

    def _more_of_pipeline(self, name: str, node_class: str) -> int:
        """Like `more_cache_tokens`, for one pipeline's pool: it shares its cards with no other model. 0 for any other pool."""
        entry, pipeline = self.entries[name], self.pipeline_on(name, node_class)
        if pipeline is None or self.written[name].cache_tokens is not None or entry.context is None:
            return 0
        if not self.classes[node_class].cards:  # the engine's own reserve of the host's memory is not in the plan
            return 0
        least = whole_pages(entry.cache_tokens or 1)
        return pipeline.cards.most_cache_tokens(least, MOST_STREAMS * whole_pages(entry.context)) - least

    @cached_property
    def by_pool(self) -> dict[tuple[str, str], list[Replica]]:
        groups: dict[tuple[str, str], list[Replica]] = {}
        for each in self.placement.replicas:
            groups.setdefault((each.model, each.slot.node_class), []).append(each)
        return groups

    @cached_property
    def processes(self) -> dict[str, Counter[tuple[str, str]]]:
        """For each node the number of its processes by pool: replicas, and stages of replicas on several nodes."""
        on_node = {node.name: Counter[tuple[str, str]]() for node in self.nodes}
        for each in self.placement.replicas:
            for machine in self.machines(each.slot.node):
                on_node[machine][each.model, each.slot.node_class] += 1
        return on_node

    @cached_property
    def sleeping(self) -> frozenset[tuple[str, str]]:
        """The pools whose replicas sleep in the host's memory while no requests come, by model and node class.

        Such a model has no required replica. Each node of the pool has memory for the weights of all its replicas that sleep,
        beside all its processes and the system. The models come in the order of the file.
        """
        left = {node.name: node.ram_bytes - HOST_RESERVE - self.processes[node.name].total() * HOST_BYTES for node in self.nodes}
        found = list[tuple[str, str]]()
        for pool in sorted(self.by_pool, key=lambda pool: list(self.entries).index(pool[0])):
            name, node_class = pool
            if self.entries[name].min_replicas or memory_kind(self.classes[node_class]) != "gpu":
                continue
            weights = self.footprint(name, node_class).weights
            needs = {node: count * weights for node, here in self.processes.items() if (count := here[pool])}
            if all(needed <= left[node] for node, needed in needs.items()):
                found.append(pool)
                left |= {node: left[node] - needed for node, needed in needs.items()}
        return frozenset(found)

    def _kept_of_host(self, node_class: str) -> int:
        node = self.classes[node_class]
        return 0 if memory_kind(node) == "gpu" else node.reserved

    def _bytes_per_token(self, name: str) -> int:
        """Bytes of a token in the cache of a generation model."""
        return bytes_per_token(self.shapes[name], compute_dtype(DTYPES[self.dtypes[name]]))

    def cache_bytes(self, pool: PlannedPool) -> int:
        """Bytes of the KV cache of a pool's replica. 0 for a model that does not generate."""
        return pool.cache_tokens * self._bytes_per_token(pool.model) if pool.cache_tokens else 0

    def more_bytes(self, name: str, node_class: str) -> int:
        """The bytes of `more_cache_tokens`."""
        tokens = self.more_cache_tokens.get((name, node_class), 0)
        return tokens * self._bytes_per_token(name) if tokens else 0

    @cached_property
    def assigned(self) -> tuple[Assigned, ...]:
        found, reasons = [], Reasons(self)
        for each in self.placement.replicas:
            slot = each.slot
            node = self.classes[slot.node_class]
            found.append(
                Assigned(
                    each.model,
                    slot.node,
                    slot.index if node.cards else None,
                    slot.more,
                    self.demands[each.model].bytes_on[slot.node_class],
                    self.more_bytes(each.model, slot.node_class),
                    self.capacity(slot),
                    *self.rates[each.model, slot.node_class],
                    each.required,
                    reasons.why(each.model, slot),
                    self.places(slot.node),
                )
            )
        return tuple(found)

    def places(self, node: str) -> tuple[str, ...]:
        """The card of each stage of a group, as `pc1:0`. Empty for a machine."""
        return self.groups[node].places if node in self.groups else ()

    def machines(self, node: str) -> tuple[str, ...]:
        """The nodes of a group with one entry for each stage; for a machine the machine."""
        return tuple(each.node.name for each in self.groups[node].members) if node in self.groups else (node,)

    def capacity(self, slot: Slot) -> int:
        """Bytes for models. A pipeline uses the whole memory of different cards."""
        node = self.classes[slot.node_class]
        if not slot.more or not node.is_mixed:
            return slot.capacity
        return sum(node.with_card(index).usable_bytes for index in (slot.index, *slot.more))

    @cached_property
    def unplaced(self) -> tuple[Unplaced, ...]:
        placed = {each.model for each in self.placement.replicas}
        without = {name: 0 for name in self.entries if name not in placed} | dict(self.placement.missing)
        reasons, ways_out = Reasons(self), WaysOut(self)
        return tuple(Unplaced(name, count, reasons.why_not(name), ways_out.of(name)) for name, count in without.items())

    @cached_property
    def pools(self) -> tuple[PlannedPool, ...]:
        """The pools with the largest replicas first. If Serve starts them in this order, Ray finds a card for more of them."""
        pools = [self._pool(name, node_class, replicas) for (name, node_class), replicas in self.by_pool.items()]
        return tuple(sorted(pools, key=lambda pool: (-pool.num_gpus, -pool.min_replicas, pool.name)))

    def choose_dtype(self, entry: ModelEntry) -> DtypeName:
        """The dtype of all replicas of a model. "auto" chooses the dtype with which the most required replicas find a place, then
        the fastest one, on the nodes that may have the model."""
        if entry.dtype != "auto":
            return entry.dtype
        nodes = [self.classes[each] for each in self.needs.allowed_classes(entry)]
        possible = [each for each in AUTO if any(self.needs.runs_fast(each, entry, node) for node in nodes)]
        if not possible or all(self.needs.runs_fast(possible[0], entry, node) for node in nodes):
            return (possible or AUTO)[0]
        return max(possible, key=lambda dtype: self._potential(entry, dtype))

    def _potential(self, entry: ModelEntry, dtype: DtypeName) -> tuple[int, float]:
        """(required replicas that find a place, tokens/s of the fastest cards for all replicas) if the model were alone."""
        demand = self.needs.demand(entry, dtype)
        bytes_on = demand.bytes_on
        speed_on = {each: self.needs.estimate(in_dtype(entry, dtype), self.classes[each]) for each in bytes_on}
        on_node, speeds = Counter[str](), []
        for slot in self.empty_slots:
            if may_have(entry, slot.node) and slot.node_class in bytes_on and slot.node_places != 0:
                if (number := demand.cards_on.get(slot.node_class, 1)) > 1:
                    if slot.index % number == number - 1:  # the last card of a replica
                        on_node[slot.node] += 1
                        speeds.append(speed_on[slot.node_class])
                    continue
                fitting = min(slot.capacity // bytes_on[slot.node_class], slot.places or entry.most_replicas)
                on_node[slot.node] = min(on_node[slot.node] + fitting, slot.node_places or entry.most_replicas)
                speeds += [speed_on[slot.node_class]] * bool(fitting)
        return min(entry.min_replicas, on_node.total()), sum(sorted(speeds, reverse=True)[: entry.most_replicas])

    def left_out(self, name: str) -> tuple[str, ...]:
        """The node classes that could hold the model but do not support the dtype that "auto" became."""
        given, bytes_on = self.given[name], self.demands[name].bytes_on
        return tuple(
            each
            for each in self.needs.allowed_classes(given)
            if each not in bytes_on
            and not isinstance(self.needs.pipeline(self.entries[name], self.classes[each]), str)
            and self.needs.footprint(given, self.classes[each]).total <= self.classes[each].usable_bytes
        )

    def _pool(self, name: str, node_class: str, replicas: Sequence[Replica]) -> PlannedPool:
        node = self.classes[node_class]
        entry = self.entries[name]
        cache = entry.cache_tokens if entry.context else None
        if cache is not None:
            cache += self.more_cache_tokens.get((name, node_class), 0)
        num_gpus = self.ray_room.share(name, node_class, self.more_bytes(name, node_class)) / 1e4 if node.cards else 0.0
        if node.members:  # of each stage
            num_gpus = 1.0 if node.cards else 0.0
        has_others = list(self.class_of.values()).count(node_class) > 1
        most = max(Counter(each.slot.node for each in replicas).values())
        machines = [machine for each in replicas for machine in self.machines(each.slot.node)]
        return PlannedPool(
            name,
            node_class,
            self.dtypes[name],
            sum(each.required for each in replicas),
            len(replicas),
            # Any limit works on the only node of a class. A limit that follows the number would make Serve replace all replicas.
            most if has_others else max(most, len(node.cards) or places_of(node)),
            num_gpus,
            CARD_REPLICA_CPUS if node.cards else cpus_of(node),
            1 if node.cards else cores_of(node),
            self.rates[name, node_class].tokens_per_s,
            cache,
            whole_pages(cache) // whole_pages(entry.context) if cache and entry.context else None,
            self.demands[name].cards_on.get(node_class, 1) if node.cards or node.members else entry.pipeline or 1,
            (name, node_class) in self.sleeping,
            tuple(each.class_name for each in node.members),
            tuple(sorted({each for each in machines if self.class_of[each] in self.ray_room.bound})),
        )

    def guesses(self) -> tuple[str, ...]:
        """The node classes with an unknown card. Their speed is a cautious guess."""
        return tuple(name for name, node in self.classes.items() if not is_known(node))


def _check_pins(entries: Iterable[ModelEntry], nodes: set[str]) -> None:
    for entry in entries:
        for name in (*(entry.nodes or ()), *entry.not_nodes):
            if name not in nodes:
                known = sorted(nodes)
                there = ", ".join(known[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "")
                raise ClusterError(f"model {entry.name} names node {name!r}, which does not exist; the nodes are {there}")
