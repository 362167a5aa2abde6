"""SwiGLU: what decoders have between their MLP's two matrices."""

from torch import Tensor

from engine import kernels
from engine.kernels import Matrix
from engine.kernels.launch import runs_on
from engine.model.layers.linear import Linear
from engine.model.layers.norm import RMSNorm
from engine.model.weights import Tensors


class SwiGLU:
    """silu(x G^T) * (x U^T).

    Where our kernels run, the rows of G and U lie in turn, eight of each, so that a product has both of a column in one place
    and need not write either.
    """

    def __init__(self, checkpoint: Tensors, gate_up: Tensor) -> None:
        """`gate_up`: [2 I, K], all of G and then all of U; I a multiple of 8."""
        self.in_turn = runs_on(gate_up)
        self.gate_up = Linear(checkpoint.layer(kernels.interleaved(gate_up) if self.in_turn else gate_up))

    def __call__(self, x: Tensor, norm: RMSNorm, pending: Tensor | None = None) -> Matrix:
        """[T, K] -> [T, I]; x is normalised first, after what is `pending` has been added to it (`Linear.onto`)."""
        if self.in_turn:
            return kernels.linear_swiglu(x, self.gate_up.weight, norm.weight, norm.eps, pending)
        return kernels.swiglu(self.gate_up(x, norm=norm, pending=pending))
