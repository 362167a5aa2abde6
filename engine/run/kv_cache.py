"""The cache of keys and values: for each layer, pages of the tokens that passes have computed."""

import psutil
import torch
from torch import Tensor

from engine.errors import ModelError
from engine.kernels.cache8 import Cache8
from engine.model.config import ModelConfig
from engine.run import reserve
from engine.run.sleep import Sleeper

_CPU = torch.device("cpu")

PAGE_SIZE = 128  # tokens: the block of keys that the attention kernels walk
# The default size of the cache is 16 whole contexts. On a CPU it takes at most a quarter of the free memory.
_CONTEXTS = 16
_FREE_SHARE = 4
# Left free of a GPU: kernels that CUDA loads after the weights.
KERNEL_BYTES = 512 << 20


class KVCache:
    """[2, num_pages * PAGE_SIZE, n_kv_heads, head_dim] for each layer: the keys, and the values, of each token.

    They are in 8 bits if the configuration says so.
    """

    def __init__(
        self, config: ModelConfig, num_tokens: int, dtype: torch.dtype, device: torch.device, sleeper: Sleeper | None = None
    ) -> None:
        """`sleeper`: of an engine that frees its cache when it sleeps."""
        self.device, self.num_pages = device, whole_pages(num_tokens) // PAGE_SIZE
        shape = (2, self.num_pages * PAGE_SIZE, config.n_kv_heads, config.head_dim)
        empty = torch.empty if sleeper is None else sleeper.empty
        self.in_8_bits = in_8_bits(config)
        self.layers: list[Tensor | Cache8] = [
            Cache8.empty(shape, device, empty) if self.in_8_bits else empty(shape, dtype=dtype, device=device)
            for _ in config.layers
        ]


def whole_pages(num_tokens: int) -> int:
    """The tokens of the pages that hold so many."""
    return -(-num_tokens // PAGE_SIZE) * PAGE_SIZE


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """`dtype` is the one that the model computes in. In 8 bits, a head has a byte for its scale besides."""
    of_head = config.head_dim + 1 if in_8_bits(config) else config.head_dim * dtype.itemsize
    return 2 * len(config.layers) * config.n_kv_heads * of_head


def in_8_bits(config: ModelConfig) -> bool:
    """Whether keys and values are in 8 bits."""
    return config.generation is not None and config.generation.cache_in_8_bits


def most_default_tokens(config: ModelConfig) -> int:
    """The size of the cache where there is memory enough."""
    return _CONTEXTS * config.max_input_length


def default_tokens(config: ModelConfig, dtype: torch.dtype, device: torch.device = _CPU, pass_bytes: int = 0) -> int:
    """The size of the cache where nobody says one; to be called with the weights loaded.

    A CPU's cache may grow into a quarter of the memory that is free now: the system gives a page of memory when it is first
    written. A GPU's cache is allocated at once, and may take all that passes leave of the free memory.

    Args:
        dtype: the one that the model computes in.
        pass_bytes: bytes of GPU memory that passes will take: `Footprint.of_passes`.
    Raises: ModelError with the numbers, where a GPU has no memory for a single page.
    """
    per_token, most = bytes_per_token(config, dtype), most_default_tokens(config)
    if device.type == "cpu":
        fits = psutil.virtual_memory().available // _FREE_SHARE // per_token
        return max(PAGE_SIZE, int(min(most, fits)))
    free = reserve.free_bytes(device)
    fits = (free - pass_bytes - KERNEL_BYTES) // per_token // PAGE_SIZE * PAGE_SIZE
    if fits < PAGE_SIZE:
        raise ModelError(
            f"{device} has {free / 2**30:.1f} GiB free beside the weights; passes take {(pass_bytes + KERNEL_BYTES) / 2**30:.1f} "
            f"GiB, and a page of the cache, {PAGE_SIZE} tokens, {PAGE_SIZE * per_token / 2**20:.1f} MiB; lower max_batch_tokens, "
            "free memory on this GPU, take another GPU, or a smaller dtype or model"
        )
    return min(whole_pages(most), fits)
