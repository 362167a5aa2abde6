"""Ways out for a model without a place: changes of its entry with which it fits, or another node."""

from bisect import bisect_left
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from cluster.amounts import capability, gib_up
from cluster.generation import settled
from cluster.model_folder import with_options
from cluster.needs import AUTO, least_capability, runs
from cluster.nodes import CARD_RESERVE
from cluster.pipelines import Cards, arrange
from engine.devices import DTYPES, INT4, DtypeName
from engine.model.families import family_of
from engine.model.footprint import MOST_BATCH_TOKENS, footprint
from engine.run.kv_cache import PAGE_SIZE, whole_pages
from engine.run.stages import why_on_one_device

if TYPE_CHECKING:
    from cluster.plan import Plan

# Limits of the search: steps of one search, and replicas placed by all searches together. All searches then take seconds. With
# hundreds of nodes only the first unplaced models get ways out.
_TRY_STEPS = 5_000
_TRY_REPLICAS = 100_000


class WaysOut:
    """Searches a plan's ways out. All models share the limit of the search."""

    def __init__(self, plan: "Plan") -> None:
        self._plan = plan
        self._tries = _TRY_REPLICAS // max(1, sum(entry.min_replicas for entry in plan.file.models))

    def of(self, name: str) -> tuple[str, ...]:
        """Changes with which all replicas of this model fit and no other replica moves: the smallest one of each kind."""
        smaller = (each for each in self._dtypes(name) if self._would_fit(name, {"dtype": each}))
        found = [f"dtype: {each}" for each in islice(smaller, 1)]
        found += self._in_four_bits(name)
        for kind in self._changes(name):
            # If a change fits, every larger change of its kind also fits.
            smallest = bisect_left(kind, True, key=partial(self._would_fit, name))
            if smallest < len(kind):
                found.append(_written_out(kind[smallest]))
        if why_on_one_device(self._plan.shapes[name]) is None:
            numbers = range(1, max(self._plan.needs.most_cards.values(), default=0) + 1)
            others = ({"pipeline": number} for number in numbers if number != self._plan.entries[name].pipeline)
            found += [_written_out(each) for each in islice((each for each in others if self._would_fit(name, each)), 1)]
        return (*found, self._another_node(name))

    def _dtypes(self, name: str) -> tuple[DtypeName, ...]:
        """The dtypes to try instead of the model's own, the most exact one first. int8 is only for cards without float8, int4
        only for models that generate."""
        wide: tuple[DtypeName, ...] = ("bfloat16",)
        if self._plan.given[name].dtype == "auto":
            ours = {self._plan.dtypes[name]} | ({"float16"} if family_of(self._plan.shapes[name]).overflows_float16 else set())
            wide = tuple(each for each in reversed(AUTO) if each not in ours)
        if self._plan.entries[name].backend != "emberforge":
            return wide
        lacks_float8 = any(runs("int8", node) and not runs("float8", node) for node in self._plan.classes.values())
        four: tuple[DtypeName, ...] = () if self._plan.entries[name].streams is None else ("int4",)
        return (*wide, "float8", *(("int8",) if lacks_float8 else ()), *four)

    def _in_four_bits(self, name: str) -> list[str]:
        """A published checkpoint in 4 bits, if it fits. Its groups of 128 columns have a scale and a zero. They take the same
        memory as the scales of the groups of 64 columns of dtype int4."""
        entry, config = self._plan.entries[name], self._plan.shapes[name]
        if entry.streams is None or config.quantization is not None or entry.backend != "emberforge":
            return []
        if not self._would_fit(name, {"dtype": "int4"}):
            return []
        config = with_options(config, entry)
        needs = footprint(config, INT4, "gpu", entry.max_batch_tokens, cache_tokens=entry.cache_tokens).total
        return [f"a published 4-bit checkpoint (GPTQ, AWQ, compressed-tensors) of {entry.model}: it takes {gib_up(needs)}"]

    def _changes(self, name: str) -> list[list[dict[str, Any]]]:
        """Changes of the model's entry to try, by kind, the smallest first."""
        entry = self._plan.entries[name]
        fewer = entry.min_replicas - self._plan.placement.missing.get(name, 0)
        kinds = [*self._smaller(name), [{"min_replicas": fewer}] if fewer else []]
        if entry.nodes is not None or entry.not_nodes:
            kinds.append([{"nodes": None, "not_nodes": ()}])
        return kinds

    def _smaller(self, name: str) -> list[list[dict[str, Any]]]:
        """Changes, by kind, with which a replica takes less memory."""
        entry, longest = self._plan.entries[name], self._plan.shapes[name].max_input_length
        if entry.context is not None and entry.streams is not None:
            in_8_bits: list[dict[str, Any]] = [{"kv_cache_dtype": "fp8"}] if entry.kv_cache_dtype == "auto" else []
            if (cache := self._plan.written[name].cache_tokens) is not None:
                least = self._plan.written[name].context or PAGE_SIZE
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
        entry = settled(self._plan.written[name].model_copy(update=changes), self._plan.shapes[name])
        changed = self._plan.needs.demand(entry, self._plan.choose_dtype(entry))
        if changed == self._plan.demands[name] or self._tries <= 0:
            return False
        self._tries -= 10 if self._plan.groups else 1
        if self._plan.groups:  # a change may give every group other cards, so this is a whole plan, which takes longer
            then = self._plan.changed(name, changes, _TRY_STEPS).placement
        else:
            demands = [changed if each.model == name else each for each in self._plan.demands.values()]
            required = [replace(each, max_replicas=max(1, each.min_replicas)) for each in demands]  # no replicas for autoscaling
            then, _ = arrange(required, self._plan.empty_slots, _TRY_STEPS)
        others = all(
            count <= self._plan.placement.missing.get(other, 0) for other, count in then.missing.items() if other != name
        )
        return others and name not in then.missing and any(each.model == name for each in then.replicas)

    def _another_node(self, name: str) -> str:
        entry = self._plan.given[name]
        config = with_options(self._plan.shapes[name], entry)
        count = self._plan.placement.missing.get(name, 0)
        # A model without any replica can have bfloat16 on the new nodes. Otherwise the new nodes must support the present dtype.
        free = entry.dtype == "auto" and count == entry.min_replicas
        dtype = torch.bfloat16 if free else DTYPES[self._plan.dtypes[name]]
        needs_bytes = footprint(config, dtype, "gpu", entry.max_batch_tokens, cache_tokens=entry.cache_tokens).total
        card = f"a card of {gib_up(needs_bytes + CARD_RESERVE)}"
        if (number := entry.pipeline or 1) > 1:
            each_bytes = Cards(config, dtype, (), entry.max_batch_tokens).card_bytes(whole_pages(entry.cache_tokens or 1), number)
            card = f"{number} cards of {gib_up(each_bytes + CARD_RESERVE)}"
        more = f"{count} more nodes, each with" if count > 1 else "another node with"
        needs = f" and compute capability {capability(least)} or later" if (least := least_capability(entry.dtype)) else ""
        fits = (each for each, need in self._plan.demands[name].bytes_on.items() if need <= self._plan.classes[each].usable_bytes)
        cpu = next((each for each in fits if not self._plan.classes[each].cards and not self._plan.classes[each].members), None)
        alike = f", or of class {cpu}" if cpu else ""
        return f"{more} {card} or more{needs}{alike}{', named in its nodes' if entry.nodes is not None else ''}"


def _written_out(changes: dict[str, Any]) -> str:
    """Changes of an entry as an operator would write them."""
    return "no nodes and not_nodes" if "nodes" in changes else " and ".join(f"{key}: {value}" for key, value in changes.items())
