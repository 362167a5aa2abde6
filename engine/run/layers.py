"""The layers of one stage of a ring of processes, on any device."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.devices import compute_dtype
from engine.kernels.tiles import LEAST_TILED
from engine.model.base import Model
from engine.model.config import ModelConfig
from engine.run.cuda_layers import CudaLayers
from engine.run.kv_cache import KVCache
from engine.run.pack import BatchPacker
from engine.run.runner import with_cache
from engine.run.streams import StreamPacker
from engine.run.work import Work


@dataclass(frozen=True, slots=True)
class Layers:
    """Some layers of a model, and their cache. Attention over the cache is the reference's."""

    model: Model
    packer: BatchPacker
    device: torch.device
    cache: KVCache | None

    def forward(self, work: Work, hidden: Tensor | None, is_last: bool) -> Tensor:
        """
        Args:
            hidden: [T, C] of the stage before; None for the first stage.
        Returns: [T, C]; of the last stage without `work.all_rows` [B, C].
        """
        sequences = [piece.token_ids for piece in work.pieces] or work.sequences
        batch = self.packer.pack(sequences, device=self.device, whole=work.whole)
        if work.pieces:
            assert self.cache is not None, "only a generation model has pieces"
            batch = with_cache(batch, work.pieces, self.cache)
        return self.model.forward(replace(batch, hidden=hidden), pooled_only=is_last and not work.all_rows)


def layers_of(
    model: Model, packer: BatchPacker, device: torch.device, cache: KVCache | None, config: ModelConfig, dtype: torch.dtype
) -> Layers | CudaLayers:
    """The layers of a later stage. `config.part` names them. With a cache, our kernels compute them if `packer` has tiles."""
    tiles = packer.tiling
    if cache is None or tiles is None:
        return Layers(model, packer, device, cache)
    if cache.in_8_bits:
        tiles = replace(tiles, capability=LEAST_TILED)
    packed = StreamPacker.for_windows(tiles, model.windows)
    return CudaLayers(model, packed, cache, config.hidden_size, compute_dtype(dtype))
