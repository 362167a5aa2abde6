"""Reads GGUF's blocks of 4 bits as `FourBits`. In Q4_0, Q4_1 and Q4_K 32 columns share a scale.

A matrix of another type is dequantised when a model takes it. Source: ggml-common.h and ggml-quants.c of llama.cpp.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.kernels.four_bits import packs
from engine.model.gguf import PLAIN, Header, StoredTensor
from engine.model.gguf_weights import GGUFWeights
from engine.model.quantized.four_bits import bytes_in_four_bits
from engine.model.quantized.layout import Blocks, FourBits, four_bits
from engine.model.quantized.scheme import Gguf

GROUP = 32  # columns that share a scale
# The engine has the gate and up in one matrix. They stay in 4 bits together or not at all.
_TOGETHER = (("attn_q",), ("attn_k",), ("attn_v",), ("attn_output",), ("ffn_gate", "ffn_up"), ("ffn_down",))


def _read_q4_0(rows: Tensor) -> FourBits:
    """Blocks of 32 values: a scale in fp16, 16 bytes of codes. The low halves are values 0 to 15, the high ones 16 to 31."""
    blocks = _blocks(rows, 18)
    return four_bits(_halves(blocks[..., 2:]).flatten(1), _fp16(blocks[..., :2]).squeeze(2))


def _read_q4_1(rows: Tensor) -> FourBits:
    """Blocks as in `_read_q4_0`, with a min in fp16 after the scale."""
    blocks = _blocks(rows, 20)
    scales, mins = _fp16(blocks[..., :4]).unbind(2)
    return four_bits(_halves(blocks[..., 4:]).flatten(1), scales, mins=mins)


def _read_q4_k(rows: Tensor) -> FourBits:
    """Blocks of 256 values: two factors in fp16 for scales and mins, 12 bytes of 6-bit scales and mins, 128 bytes of codes.

    The products are exact in fp32. Mins are subtracted in this format.
    """
    blocks = _blocks(rows, 144)
    both = _fp16(blocks[..., :4]).float()  # [N, K / 256, 2]
    first, second, third = blocks[..., 4:16].reshape(*both.shape[:2], 3, 4).unbind(2)  # [N, K / 256, 4] each
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=2)
    mins = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=2)
    codes = _halves(blocks[..., 16:].reshape(len(rows), -1, 32))  # [N, K / 64, 64]: 32 low halves, then 32 high ones
    return four_bits(codes.flatten(1), (both[..., :1] * scales).flatten(1), mins=(-both[..., 1:] * mins).flatten(1))


_READERS: dict[str, Callable[[Tensor], FourBits]] = {"Q4_0": _read_q4_0, "Q4_1": _read_q4_1, "Q4_K": _read_q4_k}


def read_matrix(file: GGUFWeights, name: str, to_device: Callable[[Tensor], Tensor]) -> Tensor | FourBits | Blocks:
    """A matrix by transformers' name: in 4 bits on the device, in the file's blocks, or as a tensor that is not quantised."""
    place = file.place(name)
    if place.kind in PLAIN or len(place.shape) != 2:
        return file.tensor(name)
    n, k = place.shape
    if place.kind not in _READERS:
        return Blocks(place.kind, (n, k), lambda: file.tensor(name))
    rows = to_device(file.content(name).view(n, -1))
    return _READERS[place.kind](rows).with_rows(lambda part: file.in_order(name, part))


def described(header: Header) -> Gguf | None:
    """The part of the layers' matrices that can stay in 4 bits. None if no matrix of a layer is quantised."""
    values: Counter[str] = Counter()
    kept = []
    for layer in range(header.whole("block_count")):
        found = [0, 0]
        for names in _TOGETHER:
            parts = [header.tensors[name] for part in names if (name := f"blk.{layer}.{part}.weight") in header.tensors]
            for part in parts:
                values[part.kind] += math.prod(part.shape)
            if (num_bytes := _bytes_in_four_bits(parts)) is not None:
                found[0] += sum(math.prod(part.shape) for part in parts)
                found[1] += num_bytes
        kept.append((found[0], found[1]))
    if values.keys() <= set(PLAIN):
        return None
    return Gguf(tuple(kind for kind, _ in values.most_common()), sum(values.values()), tuple(kept))


def _bytes_in_four_bits(parts: Sequence[StoredTensor]) -> int | None:
    """The bytes of matrices that are multiplied as one. None if they do not stay in 4 bits."""
    fit = all(part.kind in _READERS and len(part.shape) == 2 and packs(*part.shape, GROUP) for part in parts)
    if not fit or len({part.kind == "Q4_0" for part in parts}) != 1:  # only some have mins
        return None
    values = sum(math.prod(part.shape) for part in parts)
    return bytes_in_four_bits(values, GROUP, parts[0].kind != "Q4_0")


def _blocks(rows: Tensor, num_bytes: int) -> Tensor:
    return rows.view(len(rows), -1, num_bytes)


def _fp16(numbers: Tensor) -> Tensor:
    """uint8 [..., 2 A] -> fp16 [..., A]."""
    return numbers.contiguous().view(torch.float16)


def _halves(codes: Tensor) -> Tensor:
    """uint8 [..., A] -> uint8 [..., 2 A]: all low halves, then all high ones."""
    return torch.cat((codes & 15, codes >> 4), dim=-1)
