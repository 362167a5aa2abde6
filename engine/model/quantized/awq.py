"""Reads AWQ in its gemm version: `qweight` [K, N / 8], `qzeros` [G, N / 8] and `scales` [G, N], in 4 bits.

A word holds eight output rows. The lowest four bits are row 0, then come rows 2, 4, 6, 1, 3, 5, 7. Source: `WQLinear_GEMM` of
AutoAWQ.
"""

import torch
from torch import Tensor

from engine.model.quantized.layout import Codes, unpack
from engine.model.quantized.parts import SCALES, Parts
from engine.model.quantized.scheme import Awq

# The place of each row in a word, in units of four bits: row 0 is the first, row 1 the fifth.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def read_awq(parts: Parts, scheme: Awq) -> Codes:
    words = parts.take("qweight", (torch.int32,), (None, None))
    k, n = len(words), words.shape[1] * 8
    groups = parts.num_groups(k, scheme.group_size)
    zeros = _unpacked(parts.take("qzeros", (torch.int32,), (groups, n // 8)))
    scales = parts.take("scales", SCALES, (groups, n))
    found = Codes(_unpacked(words).T.contiguous(), scales.T.contiguous(), zeros=zeros.T.contiguous())
    if not scheme.has_zeros and bool((zeros != found.middle).any()):
        raise parts.error(f"{parts.module}.qzeros has other zeros than {found.middle}, but config.json says zero_point = false")
    return found


def _unpacked(words: Tensor) -> Tensor:
    """int32 [A, N / 8] -> uint8 [A, N]."""
    eights = unpack(words, 4).view(len(words), -1, 8)
    return eights[:, :, list(_PLACES)].flatten(1)
