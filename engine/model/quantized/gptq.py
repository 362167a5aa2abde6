"""Reads GPTQ: `qweight`, `qzeros`, `scales` and `g_idx`, in 4 or 8 bits.

A word of `qweight` [K * bits / 32, N] holds successive input columns, the first in the lowest bits. A word of `qzeros`
[G, N * bits / 32] holds the zeros of successive output rows. Version 1 stores a zero minus 1: writers subtract 1 from each field
of the whole word, so a zero of 0 borrows from the next field. Version 2 stores the zero itself. `g_idx` [K] is the group of each
input column, in any order with desc_act. Source: `qlinear_torch` of AutoGPTQ and GPTQModel, `convert_gptq_v2_to_v1_format`.
"""

import torch
from torch import Tensor

from engine.model.quantized.layout import Codes, unpack, unpack_rows
from engine.model.quantized.parts import SCALES, Parts
from engine.model.quantized.scheme import Gptq


def read_gptq(parts: Parts, scheme: Gptq) -> Codes:
    a_word = 32 // scheme.bits
    words = parts.take("qweight", (torch.int32,), (None, None))
    k, n = len(words) * a_word, words.shape[1]
    groups = parts.num_groups(k, scheme.group_size)
    scales = parts.take("scales", SCALES, (groups, n)).T.contiguous()  # [N, G]
    zeros = _zeros(parts, scheme, parts.take("qzeros", (torch.int32,), (groups, -(-n // a_word))), n)
    order = None
    if scheme.reorders or parts.has("g_idx"):
        order = parts.order_of(parts.take("g_idx", (torch.int32,), (k,)), groups)
    codes = unpack_rows(words, scheme.bits).T  # [N, K]
    codes = codes.contiguous() if order is None else codes[:, order]
    return Codes(codes, scales, scheme.bits, zeros, order=order)


def _zeros(parts: Parts, scheme: Gptq, words: Tensor, n: int) -> Tensor:
    """`qzeros` -> [N, G] uint8. Raises: ModelError if config.json says that all zeros are the middle code, and they are not."""
    if not scheme.symmetric:
        ones = {4: 0x11111111, 8: 0x01010101}[scheme.bits]
        return unpack(words + ones if scheme.adds_one else words, scheme.bits)[:, :n].T
    # The zeros may be those of version 2 although config.json says version 1, as in files of GPTQModel 5.
    zeros, middle = unpack(words, scheme.bits)[:, :n].T, 1 << scheme.bits - 1
    if not any(bool((zeros == stored).all()) for stored in (middle, middle - 1)):
        raise parts.error(f"{parts.module}.qzeros has other zeros than {middle}, but config.json says sym = true")
    return torch.full_like(zeros, middle)
