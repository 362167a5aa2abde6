"""Why a replica of a plan is where it is, and why a replica has no place."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cluster.amounts import capability, gib, gib_up
from cluster.model_spec import Dtype
from cluster.needs import Pipeline, has_kernels, least_capability, may_have
from cluster.placement import Slot
from cluster.slots import CARD_REPLICA_CPUS, CORES_A_REPLICA, GATEWAY_CPUS, cores_of, cpus_of, places_of
from engine.devices import LEAST_OF_KERNELS

if TYPE_CHECKING:
    from cluster.plan import Plan


class Reasons:
    """Explains the places of a plan in the words of its report."""

    def __init__(self, plan: "Plan") -> None:
        self._plan = plan

    def why(self, name: str, slot: Slot) -> str:
        demand = self._plan.demands[name]
        possible = [each for each, needs in demand.bytes_on.items() if needs <= self._plan.classes[each].usable_bytes]
        if demand.nodes is not None:
            return "pinned there"
        if slot.node in self._plan.groups:
            on_nodes = f"{len(slot.more) + 1} stages on {len(set(self._plan.machines(slot.node)))} nodes"
            return f"{on_nodes}, because no node holds {self._held(name)}"
        if slot.more:
            return (
                f"{len(slot.more) + 1} cards, {'as asked' if self._plan.entries[name].pipeline else 'because no card holds it'}"
            )
        if len(self._plan.classes) == 1:
            return "the only node class"
        if len(possible) == 1:
            return f"no other node class {f'supports {self._plan.dtypes[name]}' if self._plan.left_out(name) else 'can hold it'}"
        best = max(possible, key=lambda each: demand.tokens_per_s[each])
        if best == slot.node_class:
            return "fastest class that holds it"
        share = demand.tokens_per_s[slot.node_class] / demand.tokens_per_s[best]
        return f"{share:.0%} of {best}, shared or full"

    def _held(self, name: str) -> str:
        """What a node must hold: the whole model, or as many stages as the entry asks for, which one card might hold together."""
        number = self._plan.entries[name].pipeline
        return f"its {number} stages" if number else "it"

    def why_not(self, name: str) -> str:
        demand = self._plan.demands[name]
        allowed = [slot for slot in self._plan.empty_slots if may_have(self._plan.entries[name], slot.node)]
        if group := self._plan.why_no_group.get(name):
            one = self._why_no_pipeline(name, allowed)
            return f"no node holds {self._held(name)}{f' ({one})' if one else ''}, and neither do several: {group}"
        if reason := self._why_no_pipeline(name, allowed):
            return reason
        possible = [slot for slot in allowed if slot.node_class in demand.bytes_on]
        if not possible:
            classes = sorted({slot.node_class for slot in allowed})
            if not classes:
                return "nodes and not_nodes leave no node for it"
            is_old = not any(has_kernels(self._plan.classes[each]) for each in classes)
            return _cannot_run("auto" if is_old else self._plan.entries[name].dtype, classes)
        used: Counter[Slot] = Counter()
        for each in self._plan.placement.replicas:
            used[each.slot] += self._plan.demands[each.model].bytes_on[each.slot.node_class]
        count = Counter(each.slot for each in self._plan.placement.replicas)

        def lacks(slot: Slot, taken: int) -> int:
            return demand.bytes_on[slot.node_class] - (slot.capacity - taken)

        on_node = Counter(each.slot.node for each in self._plan.placement.replicas)
        largest = min(possible, key=lambda slot: lacks(slot, 0))
        if lacks(largest, 0) > 0:
            needs = demand.bytes_on[largest.node_class]
            return f"a replica needs {gib_up(needs)}, but {_where(largest)} has only {gib(largest.capacity)} for models"
        with_cpus = [slot for slot in possible if slot.node_places is None or on_node[slot.node] < slot.node_places]
        if not with_cpus:
            return self._cpus_taken(min(possible, key=lambda slot: lacks(slot, used[slot])).node)
        with_place = [slot for slot in with_cpus if slot.places is None or count[slot] < slot.places]
        if not with_place:
            return self._cores_taken(with_cpus)
        closest = min(with_place, key=lambda slot: lacks(slot, used[slot]))
        needs, free = demand.bytes_on[closest.node_class], closest.capacity - used[closest]
        return f"a replica needs {gib_up(needs)}, but {_where(closest)} has only {gib(free)} of {gib(closest.capacity)} left"

    def _why_no_pipeline(self, name: str, allowed: Sequence[Slot]) -> str | None:
        """Why no node has several cards for a replica. None for a replica on one card."""
        classes = tuple(dict.fromkeys(slot.node_class for slot in allowed))
        found = {each: self._plan.needs.pipeline(self._plan.entries[name], self._plan.classes[each]) for each in classes}
        fitting = {each: pipeline for each, pipeline in found.items() if isinstance(pipeline, Pipeline)}
        if fitting:
            number = min(len(pipeline.layers) for pipeline in fitting.values())
            return f"a replica needs {number} whole cards of one node, but no node has {number} empty cards"
        return next((f"{each} {reason}" for each, reason in found.items() if isinstance(reason, str)), None)

    def _cpus_taken(self, name: str) -> str:
        num_cpus = next(node.num_cpus for node in self._plan.nodes if node.name == name)
        kept = self._plan.gateways_a_node * GATEWAY_CPUS
        return f"a replica needs {CARD_REPLICA_CPUS:g} CPUs; all {num_cpus} of {name} are reserved, {kept:g} of them for gateways"

    def _cores_taken(self, slots: Sequence[Slot]) -> str:
        """Tells cores from CPUs: Ray reserves fewer CPUs for a replica than the replica has cores."""
        first, node = slots[0].node, self._plan.classes[slots[0].node_class]
        places, others = places_of(node), len(slots) - 1
        nodes = f"{first} and {others} other node{'s' if others > 1 else ''}" if others else first
        compute = "1 replica computes" if places == 1 else f"{places} replicas each compute"
        return (
            f"a replica needs {_cores(min(node.num_cpus, CORES_A_REPLICA))}, but no cores are free on {nodes}: "
            f"{compute} with {_cores(cores_of(node))} on {first}. "
            f"Ray reserves {cpus_of(node):g} CPUs for each of these replicas, so that a gateway or a successor can start"
        )


def _cannot_run(dtype: Dtype, classes: Sequence[str]) -> str:
    least = LEAST_OF_KERNELS if dtype == "auto" else least_capability(dtype)
    if least is None:
        return f"{dtype} does not run on a CPU"
    names = [*classes[:3], *([f"{len(classes) - 3} more"] if classes[3:] else [])]
    there = f"{', '.join(names[:-1])} and {names[-1]} have" if names[1:] else f"{names[0]} has"
    what = "the engine" if dtype == "auto" else dtype
    return f"{what} needs an NVIDIA card of compute capability {capability(least)} or later; {there} no such card"


def _cores(number: int) -> str:
    return f"{number} core{'s' if number != 1 else ''}"


def _where(slot: Slot) -> str:
    return slot.node if slot.shared_out else f"{slot.node}:{slot.index}"
