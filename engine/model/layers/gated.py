"""Gated linear units: the first half of a gated MLP."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from engine import kernels
from engine.kernels import MaybeQuantized, Packed, Quantized, reference
from engine.kernels.launch import runs_on
from engine.model.layers.e4m3_values import scale_products
from engine.model.layers.linear import Linear
from engine.model.layers.norm import Residual, RMSNorm
from engine.model.quantized.layout import Codes
from engine.model.weights import WeightSource


class Gated:
    """act(x G^T) * (x U^T). `gate_up` gives the gate's columns, then up's columns. `activation` multiplies the two."""

    def __init__(self, gate_up: Linear, activation: Callable[[Tensor], Tensor]) -> None:
        self.gate_up, self.activation = gate_up, activation

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, I]."""
        return self.activation(self.gate_up(x))


def in_order_of(down: Tensor | Codes, gate_up: Tensor | Codes) -> tuple[Tensor | Codes, Tensor | Codes]:
    """Moves the rows of G and U to the order in which `down` has its columns, so that passes need not reorder their products.

    Args:
        down: [C, I], the matrix that multiplies the products. Only codes can have their columns in another order.
        gate_up: [2 I, K], all rows of G and then all of U.
    Returns: (down, gate_up).
    """
    if not isinstance(down, Codes) or down.order is None:
        return down, gate_up
    rows = torch.cat((down.order, down.order + len(down.order)))
    moved = gate_up.with_rows(lambda part: part[rows]) if isinstance(gate_up, Codes) else gate_up[rows]
    return replace(down, order=None), moved


class SwiGLU:
    """silu(x G^T) * (x U^T) of a normalised residual stream.

    For our kernels the rows of G and U alternate, eight of each. So a product has both values of a column in one place, and does
    not write them to memory. With a matrix in e4m3 the results are in e4m3 too, after `scale_results`.
    """

    def __init__(self, checkpoint: WeightSource, gate_up: Tensor | Codes, norm: RMSNorm) -> None:
        """`gate_up`: [2 I, K], all rows of G and then all of U; 8 divides I. `norm`: the norm before it."""
        if isinstance(gate_up, Codes):
            self.in_turn = True
            gate_up = gate_up.with_rows(kernels.interleaved)
        else:
            self.in_turn = runs_on(gate_up)
            gate_up = kernels.interleaved(gate_up) if self.in_turn else gate_up
        self.gate_up, self.norm = Linear.of_matrix(checkpoint, gate_up), norm
        self.fits = False  # into e4m3, without a scale

    def scale_results(self) -> Tensor | None:
        """Divide the results so that they fit into e4m3, once, at load.

        Returns: the divisors, [I] fp32, by which the next matrix has to multiply its columns. None if the matrix is not in e4m3.
        """
        divisors = scale_products(self.gate_up, self.norm, self.in_turn)
        self.fits = divisors is not None
        return divisors

    def __call__(self, x: Residual) -> MaybeQuantized:
        """[T, K] -> [T, I]. `x.value` holds the whole sum afterwards."""
        norm, weight = self.norm, self.gate_up.weight
        if not self.in_turn:
            results = kernels.swiglu(self.gate_up.normed(x, norm))
            if not self.fits:
                return results
            return Quantized(reference.to_e4m3(results), results.new_ones(len(results), dtype=torch.float32))
        if isinstance(weight, Quantized):
            return kernels.linear8_swiglu(x.value, weight, norm.weight, norm.eps, x.pending, fits=self.fits)
        assert x.pending is None, "a product in 16 bits leaves nothing pending"
        if isinstance(weight, Packed):
            return kernels.linear_packed_swiglu(x.value, weight, norm.weight, norm.eps)
        return kernels.linear_swiglu(x.value, weight, norm.weight, norm.eps)
