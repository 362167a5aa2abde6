"""x W^T for a few rows, with the operations around it, against fp64."""

import pytest
import torch
from closeness import assert_as_close_as_torch
from helpers import DEVICE, EPS, HOPPER_ONLY, poisoned, rms_norm_exact
from torch import Tensor
from torch.nn import functional as F

from engine.kernels import reference
from engine.kernels.few_rows import FewRowsShape, few_rows, few_rows_shape, padded
from engine.kernels.gemm_hopper import FollowedBy
from engine.kernels.launch import num_sms
from engine.kernels.linear import interleaved

pytestmark = HOPPER_ONLY

# W's sizes and shapes of the kernel: blocks share K or not, one turn or many, a ring that holds all stages or is reused.
CASES = [
    (64, 256, FewRowsShape(1, 32, 4)),
    (1024, 1024, FewRowsShape(2, 64, 3)),
    (96, 1536, FewRowsShape(8, 32, 2)),
    (240, 512, FewRowsShape(4, 80, 3)),
    (96, 192, FewRowsShape(1, 96, 2)),
    (240, 512, FewRowsShape(1, 48, 3)),
    (24576, 512, FewRowsShape(2, 32, 5)),
    (24576, 256, FewRowsShape(1, 64, 4)),
    (4096, 1024, None),
    (1024, 3072, None),
    (512, 9728, None),
]


def operands(m: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, W, the residual and the norm's weight, bf16."""
    torch.manual_seed(m + n + k)
    x, residual = 3 * torch.randn(m, k, device=DEVICE), torch.randn(m, n, device=DEVICE)
    w, norm = torch.randn(n, k, device=DEVICE) / k**0.5, 1 + torch.randn(k, device=DEVICE) / 4
    return x.bfloat16(), w.bfloat16(), residual.bfloat16(), norm.bfloat16()


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("followed_by", ["nothing", "residual", "swiglu"])
@pytest.mark.parametrize(("n", "k", "shape"), CASES)
@pytest.mark.parametrize("m", [1, 7, 8, 9, 16, 24, 32])
def test_few_rows(m: int, n: int, k: int, shape: FewRowsShape | None, followed_by: FollowedBy, normed: bool) -> None:
    shape = shape or few_rows_shape(n, k, padded(m), normed, num_sms(DEVICE))
    assert shape is not None, "these are models' shapes"
    x, w, residual, norm = operands(m, n, k)

    def expected(x: Tensor, w: Tensor, residual: Tensor, norm: Tensor) -> Tensor:
        if normed:
            x = reference.rms_norm(x, norm, EPS) if x.dtype == torch.bfloat16 else rms_norm_exact(x, norm)
        y = F.linear(x, w)
        return y + residual if followed_by == "residual" else reference.swiglu(y) if followed_by == "swiglu" else y

    low, exact = expected(x, w, residual, norm), expected(*(each.double() for each in (x, w, residual, norm)))
    given = interleaved(w) if followed_by == "swiglu" else w
    with poisoned():
        y = few_rows(x, given, shape, followed_by, residual if followed_by == "residual" else None, norm if normed else None, EPS)
    assert_as_close_as_torch(y, low, exact)


def test_one_after_the_other_in_a_graph() -> None:
    """Each kernel begins while the previous one runs, and still reads the previous kernel's results."""
    m, width, layers = 16, 1024, 24
    x, _, _, norm = operands(m, width, width)
    weights = [torch.randn(width, width, device=DEVICE).bfloat16() / width**0.5 for _ in range(layers)]
    shape = few_rows_shape(width, width, m, True, num_sms(DEVICE))
    assert shape is not None

    def run(x: Tensor) -> Tensor:
        for w in weights:
            x = few_rows(x, w, shape, norm=norm)
        return x

    exact = x
    for w in weights:  # without overlap
        exact = few_rows(exact, w, shape, norm=norm)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(x)
    for _ in range(20):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, exact)


def test_wide_rows_of_x() -> None:
    """x and the residual may be parts of wider rows."""
    m, n, k = 16, 256, 512
    x, w, _, _ = operands(m, n, k)
    wide = torch.full((m, 2 * k), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    wide[:, :k] = x
    shape = FewRowsShape(2, 64, 4)
    assert torch.equal(few_rows(wide[:, :k], w, shape), few_rows(x, w, shape))
