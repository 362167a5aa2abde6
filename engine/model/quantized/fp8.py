"""Reads FP8 in Qwen's and DeepSeek's form: `weight` in e4m3, and `weight_scale_inv` with a scale for each block of 128 x 128.

A value is weight * weight_scale_inv, in spite of the name. Other checkpoints have one scale for the matrix: `weight_scale_inv`
if transformers wrote them, otherwise `weight_scale`.
Source: `FineGrainedFP8Config` of transformers; `fp8.py` of vLLM.
"""

import torch

from engine.model.quantized.layout import EightBits
from engine.model.quantized.parts import SCALES, Parts
from engine.model.quantized.scheme import Fp8


def read_fp8(parts: Parts, scheme: Fp8) -> EightBits:
    codes = parts.take("weight", (torch.float8_e4m3fn,), (None, None))
    n, k = codes.shape
    if scheme.has_input_scales:
        parts.skip("input_scale")
        parts.skip("activation_scale")
    if scheme.block is None:
        scale = parts.take_one("weight_scale_inv" if parts.has("weight_scale_inv") else "weight_scale")
        return EightBits(codes, scale.expand(n, 1), (1, k))
    rows, columns = scheme.block
    scales = parts.take("weight_scale_inv", (*SCALES, torch.float8_e8m0fnu), (-(-n // rows), -(-k // columns)))
    return EightBits(codes, scales, scheme.block)
