"""Mixture of experts: a router chooses a few of several feed-forward layers for each token."""

import torch
from torch import Tensor

from engine.model.layers.linear import Linear


class Experts:
    """x + bias + sum of gate_e * down_e(gelu(up_e(x))) over the `top_k` experts of the largest gates.

    The gates are a softmax over all experts, in fp32. They are not normalised again over the chosen experts.
    """

    def __init__(self, router: Linear, experts: list[tuple[Linear, Linear]], bias: Tensor, top_k: int) -> None:
        """`experts`: (up, down) of each expert. `up` has the GeLU."""
        self.router, self.experts, self.bias, self.top_k = router, experts, bias, top_k

    def __call__(self, x: Tensor) -> Tensor:
        """[T, C] -> [T, C]; x is not changed."""
        gates = self.gates(x)
        return self.all_of_them(x, gates) if x.is_cuda else self.only_the_chosen(x, gates)

    def gates(self, x: Tensor) -> Tensor:
        """The gates, [T, E], in the dtype of x; zero for experts that are not chosen."""
        largest, chosen = torch.softmax(self.router(x), dim=-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        return torch.zeros(len(x), len(self.experts), dtype=x.dtype, device=x.device).scatter_(1, chosen, largest.to(x.dtype))

    def all_of_them(self, x: Tensor, gates: Tensor) -> Tensor:
        """Runs every expert on every token. A gate of zero adds exactly 0. CUDA graphs need shapes that are always the same."""
        out = x + self.bias
        for (up, down), gate in zip(self.experts, gates.unbind(1), strict=True):
            out = down.add_to(out, up(x).mul_(gate.unsqueeze(1))).added()
        return out

    def only_the_chosen(self, x: Tensor, gates: Tensor) -> Tensor:
        """Runs each expert on its own tokens."""
        out = x + self.bias
        for (up, down), gate in zip(self.experts, gates.unbind(1), strict=True):
            rows = gate.nonzero().flatten()
            if len(rows):
                out.index_add_(0, rows, down(up(x[rows]).mul_(gate[rows].unsqueeze(1))))
        return out
