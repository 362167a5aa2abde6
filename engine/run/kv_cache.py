"""The cache of keys and values: for each layer, pages of the tokens that passes have computed."""

import psutil
import torch
from torch import Tensor

from engine.model.config import ModelConfig

PAGE_SIZE = 128  # tokens: the block of keys that the attention kernels walk
# The default size of the cache is 16 whole contexts. It takes at most a quarter of the free memory.
_CONTEXTS = 16
_FREE_SHARE = 4


class KVCache:
    """[2, num_pages * PAGE_SIZE, n_kv_heads, head_dim] for each layer: the keys, and the values, of each token."""

    def __init__(self, config: ModelConfig, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_pages = -(-num_tokens // PAGE_SIZE)
        shape = (2, self.num_pages * PAGE_SIZE, config.n_kv_heads, config.head_dim)
        self.layers: list[Tensor] = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.n_layers)]


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    return 2 * config.n_layers * config.n_kv_heads * config.head_dim * dtype.itemsize


def default_tokens(config: ModelConfig, dtype: torch.dtype) -> int:
    """The size of the cache on a CPU. The system gives a page of memory when it is first written."""
    fits = psutil.virtual_memory().available // _FREE_SHARE // bytes_per_token(config, dtype)
    return max(PAGE_SIZE, int(min(_CONTEXTS * config.max_input_length, fits)))
