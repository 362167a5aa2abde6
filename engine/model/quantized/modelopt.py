"""Reads NVIDIA's ModelOpt: NVFP4 (`fp4.py`), or e4m3 in `weight` with one `weight_scale` for the matrix.

Source: `modelopt.py` of vLLM.
"""

from engine.model.quantized.fp4 import read_nvfp4
from engine.model.quantized.fp8 import read_fp8
from engine.model.quantized.layout import Codes, EightBits
from engine.model.quantized.parts import Parts
from engine.model.quantized.scheme import Fp8, ModelOpt


def read_modelopt(parts: Parts, scheme: ModelOpt) -> Codes | EightBits:
    parts.skip("input_scale")
    if scheme.algorithm == "NVFP4":
        return read_nvfp4(parts, scheme.inputs_in_4_bits)
    return read_fp8(parts, Fp8(None, has_input_scales=False))
