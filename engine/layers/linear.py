"""y = x W^T + b on packed rows, with the activation that follows it."""

from torch import Tensor
from torch.nn import functional as F


class Linear:
    """[T, K] -> [T, N]; `gelu` adds exact GeLU."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, gelu: bool = False) -> None:
        self.weight, self.bias, self.gelu = weight, bias, gelu

    def __call__(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return F.gelu(y) if self.gelu else y
