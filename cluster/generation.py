"""The plan of a generation model: its context, the size of its KV cache, and its rates on a node class."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from cluster.files import ClusterError
from cluster.measurement import What
from cluster.models_file import ModelEntry
from cluster.nodes import Node
from cluster.throughput import Rate, measured_here, pipeline_tokens_per_s, speed_of, tokens_per_s
from engine.cut import num_groups
from engine.devices import compute_dtype, is_8_bits
from engine.model.config import ModelConfig, with_kv_cache_dtype
from engine.model.decoder import DecoderConfig
from engine.model.footprint import body_parameters, codes_of, language_head_bytes, language_head_form, layer_bytes_saved
from engine.run.kv_cache import bytes_per_token, whole_pages
from engine.run.stages import why_on_one_device

# The defaults are minimums that a card must hold. The remaining memory becomes more cache, so low values have no disadvantage.
_CONTEXT = 8192
_STREAMS = 4

# Measured on an H200 with models of 28 to 40 layers (loadtests/results/generate.md): for each layer, the time of a decode step
# in which the GPU starts kernels or waits for their ends. With more than 16 streams a layer has more kernels. Then the host's
# time for each step, and for each stream of a step.
_FEW_STREAMS, _LAYER_OF_FEW_S, _LAYER_S = 16, 12e-6, 16e-6
_HOST_S, _HOST_STREAM_S = 650e-6, 7e-6
# The time of a hop between processes that each have a stage (loadtests/results/ring.md), without the time on the network.
_HOP_S = 400e-6
# A product reads weights and multiplies at the same time. This share of the shorter of the two is not hidden behind the longer.
_NOT_HIDDEN = 0.3
# Weights in codes (loadtests/results/packed_models.md): the part of a copy's time that reading them takes longer, and how much
# longer products take while they convert codes: for few streams, and for more on cards with wgmma and with mma.sync, which an
# H200 had before decision 070. Reading and multiplying of codes are not hidden behind each other. For still more streams the
# weights are written out in 16 bits first.
_CODES_READ, _FEW_IN_CODES, _MORE_ON_WGMMA, _MORE_ON_MMA_SYNC = 0.3, 2, 1.25, 2.5
_MOST_STREAMS_ON_WGMMA, _MOST_STREAMS_ON_MMA_SYNC = 512, 128
# The share of the bandwidth that decode reaches on a CPU (loadtests/results/generate_cpu.md).
_CPU_READ_SHARE = 0.36
# The share of the card's attention rate that prompts of 8,192 tokens reach on an H200.
_ATTENTION_SHARE = 0.74


def settled(entry: ModelEntry, config: ModelConfig) -> ModelEntry:
    """Completes the entry of a generation model with the context, the streams and the least cache of the plan. The entry of any
    other model does not change.

    Raises: ClusterError for a context, streams or a pipeline that the model does not support.
    """
    if entry.pipeline not in (None, 1) and (reason := why_on_one_device(config)) is not None:
        raise ClusterError(f"model {entry.name} has pipeline: {entry.pipeline}, but {reason}; leave pipeline out")
    if config.generation is None:
        for key in ("context", "streams"):
            if getattr(entry, key) is not None:
                raise ClusterError(
                    f"model {entry.name} has {key}: {getattr(entry, key)}, but does not generate text; leave {key} out"
                )
        if entry.kv_cache_dtype != "auto":
            raise ClusterError(
                f"model {entry.name} has kv_cache_dtype: {entry.kv_cache_dtype}, but does not generate text; leave it out"
            )
        return entry
    longest, cache = config.max_input_length, entry.cache_tokens
    if entry.max_input_tokens is not None:
        raise ClusterError(
            f"model {entry.name} generates text, so its limit counts prompt and answer together: write context: "
            f"{entry.max_input_tokens} instead of max_input_tokens"
        )
    if entry.context is not None and entry.context > longest:
        raise ClusterError(f"model {entry.name} has context: {entry.context}, but {entry.model} takes at most {longest} tokens")
    context = entry.context or min(_CONTEXT, longest, cache or longest)
    if cache is not None and cache < context:
        raise ClusterError(
            f"model {entry.name} has cache_tokens: {cache}, too few for one stream of context: {context}; give more cache_tokens "
            "or a shorter context"
        )
    pages = whole_pages(context)
    streams = entry.streams or (_STREAMS if cache is None else whole_pages(cache) // pages)
    changes = {"context": context, "streams": streams, "max_input_tokens": context, "cache_tokens": cache or streams * pages}
    return entry.model_copy(update=changes)


def decode_rate(config: ModelConfig, dtype: torch.dtype, node: Node, streams: int, length: int) -> Rate:
    """Decode tokens/s of all streams together, each with `length` tokens, while no prompt is computed.

    If the model was measured on the node: `decode_tokens_per_s` times the ratio of measured to computed rate at the nearest
    measured number of streams.
    """
    here = _calibrated(config, dtype, node, "decode", streams, decode_tokens_per_s)
    rate = decode_tokens_per_s(config, dtype, node, streams, length)
    return Rate(rate, "estimated") if here is None else Rate(rate * here, "measured here")


def prefill_rate(config: ModelConfig, dtype: torch.dtype, node: Node, length: int) -> Rate:
    """Tokens/s of prompts of `length` tokens. If the model was measured on the node, corrected as in `decode_rate`."""
    here = _calibrated(config, dtype, node, "prefill", 1, lambda c, d, n, _, length: prefill_tokens_per_s(c, d, n, length))
    rate = prefill_tokens_per_s(config, dtype, node, length)
    return Rate(rate, "estimated") if here is None else Rate(rate * here, "measured here")


def _calibrated(
    config: ModelConfig,
    dtype: torch.dtype,
    node: Node,
    what: What,
    streams: int,
    computed: Callable[[ModelConfig, torch.dtype, Node, int, int], float],
) -> float | None:
    """The ratio of measured to computed rate at the nearest measured number of streams. None without a measurement."""
    rows = measured_here(config, dtype, node, what)
    if not rows:
        return None
    nearest = min(rows, key=lambda row: abs(math.log(row.streams / streams)))
    measured = with_kv_cache_dtype(config, "auto")  # the measurement's cache is in 16 bits
    return nearest.tokens_per_s / computed(measured, dtype, node, nearest.streams, nearest.length)


def decode_tokens_per_s(config: ModelConfig, dtype: torch.dtype, node: Node, streams: int, length: int) -> float:
    """Like `decode_rate`, but computed only from bytes and FLOPs.

    A step reads all weights, and the keys and values of all streams. It multiplies each stream's token with the weights.
    """
    step_s = _step_s(config, dtype, node, streams, length)
    return streams / max(step_s, _host_s(streams) if node.cards else 0.0)


def pipeline_decode_tokens_per_s(
    config: ModelConfig,
    dtype: torch.dtype,
    nodes: Sequence[Node],
    layers: Sequence[range],
    streams: int,
    length: int,
    gbit_s: float | None = None,
) -> float:
    """Like `decode_tokens_per_s`, for a model on several cards.

    The streams form groups that take turns (`engine.cut.num_groups`). The slowest stage limits the rate of steps. A group's next
    step begins after its previous step has passed all stages.

    Args:
        nodes: for each stage, a node with only its card.
        layers: the layers of each stage.
        gbit_s: the rate of the network between stages on several nodes. None for stages on one node.
    """
    alone_s, *_ = ring_pass_s(config, dtype, nodes, layers, 1, 0, gbit_s)
    groups = min(streams, num_groups(alone_s))
    rows = math.ceil(streams / groups)
    steps_s, sent_s, host_s = ring_pass_s(config, dtype, nodes, layers, rows, length, gbit_s)
    return streams / max(groups * max(*steps_s, sent_s, _host_s(rows)), sum(steps_s) + len(layers) * sent_s + host_s)


def ring_pass_s(
    config: ModelConfig,
    dtype: torch.dtype,
    nodes: Sequence[Node],
    layers: Sequence[range],
    rows: int,
    length: int,
    gbit_s: float | None,
) -> tuple[list[float], float, float]:
    """The seconds of each stage for a decode step of `rows` streams, the seconds to send its hidden states once, and the seconds
    that the threads of all stages take between them: 0 for CPUs and for stages in one process.

    Arguments as in `pipeline_decode_tokens_per_s`. The delay of the network's packets does not count.
    """
    head = len(layers) - 1 if gbit_s is None else 0  # the stage that has the head
    steps_s = [
        _step_s(replace(config, part=part), dtype, node, rows, length, has_head=stage == head)
        for stage, (node, part) in enumerate(zip(nodes, layers, strict=True))
    ]
    if gbit_s is None:
        return steps_s, 0.0, 0.0
    host_s = len(layers) * _HOP_S + rows * _HOST_STREAM_S if nodes[0].cards else 0.0
    return steps_s, rows / sent_tokens_per_s(config, dtype, gbit_s), host_s


def sent_tokens_per_s(config: ModelConfig, dtype: torch.dtype, gbit_s: float) -> float:
    """The tokens/s whose hidden states a network carries from one stage to the next."""
    return gbit_s * 1e9 / 8 / (config.hidden_size * compute_dtype(dtype).itemsize)


def _host_s(streams: int) -> float:
    """The host's time for a step on a GPU."""
    return _HOST_S + streams * _HOST_STREAM_S


