"""Reads NVFP4 and MXFP4: values in e2m1, two in a byte, the earlier column in the low half.

NVFP4 has a scale in e4m3 for 16 columns, and a scale in fp32 for the matrix. compressed-tensors divides by the matrix's scale
(`weight_global_scale`), ModelOpt multiplies by it (`weight_scale_2`). MXFP4 has a power of two for 32 columns, stored as the
exponent plus 127. Source: `compressors/nvfp4` and `compressors/mxfp4` of compressed-tensors; `modelopt.py` of vLLM.
"""

import torch

from engine.model.quantized.layout import Codes, halves
from engine.model.quantized.parts import Parts
from engine.model.quantized.scheme import MXFP4_GROUP, NVFP4_GROUP


def read_nvfp4(parts: Parts, activations: bool) -> Codes:
    """A matrix of compressed-tensors if it has a `weight_packed`, otherwise of ModelOpt.

    Args:
        activations: whether config.json says that the inputs of the layer are in NVFP4, too.
    """
    is_compressed = parts.has("weight_packed")
    codes = parts.take("weight_packed" if is_compressed else "weight", (torch.uint8,), (None, None))
    groups = parts.num_groups(2 * codes.shape[1], NVFP4_GROUP)
    scales = parts.take("weight_scale", (torch.float8_e4m3fn,), (len(codes), groups))
    whole = parts.take_one("weight_global_scale" if is_compressed else "weight_scale_2").float().view(())
    whole = whole.reciprocal() if is_compressed else whole
    scales = scales.double() * whole  # exact in fp64
    # A row of q, k and v, or of gate and up, keeps the scale of its matrix when the matrices are joined.
    return Codes(halves(codes), scales, is_float=True, row_scales=whole.expand(len(codes)).clone() if activations else None)


def read_mxfp4(parts: Parts) -> Codes:
    codes = parts.take("weight_packed", (torch.uint8,), (None, None))
    groups = parts.num_groups(2 * codes.shape[1], MXFP4_GROUP)
    scales = parts.take("weight_scale", (torch.uint8, torch.float8_e8m0fnu), (len(codes), groups))
    return Codes(halves(codes), scales.view(torch.float8_e8m0fnu), is_float=True)
