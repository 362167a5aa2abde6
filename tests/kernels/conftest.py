"""Settings for all tests of kernels."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Gives the same random numbers in every run, because a test that compares two roundings must not fail by chance."""
    torch.manual_seed(0)
