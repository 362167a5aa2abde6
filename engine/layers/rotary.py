"""Rotary position embedding, full width, "half-rotate" as Llama and Qwen store it."""

import torch
from torch import Tensor


class Rotary:
    """The inverse frequencies of one model."""

    def __init__(self, head_dim: int, theta: float, device: torch.device) -> None:
        exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
        self._inv_freq = 1.0 / theta**exponents  # [D / 2]

    def table(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, [T, 1, D] each, for `apply`; computed once a batch, used by every layer.

        Angles in fp32: bf16 holds whole numbers exactly only up to 256, so far positions would share an angle.
        """
        angles = torch.outer(positions.float(), self._inv_freq)  # [T, D / 2]
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)  # [T, 1, D]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    @staticmethod
    def apply(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate heads: [T, H, D] -> [T, H, D].

        Source: `apply_rotary_pos_emb` of transformers' Qwen3.
        """
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin
