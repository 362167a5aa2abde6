"""Reads compressed-tensors: FP8 and int8 in `weight`, int4 and int8 packed in `weight_packed`, with `weight_scale`.

`fp4.py` reads e2m1. A word of `weight_packed` [N, K * bits / 32] has successive input columns as code + 2^(bits - 1), the first
in the lowest bits. In packed matrices `weight_zero_point` is packed in the same way along the rows, [N * bits / 32, G]. In others
it is int8, with the shape of `weight_scale`. `weight_g_idx` [K] is the group of each column; -1 in all places means "in order".
Source: `compressors/pack_quantized` and `compressors/naive_quantized` of compressed-tensors.
"""

import torch
from torch import Tensor

from engine.model.quantized.fp4 import read_mxfp4, read_nvfp4
from engine.model.quantized.layout import Codes, EightBits, unpack, unpack_rows
from engine.model.quantized.parts import SCALES, Parts
from engine.model.quantized.scheme import CompressedTensors, Group


def read_compressed_tensors(parts: Parts, scheme: CompressedTensors) -> Codes | EightBits:
    group = scheme.group_of(parts.module)
    if group is None:
        raise parts.error(f"{parts.module} is quantised, but config.json's quantisation ignores it or has no group for it")
    if group.has_input_scales:
        parts.skip("input_scale")
        parts.skip("input_zero_point")
        parts.skip("input_global_scale")
    if group.is_float and group.bits == 4:
        return read_nvfp4(parts, group.inputs_in_4_bits) if group.strategy == "tensor_group" else read_mxfp4(parts)
    return _read_packed(parts, group) if group.packed else _read_plain(parts, group)


def _read_plain(parts: Parts, group: Group) -> EightBits:
    codes = parts.take("weight", (torch.float8_e4m3fn if group.is_float else torch.int8,), (None, None))
    n, k = codes.shape
    scales, block = _scales(parts, group, n, k)
    zeros = None
    if not group.symmetric:
        zeros = parts.take("weight_zero_point", (torch.int8,)).reshape(-1, scales.shape[1])
        if len(zeros) not in (1, len(scales)):
            raise parts.error(f"{parts.module}.weight_zero_point has {zeros.numel()} values, weight_scale {scales.numel()}")
        zeros = zeros.to(torch.int16).expand(scales.shape)
    return EightBits(codes, scales, block, zeros)


def _read_packed(parts: Parts, group: Group) -> Codes:
    shape = parts.take("weight_shape", (torch.int64, torch.int32), (2,)).tolist()
    n, k = int(shape[0]), int(shape[1])
    a_word = 32 // group.bits
    words = parts.take("weight_packed", (torch.int32,), (n, -(-k // a_word)))
    codes = unpack(words, group.bits)[:, :k]
    scales, (_, columns) = _scales(parts, group, n, k)
    groups, zeros, order = scales.shape[1], None, None
    if not group.symmetric:
        zeros = unpack_rows(parts.take("weight_zero_point", (torch.int32,), (-(-n // a_word), groups)), group.bits)[:n]
    if group.reorders:
        group_of = parts.take("weight_g_idx", (torch.int32,), (k,))
        order = None if bool((group_of == -1).all()) else parts.order_of(group_of, groups)
    codes = codes.contiguous() if order is None else codes[:, order]
    parts.num_groups(k, columns)
    return Codes(codes, scales, group.bits, zeros, order=order)


def _scales(parts: Parts, group: Group, n: int, k: int) -> tuple[Tensor, tuple[int, int]]:
    """(the scales as in `EightBits`, the rows and columns of a block with one scale)."""
    if group.strategy == "tensor":
        return parts.take_one("weight_scale").expand(n, 1), (1, k)
    if group.strategy == "block":
        assert group.block is not None, "read_scheme has checked it"
        rows, columns = group.block
        return parts.take("weight_scale", SCALES, (-(-n // rows), -(-k // columns))), group.block
    groups = parts.num_groups(k, group.group_size if group.strategy == "group" else None)
    return parts.take("weight_scale", SCALES, (n, groups)), (1, k // groups)
