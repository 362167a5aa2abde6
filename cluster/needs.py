"""What a replica of each model needs on each class of node, and how fast it computes there."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from cluster.catalogue import known_model
from cluster.generation import (
    decode_rate,
    pipeline_decode_tokens_per_s,
    pipeline_prefill_tokens_per_s,
    prefill_rate,
    sent_tokens_per_s,
    settled,
)
from cluster.model_folder import read_model, with_options
from cluster.model_spec import Dtype, ModelSpec
from cluster.models_file import ModelEntry, ModelsFile
from cluster.node_classes import most_cards, node_classes
from cluster.nodes import Node
from cluster.pipelines import Cards
from cluster.placement import Demand
from cluster.throughput import (
    Rate,
    capability_of,
    estimated_tokens_per_s,
    has_bf16,
    pipeline_tokens_per_s,
    tokens_per_s,
)
from engine.devices import DTYPES, LEAST_CAPABILITY, LEAST_OF_CODES, LEAST_OF_KERNELS, DtypeName, compute_dtype
from engine.errors import ModelError
from engine.model.config import ModelConfig
from engine.model.families import family_of
from engine.model.footprint import Footprint, MemoryKind, footprint
from engine.model_id import is_path, split_revision
from engine.run.kv_cache import whole_pages
from engine.run.stages import why_on_one_device

# The dtypes that "auto" may become, the most preferred first. No model overflows bfloat16.
AUTO: tuple[DtypeName, ...] = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A replica over several cards: the layers of each card, and the bytes that it needs there."""

    cards: Cards
    layers: tuple[range, ...]
    needs_bytes: tuple[int, ...]


def shape_of(entry: ModelEntry) -> ModelConfig:
    """The model's configuration from the catalogue, a local folder, or the Hub. Raises: ClusterError, ModelError."""
    ours = entry.backend == "emberforge" and not is_path(entry.model)
    config = known_model(split_revision(entry.model)[0]) if ours else None  # revisions differ in values, not in the shape
    if config is None or (config.generation is not None and entry.pooling is not None):  # a pooling may end generation
        _, config = read_model(entry)
    return with_options(config, entry)


