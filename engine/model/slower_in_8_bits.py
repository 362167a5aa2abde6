"""Names the models that are slower with layers in 8 bits."""

import torch

from engine.model.config import ModelConfig
from engine.model.families import family_of
from engine.model.families.bert import Bert

# A layer in int8 reads its activations more often, for roundings. This cost grows with the hidden size, and the gain of the
# products grows with its square. docs/decisions/084.
_LARGEST_SLOWER_IN_INT8 = 384


def slower_in_8_bits(config: ModelConfig, dtype: torch.dtype) -> str | None:
    """The reason why bfloat16 is faster than `dtype` for this model. None for other dtypes, and if that is not known."""
    if dtype != torch.int8 or not issubclass(family_of(config), Bert) or config.hidden_size > _LARGEST_SLOWER_IN_INT8:
        return None
    return (
        f"BERT models of hidden size {_LARGEST_SLOWER_IN_INT8} or less are slower in int8 than in bfloat16, and save memory only "
        "(12 layers on an H200: 5,900 thousand tokens/s in int8, 6,400 in bfloat16, 6,800 in float8)"
    )
