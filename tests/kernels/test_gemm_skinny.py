"""x W^T for few rows, with the operation that follows, against fp64."""

import pytest
import torch
from closeness import assert_as_close_as_torch
from helpers import DEVICE, HOPPER_ONLY, InEightBits, poisoned
from torch import Tensor
from torch.nn import functional as F

from engine.kernels import reference
from engine.kernels.gemm_hopper import FollowedBy
from engine.kernels.gemm_skinny import SkinnyShape, gemm_skinny, padded, skinny_shape
from engine.kernels.launch import num_sms
from engine.kernels.linear import interleaved

pytestmark = HOPPER_ONLY

# W's sizes and shapes of the kernel: blocks share K evenly, unevenly or not at all, boxes end within a warpgroup or beyond W, two
# boxes make a stage, and a ring holds all stages or is reused.
CASES = [
    (64, 320, (1, 64, 3)),
    (1024, 1024, (2, 128, 4)),
    (240, 448, (3, 80, 3)),
    (400, 1536, (4, 96, 6)),
    (1616, 512, (1, 272, 5)),
    (576, 384, (2, 288, 3)),
    (24576, 256, (1, 64, 4)),
    (4096, 1024, None),
    (1024, 3072, None),
    (2560, 9728, None),
    (19456, 2560, None),
]

# The same for more than 64 rows, whose sums need a longer ring.
OF_MORE_ROWS = [
    (64, 320, (1, 64, 3)),
    (1024, 1024, (2, 128, 5)),
    (240, 448, (3, 80, 4)),
    (416, 1536, (4, 96, 6)),
    (1616, 512, (1, 256, 4)),
    (1616, 512, (1, 272, 4)),
    (1024, 3072, None),
    (2560, 9728, None),
    (19456, 2560, None),
]

# K is divided into whole boxes of 128 values.
IN_8_BITS = [(n, k, cut) for n, k, cut in CASES if k % 128 == 0 and (cut is None or k // 128 >= cut[2])]


def operands(m: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, W and the residual, bf16."""
    torch.manual_seed(m + n + k)
    x, residual, w = torch.randn(m, k, device=DEVICE), torch.randn(m, n, device=DEVICE), torch.randn(n, k, device=DEVICE) / k**0.5
    return x.bfloat16(), w.bfloat16(), residual.bfloat16()


@pytest.mark.parametrize("followed_by", ["nothing", "residual", "swiglu"])
@pytest.mark.parametrize(
    ("m", "n", "k", "cut"),
    [(m, *case) for m in (1, 8, 9, 16, 17, 32, 33, 48, 57, 64) for case in CASES]
    + [(m, *case) for m in (65, 95, 96, 97, 128) for case in OF_MORE_ROWS],
)
def test_gemm_skinny(m: int, n: int, k: int, cut: tuple[int, int, int] | None, followed_by: FollowedBy) -> None:
    if cut and m > 96 and cut[1] > 256:
        pytest.skip("128 rows of x take at most 256 rows of W")
    shape = SkinnyShape(padded(m), *cut) if cut else skinny_shape(n, k, padded(m), num_sms(DEVICE))
    assert shape is not None, "these are models' shapes"
    x, w, residual = operands(m, n, k)

    def expected(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
        y = F.linear(x, w)
        return y + residual if followed_by == "residual" else reference.swiglu(y) if followed_by == "swiglu" else y

    low, exact = expected(x, w, residual), expected(*(each.double() for each in (x, w, residual)))
    given = interleaved(w) if followed_by == "swiglu" else w
    with poisoned():
        y = gemm_skinny(x, given, shape, followed_by, residual if followed_by == "residual" else None)
    assert_as_close_as_torch(y, low, exact)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("followed_by", ["nothing", "residual", "swiglu"])
@pytest.mark.parametrize(("n", "k", "cut"), IN_8_BITS)
@pytest.mark.parametrize("m", [1, 8, 9, 16, 17, 32, 33, 48, 57, 64, 65, 128, 129, 300, 512])
def test_eight_bits(
    m: int, n: int, k: int, cut: tuple[int, int, int] | None, followed_by: FollowedBy, dtype: torch.dtype
) -> None:
    if cut and m > 64 and cut[1] > 256:
        pytest.skip("128 rows of x take at most 256 rows of W")
    shape = SkinnyShape(min(padded(m, 1), 128), *cut, 1) if cut else skinny_shape(n, k, padded(m, 1), num_sms(DEVICE), 1)
    assert shape is not None, "these are models' shapes"
    given = InEightBits.random(m, n, k, followed_by, dtype)
    with poisoned():
        y = gemm_skinny(given.x, given.w, shape, followed_by, given.residual, given.row_scale, given.column_scale)
    given.check(y)


@pytest.mark.parametrize(("n", "k", "cut"), IN_8_BITS)
@pytest.mark.parametrize("m", [1, 9, 33, 64, 129, 256])
def test_swiglu_in_e4m3(m: int, n: int, k: int, cut: tuple[int, int, int] | None) -> None:
    if cut and m > 64 and cut[1] > 256:
        pytest.skip("128 rows of x take at most 256 rows of W")
    shape = SkinnyShape(min(padded(m, 1), 128), *cut, 1) if cut else skinny_shape(n, k, padded(m, 1), num_sms(DEVICE), 1)
    assert shape is not None, "these are models' shapes"
    given, y_scale = InEightBits.random(m, n, k, "swiglu in e4m3", torch.float8_e4m3fn), torch.zeros(m, device=DEVICE)
    with poisoned():
        y = gemm_skinny(given.x, given.w, shape, "swiglu in e4m3", None, given.row_scale, given.column_scale, y_scale)
    given.check(y)
    assert (y_scale == 1).all()


def test_one_after_the_other_in_a_graph() -> None:
    """Each kernel begins while the previous one runs, and still reads the previous kernel's results."""
    m, width, layers = 64, 1024, 12
    x, _, _ = operands(m, width, width)
    weights = [torch.randn(2, width, width, device=DEVICE).bfloat16() / width**0.5 for _ in range(layers)]
    first, second = SkinnyShape(64, 2, 64, 8), SkinnyShape(64, 1, 80, 5)

    def run(wait: bool) -> Tensor:
        sums = x.clone()
        for up, down in weights:
            y = gemm_skinny(sums, up, first)
            if wait:
                torch.cuda.synchronize()
            gemm_skinny(y, down, second, "residual", sums)
            if wait:
                torch.cuda.synchronize()
        return sums

    exact = run(wait=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sums = run(wait=False)
    for _ in range(20):
        sums.fill_(float("nan"))
        graph.replay()
        assert torch.equal(sums, exact)


def test_wide_rows_of_x() -> None:
    """x may be a part of wider rows."""
    m, n, k = 40, 256, 512
    x, w, _ = operands(m, n, k)
    wide = torch.full((m, 2 * k), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    wide[:, :k] = x
    shape = SkinnyShape(64, 2, 64, 4)
    assert torch.equal(gemm_skinny(wide[:, :k], w, shape), gemm_skinny(x, w, shape))
