"""Names the models that are slower with layers in 8 bits."""

import torch

from engine.devices import is_8_bits
from engine.model.config import ModelConfig
from engine.model.families import family_of
from engine.model.families.bert import Bert

# BERT-base is the largest BERT that was measured. In 8 bits a layer reads its activations more often: for a bias, GeLU and
# roundings. This cost grows with the hidden size, and the gain of the products grows with its square. docs/decisions/055.
_LARGEST_SLOWER = 768


def slower_in_8_bits(config: ModelConfig, dtype: torch.dtype) -> str | None:
    """The reason why bfloat16 is faster than `dtype` for this model. None for other dtypes, and if that is not known."""
    if not is_8_bits(dtype) or not issubclass(family_of(config), Bert) or config.hidden_size > _LARGEST_SLOWER:
        return None
    return (
        f"BERT models of hidden size {_LARGEST_SLOWER} or less are slower in 8 bits than in bfloat16, and save memory only "
        "(BERT-base on an H100: 2,160 thousand tokens/s in float8, 2,550 in bfloat16)"
    )
