"""BGE-M3's two layers beside the weights: a token's lexical weight, and its ColBERT vector.

Source: `EncoderOnlyEmbedderM3Model` of FlagEmbedding.
"""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.config import ModelConfig, OutputName
from engine.model.layers.linear import Linear
from engine.model.weight_files import read_linear


class TokenOutputs:
    """Of every token; which tokens count is decided where they are cut by sequence (`engine/results.py`)."""

    def __init__(self, lexical: Linear | None, colbert: Linear | None) -> None:
        self.lexical, self.colbert = lexical, colbert

    @classmethod
    def load(cls, config: ModelConfig, folder: Path, device: torch.device, dtype: torch.dtype) -> "TokenOutputs":
        def layer(name: str) -> Linear:
            tensors = read_linear(folder, name, config.hidden_size)
            assert tensors is not None, "the config was read from this folder"
            weight, bias = (each.to(device=device, dtype=dtype) for each in tensors)
            return Linear.of(weight, bias)

        return cls(
            layer("sparse_linear") if config.lexical else None,
            layer("colbert_linear") if config.colbert_size is not None else None,
        )

    def rows(self, hidden: Tensor, want: tuple[OutputName, ...]) -> dict[OutputName, Tensor]:
        """[T, C] -> "sparse": [T, 1], at least 0; "colbert": [T, colbert_size], normalised. fp32."""
        rows: dict[OutputName, Tensor] = {}
        if "sparse" in want and self.lexical is not None:
            rows["sparse"] = torch.relu(self.lexical(hidden).float())
        if "colbert" in want and self.colbert is not None:
            rows["colbert"] = F.normalize(self.colbert(hidden).float(), dim=-1)
        return rows
