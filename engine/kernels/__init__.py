"""The operations of a forward pass. On a GPU in 16 bits our CUDA kernels compute them. Otherwise plain torch does (`reference`).

Each operation chooses between the two by the tensor's device and dtype, so that a model is written once.
"""

from engine.draws import choices_of
from engine.kernels.activation import geglu, gelu, swiglu
from engine.kernels.attention import attention
from engine.kernels.attention_decode import attention_decode
from engine.kernels.embed import embed, embed_packed
from engine.kernels.linear import interleaved, linear, linear_add, linear_swiglu
from engine.kernels.linear8 import linear8, linear8_add, linear8_gelu, linear8_gelu_in_e4m3, linear8_swiglu
from engine.kernels.linear_packed import linear_packed, linear_packed_add, linear_packed_in_parts, linear_packed_swiglu
from engine.kernels.norm import layer_norm, rms_norm
from engine.kernels.packed import Packed
from engine.kernels.paged_attention import paged_attention
from engine.kernels.pool import pool_finish, pool_mean
from engine.kernels.quantize import MaybeQuantized, Quantized, quantize_weight
from engine.kernels.rope import norm_rope, rope, rope_store
from engine.kernels.sample import sample

Weight = MaybeQuantized | Packed  # of a layer

__all__ = [
    "MaybeQuantized", "Packed", "Quantized", "Weight", "attention", "attention_decode", "choices_of", "embed", "embed_packed",
    "geglu", "gelu", "interleaved", "layer_norm", "linear", "linear8", "linear8_add", "linear8_gelu", "linear8_gelu_in_e4m3",
    "linear8_swiglu", "linear_add", "linear_packed", "linear_packed_add", "linear_packed_in_parts", "linear_packed_swiglu",
    "linear_swiglu", "norm_rope", "paged_attention", "pool_finish", "pool_mean", "quantize_weight", "rms_norm", "rope",
    "rope_store", "sample", "swiglu",
]  # fmt: skip
