"""Reads GGUF's blocks of 4 to 8 bits as `Codes`. 16 or 32 columns share a scale.

A matrix of another type is dequantised when a model takes it. Source: ggml-common.h and ggml-quants.c of llama.cpp.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.codes import Form
from engine.model.gguf import PLAIN, Header, StoredTensor
from engine.model.gguf_weights import GGUFWeights
from engine.model.quantized.kept import joined
from engine.model.quantized.layout import Blocks, Codes
from engine.model.quantized.scheme import Gguf

# Values that are read at a time. A head has ten times as many, and while it is read each value takes several bytes.
_SLICE_VALUES = 1 << 26
# The engine has the gate and up in one matrix. They stay in their codes together or not at all.
_TOGETHER = (("attn_q",), ("attn_k",), ("attn_v",), ("attn_output",), ("ffn_gate", "ffn_up"), ("ffn_down",))


def _read_q4_0(rows: Tensor) -> Codes:
    """Blocks of 32 values: a scale in fp16, 16 bytes of codes. The low halves are values 0 to 15, the high ones 16 to 31."""
    blocks = _blocks(rows, 18)
    return Codes(_halves(blocks[..., 2:]).flatten(1), _fp16(blocks[..., :2]).squeeze(2))


def _read_q4_1(rows: Tensor) -> Codes:
    """Blocks as in `_read_q4_0`, with a min in fp16 after the scale."""
    blocks = _blocks(rows, 20)
    scales, mins = _fp16(blocks[..., :4]).unbind(2)
    return Codes(_halves(blocks[..., 4:]).flatten(1), scales, mins=mins)


def _read_q5_0(rows: Tensor) -> Codes:
    """Blocks as in `_read_q4_0`, with 4 bytes after the scale: bit i is the fifth bit of value i."""
    blocks = _blocks(rows, 22)
    codes = _halves(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return Codes(codes.flatten(1), _fp16(blocks[..., :2]).squeeze(2), 5)


def _read_q5_1(rows: Tensor) -> Codes:
    """Blocks as in `_read_q5_0`, with a min in fp16 after the scale."""
    blocks = _blocks(rows, 24)
    codes = _halves(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    scales, mins = _fp16(blocks[..., :4]).unbind(2)
    return Codes(codes.flatten(1), scales, 5, mins=mins)


def _read_q8_0(rows: Tensor) -> Codes:
    """Blocks of 32 values: a scale in fp16, 32 codes in int8."""
    blocks = _blocks(rows, 34)
    return Codes((blocks[..., 2:] ^ 128).flatten(1), _fp16(blocks[..., :2]).squeeze(2), 8)


def _read_q4_k(rows: Tensor) -> Codes:
    """Blocks of 256 values: two factors in fp16 for scales and mins, 12 bytes of 6-bit scales and mins, 128 bytes of codes."""
    blocks = _blocks(rows, 144)
    scales, mins = _scales_and_mins(blocks[..., :16])
    return Codes(_in_64(blocks[..., 16:]).flatten(1), scales, mins=mins)


def _read_q5_k(rows: Tensor) -> Codes:
    """Blocks as in `_read_q4_k`, with 32 bytes before the codes: bit i of byte j is the fifth bit of value 32 i + j."""
    blocks = _blocks(rows, 176)
    scales, mins = _scales_and_mins(blocks[..., :16])
    shifts = torch.arange(8, device=rows.device, dtype=torch.uint8)[:, None]
    fifth = (blocks[..., None, 16:48] >> shifts & 1).flatten(2)  # [N, K / 256, 256]
    codes = _in_64(blocks[..., 48:]).flatten(1) | fifth.flatten(1) << 4
    return Codes(codes, scales, 5, mins=mins)


def _read_q6_k(rows: Tensor) -> Codes:
    """Blocks of 256 values: 128 bytes with four bits of two values, 64 with two bits of four, 16 int8 scales, a factor in fp16.

    Each half of the values has 64 and 32 of these bytes. The low halves of the 64 belong to its values 0 to 63. Byte j of the 32
    belongs to its values j, j + 32, j + 64 and j + 96, the lowest bits first. The products of scales are exact in fp32.
    """
    blocks = _blocks(rows, 210)
    low = _halves(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64))  # [N, K / 256, 2, 128]
    shifts = torch.arange(0, 8, 2, device=rows.device, dtype=torch.uint8)[:, None]
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> shifts & 3  # [N, K / 256, 2, 4, 32]
    scales = blocks[..., 192:208].view(torch.int8).float() * _fp16(blocks[..., 208:]).float()
    return Codes((low | high.flatten(3) << 4).flatten(1), scales.flatten(1), 6)


_READERS: dict[str, tuple[Form, Callable[[Tensor], Codes]]] = {
    "Q4_0": (Form(32), _read_q4_0),
    "Q4_1": (Form(32, beside="mins"), _read_q4_1),
    "Q5_0": (Form(32, 5), _read_q5_0),
    "Q5_1": (Form(32, 5, "mins"), _read_q5_1),
    "Q8_0": (Form(32, 8), _read_q8_0),
    "Q4_K": (Form(32, beside="mins"), _read_q4_k),
    "Q5_K": (Form(32, 5, "mins"), _read_q5_k),
    "Q6_K": (Form(16, 6), _read_q6_k),
}


def read_matrix(file: GGUFWeights, name: str, to_device: Callable[[Tensor], Tensor]) -> Tensor | Codes | Blocks:
    """A matrix by transformers' name: in codes on the device, in the file's blocks, or as a tensor that is not quantised."""
    place = file.place(name)
    if place.kind in PLAIN or len(place.shape) != 2:
        return file.tensor(name)
    n, k = place.shape
    if place.kind not in _READERS:
        return Blocks(place.kind, (n, k), lambda: file.tensor(name))
    _, read = _READERS[place.kind]
    rows, step = file.content(name).view(n, -1), max(1, _SLICE_VALUES // k)
    parts = [read(to_device(rows[start : start + step])) for start in range(0, n, step)]
    whole = parts[0] if len(parts) == 1 else joined(parts)
    assert whole is not None, "the rows of a matrix have one form"
    return whole.with_rows(lambda part: file.in_order(name, part))


def described(header: Header) -> Gguf | None:
    """The part of the layers' matrices that can stay in codes. None if no matrix of a layer is quantised."""
    values: Counter[str] = Counter()
    kept = []
    for layer in range(header.whole("block_count")):
        of_layer: Counter[Form] = Counter()
        for names in _TOGETHER:
            parts = [header.tensors[name] for part in names if (name := f"blk.{layer}.{part}.weight") in header.tensors]
            for part in parts:
                values[part.kind] += math.prod(part.shape)
            if (form := _form_of(parts)) is not None:
                of_layer[form] += sum(math.prod(part.shape) for part in parts)
        kept.append(tuple(of_layer.items()))
    if values.keys() <= set(PLAIN):
        return None
    kinds = tuple(kind for kind, _ in values.most_common())
    words, head = (
        _form_of([header.tensors[name]] if name in header.tensors else []) for name in ("token_embd.weight", "output.weight")
    )
    return Gguf(kinds, sum(values.values()), tuple(kept), words, head)


