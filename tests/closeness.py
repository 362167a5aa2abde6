"""The measure of closeness for all tests in low precision."""

from torch import Tensor


def assert_as_close_as_torch(ours: Tensor, low: Tensor, exact: Tensor, factor: float = 2.0) -> None:
    """Our error against fp64 may be at most `factor` times the error torch makes in our dtype. NaN never passes."""
    assert (ours.dtype, ours.shape, low.shape) == (low.dtype, exact.shape, exact.shape)
    assert not ours.isnan().any(), f"{int(ours.isnan().sum())} of {ours.numel()} values are NaN"
    ours_err = (ours.double() - exact).abs().max()
    torch_err = (low.double() - exact).abs().max()
    assert ours_err <= factor * torch_err + 1e-6, f"{ours_err=:.2e} {torch_err=:.2e}"