def half_of_context(entry: ModelEntry) -> int:
    """Half of the context of a generation model, because streams are half full on average."""
    assert entry.context is not None, "the model generates"
    return max(1, entry.context // 2)


def memory_kind(node: Node) -> MemoryKind:
    return "cpu" if not node.cards else "unified" if node.cards[0].unified else "gpu"


def in_dtype(entry: ModelEntry, dtype: DtypeName) -> ModelEntry:
    return entry.model_copy(update={"dtype": dtype})


def runs(dtype: Dtype, node: Node) -> bool:
    """Whether the node can compute in this dtype, however slowly."""
    if not has_kernels(node):
        return False
    if dtype == "float16":
        return bool(node.cards)
    return (capability_of(node) or (0, 0)) >= (least_capability(dtype) or (0, 0))


def has_kernels(node: Node) -> bool:
    """Whether the engine runs on the node's cards. It does on every node without cards."""
    capability = capability_of(node)
    return capability is None or capability >= LEAST_OF_KERNELS


def least_capability(dtype: Dtype) -> tuple[int, int] | None:
    """The compute capability that a dtype needs. None if every card supports the dtype."""
    return None if dtype == "auto" else LEAST_CAPABILITY.get(DTYPES[dtype])


def dtype_on(entry: ModelSpec, node: Node, config: ModelConfig) -> torch.dtype:
    """The dtype that the engine chooses on this node alone. For an unknown CPU it is the larger dtype."""
    if entry.dtype != "auto":
        return DTYPES[entry.dtype]
    if has_bf16(node):
        return torch.bfloat16
    return torch.float16 if node.cards and not family_of(config).overflows_float16 else torch.float32


def as_loaded(config: ModelConfig, *nodes: Node) -> ModelConfig:
    """The model with the matrices that the engine has after loading: cards without kernels for codes dequantise a checkpoint."""
    lacks_kernels = any((capability_of(node) or LEAST_OF_CODES) < LEAST_OF_CODES for node in nodes)
    return replace(config, quantization=None) if lacks_kernels else config


def may_have(entry: ModelEntry, node: str) -> bool:
    return (entry.nodes is None or node in entry.nodes) and node not in entry.not_nodes


class Needs:
    """The needs and rates of the entries of a models file on the classes of nodes. A plan adds its groups to `classes`."""

    def __init__(self, file: ModelsFile, nodes: Sequence[Node]) -> None:
        """Raises: ModelError for a model that cannot be read."""
        self.nodes = tuple(nodes)
        self.written = {entry.name: entry for entry in file.models}
        self.shapes = {name: shape_of(entry) for name, entry in self.written.items()}
        # The entries as written, with a context and a cache for generation models.
        self.given = {name: settled(entry, self.shapes[name]) for name, entry in self.written.items()}
        self.classes, self.most_cards = node_classes(nodes), most_cards(nodes)
        self._network_gbit_s = file.network_gbit_s
        self._pipelines: dict[tuple[str, str], Pipeline | str | None] = {}

    def allowed_classes(self, entry: ModelEntry) -> tuple[str, ...]:
        return tuple(dict.fromkeys(node.class_name for node in self.nodes if may_have(entry, node.name)))

    def footprint(self, entry: ModelEntry, node: Node) -> Footprint:
        """The bytes of one replica on one card of the node, or on its CPUs."""
        config = with_options(self.shapes[entry.name], entry)
        dtype, kind = dtype_on(entry, node, config), memory_kind(node)
        return footprint(as_loaded(config, node), dtype, kind, entry.max_batch_tokens, cache_tokens=entry.cache_tokens)

    def rate(self, entry: ModelEntry, node_class: str) -> Rate:
        """The rate in the model's entry, else the best estimate. For a generation model: of decode, with all `streams`."""
        if node_class in entry.tokens_per_s:
            return Rate(entry.tokens_per_s[node_class], "given")
        node, config = self.classes[node_class], self.shapes[entry.name]
        if entry.streams is not None:
            return self.decode(entry, node, entry.streams)
        if isinstance(pipeline := self.pipeline(entry, node), Pipeline):
            rates = [tokens_per_s(config, dtype_on(entry, card, config), card).tokens_per_s for card in pipeline.cards.nodes]
            return Rate(self._carried(pipeline, pipeline_tokens_per_s(rates, pipeline.layers)), "estimated")
        return tokens_per_s(config, dtype_on(entry, node, config), node)

    def _carried(self, pipeline: Pipeline, rate: float) -> float:
        """The rate of a pipeline's passes, limited by the network between its nodes."""
        cards = pipeline.cards
        return min(rate, sent_tokens_per_s(cards.config, cards.dtype, self._network_gbit_s)) if cards.in_ring else rate

    def decode(self, entry: ModelEntry, node: Node, streams: int) -> Rate:
        """Tokens/s of decode of a replica with so many streams, each with half of its context."""
        config, pipeline = self.shapes[entry.name], self.pipeline(entry, node)
        dtype = dtype_on(entry, node, config)
        if isinstance(pipeline, Pipeline):
            cards, layers = pipeline.cards.nodes, pipeline.layers
            gbit_s = self._network_gbit_s if pipeline.cards.in_ring else None
            return Rate(
                pipeline_decode_tokens_per_s(config, dtype, cards, layers, streams, half_of_context(entry), gbit_s), "estimated"
            )
        return decode_rate(config, dtype, node, streams, half_of_context(entry))

    def prefill(self, entry: ModelEntry, node: Node) -> Rate:
        """Tokens/s of prompts of half of the context."""
        config, pipeline = self.shapes[entry.name], self.pipeline(entry, node)
        dtype = dtype_on(entry, node, config)
        if isinstance(pipeline, Pipeline):
            cards, layers = pipeline.cards.nodes, pipeline.layers
            rate = pipeline_prefill_tokens_per_s(config, dtype, cards, layers, half_of_context(entry))
            return Rate(self._carried(pipeline, rate), "estimated")
        return prefill_rate(config, dtype, node, half_of_context(entry))

    def pipeline(self, entry: ModelEntry, node: Node) -> Pipeline | str | None:
        """The pipeline of an entry with its dtype, or the reason why none fits. None for a replica on one card, or on CPUs.
        `node` represents its class."""
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
        most = most_cards(each for each in self.nodes if may_have(entry, each.name)).get(node.class_name, 0)
        if most < (entry.pipeline or 2):
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
        dtype = dtype_on(entry, node, config)
        cards = Cards(as_loaded(config, *alone), dtype, alone, entry.max_batch_tokens, in_ring=bool(node.members))
        tokens = whole_pages(entry.cache_tokens or 1)
        return Pipeline(cards, tuple(cards.layers(tokens)), cards.needs(tokens))

    def _has_a_card_for(self, entry: ModelEntry) -> bool:
        """Whether one card holds a replica, on any node that may have the model. With "auto", a card that supports the dtype."""
        nodes = [node for each in self.allowed_classes(entry) if (node := self.classes[each]).cards and runs(entry.dtype, node)]
        if self.written[entry.name].dtype == "auto" and entry.dtype in AUTO:
            nodes = [node for node in nodes if self.runs_fast(entry.dtype, entry, node)]
        return any(self.footprint(entry, node).total <= node.usable_bytes for node in nodes)

    def estimate(self, entry: ModelEntry, node: Node) -> float:
        """Tokens/s computed only from FLOPs and bytes."""
        if entry.streams is not None:
            return self.decode(entry, node, entry.streams).tokens_per_s
        config, pipeline = self.shapes[entry.name], self.pipeline(entry, node)
        dtype = dtype_on(entry, node, config)
        if isinstance(pipeline, Pipeline):
            rates = [estimated_tokens_per_s(config, dtype, card) for card in pipeline.cards.nodes]
            return pipeline_tokens_per_s(rates, pipeline.layers)
        return estimated_tokens_per_s(config, dtype, node)

    def runs_fast(self, dtype: DtypeName, entry: ModelEntry, node: Node) -> bool:
        """Whether the node computes in this dtype at full speed and the model supports it."""
        if dtype == "bfloat16":
            return has_bf16(node)
        return dtype == "float32" or (bool(node.cards) and not family_of(self.shapes[entry.name]).overflows_float16)

    def demand(self, given: ModelEntry, dtype: DtypeName) -> Demand:
        """The demand of an entry's replicas, on all classes that can compute in this dtype."""
        entry = in_dtype(given, dtype)
        # An operator may choose a dtype that a node computes slowly; "auto" never does.
        may = partial(self.runs_fast, dtype, entry) if given.dtype == "auto" else partial(runs, dtype)
        able = {name: node for name, node in self.classes.items() if has_kernels(node) and may(node)}
        cuts = {name: self.pipeline(entry, node) for name, node in able.items()}
        classes = [name for name, found in cuts.items() if not isinstance(found, str)]
        return Demand(
            entry.name,
            {each: self._bytes(entry, self.classes[each]) for each in classes},
            {each: self.rate(entry, each).tokens_per_s for each in classes},
            entry.min_replicas,
            entry.most_replicas,
            None if entry.nodes is None else frozenset(entry.nodes),
            frozenset(entry.not_nodes),
            {each: len(found.layers) for each, found in cuts.items() if isinstance(found, Pipeline)},
        )

    def _bytes(self, entry: ModelEntry, node: Node) -> int:
        """Bytes of a replica: of its cards together, or of the host."""
        if isinstance(pipeline := self.pipeline(entry, node), Pipeline):
            return sum(pipeline.needs_bytes)
        needs, stages = self.footprint(entry, node), entry.pipeline or 1
        if node.cards or stages == 1:
            return needs.total
        config = self.shapes[entry.name]
        head = config.vocab_size * config.hidden_size * compute_dtype(dtype_on(entry, node, config)).itemsize
        return needs.total + (stages - 1) * needs.workspace + head  # the last stage may have a copy of the word embeddings
