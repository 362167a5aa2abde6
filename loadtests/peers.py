"""Other engines for the same models: transformers with padding like sentence-transformers, and packed with FlashAttention 2."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

Ids = NDArray[np.int32]
Encode = Callable[[Sequence[Ids]], None]  # the vectors reach the host


def load(folder: Path, attention: str) -> Any:
    return transformers.AutoModel.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=attention, device_map="cuda")


def padded(model: Any, batch_size: int) -> Encode:
    """Vectors of the last token."""

    @torch.inference_mode()
    def encode(sequences: Sequence[Ids]) -> None:
        for batch in padded_batches(sequences, batch_size):
            hidden = model(**batch).last_hidden_state
            torch.nn.functional.normalize(hidden[:, -1].float(), dim=-1).cpu()

    return encode


def padded_batches(sequences: Sequence[Ids], batch_size: int) -> Iterator[dict[str, Tensor]]:
    """Batches of texts sorted by length, padded on the left to the longest text of the batch."""
    ordered = sorted(sequences, key=len, reverse=True)
    for start in range(0, len(ordered), batch_size):
        part = ordered[start : start + batch_size]
        ids = np.zeros((len(part), len(part[0])), dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, each in enumerate(part):
            ids[row, -len(each) :], mask[row, -len(each) :] = each, 1
        yield {"input_ids": torch.from_numpy(ids).cuda(), "attention_mask": torch.from_numpy(mask).cuda()}


def packed(model: Any, batch_tokens: int) -> Encode:
    """Vectors without padding. Positions restart in each text. The model was loaded with "packed_fa2"."""

    @torch.inference_mode()
    def run(part: list[Ids]) -> None:
        lengths = np.fromiter(map(len, part), dtype=np.int64, count=len(part))
        ends = np.cumsum(lengths)
        _packed.cu_seqlens = torch.tensor([0, *ends], dtype=torch.int32, device="cuda")
        _packed.longest = int(lengths.max())
        ids = torch.from_numpy(np.concatenate(part)).cuda().long()[None]
        positions = torch.from_numpy(np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)).cuda()[None]
        hidden = model(input_ids=ids, position_ids=positions).last_hidden_state[0]
        torch.nn.functional.normalize(hidden[_packed.cu_seqlens[1:].long() - 1].float(), dim=-1).cpu()

    def encode(sequences: Sequence[Ids]) -> None:
        part: list[Ids] = []
        room = batch_tokens
        for ids in sorted(sequences, key=len, reverse=True):
            if part and len(ids) > room:
                run(part)
                part, room = [], batch_tokens
            part.append(ids)
            room -= len(ids)
        run(part)

    return encode


class _Packed:
    """The present batch, because transformers gives an attention function only values that the layers know."""

    cu_seqlens: Tensor
    longest: int


_packed = _Packed()


def _flash_attention_2(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """[1, heads, T, D] each -> [1, T, heads, D]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    cu, longest = _packed.cu_seqlens, _packed.longest
    out = torch.ops.aten._flash_attention_forward(q, k, v, cu, cu, longest, longest, 0.0, bool(module.is_causal), False)[0]
    return out[None], None


transformers.AttentionInterface.register("packed_fa2", _flash_attention_2)