def _step_s(config: ModelConfig, dtype: torch.dtype, node: Node, streams: int, length: int, has_head: bool = True) -> float:
    """The device's time for a decode step of a model, or of a part of a model."""
    speed = speed_of(node)
    wide, on_gpu = compute_dtype(dtype).itemsize, bool(node.cards)
    values, code_bytes = codes_of(config, dtype, on_gpu)
    head, head_values = 0, 0
    if has_head:
        head, head_values = language_head_bytes(config, dtype, on_gpu), config.vocab_size * config.hidden_size
        if language_head_form(config, dtype, on_gpu) is not None:
            values, code_bytes = values + head_values, code_bytes + head
    layers = body_parameters(config) * wide - layer_bytes_saved(config, dtype, on_gpu)
    read, cached = float(layers + head), streams * _cached_bytes(config, dtype, length)
    # A weight of 2 bytes is 2 FLOPs at the bf16 rate. A weight in 8 bits takes half this time, one of 4 bytes twice this time.
    multiplied_s = streams * (body_parameters(config) * (1 if is_8_bits(dtype) else wide) + head_values * wide) / speed.gemm
    not_hidden = _NOT_HIDDEN
    if streams <= (_MOST_STREAMS_ON_WGMMA if speed.wgmma else _MOST_STREAMS_ON_MMA_SYNC):
        read += _CODES_READ * code_bytes
        more = _MORE_ON_WGMMA if speed.wgmma else _MORE_ON_MMA_SYNC
        multiple = _FEW_IN_CODES if streams <= _FEW_STREAMS else more
        not_hidden += (1 - _NOT_HIDDEN) * min(1, values / (body_parameters(config) + head_values))
        multiplied_s += (multiple - 1) * streams * values * wide / speed.gemm
    else:
        read += 2 * values * wide
    if not node.cards:
        return (read + cached) / (_CPU_READ_SHARE * speed.copy) + multiplied_s
    shorter, longer = sorted((read / speed.copy, multiplied_s))
    layer_s = _LAYER_OF_FEW_S if streams <= _FEW_STREAMS else _LAYER_S
    return len(config.layers) * layer_s + cached / speed.copy + longer + not_hidden * shorter


