"""Models that layers in 8 bits make slower."""

import torch

from engine.devices import is_8_bits
from engine.model.config import ModelConfig
from engine.model.families import family_of
from engine.model.families.bert import Bert

# BERT-base, the largest one that was measured. In 8 bits a layer has more passes over its activations: a bias, GeLU and
# roundings. They grow with the hidden size, and what the products gain grows with its square. docs/decisions/055.
_LARGEST_SLOWER = 768


def slower_in_8_bits(config: ModelConfig, dtype: torch.dtype) -> str | None:
    """Why bfloat16 is faster for this model than `dtype`. None for other dtypes and for models of which we do not know it."""
    if not is_8_bits(dtype) or not issubclass(family_of(config), Bert) or config.hidden_size > _LARGEST_SLOWER:
        return None
    return (
        f"BERT models of hidden size {_LARGEST_SLOWER} or less are slower in 8 bits than in bfloat16, and save memory only "
        "(BERT-base on an H100: 2,160 thousand tokens/s in float8, 2,550 in bfloat16)"
    )
