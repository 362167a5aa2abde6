"""Computes the expected memory of a replica, and checks that a generation model fits into a GPU's free memory."""

from dataclasses import replace

import torch

from engine.amounts import gib
from engine.devices import compute_dtype, is_integrated, multiplies_codes
from engine.errors import ModelError
from engine.model.config import ModelConfig
from engine.model.footprint import MOST_STREAM_TOKENS, MemoryKind, footprint
from engine.run import reserve
from engine.run.kv_cache import KERNEL_BYTES, PAGE_SIZE, bytes_per_token, in_8_bits


def pass_bytes(config: ModelConfig, dtype: torch.dtype, device: torch.device, max_batch_tokens: int | None) -> int:
    """The bytes that passes take besides weights and cache."""
    return footprint(as_loaded(config, device), dtype, _kind(device), max_batch_tokens, cache_tokens=0).of_passes


def planned_bytes(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, max_batch_tokens: int | None, cache_tokens: int | None
) -> int:
    """The bytes that a plan counts for a replica: GPU memory by torch's count, or host memory by the system's count."""
    needs = footprint(as_loaded(config, device), dtype, _kind(device), max_batch_tokens, cache_tokens=cache_tokens)
    return needs.total if device.type == "cpu" else needs.reserved


def check_generator_fits(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    model: str,
    max_batch_tokens: int | None,
    cache_tokens: int | None,
) -> None:
    """Check the memory for weights, passes and the cache of `cache_tokens`, or of one page. Does nothing for a CPU.

    Raises: ModelError with the numbers and the ways out.
    """
    if device.type != "cuda":
        return
    needs = footprint(as_loaded(config, device), dtype, _kind(device), max_batch_tokens, cache_tokens=cache_tokens or PAGE_SIZE)
    free = reserve.free_bytes(device)
    if needs.reserved + KERNEL_BYTES <= free:
        return
    room = (free - needs.reserved - KERNEL_BYTES + needs.cache) // bytes_per_token(config, compute_dtype(dtype))
    fewer = room // PAGE_SIZE * PAGE_SIZE
    way_out = f"give {fewer:,} cache_tokens or fewer"
    if fewer < PAGE_SIZE:
        way_out = "lower max_batch_tokens"
    elif fewer < config.max_input_length:
        way_out += ", which shortens the context to that number"
    raise ModelError(
        f"{model} needs {gib(needs.reserved + KERNEL_BYTES)} on {device}, which has {gib(free)} free: {gib(needs.weights)} of "
        f"weights in this dtype, {gib(needs.of_passes + KERNEL_BYTES)} for passes of {max_batch_tokens or MOST_STREAM_TOKENS:,} "
        f"tokens, and {gib(needs.cache)} for a cache of {cache_tokens or PAGE_SIZE:,} tokens; {way_out}, free memory on this "
        f"GPU, use another GPU, or a smaller dtype or model{'' if in_8_bits(config) else ', or kv_cache_dtype fp8'}"
    )


def as_loaded(config: ModelConfig, *devices: torch.device) -> ModelConfig:
    """The model with the matrices that it has after loading: a GPU without kernels for codes dequantises a checkpoint."""
    if config.quantization is None or devices[0].type == "cpu" or all(map(multiplies_codes, devices)):
        return config
    return replace(config, quantization=None)


def _kind(device: torch.device) -> MemoryKind:
    if device.type == "cpu":
        return "cpu"
    return "unified" if is_integrated(device) else "gpu"
