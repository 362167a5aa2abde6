"""The columns of `gemm_hopper`'s tiles, chosen without a GPU."""

import pytest
import torch

from engine.kernels import gemm_hopper
from engine.kernels.gemm_hopper import BLOCKS_N, FollowedBy, best_block_n, block_n_of

SMS = 132


@pytest.mark.parametrize(
    ("m", "n", "k", "followed_by", "block_n"),
    [
        (512, 7168, 5120, "nothing", 224),  # 64 tiles of a cluster; 66 run at a time
        (512, 5120, 17408, "residual", 160),  # the same
        (512, 19456, 2560, "swiglu", 128),
        (256, 24576, 4096, "swiglu", 128),
        (8192, 24576, 4096, "swiglu", 256),
    ],
)
def test_the_last_wave_of_tiles_is_full(m: int, n: int, k: int, followed_by: FollowedBy, block_n: int) -> None:
    assert best_block_n(m, n, k, followed_by, SMS) == block_n
    tiles = -(-m // 256) * -(-n // block_n)
    assert tiles / (-(-tiles // (SMS // 2)) * (SMS // 2)) > 0.9


@pytest.mark.parametrize(
    ("m", "n", "k", "followed_by"),
    [
        (512, 2560, 9728, "residual"),  # at most 40 tiles
        (300, 19456, 2560, "swiglu"),  # a cluster computes 256 rows
        (512, 34816, 5120, "swiglu"),
        (256, 7168, 5120, "nothing"),
        (8192, 6144, 4096, "nothing"),
        (65, 24576, 4096, "swiglu"),
    ],
)
def test_cublas_computes_the_rest(m: int, n: int, k: int, followed_by: FollowedBy) -> None:
    assert best_block_n(m, n, k, followed_by, SMS) is None


def test_fewer_multiprocessors_fill_with_fewer_columns() -> None:
    """An H100 with PCIe has 114 multiprocessors, so 57 clusters."""
    chosen = best_block_n(512, 5120, 17408, "residual", 114)
    assert chosen == 192
    assert 2 * -(-5120 // chosen) <= 57


def test_only_hopper_has_these_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.zeros(512, 64, dtype=torch.bfloat16), torch.zeros(7168, 64, dtype=torch.bfloat16)
    assert block_n_of(x, w, "swiglu") is None
    monkeypatch.setattr(gemm_hopper, "is_hopper", lambda device: True)
    monkeypatch.setattr(gemm_hopper, "num_sms", lambda device: SMS)
    assert block_n_of(x, w, "swiglu") in BLOCKS_N


@pytest.mark.parametrize(("n", "k"), [(50257, 5120), (50256, 5124)])
def test_rows_that_are_no_multiples_of_16_bytes_go_to_cublas(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary may have any number of words."""
    monkeypatch.setattr(gemm_hopper, "is_hopper", lambda device: True)
    monkeypatch.setattr(gemm_hopper, "num_sms", lambda device: SMS)
    assert best_block_n(512, 50256, 5120, "nothing", SMS) in BLOCKS_N
    x, w = torch.empty(512, k, dtype=torch.bfloat16, device="meta"), torch.empty(n, k, dtype=torch.bfloat16, device="meta")
    assert block_n_of(x, w, "nothing") is None
