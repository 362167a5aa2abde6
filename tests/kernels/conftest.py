"""What the tests of kernels share besides helpers."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same numbers in every run, whatever ran before. A test that compares two roundings must not fail by chance."""
    torch.manual_seed(0)
