"""Measures the time of a layer and of the head of a model on a device, before the model's weights are loaded.

GPUs differ in bandwidth, in FLOPs and in the time to start a kernel. None of the three alone gives the time of a layer. One layer
with random weights gives it, in about 10 ms.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from engine.devices import compute_dtype, current
from engine.heads.language import LanguageHead
from engine.kernels.tiles import tiling
from engine.model.config import ModelConfig
from engine.model.families import family_of
from engine.model.random_weights import RandomWeights
from engine.run.pack import BatchPacker

# The measured pass is a decode step of 64 streams without a cache, or a pass over 4 texts of 512 tokens.
_STREAMS, _TEXTS, _TEXT_TOKENS = 64, 4, 512
_CALLS = 10
_AHEAD_CYCLES = 10_000_000  # about 6 ms, in which the host queues the calls

Call = Callable[[], object]


class Times(NamedTuple):
    """Times in seconds. `head` is 0 for a model that does not generate, because its head is used once for each text."""

    layer: float
    head: float


def measure(config: ModelConfig, dtype: torch.dtype, device: torch.device, seconds_of: Callable[[Call], float]) -> Times | None:
    """The times of the last layer and of the head in 16 or 32 bits. None if the device has too little memory to measure.

    Args:
        config: the config of a whole decoder.
        dtype: for 4 or 8 bits, the layer is measured in the dtype of the rest of the model.
        seconds_of: measures a call on the current device, such as `seconds_on_gpu`.
    """
    wide, generates = compute_dtype(dtype), config.generation is not None
    lengths = [1] * _STREAMS if generates else [min(_TEXT_TOKENS, config.max_input_length)] * _TEXTS
    part = replace(config, part=range(config.n_layers - 1, config.n_layers))
    try:
        with torch.inference_mode(), current(device):
            weights = RandomWeights(device, wide, decodes=generates)
            model = family_of(part)(part, weights)
            heads = config.n_heads, config.n_kv_heads
            tiles = tiling(heads, config.head_dim, wide, device, config.causal, model.biases_scores)
            packer = BatchPacker(config.pooling, config.embedding_size, tiles)
            batch = packer.pack([np.zeros(length, np.int32) for length in lengths], device=device)
            hidden = torch.zeros(sum(lengths), config.hidden_size, dtype=wide, device=device)
            # A pass overwrites its hidden states.
            layer_s = seconds_of(lambda: model.forward(replace(batch, hidden=hidden.clone())))
            if not generates:
                return Times(layer_s, 0.0)
            head = LanguageHead(weights.take("lm_head", config.vocab_size, config.hidden_size), decodes=True)
            return Times(layer_s, seconds_of(lambda: head.narrow(hidden)))
    except torch.OutOfMemoryError:
        return None


def seconds_on_gpu(call: Call) -> float:
    """Seconds that the current GPU takes for the work of `call`, without the host's time to queue it."""
    for _ in range(2):  # the first calls compile and load kernels
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(_CALLS):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end) / 1e3 / _CALLS)
