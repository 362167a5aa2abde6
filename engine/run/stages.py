"""Plans the stages of a model on several devices: the layers of each device, and the size of the cache."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil
import torch

from engine import cut
from engine.devices import compute_dtype
from engine.errors import ModelError
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.families import Transformers, family_of
from engine.model.footprint import (
    MOST_BATCH_TOKENS,
    MOST_STREAM_TOKENS,
    bytes_saved,
    dense_parameters,
    head_parameters,
    language_head_bytes,
    num_parameters,
    word_bytes,
)
from engine.run import reserve
from engine.run.fits import as_loaded, pass_bytes
from engine.run.kv_cache import CPU_SHARE, KERNEL_BYTES, PAGE_SIZE, bytes_per_token, most_default_tokens, whole_pages
from engine.run.layer_times import measure, seconds_on_gpu

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a model and the device that computes it. `config.part` names the layers."""

    config: ModelConfig
    device: torch.device


def plan_stages(
    config: ModelConfig,
    dtype: torch.dtype,
    devices: Sequence[torch.device],
    max_batch_tokens: int | None,
    cache_tokens: int | None,
) -> tuple[list[Stage], int | None, int]:
    """The stages, one for each device in the given order, and the tokens of the cache. Call it before the weights are loaded.

    Returns: the stages; `cache_tokens` or the most tokens that fit on the GPUs; the number of groups of streams that take turns.
        The tokens are None for a model without a cache, and on CPUs, whose free memory decides later.
    Raises: ModelError for a model that cannot be cut, and, with the numbers, if the devices have too little memory.
    """
    if (reason := why_on_one_device(config)) is not None:
        raise ModelError(f"{reason}; give one device")
    if len({device.type for device in devices}) > 1:
        raise ModelError(f"devices {', '.join(map(str, devices))}: a model runs on GPUs or on CPUs, not on both")
    sizes = sizes_of(as_loaded(config, *devices), dtype, on_gpu=devices[0].type == "cuda")
    cards = _cards(config, dtype, devices, sizes, max_batch_tokens)
    page = whole_pages(1)
    if config.generation is None:
        parts = cut.cut(sizes, cards, cache_tokens=0)
    elif cache_tokens is not None or devices[0].type == "cpu":
        parts = cut.cut(sizes, cards, whole_pages(cache_tokens or page))
    else:
        parts, cache_tokens = cut.cut_with_cache(sizes, cards, most_default_tokens(config), PAGE_SIZE)
    stages = [Stage(replace(config, part=layers), device) for layers, device in zip(parts, devices, strict=True)]
    return stages, cache_tokens, _num_groups(sizes, cards, parts)


def why_on_one_device(config: ModelConfig) -> str | None:
    """The reason why a model cannot be cut, or None. Plans use it, too."""
    if family_of(config) is Transformers:
        return "--backend transformers runs on one device"
    if not issubclass(family_of(config), Decoder):
        return f"{config.architecture} runs on one device, only decoders run on several"
    return None


def sizes_of(config: ModelConfig, dtype: torch.dtype, on_gpu: bool, head_is_first: bool = False) -> cut.Model:
    """The bytes of the parts of a decoder, each in its dtype. Plans use it, too.

    `head_is_first`: the first stage has the head, as in a ring. A tied head is then the table of the words, and counts once.
    """
    wide = compute_dtype(dtype)

    def weights(index: int) -> int:
        part = replace(config, part=range(index, index + 1))
        return num_parameters(part) * wide.itemsize - bytes_saved(part, dtype, on_gpu)

    layers = [weights(index) for index in range(config.n_layers)]
    table = word_bytes(config, dtype, on_gpu)
    head = (config.hidden_size + dense_parameters(config) + head_parameters(config)) * wide.itemsize  # the final norm first
    if config.generation is not None:
        head += language_head_bytes(config, dtype, on_gpu)  # the last layer's number of weights contains it
    if config.n_layers > 1:  # a model of one layer is refused by its number of layers
        layers[0] -= table
        layers[-1] -= head
    words = 0 if head_is_first and config.generation is not None and config.generation.tied else table
    cache = 0 if config.generation is None else bytes_per_token(replace(config, part=range(1)), wide)
    return cut.Model(tuple(layers), words, head, cache, head_is_first)


