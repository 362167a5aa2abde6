"""Reads GPTQ: `qweight`, `qzeros`, `scales` and `g_idx`, in 4 or 8 bits.

A word of `qweight` [K * bits / 32, N] holds successive input columns, the first in the lowest bits. A word of `qzeros`
[G, N * bits / 32] holds the zeros of successive output rows. Version 1 stores a zero minus 1, modulo 2^bits. Version 2 stores the
zero itself. `g_idx` [K] is the group of each input column, in any order with desc_act. Source: `qlinear_torch` of AutoGPTQ and
GPTQModel.
"""

import torch

from engine.model.quantized.layout import Codes, unpack, unpack_rows
from engine.model.quantized.parts import SCALES, Parts
from engine.model.quantized.scheme import Gptq


def read_gptq(parts: Parts, scheme: Gptq) -> Codes:
    a_word = 32 // scheme.bits
    words = parts.take("qweight", (torch.int32,), (None, None))
    k, n = len(words) * a_word, words.shape[1]
    groups = parts.num_groups(k, scheme.group_size)
    scales = parts.take("scales", SCALES, (groups, n)).T.contiguous()  # [N, G]
    zeros = unpack(parts.take("qzeros", (torch.int32,), (groups, -(-n // a_word))), scheme.bits)[:, :n].T  # [N, G]
    order = None
    if scheme.reorders or parts.has("g_idx"):
        order = parts.order_of(parts.take("g_idx", (torch.int32,), (k,)), groups)
    codes = unpack_rows(words, scheme.bits).T  # [N, K]
    codes = codes.contiguous() if order is None else codes[:, order]
    if scheme.adds_one:
        zeros = zeros + 1 & (1 << scheme.bits) - 1
    return Codes(codes, scales, scheme.bits, zeros, order=order)