def _form_of(parts: Sequence[StoredTensor]) -> Form | None:
    """The form of matrices that are multiplied as one. None if they do not stay in codes, or if there are none."""
    forms = {_READERS[part.kind][0] if part.kind in _READERS else None for part in parts}
    if len(forms) != 1 or (form := forms.pop()) is None:
        return None
    return form if all(len(part.shape) == 2 and form.fits(*part.shape) for part in parts) else None


def _blocks(rows: Tensor, num_bytes: int) -> Tensor:
    return rows.view(len(rows), -1, num_bytes)


def _fp16(numbers: Tensor) -> Tensor:
    """uint8 [..., 2 A] -> fp16 [..., A]."""
    return numbers.contiguous().view(torch.float16)


def _halves(codes: Tensor) -> Tensor:
    """uint8 [..., A] -> uint8 [..., 2 A]: all low halves, then all high ones."""
    return torch.cat((codes & 15, codes >> 4), dim=-1)


def _in_64(codes: Tensor) -> Tensor:
    """uint8 [N, B, 128] -> [N, B, 256]: of each 32 bytes all low halves, then all high ones."""
    return _halves(codes.reshape(*codes.shape[:2], 4, 32)).flatten(2)


def _bits(numbers: Tensor) -> Tensor:
    """uint8 [..., A] -> uint8 [..., 8 A] of 0 and 1, the lowest bit first."""
    return (numbers[..., None] >> torch.arange(8, device=numbers.device, dtype=torch.uint8) & 1).flatten(-2)


def _scales_and_mins(heads: Tensor) -> tuple[Tensor, Tensor]:
    """The first 16 bytes of blocks of Q4_K or Q5_K, [N, B, 16] -> scales and mins, [N, 8 B] fp32 each.

    The products are exact in fp32. Mins are subtracted in these formats.
    """
    both = _fp16(heads[..., :4]).float()  # [N, B, 2]
    first, second, third = heads[..., 4:].reshape(*both.shape[:2], 3, 4).unbind(2)  # [N, B, 4] each
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=2)
    mins = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=2)
    return (both[..., :1] * scales).flatten(1), (-both[..., 1:] * mins).flatten(1)
