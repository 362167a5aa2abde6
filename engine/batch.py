"""`PackedBatch`, the first of the engine's two thin waists: what every forward pass is given."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.tokenizer import TokenIds


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Sequences laid end to end with no padding. T = total tokens, B = sequences."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, restarts at 0 in every sequence
    cu_seqlens: Tensor  # [B + 1] int32, cu_seqlens[0] == 0 and cu_seqlens[-1] == T
    lengths: tuple[int, ...]  # [B], on the host: the reference attention walks the sequences

    @property
    def num_seqs(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def max_seqlen(self) -> int:
        return max(self.lengths)


def pack(sequences: Sequence[TokenIds], device: torch.device) -> PackedBatch:
    """Lay sequences end to end on `device`, in the order given.

    Args:
        sequences: at least one int32 array, each with at least one id.
    """
    lengths = np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))
    cu_seqlens = np.zeros(len(sequences) + 1, dtype=np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    token_ids = np.concatenate(sequences).astype(np.int64)
    positions = np.arange(len(token_ids), dtype=np.int64) - np.repeat(cu_seqlens[:-1].astype(np.int64), lengths)
    return PackedBatch(
        token_ids=_to_device(token_ids, device),
        positions=_to_device(positions, device),
        cu_seqlens=_to_device(cu_seqlens, device),
        lengths=tuple(lengths.tolist()),
    )


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
