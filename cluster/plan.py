"""Plans a cluster: from its models and nodes to the node of each replica, the reasons, and the models that do not fit."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from operator import attrgetter
from typing import Any

import torch

from cluster.cache_shares import finds_room, more_pages
from cluster.catalogue import known_model
from cluster.files import ClusterError
from cluster.generation import (
    decode_rate,
    pipeline_decode_tokens_per_s,
    pipeline_prefill_tokens_per_s,
    prefill_rate,
    sent_tokens_per_s,
    settled,
)
from cluster.groups import Group, choose_group, free_members
from cluster.measurement import Measurement
from cluster.model_folder import read_model, with_options
from cluster.model_spec import Dtype, ModelSpec, pool_name
from cluster.models_file import ModelEntry, ModelsFile
from cluster.nodes import CARD_RESERVE, GIB, HOST_RESERVE, Card, Node
from cluster.pipelines import Cards, arrange
from cluster.placement import EXACT_STEPS, Demand, Replica, Slot
from cluster.ray_choice import WHOLE, Share, may_overfill, may_strand
from cluster.throughput import (
    Basis,
    Rate,
    capability_of,
    estimated_tokens_per_s,
    has_bf16,
    is_known,
    pipeline_tokens_per_s,
    tokens_per_s,
)
from engine.devices import DTYPES, INT4, LEAST_CAPABILITY, DtypeName, compute_dtype
from engine.errors import ModelError
from engine.model.config import ModelConfig
from engine.model.families import family_of
from engine.model.footprint import HOST_BYTES, MOST_BATCH_TOKENS, MOST_STREAMS, Footprint, MemoryKind, footprint
from engine.model_id import is_path, split_revision
from engine.run.kv_cache import PAGE_SIZE, bytes_per_token, whole_pages
from engine.run.stages import why_on_one_device

# A CPU replica computes with at least this many cores.
_CORES_A_REPLICA = 4
# CPUs that Ray reserves for a gateway, and for a replica on a card.
GATEWAY_CPUS = 0.5
CARD_REPLICA_CPUS = 0.5
# Limits of the search for ways out: steps of one search, and replicas placed by all searches together. All searches then take
# seconds. With hundreds of nodes only the first unplaced models get ways out.
_TRY_STEPS = 5_000
_TRY_REPLICAS = 100_000
# The dtypes that "auto" may become, the most preferred first. No model overflows bfloat16.
_AUTO: tuple[DtypeName, ...] = ("bfloat16", "float16", "float32")


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
    nodes: tuple[str, ...] = ()  # the only nodes of their classes for it, where Ray may not choose freely (`Plan.bound`)

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
class Pipeline:
    """A replica over several cards: the layers of each card, and the bytes that it needs there."""

    cards: Cards
    layers: tuple[range, ...]
    needs_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unplaced:
    """Required replicas without a card, and the changes with which they would fit.

    `count` is 0 for a model scaled to zero that has no card for its start.
    """

    model: str
    count: int
    why: str
    ways_out: tuple[str, ...]


def shape_of(entry: ModelEntry) -> ModelConfig:
    """The model's configuration from the catalogue, a local folder, or the Hub. Raises: ClusterError, ModelError."""
    ours = entry.backend == "emberforge" and not is_path(entry.model)
    config = known_model(split_revision(entry.model)[0]) if ours else None  # revisions differ in values, not in the shape
    if config is None or (config.generation is not None and entry.pooling is not None):  # a pooling may end generation
        _, config = read_model(entry)
    return with_options(config, entry)


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
        self.written = {entry.name: entry for entry in file.models}
        self.shapes = {name: shape_of(entry) for name, entry in self.written.items()}
        # The entries as written, with a context and a cache for generation models.
        self.given = {name: settled(entry, self.shapes[name]) for name, entry in self.written.items()}
        self.classes = _classes(nodes)
        self.class_of = {node.name: node.class_name for node in nodes}
        self.gateways_a_node = math.ceil(file.gateways / max(1, len(nodes)))
        most = sum(entry.most_replicas for entry in file.models)
        empty = [
            slot if slot.node_places is None or slot.node_places < most else replace(slot, node_places=None)
            for slot in _slots(nodes, self.classes, self.gateways_a_node)
        ]
        _check_pins(file.models, {node.name for node in nodes})
        for entry in file.models:
            if entry.dtype == "float16" and family_of(self.shapes[entry.name]).overflows_float16:
                raise ClusterError(f"model {entry.name} overflows float16; use dtype bfloat16 or float32")
        self._empty_slots, self._most_cards = empty, _most_cards(nodes)
        self._pipelines: dict[tuple[str, str], Pipeline | str | None] = {}
        self._tries = _TRY_REPLICAS // max(1, sum(entry.min_replicas for entry in file.models))
        # The entries with one dtype instead of "auto" (docs/decisions/037).
        self.dtypes = {name: self._dtype(entry) for name, entry in self.given.items()}
        self.entries = {name: _in_dtype(entry, self.dtypes[name]) for name, entry in self.given.items()}
        self.demands = {name: self._demand(entry, self.dtypes[name]) for name, entry in self.given.items()}
        self.groups: dict[str, Group] = {}  # by the name of the node that stands for it
        self._why_no_group: dict[str, str] = {}
        grouped = self._group_all()
        self.rates = {
            (name, each): self._rate(self.entries[name], each)
            for name, demand in self.demands.items()
            for each in demand.bytes_on
        }
        alone = [demand for name, demand in self.demands.items() if name not in {each.model for each in grouped}]
        placed, slots = arrange(alone, self._empty_slots, steps)
        lacking = Counter(each.model for each in grouped)
        missing = {name: lack for name, count in lacking.items() if (lack := self.entries[name].min_replicas - count)}
        self.placement = replace(placed, replicas=(*grouped, *placed.replicas), missing={**placed.missing, **missing})
        self.slots = [*slots, *(each.slot for each in grouped)]

    def _group_all(self) -> list[Replica]:
        """The replicas of models that no node holds. Their cards are no longer free for other models."""
        found = list[Replica]()
        for name, entry in self.entries.items():
            if not entry.min_replicas or entry.pipeline == 1 or why_on_one_device(self.shapes[name]) or self._node_holds(name):
                continue
            # Ray chooses a node of a class, so each one counts as one with the least memory. It cannot choose among unlike cards.
            nodes = [
                replace(least := self.classes[node.class_name], name=node.name, cards=_least_cards(node, least))
                for node in self.nodes
                if _may(entry, node.name) and _runs(entry.dtype, node) and not node.is_mixed
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
                    self._why_no_group[name] = str(error)
                    break
                found.append(self._grouped(name, group))
        return found

    def _node_holds(self, name: str) -> bool:
        """Whether an empty node holds a replica, as the entry asks for it."""
        entry = self.entries[name]
        allowed = self._allowed_classes(entry)
        return any(
            isinstance(self._pipeline(entry, self.classes[each]), Pipeline) or needs <= self.classes[each].usable_bytes
            for each, needs in self.demands[name].bytes_on.items()
            if each in allowed
        )

    def _check_group(self, entry: ModelEntry, node: Node) -> None:
        if isinstance(found := self._pipeline(entry, node), str):
            raise ModelError(found)

    def _grouped(self, name: str, group: Group) -> Replica:
        """Adds a group to the plan. The group is a node class on which the model alone runs."""
        node, entry = group.node, self.entries[name]
        pipeline = self._pipeline(entry, node)
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
            tokens_per_s=and_earlier(demand.tokens_per_s, self._rate(entry, node.class_name).tokens_per_s),
            cards_on=and_earlier(demand.cards_on, len(group.members)),
        )
        used, on_node = (
            {(each.node.name, each.index) for each in group.members},
            Counter(each.node.name for each in group.members),
        )
        self._empty_slots = [
            slot if slot.node_places is None else replace(slot, node_places=max(0, slot.node_places - on_node[slot.node]))
            for slot in self._empty_slots
            if (slot.node, slot.index) not in used
        ]
        more = tuple(range(1, len(group.members)))
        return Replica(name, Slot(key, 0, node.class_name, node.usable_bytes, None, None, more), True)

    def footprint(self, name: str, node_class: str, **changes: Any) -> Footprint:
        """The bytes of one replica on a node class. `changes` replaces fields of the model's entry."""
        return self._footprint(self.entries[name].model_copy(update=changes), self.classes[node_class])

    def _footprint(self, entry: ModelEntry, node: Node) -> Footprint:
        config = with_options(self.shapes[entry.name], entry)
        dtype, kind = dtype_on(entry, node, config), memory_kind(node)
        return footprint(config, dtype, kind, entry.max_batch_tokens, cache_tokens=entry.cache_tokens)

    def _rate(self, entry: ModelEntry, node_class: str) -> Rate:
        """The rate in the model's entry, else the best estimate. For a generation model: of decode, with all `streams`."""
        if node_class in entry.tokens_per_s:
            return Rate(entry.tokens_per_s[node_class], "given")
        node, config = self.classes[node_class], self.shapes[entry.name]
        if entry.streams is not None:
            return self._decode(entry, node, entry.streams)
        if isinstance(pipeline := self._pipeline(entry, node), Pipeline):
            rates = [tokens_per_s(config, dtype_on(entry, card, config), card).tokens_per_s for card in pipeline.cards.nodes]
            return Rate(self._carried(pipeline, pipeline_tokens_per_s(rates, pipeline.layers)), "estimated")
        return tokens_per_s(config, dtype_on(entry, node, config), node)

    def _carried(self, pipeline: Pipeline, rate: float) -> float:
        """The rate of a pipeline's passes, limited by the network between its nodes."""
        cards = pipeline.cards
        return min(rate, sent_tokens_per_s(cards.config, cards.dtype, self.file.network_gbit_s)) if cards.in_ring else rate

    def _decode(self, entry: ModelEntry, node: Node, streams: int) -> Rate:
        config, pipeline = self.shapes[entry.name], self._pipeline(entry, node)
        dtype = dtype_on(entry, node, config)
        if isinstance(pipeline, Pipeline):
            cards, layers = pipeline.cards.nodes, pipeline.layers
            gbit_s = self.file.network_gbit_s if pipeline.cards.in_ring else None
            return Rate(pipeline_decode_tokens_per_s(config, dtype, cards, layers, streams, _half(entry), gbit_s), "estimated")
        return decode_rate(config, dtype, node, streams, _half(entry))

    def _prefill(self, entry: ModelEntry, node: Node) -> Rate:
        config, pipeline = self.shapes[entry.name], self._pipeline(entry, node)
        dtype = dtype_on(entry, node, config)
        if isinstance(pipeline, Pipeline):
            cards, layers = pipeline.cards.nodes, pipeline.layers
            rate = pipeline_prefill_tokens_per_s(config, dtype, cards, layers, _half(entry))
            return Rate(self._carried(pipeline, rate), "estimated")
        return prefill_rate(config, dtype, node, _half(entry))

    def pipeline_on(self, name: str, node_class: str) -> Pipeline | None:
        """The pipeline of a replica on a node class. None for a replica on one card, or on CPUs."""
        found = self._pipeline(self.entries[name], self.classes[node_class])
        return found if isinstance(found, Pipeline) else None

    def _pipeline(self, entry: ModelEntry, node: Node) -> Pipeline | str | None:
        """Like `pipeline_on`, for an entry with its dtype; or the reason why no pipeline fits. `node` represents its class."""
        key = entry.model_dump_json(), node.class_name
        if key not in self._pipelines:
            self._pipelines[key] = self._new_pipeline(entry, node)
        return self._pipelines[key]

    def _new_pipeline(self, entry: ModelEntry, node: Node) -> Pipeline | str | None:
        if node.members:
            try:
                return self._cut(entry, node, len(node.members))
            except ModelError as error:
                return str(error)
        if not node.cards or entry.pipeline == 1 or why_on_one_device(self.shapes[entry.name]) is not None:
            return None
        if (most := self._most_cards[node.class_name]) < (entry.pipeline or 2):
            return f"has {most} on a node, but pipeline is {entry.pipeline}" if entry.pipeline else None
        if entry.pipeline is None and self._has_a_card_for(entry):
            return None
        reason = ""
        for number in [entry.pipeline] if entry.pipeline else range(2, most + 1):
            try:
                if node.is_mixed and number < len(node.cards):
                    raise ModelError(f"Ray cannot choose {number} of its {len(node.cards)} different cards")
                return self._cut(entry, node, number)
            except ModelError as error:
                reason = f"over {number} cards of one node: {error}"
        return reason

    def _cut(self, entry: ModelEntry, node: Node, number: int) -> Pipeline:
        """The pipeline of an entry over `number` cards of the node. Raises: ModelError if it does not fit."""
        config = with_options(self.shapes[entry.name], entry)
        alone = node.members or tuple(node.with_card(index if node.is_mixed else 0) for index in range(number))
        cards = Cards(config, dtype_on(entry, node, config), alone, entry.max_batch_tokens, in_ring=bool(node.members))
        tokens = whole_pages(entry.cache_tokens or 1)
        return Pipeline(cards, tuple(cards.layers(tokens)), cards.needs(tokens))

    def _has_a_card_for(self, entry: ModelEntry) -> bool:
        """Whether one card holds a replica, on any node that may have the model. With "auto", a card that supports the dtype."""
        nodes = [node for each in self._allowed_classes(entry) if (node := self.classes[each]).cards and _runs(entry.dtype, node)]
        if self.written[entry.name].dtype == "auto" and entry.dtype in _AUTO:
            nodes = [node for node in nodes if self._has(entry.dtype, entry, node)]
        return any(self._footprint(entry, node).total <= node.usable_bytes for node in nodes)

    def generation_rates(self, name: str) -> dict[str, GenerationRates]:
        """The rates of a generation model, by node class that can hold it. Empty for any other model."""
        entry, found = self.entries[name], {}
        allowed = self._allowed_classes(entry)
        for each, needs in self.demands[name].bytes_on.items():
            node = self.classes[each]
            holds = needs <= node.usable_bytes or self.pipeline_on(name, each) is not None
            if entry.streams is not None and (each in allowed or node.members) and holds:
                decode, alone, prefill = self.rates[name, each], self._decode(entry, node, 1), self._prefill(entry, node)
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
            here = [pool for pool in pages if pool[1] == node_class]
            while any(pages[pool] for pool in here) and not self._ray_finds_room(
                node_class, {pool: pages[pool] * page_bytes[pool] for pool in here}
            ):
                pages |= {pool: pages[pool] * 3 // 4 for pool in here}
        of_pipelines = {pool: self._more_of_pipeline(*pool) for pool in self._by_pool}
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

    def _ray_finds_room(self, node_class: str, more_bytes: dict[tuple[str, str], int]) -> bool:
        """Whether Ray finds a card for each replica on a class of node, if some replicas take more bytes than they need.

        The replicas may start in any order, unless in some order even smaller replicas would not all find a card.
        """
        nodes = self._nodes_of(node_class)
        if not nodes[0].cards:  # Ray does not count the host's memory, so it may put all replicas on one node
            return len(nodes) == 1
        pools = self._shares(node_class, more_bytes, bound=True)
        taken = Counter(each.node.name for group in self.groups.values() for each in group.members)
        alone = [(pool.share, pool.replicas, pool.most_on_node) for pool in pools if pool.most_on_node]
        if not finds_room(sorted(alone, reverse=True), [len(node.cards) - taken[node.name] for node in nodes]):
            return False
        least = self._shares(node_class, {}, bound=True)
        cards = [len(node.cards) for node in nodes]
        return not may_strand(pools, cards) or may_strand(least, cards)

    @cached_property
    def bound(self) -> frozenset[str]:
        """The classes whose replicas stay on the nodes of the plan. On others of the class Ray might put them where they leave
        another replica without a card, or a host without memory."""
        several = [each for each, count in Counter(node.class_name for node in self.nodes).items() if count > 1]
        return frozenset(each for each in several if self._may_fail(each, False) and not self._may_fail(each, True))

    @cached_property
    def at_risk(self) -> dict[str, tuple[str, ...]]:
        """The models by class, for classes where a replica may find no card, or a host without memory, if Ray chooses badly."""
        models: dict[str, dict[str, None]] = {}
        for each in self.placement.replicas:
            for machine in self.machines(each.slot.node):
                models.setdefault(self.class_of[machine], {})[each.model] = None
        return {each: (*names,) for each, names in models.items() if each not in self.bound and self._may_fail(each, False)}

    def _may_fail(self, node_class: str, bound: bool) -> bool:
        """Whether Ray may choose nodes and cards where a replica finds no card, or no memory of its host."""
        nodes, more = self._nodes_of(node_class), {pool: self._more_bytes(*pool) for pool in self._by_pool}
        pools = self._shares(node_class, more, bound)
        return may_strand(pools, [len(node.cards) for node in nodes]) if nodes[0].cards else may_overfill(pools, len(nodes))

    def _nodes_of(self, node_class: str) -> list[Node]:
        return [node for node in self.nodes if node.class_name == node_class]

    def _shares(self, node_class: str, more_bytes: Mapping[tuple[str, str], int], bound: bool) -> list[Share]:
        """The pools of a node class, as Ray sees them. With `bound`, Ray may only use the nodes of the plan. The share of a node
        without cards is one of the host's memory."""
        index_of, found = {node.name: index for index, node in enumerate(self._nodes_of(node_class))}, []
        for (name, each), replicas in self._by_pool.items():
            machines = [machine for replica in replicas for machine in self.machines(replica.slot.node) if machine in index_of]
            if not machines:
                continue
            may = {*machines} if bound else {machine for machine in index_of if _may(self.entries[name], machine)}
            nodes = frozenset(index_of[machine] for machine in may)
            if each == node_class:
                share, required = (
                    self._share(name, each, more_bytes.get((name, each), 0)),
                    sum(each.required for each in replicas),
                )
                most = max(Counter(machines).values())
                found.append(Share(share, required, len(machines), most, nodes, not self.entries[name].min_replicas))
            else:  # whole cards, or hosts, for the stages of replicas on several nodes
                most_hosts = None if self.classes[node_class].cards else len(replicas)
                found.append(Share(WHOLE, len(machines), len(machines), most_hosts, nodes))
        return found

    def _share(self, name: str, node_class: str, more_bytes: int) -> int:
        """The share of a card that Ray reserves for a replica, in ten-thousandths, because Ray counts four decimals.

        It is rounded down, because otherwise replicas that fit exactly would exceed the card. A pipeline takes whole cards,
        because Ray gives no shares of several cards.
        """
        if (number := self.demands[name].cards_on.get(node_class, 1)) > 1:
            return number * 10_000
        share = (self.demands[name].bytes_on[node_class] + more_bytes) / self.classes[node_class].usable_bytes
        return max(1, int(share * 1e4))

    @cached_property
    def _by_pool(self) -> dict[tuple[str, str], list[Replica]]:
        groups: dict[tuple[str, str], list[Replica]] = {}
        for each in self.placement.replicas:
            groups.setdefault((each.model, each.slot.node_class), []).append(each)
        return groups

    @cached_property
    def sleeping(self) -> frozenset[tuple[str, str]]:
        """The pools whose replicas sleep in the host's memory while no requests come, by model and node class.

        Such a model has no required replica. Each node of the pool has memory for the weights of all its replicas that sleep,
        beside all its processes and the system. The models come in the order of the file.
        """
        on_node = {node.name: Counter[tuple[str, str]]() for node in self.nodes}  # processes, with the stages of groups
        for each in self.placement.replicas:
            for machine in self.machines(each.slot.node):
                on_node[machine][each.model, each.slot.node_class] += 1
        left = {node.name: node.ram_bytes - HOST_RESERVE - on_node[node.name].total() * HOST_BYTES for node in self.nodes}
        found = list[tuple[str, str]]()
        for pool in sorted(self._by_pool, key=lambda pool: list(self.entries).index(pool[0])):
            name, node_class = pool
            if self.entries[name].min_replicas or memory_kind(self.classes[node_class]) != "gpu":
                continue
            weights = self.footprint(name, node_class).weights
            needs = {node: count * weights for node, here in on_node.items() if (count := here[pool])}
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

    def _more_bytes(self, name: str, node_class: str) -> int:
        tokens = self.more_cache_tokens.get((name, node_class), 0)
        return tokens * self._bytes_per_token(name) if tokens else 0

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
                    slot.more,
                    self.demands[each.model].bytes_on[slot.node_class],
                    self._more_bytes(each.model, slot.node_class),
                    self.capacity(slot),
                    *self.rates[each.model, slot.node_class],
                    each.required,
                    self._why(each.model, slot),
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
        return tuple(Unplaced(name, count, self._why_not(name), self._ways_out(name)) for name, count in without.items())

    @cached_property
    def pools(self) -> tuple[PlannedPool, ...]:
        """The pools with the largest replicas first. If Serve starts them in this order, Ray finds a card for more of them."""
        pools = [self._pool(name, node_class, replicas) for (name, node_class), replicas in self._by_pool.items()]
        return tuple(sorted(pools, key=lambda pool: (-pool.num_gpus, -pool.min_replicas, pool.name)))

    def _dtype(self, entry: ModelEntry) -> DtypeName:
        """The dtype of all replicas of a model. "auto" chooses the dtype with which the most required replicas find a place, then
        the fastest one, on the nodes that may have the model."""
        if entry.dtype != "auto":
            return entry.dtype
        nodes = [self.classes[each] for each in self._allowed_classes(entry)]
        possible = [each for each in _AUTO if any(self._has(each, entry, node) for node in nodes)]
        if not possible or all(self._has(possible[0], entry, node) for node in nodes):
            return (possible or _AUTO)[0]
        return max(possible, key=lambda dtype: self._potential(entry, dtype))

    def _allowed_classes(self, entry: ModelEntry) -> tuple[str, ...]:
        return tuple(dict.fromkeys(node.class_name for node in self.nodes if _may(entry, node.name)))

    def _potential(self, entry: ModelEntry, dtype: DtypeName) -> tuple[int, float]:
        """(required replicas that find a place, tokens/s of the fastest cards for all replicas) if the model were alone."""
        demand = self._demand(entry, dtype)
        bytes_on = demand.bytes_on
        speed_on = {each: self._estimate(_in_dtype(entry, dtype), self.classes[each]) for each in bytes_on}
        on_node, speeds = Counter[str](), []
        for slot in self._empty_slots:
            if _may(entry, slot.node) and slot.node_class in bytes_on and slot.node_places != 0:
                if (number := demand.cards_on.get(slot.node_class, 1)) > 1:
                    if slot.index % number == number - 1:  # the last card of a replica
                        on_node[slot.node] += 1
                        speeds.append(speed_on[slot.node_class])
                    continue
                fitting = min(slot.capacity // bytes_on[slot.node_class], slot.places or entry.most_replicas)
                on_node[slot.node] = min(on_node[slot.node] + fitting, slot.node_places or entry.most_replicas)
                speeds += [speed_on[slot.node_class]] * bool(fitting)
        return min(entry.min_replicas, on_node.total()), sum(sorted(speeds, reverse=True)[: entry.most_replicas])

    def _estimate(self, entry: ModelEntry, node: Node) -> float:
        """Tokens/s computed only from FLOPs and bytes."""
        if entry.streams is not None:
            return self._decode(entry, node, entry.streams).tokens_per_s
        config, pipeline = self.shapes[entry.name], self._pipeline(entry, node)
        dtype = dtype_on(entry, node, config)
        if isinstance(pipeline, Pipeline):
            rates = [estimated_tokens_per_s(config, dtype, card) for card in pipeline.cards.nodes]
            return pipeline_tokens_per_s(rates, pipeline.layers)
        return estimated_tokens_per_s(config, dtype, node)

    def _has(self, dtype: DtypeName, entry: ModelEntry, node: Node) -> bool:
        """Whether the node computes in this dtype at full speed and the model supports it."""
        if dtype == "bfloat16":
            return has_bf16(node)
        return dtype == "float32" or (bool(node.cards) and not family_of(self.shapes[entry.name]).overflows_float16)

    def left_out(self, name: str) -> tuple[str, ...]:
        """The node classes that could hold the model but do not support the dtype that "auto" became."""
        given, bytes_on = self.given[name], self.demands[name].bytes_on
        return tuple(
            each
            for each in self._allowed_classes(given)
            if each not in bytes_on
            and not isinstance(self._pipeline(self.entries[name], self.classes[each]), str)
            and self._footprint(given, self.classes[each]).total <= self.classes[each].usable_bytes
        )

    def _demand(self, given: ModelEntry, dtype: DtypeName) -> Demand:
        entry = _in_dtype(given, dtype)
        # An operator may choose a dtype that a node computes slowly; "auto" never does.
        runs = partial(self._has, dtype, entry) if given.dtype == "auto" else partial(_runs, dtype)
        cuts = {name: self._pipeline(entry, node) for name, node in self.classes.items() if runs(node)}
        classes = [name for name, found in cuts.items() if not isinstance(found, str)]
        return Demand(
            entry.name,
            {each: self._needs(entry, self.classes[each]) for each in classes},
            {each: self._rate(entry, each).tokens_per_s for each in classes},
            entry.min_replicas,
            entry.most_replicas,
            None if entry.nodes is None else frozenset(entry.nodes),
            frozenset(entry.not_nodes),
            {each: len(found.layers) for each, found in cuts.items() if isinstance(found, Pipeline)},
        )

    def _needs(self, entry: ModelEntry, node: Node) -> int:
        """Bytes of a replica: of its cards together, or of the host."""
        if isinstance(pipeline := self._pipeline(entry, node), Pipeline):
            return sum(pipeline.needs_bytes)
        needs, stages = self._footprint(entry, node), entry.pipeline or 1
        if node.cards or stages == 1:
            return needs.total
        config = self.shapes[entry.name]
        head = config.vocab_size * config.hidden_size * compute_dtype(dtype_on(entry, node, config)).itemsize
        return needs.total + (stages - 1) * needs.workspace + head  # the last stage may have a copy of the word embeddings

    def _pool(self, name: str, node_class: str, replicas: Sequence[Replica]) -> PlannedPool:
        node = self.classes[node_class]
        entry = self.entries[name]
        cache = entry.cache_tokens if entry.context else None
        if cache is not None:
            cache += self.more_cache_tokens.get((name, node_class), 0)
        num_gpus = self._share(name, node_class, self._more_bytes(name, node_class)) / 1e4 if node.cards else 0.0
        if node.members:  # of each stage
            num_gpus = 1.0 if node.cards else 0.0
        places, has_others = 1 if node.members else _places(node), list(self.class_of.values()).count(node_class) > 1
        most = max(Counter(each.slot.node for each in replicas).values())
        machines = [machine for each in replicas for machine in self.machines(each.slot.node)]
        return PlannedPool(
            name,
            node_class,
            self.dtypes[name],
            sum(each.required for each in replicas),
            len(replicas),
            # Any limit works on the only node of a class. A limit that follows the number would make Serve replace all replicas.
            most if has_others else max(most, len(node.cards) or places),
            num_gpus,
            CARD_REPLICA_CPUS if node.cards else max(0.1, round(node.num_cpus / places / 2 - 0.05, 2)),
            1 if node.cards else max(1, node.num_cpus // places),
            self.rates[name, node_class].tokens_per_s,
            cache,
            whole_pages(cache) // whole_pages(entry.context) if cache and entry.context else None,
            self.demands[name].cards_on.get(node_class, 1) if node.cards or node.members else entry.pipeline or 1,
            (name, node_class) in self.sleeping,
            tuple(each.class_name for each in node.members),
            tuple(sorted({each for each in machines if self.class_of[each] in self.bound})),
        )

    def _why(self, name: str, slot: Slot) -> str:
        demand = self.demands[name]
        possible = [each for each, needs in demand.bytes_on.items() if needs <= self.classes[each].usable_bytes]
        if demand.nodes is not None:
            return "pinned there"
        if slot.node in self.groups:
            on_nodes = f"{len(slot.more) + 1} stages on {len(set(self.machines(slot.node)))} nodes"
            return f"{on_nodes}, because no node holds {self._held(name)}"
        if slot.more:
            return f"{len(slot.more) + 1} cards, {'as asked' if self.entries[name].pipeline else 'because no card holds it'}"
        if len(self.classes) == 1:
            return "the only node class"
        if len(possible) == 1:
            return f"no other node class {f'supports {self.dtypes[name]}' if self.left_out(name) else 'can hold it'}"
        best = max(possible, key=lambda each: demand.tokens_per_s[each])
        if best == slot.node_class:
            return "fastest class that holds it"
        share = demand.tokens_per_s[slot.node_class] / demand.tokens_per_s[best]
        return f"{share:.0%} of {best}, shared or full"

    def _held(self, name: str) -> str:
        """What a node must hold: the whole model, or as many stages as the entry asks for, which one card might hold together."""
        number = self.entries[name].pipeline
        return f"its {number} stages" if number else "it"

    def _why_not(self, name: str) -> str:
        demand = self.demands[name]
        allowed = [slot for slot in self._empty_slots if _may(self.entries[name], slot.node)]
        if group := self._why_no_group.get(name):
            one = self._why_no_pipeline(name, allowed)
            return f"no node holds {self._held(name)}{f' ({one})' if one else ''}, and neither do several: {group}"
        if reason := self._why_no_pipeline(name, allowed):
            return reason
        possible = [slot for slot in allowed if slot.node_class in demand.bytes_on]
        if not possible:
            classes = sorted({slot.node_class for slot in allowed})
            return _cannot_run(self.entries[name].dtype, classes) if classes else "nodes and not_nodes leave no node for it"
        used: Counter[Slot] = Counter()
        for each in self.placement.replicas:
            used[each.slot] += self.demands[each.model].bytes_on[each.slot.node_class]
        count = Counter(each.slot for each in self.placement.replicas)

        def lacks(slot: Slot, taken: int) -> int:
            return demand.bytes_on[slot.node_class] - (slot.capacity - taken)

        on_node = Counter(each.slot.node for each in self.placement.replicas)
        largest = min(possible, key=lambda slot: lacks(slot, 0))
        if lacks(largest, 0) > 0:
            needs = demand.bytes_on[largest.node_class]
            return f"a replica needs {_gib_up(needs)}, but {_where(largest)} has only {_gib(largest.capacity)} for models"
        with_cpus = [slot for slot in possible if slot.node_places is None or on_node[slot.node] < slot.node_places]
        if not with_cpus:
            return self._cpus_taken(min(possible, key=lambda slot: lacks(slot, used[slot])).node)
        with_place = [slot for slot in with_cpus if slot.places is None or count[slot] < slot.places]
        if not with_place:
            return self._cores_taken(with_cpus)
        closest = min(with_place, key=lambda slot: lacks(slot, used[slot]))
        needs, free = demand.bytes_on[closest.node_class], closest.capacity - used[closest]
        return f"a replica needs {_gib_up(needs)}, but {_where(closest)} has only {_gib(free)} of {_gib(closest.capacity)} left"

    def _why_no_pipeline(self, name: str, allowed: Sequence[Slot]) -> str | None:
        """Why no node has several cards for a replica. None for a replica on one card."""
        classes = tuple(dict.fromkeys(slot.node_class for slot in allowed))
        found = {each: self._pipeline(self.entries[name], self.classes[each]) for each in classes}
        fitting = {each: pipeline for each, pipeline in found.items() if isinstance(pipeline, Pipeline)}
        if fitting:
            number = min(len(pipeline.layers) for pipeline in fitting.values())
            return f"a replica needs {number} whole cards of one node, but no node has {number} empty cards"
        return next((f"{each} {reason}" for each, reason in found.items() if isinstance(reason, str)), None)

    def _cpus_taken(self, name: str) -> str:
        num_cpus = next(node.num_cpus for node in self.nodes if node.name == name)
        kept = self.gateways_a_node * GATEWAY_CPUS
        return f"a replica needs {CARD_REPLICA_CPUS:g} CPUs; all {num_cpus} of {name} are reserved, {kept:g} of them for gateways"

    def _cores_taken(self, slots: Iterable[Slot]) -> str:
        fewest = min(self.classes[slot.node_class].num_cpus for slot in slots)
        return f"a replica computes with {min(fewest, _CORES_A_REPLICA)} cores, but no cores are free"

    def _ways_out(self, name: str) -> tuple[str, ...]:
        """Changes with which all replicas of this model fit and no other replica moves: the smallest one of each kind."""
        smaller = (each for each in self._dtypes(name) if self._would_fit(name, {"dtype": each}))
        found = [f"dtype: {each}" for each in islice(smaller, 1)]
        found += self._in_four_bits(name)
        for kind in self._changes(name):
            # If a change fits, every larger change of its kind also fits.
            smallest = bisect_left(kind, True, key=partial(self._would_fit, name))
            if smallest < len(kind):
                found.append(_written_out(kind[smallest]))
        if why_on_one_device(self.shapes[name]) is None:
            numbers = range(1, max(self._most_cards.values(), default=0) + 1)
            others = ({"pipeline": number} for number in numbers if number != self.entries[name].pipeline)
            found += [_written_out(each) for each in islice((each for each in others if self._would_fit(name, each)), 1)]
        return (*found, self._another_node(name))

    def _dtypes(self, name: str) -> tuple[DtypeName, ...]:
        """The dtypes to try instead of the model's own, the most exact one first. int8 is only for cards without float8, int4
        only for models that generate."""
        wide: tuple[DtypeName, ...] = ("bfloat16",)
        if self.given[name].dtype == "auto":
            ours = {self.dtypes[name]} | ({"float16"} if family_of(self.shapes[name]).overflows_float16 else set())
            wide = tuple(each for each in reversed(_AUTO) if each not in ours)
        if self.entries[name].backend != "emberforge":
            return wide
        lacks_float8 = any(_runs("int8", node) and not _runs("float8", node) for node in self.classes.values())
        four: tuple[DtypeName, ...] = () if self.entries[name].streams is None else ("int4",)
        return (*wide, "float8", *(("int8",) if lacks_float8 else ()), *four)

    def _in_four_bits(self, name: str) -> list[str]:
        """A published checkpoint in 4 bits, if it fits. Its groups of 128 columns have a scale and a zero. They take the same
        memory as the scales of the groups of 64 columns of dtype int4."""
        entry, config = self.entries[name], self.shapes[name]
        if entry.streams is None or config.quantization is not None or entry.backend != "emberforge":
            return []
        if not self._would_fit(name, {"dtype": "int4"}):
            return []
        config = with_options(config, entry)
        needs = footprint(config, INT4, "gpu", entry.max_batch_tokens, cache_tokens=entry.cache_tokens).total
        return [f"a published 4-bit checkpoint (GPTQ, AWQ, compressed-tensors) of {entry.model}: it takes {_gib_up(needs)}"]

    def _changes(self, name: str) -> list[list[dict[str, Any]]]:
        """Changes of the model's entry to try, by kind, the smallest first."""
        entry = self.entries[name]
        fewer = entry.min_replicas - self.placement.missing.get(name, 0)
        kinds = [*self._smaller(name), [{"min_replicas": fewer}] if fewer else []]
        if entry.nodes is not None or entry.not_nodes:
            kinds.append([{"nodes": None, "not_nodes": ()}])
        return kinds

    def _smaller(self, name: str) -> list[list[dict[str, Any]]]:
        """Changes, by kind, with which a replica takes less memory."""
        entry, longest = self.entries[name], self.shapes[name].max_input_length
        if entry.context is not None and entry.streams is not None:
            in_8_bits: list[dict[str, Any]] = [{"kv_cache_dtype": "fp8"}] if entry.kv_cache_dtype == "auto" else []
            if (cache := self.written[name].cache_tokens) is not None:
                least = self.written[name].context or PAGE_SIZE
                return [in_8_bits, [{"cache_tokens": tokens} for tokens in range(cache - PAGE_SIZE, least - 1, -PAGE_SIZE)]]
            contexts = range(whole_pages(entry.context) - PAGE_SIZE, 0, -PAGE_SIZE)
            return [
                in_8_bits,
                [{"context": tokens} for tokens in contexts],
                [{"streams": count} for count in range(entry.streams - 1, 0, -1)],
            ]
        budget = entry.max_batch_tokens or MOST_BATCH_TOKENS
        shorter: list[dict[str, Any]] = [
            {"max_input_tokens": tokens} if budget <= tokens else
            {"max_batch_tokens": tokens} if longest <= tokens else
            {"max_input_tokens": tokens, "max_batch_tokens": tokens}
            for tokens in (16384, 8192, 4096, 2048, 512)
            if tokens < max(longest, budget)
        ]  # fmt: skip
        return [shorter]

    def _would_fit(self, name: str, changes: dict[str, Any]) -> bool:
        entry = settled(self.written[name].model_copy(update=changes), self.shapes[name])
        changed = self._demand(entry, self._dtype(entry))
        if changed == self.demands[name] or self._tries <= 0:
            return False
        self._tries -= 10 if self.groups else 1
        if self.groups:  # a change may give every group other cards, so this is a whole plan, which takes longer
            models = tuple(each.model_copy(update=changes) if each.name == name else each for each in self.file.models)
            then = Plan(self.file.model_copy(update={"models": models}), self.nodes, _TRY_STEPS).placement
        else:
            demands = [changed if each.model == name else each for each in self.demands.values()]
            required = [replace(each, max_replicas=max(1, each.min_replicas)) for each in demands]  # no replicas for autoscaling
            then, _ = arrange(required, self._empty_slots, _TRY_STEPS)
        others = all(count <= self.placement.missing.get(other, 0) for other, count in then.missing.items() if other != name)
        return others and name not in then.missing and any(each.model == name for each in then.replicas)

    def _another_node(self, name: str) -> str:
        entry = self.given[name]
        config = with_options(self.shapes[name], entry)
        count = self.placement.missing.get(name, 0)
        # A model without any replica can have bfloat16 on the new nodes. Otherwise the new nodes must support the present dtype.
        free = entry.dtype == "auto" and count == entry.min_replicas
        dtype = torch.bfloat16 if free else DTYPES[self.dtypes[name]]
        needs_bytes = footprint(config, dtype, "gpu", entry.max_batch_tokens, cache_tokens=entry.cache_tokens).total
        card = f"a card of {_gib_up(needs_bytes + CARD_RESERVE)}"
        if (number := entry.pipeline or 1) > 1:
            each_bytes = Cards(config, dtype, (), entry.max_batch_tokens).card_bytes(whole_pages(entry.cache_tokens or 1), number)
            card = f"{number} cards of {_gib_up(each_bytes + CARD_RESERVE)}"
        more = f"{count} more nodes, each with" if count > 1 else "another node with"
        needs = f" and compute capability {_written(least)} or later" if (least := _least_capability(entry.dtype)) else ""
        fits = (each for each, need in self.demands[name].bytes_on.items() if need <= self.classes[each].usable_bytes)
        cpu = next((each for each in fits if not self.classes[each].cards and not self.classes[each].members), None)
        alike = f", or of class {cpu}" if cpu else ""
        return f"{more} {card} or more{needs}{alike}{', named in its nodes' if entry.nodes is not None else ''}"

    def guesses(self) -> tuple[str, ...]:
        """The node classes with an unknown card. Their speed is a cautious guess."""
        return tuple(name for name, node in self.classes.items() if not is_known(node))


def _half(entry: ModelEntry) -> int:
    """Half of the context of a generation model, because streams are half full on average."""
    assert entry.context is not None, "the model generates"
    return max(1, entry.context // 2)


def _written_out(changes: dict[str, Any]) -> str:
    """Changes of an entry as an operator would write them."""
    return "no nodes and not_nodes" if "nodes" in changes else " and ".join(f"{key}: {value}" for key, value in changes.items())


def _classes(nodes: Iterable[Node]) -> dict[str, Node]:
    """For each class, a node with the least memory for models and the fewest CPUs of the class. A replica that fits on it fits on
    every node of the class, and so does a pipeline: each card has the size of the smallest such card of the class. The node's
    measurement is the newest one of the class."""
    classes: dict[str, Node] = {}
    for node in sorted(nodes, key=lambda node: node.name):
        known = classes.get(node.class_name)
        least = node if known is None or node.usable_bytes < known.usable_bytes else known
        num_cpus, cpu_bf16 = min(node.num_cpus, (known or node).num_cpus), node.cpu_bf16 and (known or node).cpu_bf16
        measurement = _newest(node.measurement, known.measurement if known else None)
        cards = _least_cards(least, node if least is known else known or node)
        classes[node.class_name] = replace(least, num_cpus=num_cpus, cpu_bf16=cpu_bf16, cards=cards, measurement=measurement)
    return classes


def _least_cards(node: Node, other: Node) -> tuple[Card, ...]:
    """The node's cards, each with the least size that it or a card like it has on the two nodes, which are of one class."""
    if node.is_mixed:
        return tuple(min(pair, key=attrgetter("total_bytes")) for pair in zip(node.cards, other.cards, strict=True))
    return (min((*node.cards, *other.cards), key=attrgetter("total_bytes")),) * len(node.cards) if node.cards else ()


def _most_cards(nodes: Iterable[Node]) -> dict[str, int]:
    """The largest number of cards of a node, by class. MIG slices do not count, because CUDA gives a process only one slice."""
    most: dict[str, int] = {}
    for node in nodes:
        number = 1 if any(card.is_slice for card in node.cards) else len(node.cards)
        most[node.class_name] = max(most.get(node.class_name, 0), number)
    return most


def _newest(*measurements: Measurement | None) -> Measurement | None:
    return max((each for each in measurements if each is not None), key=lambda each: each.measured_at, default=None)


def _slots(nodes: Iterable[Node], classes: dict[str, Node], gateways_a_node: int) -> list[Slot]:
    slots = []
    for node in nodes:
        least = classes[node.class_name]
        capacity = least.usable_bytes
        if node.cards:
            places = _places_beside_cards(least, gateways_a_node)
            slots += [Slot(node.name, index, node.class_name, capacity, None, places) for index in range(len(node.cards))]
        else:
            slots.append(Slot(node.name, 0, node.class_name, capacity, _places(node)))
    return slots


def _places_beside_cards(node: Node, gateways_a_node: int) -> int:
    """The largest number of replicas on a node with cards. Ray chooses the gateways' nodes, so each node keeps CPUs for some."""
    return max(0, int((node.num_cpus - gateways_a_node * GATEWAY_CPUS) / CARD_REPLICA_CPUS))


def _places(node: Node) -> int:
    """The largest number of replicas on a node without a card."""
    return max(1, node.num_cpus // _CORES_A_REPLICA)


def memory_kind(node: Node) -> MemoryKind:
    return "cpu" if not node.cards else "unified" if node.cards[0].unified else "gpu"


def _in_dtype(entry: ModelEntry, dtype: DtypeName) -> ModelEntry:
    return entry.model_copy(update={"dtype": dtype})


def _runs(dtype: Dtype, node: Node) -> bool:
    """Whether the node can compute in this dtype, however slowly."""
    if dtype == "float16":
        return bool(node.cards)
    return (capability_of(node) or (0, 0)) >= (_least_capability(dtype) or (0, 0))


def _cannot_run(dtype: Dtype, classes: Sequence[str]) -> str:
    least = _least_capability(dtype)
    if least is None:
        return f"{dtype} does not run on a CPU"
    names = [*classes[:3], *([f"{len(classes) - 3} more"] if classes[3:] else [])]
    there = f"{', '.join(names[:-1])} and {names[-1]} have" if names[1:] else f"{names[0]} has"
    return f"{dtype} needs a card of compute capability {_written(least)} or later; {there} no such card"


def _least_capability(dtype: Dtype) -> tuple[int, int] | None:
    """The compute capability that a dtype needs. None if every card supports the dtype."""
    return None if dtype == "auto" else LEAST_CAPABILITY.get(DTYPES[dtype])


def _written(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def dtype_on(entry: ModelSpec, node: Node, config: ModelConfig) -> torch.dtype:
    """The dtype that the engine chooses on this node alone. For an unknown CPU it is the larger dtype."""
    if entry.dtype != "auto":
        return DTYPES[entry.dtype]
    if has_bf16(node):
        return torch.bfloat16
    return torch.float16 if node.cards and not family_of(config).overflows_float16 else torch.float32


def _may(entry: ModelEntry, node: str) -> bool:
    return (entry.nodes is None or node in entry.nodes) and node not in entry.not_nodes


def _check_pins(entries: Iterable[ModelEntry], nodes: set[str]) -> None:
    for entry in entries:
        for name in (*(entry.nodes or ()), *entry.not_nodes):
            if name not in nodes:
                known = sorted(nodes)
                there = ", ".join(known[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "")
                raise ClusterError(f"model {entry.name} names node {name!r}, which does not exist; the nodes are {there}")


def _where(slot: Slot) -> str:
    return slot.node if slot.shared_out else f"{slot.node}:{slot.index}"


def _gib(size: float) -> str:
    """Available bytes, rounded down."""
    return f"{math.floor(size / GIB * 10) / 10:.1f} GiB"


def _gib_up(size: float) -> str:
    """Needed bytes, rounded up. A card of this size is enough."""
    return f"{math.ceil(size / GIB * 10) / 10:.1f} GiB"
