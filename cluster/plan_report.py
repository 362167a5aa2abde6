"""Reports a `Plan`: as rich tables for people, and as plain data for programs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.amounts import capability
from cluster.gateways import REQUESTS_PER_GATEWAY, TEXT_TOKENS, needed
from cluster.generation import ring_pass_s
from cluster.needs import Pipeline
from cluster.nodes import GIB
from cluster.plan import Assigned, GenerationRates, Plan, PlannedPool, Unplaced
from cluster.slots import GATEWAY_CPUS
from cluster.throughput import Basis, speed_of
from engine.devices import DTYPES, LEAST_OF_CODES, DtypeName
from engine.model.config import ModelConfig
from engine.model.footprint import HOST_BYTES, keeps_e4m3, kept_in_codes, num_quantized
from engine.model.slower_in_8_bits import slower_in_8_bits

FILE_HEADER = """\
# Deploy with: serve deploy FILE
# Start every node with `emberforge node start`, which sets the labels and the environment that this file needs.
"""
# Explanations of the marks of tokens/s.
_BASES: dict[Basis, str] = {
    "given": "the tokens_per_s in the model's entry",
    "measured here": "by emberforge doctor --measure on a node of that class, with random weights and no other model on the card",
    "measured": "our measurement on such a card, with texts of mixed lengths and no other model on the card",
    "predicted": "our measurement on another card, scaled by the speeds of both cards",
    "estimated": "computed from FLOPs and bytes, for short texts and no other model on the card",
}
_MEASURED_STREAMS = (
    "measured here, of streams: computed for these streams and this context, times what the measured streams reached of the "
    "computed rate"
)
_GENERATION = (
    "at once: streams as long as the context that each KV cache holds; remaining memory of a card may make it larger than asked",
    "decode, prefill: tokens/s with half of the context full; decode of all streams asked decides the place of a model",
    "decode: computed from the bytes that a step reads; on an H200 within a factor of 1.3 of our measurement",
    "prefill: computed from FLOPs",
)
# The mapping of a file of weights counts as the host's memory until the file has been copied. Large models have several files.
_MOST_FILE_BYTES = 5 * GIB
_KEEPING = f"GPUs of compute capability {capability(LEAST_OF_CODES)} or later"  # keep codes


@dataclass(frozen=True, slots=True)
class CardUse:
    """The used memory of a card. `card` is None for a node without cards; the memory is then the host's. The cards of a pipeline
    are one use: `more_cards` are those besides the first one, or `members` if they are of several nodes."""

    node: str
    card: int | None
    more_cards: tuple[int, ...]
    node_class: str
    used_bytes: int
    capacity: int
    models: tuple[str, ...]
    members: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        return self.used_bytes / self.capacity


@dataclass(frozen=True, slots=True)
class CpuUse:
    """The CPUs of a node that Ray reserves for replicas. Gateways do not count, because Ray chooses their nodes."""

    node: str
    booked: float
    num_cpus: int

    @property
    def gateways(self) -> int:
        """The number of gateways for which the other CPUs are enough."""
        return int((self.num_cpus - self.booked) / GATEWAY_CPUS + 1e-6)


def cpu_uses(plan: Plan) -> tuple[CpuUse, ...]:
    """The reserved CPUs of every node of the cluster."""
    num_cpus = {(pool.model, pool.node_class): pool.num_cpus for pool in plan.pools}
    booked = dict.fromkeys((node.name for node in plan.nodes), 0.0)
    for each in plan.assigned:
        for machine in plan.machines(each.node):
            booked[machine] += num_cpus[each.model, plan.class_of[each.node]]
    return tuple(CpuUse(node.name, round(booked[node.name], 2), node.num_cpus) for node in plan.nodes)


def card_uses(plan: Plan) -> tuple[CardUse, ...]:
    """The use of every card of the cluster, also of empty cards. The remaining memory that caches get counts as used."""
    on: dict[tuple[str, int | None], list[Assigned]] = {}
    for each in plan.assigned:
        on.setdefault((each.node, each.card), []).append(each)
    uses = []
    for slot in plan.slots:
        card = None if slot.shared_out else slot.index
        here = on.get((slot.node, card), [])
        used = sum(each.needs_bytes + each.more_cache_bytes for each in here)
        models = tuple(each.model for each in here)
        if slot.node in plan.groups and not plan.classes[slot.node_class].cards:
            here = on[slot.node, None]
            used, models = sum(each.needs_bytes for each in here), tuple(each.model for each in here)
        members = plan.places(slot.node)
        uses.append(CardUse(slot.node, card, slot.more, slot.node_class, used, plan.capacity(slot), models, members))
    return tuple(uses)


def as_data(plan: Plan) -> dict[str, Any]:
    """The plan as plain data for JSON. Sizes are in bytes. `card` is null on a node without cards."""
    replicas = [asdict(each) | {"tokens_per_s": round(each.tokens_per_s)} for each in plan.assigned]
    return {
        "complete": not plan.unplaced,
        "replicas": replicas,
        "cards": [asdict(each) for each in card_uses(plan)],
        "cpus": [asdict(each) for each in cpu_uses(plan)],
        "generation": {name: {each: asdict(rates) for each, rates in found.items()} for name, found in _generating(plan).items()},
        "pools": [asdict(each) | {"name": each.name, "tokens_per_s": round(each.tokens_per_s)} for each in plan.pools],
        "unplaced": [asdict(each) for each in plan.unplaced],
        "notes": list(notes(plan)),
        "placement": {"method": plan.placement.method, "proven": plan.placement.proven},
    }


def as_text(plan: Plan) -> Iterator[RenderableType]:
    """The tables and sentences of the report, in the order of printing. First come a summary and the warnings."""
    warnings = tuple(_warnings(plan))
    for line in (*summary(plan), *warnings):
        yield Text(line)
    yield Text()
    yield _replicas(plan)
    yield _cards(plan)
    yield _pools(plan)
    if generating := _generating(plan):
        yield _generation(plan, generating)
    if plan.unplaced:
        yield Text("Does not fit", style="bold red")
        for each in plan.unplaced:
            yield from _unplaced(each)
        yield Text()
    for note in notes(plan):
        if note not in warnings:
            yield Text(f"* {note}")


def in_short(plan: Plan) -> Iterator[Text]:
    """The report without tables: a summary, the warnings, and what does not fit."""
    for line in (*summary(plan), *_warnings(plan)):
        yield Text(line)
    for each in plan.unplaced:
        yield from _unplaced(each)


def show(plan: Plan, console: Console) -> None:
    for part in as_text(plan):
        console.print(part, soft_wrap=isinstance(part, Text))


def summary(plan: Plan) -> tuple[str, ...]:
    """The plan in a few lines: what is placed, what is missing, and how full the cluster is."""
    required, nodes = (
        sum(each.required for each in plan.assigned),
        {machine for each in plan.assigned for machine in plan.machines(each.node)},
    )
    uses, cpus = card_uses(plan), cpu_uses(plan)
    memory = f"{sum(each.used_bytes for each in uses) / GIB:,.1f} of {sum(each.capacity for each in uses) / GIB:,.1f} GiB"
    booked = f"{sum(each.booked for each in cpus):g} of {sum(each.num_cpus for each in cpus)}"
    fullest = max(cpus, key=lambda each: each.booked / each.num_cpus)
    missing = [each.model for each in plan.unplaced]
    more = f" and {len(missing) - 3} more" if missing[3:] else ""
    if handed_out := sum(each.more_cache_bytes for each in plan.assigned):
        memory += f" ({handed_out / GIB:,.1f} of them as additional cache for streams)"
    return (
        f"Some replicas have no place: of {', '.join(missing[:3])}{more}"
        if missing
        else "Everything fits: every required replica has a place",
        f"{_count(len(plan.entries), 'model')}; {_count(len(plan.assigned), 'replica')}, {required} of them required; "
        f"{len(nodes)} of {_count(len(plan.nodes), 'node')} used; {_count(plan.file.gateways, 'gateway')}",
        f"memory for models: {memory}; CPUs reserved for replicas: {booked}, "
        f"on {fullest.node} {fullest.booked:g} of {fullest.num_cpus}",
    )


def notes(plan: Plan) -> tuple[str, ...]:
    """Sentences that explain the values and the placement. They name guesses and doubtful settings."""
    found = [
        f"the speed of {name} is a guess, because the card is unknown: set tokens_per_s to a measured rate"
        for name in plan.guesses()
    ]
    for name, entry in plan.entries.items():
        for node_class in entry.tokens_per_s:
            if node_class not in plan.classes:
                found.append(f"{name}: tokens_per_s names {node_class}, but no node is of this class")
    found += _measurements(plan)
    bases = {each.basis for each in plan.assigned if each.basis != "estimated" or plan.entries[each.model].streams is None}
    found += [f"{basis}: {meaning}" for basis, meaning in _BASES.items() if basis in bases]
    generating = _generating(plan)
    found += _GENERATION if generating else ()
    if any(each.basis == "measured here" and plan.entries[each.model].streams for each in plan.assigned):
        found.append(_MEASURED_STREAMS)
    found += [note for name, rates in generating.items() for note in _ranks_note(name, rates)]
    found += [note for pool in plan.pools for note in _pipeline_note(plan, pool)]
    found += [_sleep_note(plan, pool) for pool in plan.pools if pool.sleeps]
    found += [
        f"{node_class}: replicas stay on the nodes of the plan; on other nodes of the class a replica might take the place of "
        "another model. The replicas of a lost node wait for this node, or for the next plan"
        for node_class in sorted(plan.ray_room.bound)
    ]
    found += [
        f"{node.name} has cards of different kinds: Ray chooses the card of a replica on one card, so each card counts as the "
        "smallest one; start one node per kind, each with its own CUDA_VISIBLE_DEVICES, to use all of their memory"
        for node in plan.nodes
        if node.is_mixed and any(each.node == node.name and not each.more_cards for each in plan.assigned)
    ]
    found += [
        f"{name}: the checkpoint is quantised ({shape.quantization}); {_of_quantised(shape, plan.dtypes[name])}"
        for name, shape in plan.shapes.items()
        if shape.quantization is not None
    ]
    return (*_warnings(plan), *found, *_gateways_note(plan), _placement_note(plan))


def _of_quantised(shape: ModelConfig, dtype: DtypeName) -> str:
    dequantised = f"dequantised at load, so it takes the memory of {dtype}"
    all_values, (values, _) = num_quantized(shape), kept_in_codes(shape, DTYPES[dtype])
    if keeps_e4m3(shape, DTYPES[dtype]):
        return f"GPUs of compute capability 9.0 keep its values in e4m3, on others it is {dequantised}"
    if not values:
        return f"it is {dequantised}"
    if values < all_values:
        share = 100 * values // all_values
        kept = f"{_KEEPING} keep {share} % of the layers' values in their bits and"
        if dtype == "int4":
            return f"{kept} round the others to 4 bits"
        return f"{kept} dequantise the others; elsewhere it is {dequantised}"
    return f"{_KEEPING} keep it in its bits, elsewhere it is {dequantised}"


def failure(plan: Plan) -> str:
    """One sentence that names the models without enough replicas."""
    return "; ".join(_lacking(each) for each in plan.unplaced)


def _warnings(plan: Plan) -> Iterator[str]:
    """Warnings of failures to expect: a single gateway, too few CPUs, an unsupported dtype, too little host memory."""
    gateways, cpus = plan.file.gateways, cpu_uses(plan)
    if gateways == 1 and len(plan.nodes) > 1:
        yield "warning: with one gateway, requests wait for about 10 s if it or its node dies: set gateways: 2 or more"
    places = sum(min(each.gateways, plan.gateways_a_node) for each in cpus)
    if places < gateways:
        yield f"warning: {gateways} gateways need {GATEWAY_CPUS:g} CPUs each, but beside the replicas there are CPUs for {places}"
    left_out: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, dtype in plan.dtypes.items():
        if classes := plan.left_out(name):
            left_out.setdefault((dtype, classes), []).append(name)
    for (chosen, classes), names in left_out.items():
        yield (
            f"warning: {_some(names)}: one dtype on all nodes, {chosen}, excludes {_some(classes)}, which compute it slowly "
            "or not at all; dtype: float32 uses all nodes"
        )
    for node_class, models in plan.ray_room.at_risk.items():
        fails = "finds no card" if plan.classes[node_class].cards else "exceeds the memory of its host"
        yield (
            f"warning: {node_class}: Ray chooses where replicas start, in any order; with a bad choice a replica of "
            f"{_some(models)} {fails}. Plan fewer replicas or smaller ones"
        )
    for name, dtype in plan.dtypes.items():
        if why := slower_in_8_bits(plan.shapes[name], DTYPES[dtype]):
            yield f"warning: {name}: {why}"
    for node in plan.nodes:
        here = plan.processes[node.name]
        if not here or not node.cards or node.cards[0].unified:
            continue
        weights = max(plan.footprint(*pool).weights for pool in here)
        needs = here.total() * HOST_BYTES + min(weights, _MOST_FILE_BYTES)
        if needs > node.ram_bytes:
            yield (
                f"warning: loading the replicas of {node.name} may take {_gib(needs)} GiB of the host's memory, but it has "
                f"{_gib(node.ram_bytes)} GiB"
            )


def _measurements(plan: Plan) -> Iterator[str]:
    """A note for each node class whose speed was measured, and for each node whose measurement is not used."""
    for name, node in plan.classes.items():
        measured = node.measurement
        if measured is None:
            continue
        speed = speed_of(node)
        speeds = f"GEMM {speed.gemm / 1e12:,.3g} TFLOP/s in 16 bits, copy {speed.copy / 1e9:,.0f} GB/s"
        wrong = sum(not each.is_right for each in measured.kernels)
        warning = f"; {_count(wrong, 'kernel check')} failed: see emberforge doctor --measure there" if wrong else ""
        yield f"{name}: its speed was measured here on {measured.day}: {speeds}{warning}"
    for node in plan.nodes:
        if node.measurement_problem is not None:
            yield f"{node.name}: {node.measurement_problem}"


def _gateways_note(plan: Plan) -> Iterator[str]:
    """A note if requests of one text each would reach the limit of the gateways before the limit of the cards."""
    tokens = sum(each.tokens_per_s for each in plan.assigned if plan.entries[each.model].streams is None)
    if needed(tokens) > plan.file.gateways:
        most = plan.file.gateways * REQUESTS_PER_GATEWAY
        rate = f"the replicas' {_rounded(tokens / TEXT_TOKENS):,} texts/s of {TEXT_TOKENS} tokens"
        yield f"gateways: {plan.file.gateways} can take about {most:,} one-text requests/s; {rate} need {needed(tokens)} gateways"


def _ranks_note(name: str, rates: Mapping[str, GenerationRates]) -> Iterator[str]:
    """A note if one node class is faster in decode and another one in prefill."""
    fastest = sorted(rates, key=lambda each: -rates[each].decode)
    for first, second in pairwise(fastest):
        if rates[first].prefill < rates[second].prefill:
            yield (
                f"{name}: {first} decodes faster and {second} computes prompts faster: bytes limit decode, FLOPs limit "
                "prefill; replicas go where decode is faster"
            )
            return


def _pipeline_note(plan: Plan, pool: PlannedPool) -> Iterator[str]:
    """The layers and the memory of each card, with the whole cache, for a pool whose replicas have several cards."""
    pipeline = plan.pipeline_on(pool.model, pool.node_class)
    if pipeline is None:
        return
    tokens = pool.cache_tokens or 0
    if pool.bundles:
        yield from _group_notes(plan, pool, pipeline, tokens)
        return
    cards = zip(pipeline.cards.layers(tokens), pipeline.cards.needs(tokens), strict=True)
    cut = ", ".join(f"layers {part.start} to {part.stop - 1} with {_gib(needs)} GiB" for part, needs in cards)
    yield f"{pool.name}: {pool.num_stages} cards of one node, {cut}; the slowest card decides the rates"


def _group_notes(plan: Plan, pool: PlannedPool, pipeline: Pipeline, tokens: int) -> Iterator[str]:
    """The stages of each replica on several nodes, and the predicted time of a pass."""
    parts = list(zip(pipeline.cards.layers(tokens), pipeline.cards.needs(tokens), strict=True))
    for each in plan.assigned:
        if each.model == pool.model and each.members and plan.class_of[each.node] == pool.node_class:
            stages = zip(each.members, parts, strict=True)
            cut = ", ".join(
                f"{place} layers {part.start} to {part.stop - 1} with {_gib(needs)} GiB" for place, (part, needs) in stages
            )
            yield f"{pool.name}: {len(parts)} stages, {cut}; the first one has the head"
    entry, cards, gbit_s = plan.entries[pool.model], pipeline.cards, plan.file.network_gbit_s
    if entry.streams is not None and entry.context is not None:
        rows = -(-entry.streams // min(entry.streams, len(parts)))
        layers = [part for part, _ in parts]
        length = max(1, entry.context // 2)
        steps_s, sent_s, host_s = ring_pass_s(cards.config, cards.dtype, cards.nodes, layers, rows, length, gbit_s)
        on_way_s = len(parts) * sent_s
        takes = f"{1e3 * (sum(steps_s) + on_way_s + host_s):.3g} ms through all stages"
        yield (
            f"{pool.name}: a decode pass of {_count(rows, 'stream')} takes {takes}, {1e3 * on_way_s:.2g} ms of it on the network "
            f"at network_gbit_s: {gbit_s:g}"
        )
    if plan.classes[pool.node_class].cards:
        yield f"{pool.name}: GPU stages that are separate processes have run only on one host; the rates are computed"


def _sleep_note(plan: Plan, pool: PlannedPool) -> str:
    weights = plan.footprint(pool.model, pool.node_class).weights
    return f"{pool.name}: a replica without requests frees its card and keeps {_gib(weights)} GiB of weights in the host's memory"


def _placement_note(plan: Plan) -> str:
    if not plan.placement.missing:
        return f"placement: {plan.placement.method}; every required replica has its card"
    if plan.placement.proven:
        return f"placement: {plan.placement.method}; proven, no arrangement places more"
    return f"placement: {plan.placement.method}; not proven, another arrangement may place more"


def _replicas(plan: Plan) -> Table:
    table = _table("Replicas", "model", "node:card", "needs GiB", "of GiB", "tokens/s", "", "", "why")
    for each in plan.assigned:
        rate = f"{_rounded(each.tokens_per_s):,}"
        room = "required" if each.required else "room to grow"
        table.add_row(
            each.model, _place(each), _gib(each.needs_bytes), _gib(each.capacity), rate, each.basis, room,
            each.why, style=None if each.required else "dim",
        )  # fmt: skip
    return table


def _cards(plan: Plan) -> Table:
    table = _table("Cards", "node:card", "class", "used GiB", "of GiB", "full", "models")
    for each in card_uses(plan):
        models = ", ".join(each.models)
        table.add_row(_place(each), each.node_class, _gib(each.used_bytes), _gib(each.capacity), f"{each.share:.0%}", models)
    return table


def _pools(plan: Plan) -> Table:
    table = _table("Pools", "pool", "dtype", "replicas", "num_gpus", "num_cpus")
    for each in plan.pools:
        replicas = f"{each.min_replicas}-{each.max_replicas}"
        table.add_row(each.name, each.dtype, replicas, f"{each.num_gpus:.4f}" if each.num_gpus else "", f"{each.num_cpus:g}")
    return table


def _generating(plan: Plan) -> dict[str, dict[str, GenerationRates]]:
    """The rates of the generation models, by node class that can hold them."""
    return {name: rates for name in plan.entries if (rates := plan.generation_rates(name))}


def _generation(plan: Plan, generating: Mapping[str, Mapping[str, GenerationRates]]) -> Table:
    """The table of streams. Classes that could hold a model but get no replica have a dash for streams and cache."""
    table = _table("Streams", *("model", "class", *_STREAM_NUMBERS))
    pools = {(pool.model, pool.node_class): pool for pool in plan.pools}
    for name, rates in generating.items():
        for node_class, rate in rates.items():
            entry, pool = plan.entries[name], pools.get((name, node_class))
            streams, cache = ("-", "-") if pool is None else (f"{pool.streams:,}", _gib(plan.cache_bytes(pool)))
            speeds = (f"{_rounded(each):,}" for each in (rate.decode_alone, rate.decode, rate.prefill))
            table.add_row(name, node_class, f"{entry.context:,}", f"{entry.streams}", streams, cache, *speeds)
    return table


_STREAM_NUMBERS = ("context", "asked", "at once", "cache GiB", "decode of 1", "of all asked", "prefill")
_NUMBERS = ("needs GiB", "used GiB", "of GiB", "tokens/s", "full", "replicas", "num_gpus", "num_cpus", *_STREAM_NUMBERS)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        may_wrap = column in ("why", "models")
        table.add_column(column, justify="right" if column in _NUMBERS else "left", no_wrap=not may_wrap)
    return table


def _unplaced(each: Unplaced) -> Iterator[Text]:
    yield Text(f"  {_lacking(each)}: {each.why}")
    for way in each.ways_out:
        yield Text(f"    way out: {way}")


def _lacking(each: Unplaced) -> str:
    if not each.count:
        return f"{each.model} is scaled to zero and has no card for its start"
    return f"{each.model} lacks {each.count} required replica{'s' if each.count > 1 else ''}"


def _place(each: Assigned | CardUse) -> str:
    """The node and its card, as `srv:0`, or its cards, as `srv:0+1`; for cards of several nodes `pc1:0+pc2:0`."""
    if each.members:
        return "+".join(each.members)
    return f"{each.node}:cpu" if each.card is None else f"{each.node}:{'+'.join(map(str, (each.card, *each.more_cards)))}"


def _some(names: Sequence[str]) -> str:
    """The first three names, and the number of the others."""
    return " and ".join(filter(None, (", ".join(names[:3]), f"{len(names) - 3} more" if names[3:] else "")))


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def _rounded(rate: float) -> int:
    """Rounds to three digits, because the rates are not more exact."""
    return int(float(f"{rate:.3g}"))
