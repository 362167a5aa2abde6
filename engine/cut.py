"""Divides a model's layers among the devices of a pipeline, by the memory and the speed of each device. Does not import torch.

A stage is the consecutive layers on one device. The first stage also has the word embeddings, and the last one has the final norm
and the head. If the stages are processes of their own, the first one has the head (`engine/run/ring_pipeline.py`). Stages compute
at the same time, so the slowest stage limits the throughput. The cut makes the slowest stage as fast as the memory allows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.amounts import gib
from engine.errors import ModelError

# The slowest stage may need this many times as long for all groups as all stages together need for one. Two groups of a 14B's
# streams are faster than one if no stage takes more than 0.7 of a pass (loadtests/results/pipeline_schedule.md).
_MOST_OF_A_PASS = 1.4

# (stage, first layer, layer after the last one) -> a number of bytes or seconds
OfStage = Callable[[int, int, int], float]


@dataclass(frozen=True, slots=True)
class Model:
    """The bytes of a model."""

    layer_bytes: tuple[int, ...]  # the weights of each layer
    words_bytes: int  # the word embeddings and other weights of the first stage
    head_bytes: int  # the final norm, the head, and other weights of the stage that has the head
    cache_bytes: int  # of the cache, for one token and one layer; 0 for a model without a cache
    head_is_first: bool = False  # the first stage has the head

    def has_head(self, stage: int, num_stages: int) -> bool:
        return stage == (0 if self.head_is_first else num_stages - 1)


@dataclass(frozen=True, slots=True)
class Device:
    """One device, in the order of the stages, and the seconds that it takes for each layer and for the head."""

    name: str
    free_bytes: int
    pass_bytes: int  # memory of a pass besides weights and cache
    layer_s: tuple[float, ...]
    head_s: float


def seconds_by_bytes(model: Model, bytes_per_s: float) -> tuple[tuple[float, ...], float]:
    """`layer_s` and `head_s` of a device that was not measured: the time to read the weights."""
    return tuple(size / bytes_per_s for size in model.layer_bytes), model.head_bytes / bytes_per_s


def seconds_by_layer(model: Model, layer_s: float, layer_bytes: int, head_s: float) -> tuple[tuple[float, ...], float]:
    """`layer_s` and `head_s` of a device on which one layer took `layer_s`. Other layers take the same time per byte.

    Args:
        layer_bytes: of the measured layer, which may be in another dtype.
    """
    return tuple(layer_s * size / layer_bytes for size in model.layer_bytes), head_s


def cut(model: Model, devices: Sequence[Device], cache_tokens: int) -> list[range]:
    """The layers of each device. Each device gets at least one layer, and the devices keep their order.

    Of all cuts that fit, the result has the fastest slowest stage. Of several such cuts it has the least sum of the stages'
    times, because a token of a single stream waits for all stages.

    Args:
        cache_tokens: tokens that each stage's cache must hold.
    Raises: ModelError with the numbers if no cut fits.
    """
    n_layers = len(model.layer_bytes)
    if n_layers < len(devices):
        raise ModelError(f"the model has {n_layers} layers, too few for {len(devices)} devices; give fewer devices")

    def seconds(stage: int, first: int, stop: int) -> float:
        fits = stage_bytes(model, devices, stage, range(first, stop), cache_tokens) <= devices[stage].free_bytes
        return stage_seconds(model, devices, stage, range(first, stop)) if fits else float("inf")

    slowest, _ = _cheapest(seconds, len(devices), n_layers, max)
    if slowest == float("inf"):
        raise ModelError(_refusal(model, devices, cache_tokens))

    def allowed(stage: int, first: int, stop: int) -> float:
        taken = seconds(stage, first, stop)
        return taken if taken <= slowest else float("inf")

    return _cheapest(allowed, len(devices), n_layers, lambda before, stage: before + stage)[1]


def cut_with_cache(model: Model, devices: Sequence[Device], most_tokens: int, page_size: int) -> tuple[list[range], int]:
    """A cut for a cache without a given size, and the tokens of the cache that fit with this cut.

    The cut is the best one with room for `most_tokens`; if there is none, for half of them, a quarter, and so on.
    Raises: ModelError if not even one page fits.
    """
    wanted = most_tokens
    while True:
        wanted = max(page_size, wanted)
        try:
            stages = cut(model, devices, wanted)
        except ModelError:
            if wanted == page_size:
                raise
            wanted //= 2
            continue
        room = min(
            (device.free_bytes - stage_bytes(model, devices, stage, layers, 0)) // (model.cache_bytes * len(layers))
            for stage, (device, layers) in enumerate(zip(devices, stages, strict=True))
        )
        return stages, min(most_tokens, room // page_size * page_size)


def stage_bytes(model: Model, devices: Sequence[Device], stage: int, layers: range, cache_tokens: int) -> int:
    """Bytes of a stage: weights, passes and cache."""
    weights = sum(model.layer_bytes[layers.start : layers.stop])
    weights += model.words_bytes * (stage == 0) + model.head_bytes * model.has_head(stage, len(devices))
    return weights + devices[stage].pass_bytes + cache_tokens * model.cache_bytes * len(layers)


def stage_seconds(model: Model, devices: Sequence[Device], stage: int, layers: range) -> float:
    """Seconds of a stage for a pass. The look-up of words counts as no time."""
    device = devices[stage]
    return sum(device.layer_s[layers.start : layers.stop]) + device.head_s * model.has_head(stage, len(devices))


def num_groups(stage_s: Sequence[float]) -> int:
    """The number of groups of streams that take turns. At any time each stage computes another group.

    There are as many groups as stages, if the stages take about equally long. A stage reads its weights for each group. So if one
    stage takes most of the time, fewer groups are faster.

    Args:
        stage_s: the seconds of each stage for a pass, as of `stage_seconds`.
    """
    return max(1, min(len(stage_s), int(_MOST_OF_A_PASS * sum(stage_s) / max(stage_s))))


def _cheapest(cost: OfStage, num_stages: int, n_layers: int, join: Callable[[float, float], float]) -> tuple[float, list[range]]:
    """The stages with the least joined cost, and that cost."""
    best: dict[int, tuple[float, list[range]]] = {0: (0.0, [])}  # by the number of layers of the stages so far
    for stage in range(num_stages):
        still_to_come = num_stages - stage - 1
        stops = range(stage + 1, n_layers - still_to_come + 1) if still_to_come else (n_layers,)
        best = {
            stop: min(
                (
                    (join(before, cost(stage, first, stop)), [*stages, range(first, stop)])
                    for first, (before, stages) in best.items()
                    if first < stop
                ),
                key=lambda found: found[0],
            )
            for stop in stops
        }
    return best[n_layers]


def _refusal(model: Model, devices: Sequence[Device], cache_tokens: int) -> str:
    """An error text with the layers that each device can hold, if each earlier device holds as many as it can."""
    n_layers, first, held = len(model.layer_bytes), 0, []
    for stage, device in enumerate(devices):
        most = n_layers if stage == len(devices) - 1 else n_layers - (len(devices) - stage - 1)
        stop = first
        while stop < most:
            if stage_bytes(model, devices, stage, range(first, stop + 1), cache_tokens) > device.free_bytes:
                break
            stop += 1
        held.append(f"{device.name} with {gib(device.free_bytes)} free holds {stop - first}")
        first = stop
    weights = sum(model.layer_bytes) + model.words_bytes + model.head_bytes
    cache = cache_tokens * model.cache_bytes * n_layers
    passes = sum(device.pass_bytes for device in devices)
    return (
        f"the model does not fit on these devices in this order: of its {n_layers} layers {', '.join(held)}; it needs "
        f"{gib(weights)} for weights, {gib(cache)} for a cache of {cache_tokens:,} tokens, and {gib(passes)} for passes; give "
        "more devices, a smaller cache, a smaller dtype, or a smaller model"
    )
