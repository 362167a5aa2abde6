"""The KV cache: for each layer, pages with the keys and values of computed tokens."""

import psutil
import torch
from torch import Tensor

from engine.amounts import gib
from engine.errors import ModelError
from engine.kernels.cache8 import Cache8
from engine.model.config import ModelConfig
from engine.run import reserve
from engine.run.sleep import Sleeper
from engine.schedule.pages import PAGE_SIZE as PAGE_SIZE

_CPU = torch.device("cpu")

# The default size of the cache is 16 whole contexts. On a CPU it takes at most a quarter of the free memory.
_CONTEXTS = 16
CPU_SHARE = 4
# This much of a GPU stays free, for kernels that CUDA loads after the weights.
KERNEL_BYTES = 512 << 20


_CODES = {"auto": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8}  # by `GenerationConfig.cache_dtype`


class KVCache:
    """[2, num_pages * PAGE_SIZE, n_kv_heads, head_dim] for each layer: the keys, and the values, of each token.

    They are in 8 bits if the configuration says so.
    """

    def __init__(
        self, config: ModelConfig, num_tokens: int, dtype: torch.dtype, device: torch.device, sleeper: Sleeper | None = None
    ) -> None:
        """`sleeper`: for an engine that frees its cache when it sleeps."""
        self.device, self.num_pages = device, whole_pages(num_tokens) // PAGE_SIZE
        shape = (2, self.num_pages * PAGE_SIZE, config.n_kv_heads, config.head_dim)
        empty = torch.empty if sleeper is None else sleeper.empty
        self.in_8_bits = in_8_bits(config)
        in_codes = _CODES[config.generation.cache_dtype] if config.generation is not None else None
        self.layers: list[Tensor | Cache8] = [
            empty(shape, dtype=dtype, device=device) if in_codes is None else Cache8.empty(shape, in_codes, device, empty)
            for _ in config.layers
        ]


def whole_pages(num_tokens: int) -> int:
    """`num_tokens` rounded up to whole pages."""
    return -(-num_tokens // PAGE_SIZE) * PAGE_SIZE


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of a token's keys and values. `dtype` is the model's compute dtype. In 8 bits each head's scale is another byte."""
    of_head = config.head_dim + 1 if in_8_bits(config) else config.head_dim * dtype.itemsize
    return 2 * len(config.layers) * config.n_kv_heads * of_head


def in_8_bits(config: ModelConfig) -> bool:
    """Whether keys and values are in 8 bits."""
    return config.generation is not None and config.generation.cache_dtype != "auto"


def most_default_tokens(config: ModelConfig) -> int:
    """The default size of the cache if there is enough memory."""
    return _CONTEXTS * config.max_input_length


def default_tokens(config: ModelConfig, dtype: torch.dtype, device: torch.device = _CPU, pass_bytes: int = 0) -> int:
    """The default size of the cache. Call it after the weights are loaded.

    On a CPU the cache may take a quarter of the free memory. The system gives this memory only when it is written. On a GPU the
    cache is allocated at once, and may take all free memory except that of passes.

    Args:
        dtype: the model's compute dtype.
        pass_bytes: bytes of GPU memory that passes will take: `Footprint.of_passes`.
    Raises: ModelError with the numbers if a GPU has no memory for a single page.
    """
    per_token, most = bytes_per_token(config, dtype), most_default_tokens(config)
    if device.type == "cpu":
        fits = psutil.virtual_memory().available // CPU_SHARE // per_token
        return max(PAGE_SIZE, int(min(most, fits)))
    free = reserve.free_bytes(device)
    fits = (free - pass_bytes - KERNEL_BYTES) // per_token // PAGE_SIZE * PAGE_SIZE
    if fits < PAGE_SIZE:
        raise ModelError(
            f"{device} has {gib(free)} free beside the weights; passes take {gib(pass_bytes + KERNEL_BYTES)}, and a page of the "
            f"cache, {PAGE_SIZE} tokens, {PAGE_SIZE * per_token / 2**20:.1f} MiB; lower max_batch_tokens, free "
            "memory on this GPU, use another GPU, or a smaller dtype or model"
        )
    return min(whole_pages(most), fits)