def _cards(
    config: ModelConfig, dtype: torch.dtype, devices: Sequence[torch.device], sizes: cut.Model, max_batch_tokens: int | None
) -> list[cut.Device]:
    """The facts about each device that the cut needs. Stages on one device share its free memory."""
    if devices[0].type == "cpu":
        free, passes = int(psutil.virtual_memory().available), family_of(config).table_bytes(config)
        seconds = cut.seconds_by_bytes(sizes, 1.0)  # stages on CPUs are equally fast
        return [cut.Device(str(device), free // len(devices), passes, *seconds) for device in devices]
    count = Counter(devices)
    seconds_on_each = _seconds(config, dtype, devices, sizes)
    passes = bytes_beside_passes(config, dtype, len(devices), max_batch_tokens)
    return [
        cut.Device(
            str(device),
            reserve.free_bytes(device) // count[device],
            passes + pass_bytes(config, dtype, device, max_batch_tokens),
            *seconds,
        )
        for device, seconds in zip(devices, seconds_on_each, strict=True)
    ]


def facts_of(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, num_stages: int, max_batch_tokens: int | None, address: str
) -> cut.Device:
    """The facts about the device of one stage that is a process of its own. `address`: of its machine, for errors.

    A GPU that cannot be measured has no `layer_s`.
    """
    sizes = sizes_of(config, dtype, on_gpu=device.type == "cuda", head_is_first=True)
    name = f"{device} of {address}"
    if device.type == "cpu":
        passes = family_of(config).table_bytes(config)
        seconds = cut.seconds_by_bytes(sizes, 1.0)  # stages on CPUs are equally fast
        return cut.Device(name, int(psutil.virtual_memory().available), passes, *seconds)
    times = measure(config, dtype, device, seconds_on_gpu)
    torch.cuda.empty_cache()  # frees the memory of the measured layers before the free memory is read
    beside = bytes_beside_passes(config, dtype, num_stages, max_batch_tokens)
    passes = beside + pass_bytes(config, dtype, device, max_batch_tokens)
    seconds = (), 0.0
    if times is not None:
        seconds = cut.seconds_by_layer(sizes, times.layer, _one_layer(config, dtype), times.head)
    return cut.Device(name, reserve.free_bytes(device), passes, *seconds)


def plan_ring(
    config: ModelConfig, dtype: torch.dtype, devices: Sequence[cut.Device], on_gpu: bool, cache_tokens: int | None
) -> tuple[list[range], int | None, int]:
    """The layers of each stage, for stages that are processes of their own, and the tokens of the cache.

    Args:
        devices: the results of `facts_of`, in the order of the stages.
        cache_tokens: the size of a generation model's cache. None chooses it by the free memory: on GPUs all of it, on CPUs a
            quarter.
    Returns: the layers, the tokens, and the number of groups of streams that take turns. The tokens are None for a model without
        a cache. Raises: as `plan_stages`.
    """
    if (reason := why_on_one_device(config)) is not None:
        raise ModelError(f"{reason}; give one device")
    sizes = sizes_of(config, dtype, on_gpu, head_is_first=True)
    if any(not each.layer_s for each in devices):
        layer_s, head_s = cut.seconds_by_bytes(sizes, 1.0)
        devices = [replace(each, layer_s=layer_s, head_s=head_s) for each in devices]
    if config.generation is None:
        layers = cut.cut(sizes, devices, cache_tokens=0)
    elif cache_tokens is not None:
        layers = cut.cut(sizes, devices, whole_pages(cache_tokens))
    elif on_gpu:
        layers, cache_tokens = cut.cut_with_cache(sizes, devices, most_default_tokens(config), PAGE_SIZE)
    else:
        layers, wide = cut.cut(sizes, devices, PAGE_SIZE), compute_dtype(dtype)
        fits = [
            device.free_bytes // CPU_SHARE // bytes_per_token(replace(config, part=part), wide)
            for device, part in zip(devices, layers, strict=True)
        ]
        cache_tokens = max(PAGE_SIZE, min(most_default_tokens(config), *fits))
    return layers, cache_tokens, _num_groups(sizes, devices, layers)


def _num_groups(sizes: cut.Model, devices: Sequence[cut.Device], parts: Sequence[range]) -> int:
    return cut.num_groups([cut.stage_seconds(sizes, devices, stage, layers) for stage, layers in enumerate(parts)])


def _one_layer(config: ModelConfig, dtype: torch.dtype) -> int:
    """The bytes of the layer that `measure` computes."""
    return sizes_of(config, compute_dtype(dtype), on_gpu=True).layer_bytes[-1]


def _seconds(
    config: ModelConfig, dtype: torch.dtype, devices: Sequence[torch.device], sizes: cut.Model
) -> list[tuple[tuple[float, ...], float]]:
    """The measured seconds of the layers and of the head on each GPU. GPUs with the same name are measured once.

    If a GPU has too little memory to measure, each layer's time follows from its bytes, on all GPUs.
    """
    names = {device: torch.cuda.get_device_name(device) for device in devices}
    one_of_each = {name: device for device, name in names.items()}
    times = {name: measure(config, dtype, device, seconds_on_gpu) for name, device in one_of_each.items()}
    torch.cuda.empty_cache()  # frees the memory of the measured layers before the free memory is read
    layer_bytes = _one_layer(config, dtype)
    found = []
    for device in devices:
        if (its := times[names[device]]) is None:
            return [cut.seconds_by_bytes(sizes, 1.0)] * len(devices)
        log.info("%s takes %.0f us for a layer, %.0f us for the head", device, 1e6 * its.layer, 1e6 * its.head)
        found.append(cut.seconds_by_layer(sizes, its.layer, layer_bytes, its.head))
    return found


def bytes_beside_passes(config: ModelConfig, dtype: torch.dtype, num_stages: int, max_batch_tokens: int | None) -> int:
    """The bytes of each GPU that a stage takes beside its weights, its cache and the passes of a whole model."""
    # The hidden states of the passes in flight, and those that CUDA graphs begin and end with.
    if config.generation is None:
        tokens = max(max_batch_tokens or MOST_BATCH_TOKENS, config.max_input_length)
    else:
        tokens = max_batch_tokens or MOST_STREAM_TOKENS
    hidden = (num_stages + 3) * tokens * config.hidden_size * compute_dtype(dtype).itemsize
    return family_of(config).table_bytes(config) + KERNEL_BYTES + hidden