def prefill_tokens_per_s(config: ModelConfig, dtype: torch.dtype, node: Node, length: int) -> float:
    """Like `prefill_rate`, computed from the rate of texts of mixed lengths and the attention of a long prompt."""
    width = config.n_heads * config.head_dim
    flops = 2 * width * sum(_seen(config, length))  # for a token that sees half of the prompt
    attention_s = flops / (_ATTENTION_SHARE * speed_of(node).attention(wgmma=True))
    if compute_dtype(dtype).itemsize == 4:
        attention_s *= 2
    return 1 / (1 / tokens_per_s(config, dtype, node).tokens_per_s + attention_s)


def pipeline_prefill_tokens_per_s(
    config: ModelConfig, dtype: torch.dtype, nodes: Sequence[Node], layers: Sequence[range], length: int
) -> float:
    """Like `prefill_tokens_per_s`, for a model on several cards. The chunks of prompts follow each other. Same arguments as
    `pipeline_decode_tokens_per_s`."""
    return pipeline_tokens_per_s([prefill_tokens_per_s(config, dtype, node, length) for node in nodes], layers)


def _cached_bytes(config: ModelConfig, dtype: torch.dtype, length: int) -> float:
    """Bytes of the keys and values that one token's attention reads."""
    return bytes_per_token(config, compute_dtype(dtype)) * sum(_seen(config, length)) / len(config.layers)


def _seen(config: ModelConfig, length: int) -> list[int]:
    """The number of tokens that the last of `length` tokens sees, for each layer of the model or of a part of it."""
    windows = [config.layer_window(layer) if isinstance(config, DecoderConfig) else None for layer in config.layers]
    return [length if window is None else min(length, window + 1) for window in windows]
