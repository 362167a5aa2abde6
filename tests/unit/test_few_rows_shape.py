"""The division of a product of few rows among blocks. The division is computed without a GPU."""

import pytest
import torch

from engine.codes import STRIP, Form
from engine.kernels import few_rows
from engine.kernels.few_rows import MOST_ROWS, MOST_SENT, few_rows_shape, few_rows_shapes, padded
from engine.kernels.packed import Packed

SMS = 132
SHARED_BYTES = 227 << 10  # shared memory of a block on sm_90
# N, K and whether a norm comes first, for Qwen3 0.6B, 4B and 8B.
PRODUCTS = [
    (4096, 1024, True),
    (1024, 3072, False),
    (19456, 2560, True),
    (2560, 9728, False),
    (24576, 4096, True),
    (4096, 12288, False),
]


@pytest.mark.parametrize(("n", "k", "norm"), PRODUCTS)
@pytest.mark.parametrize("rows", [8, 16, 24, 32])
def test_every_cut_comes_out_even_and_fits(n: int, k: int, norm: bool, rows: int) -> None:
    shapes = [shape for _, shape in few_rows_shapes(n, k, rows, norm, SMS)]
    assert shapes
    for shape in shapes:
        assert (k % (64 * shape.split), n % shape.block_n, rows % shape.split) == (0, 0, 0)
        assert shape.split * rows <= MOST_SENT
        assert shape.shared_bytes(k, rows, norm) <= SHARED_BYTES
        assert shape.stages >= 3


@pytest.mark.parametrize(("n", "k", "norm"), PRODUCTS)
def test_the_chosen_one_has_work_for_half_the_chip_and_more(n: int, k: int, norm: bool) -> None:
    shape = few_rows_shape(n, k, 16, norm, SMS)
    assert shape is not None
    assert shape.split * min(n // shape.block_n, shape.clusters(SMS)) >= SMS / 2 - shape.split


def test_clusters_stay_within_a_part_of_the_chip() -> None:
    clusters = {shape.split: shape.clusters(SMS) for _, shape in few_rows_shapes(24576, 4096, 16, True, SMS)}
    assert (clusters[1], clusters[2]) == (132, 66)
    assert 4 * clusters[4] < SMS
    assert 8 * clusters[8] < SMS


@pytest.mark.parametrize("sms", [16, 26, 60, 78, 114, 132, 144])
def test_a_part_of_a_chip_and_its_kin_have_a_cut_too(sms: int) -> None:
    """The parameters are the numbers of SMs of MIG slices, and of H20, H100 and GH200."""
    for n, k, norm in PRODUCTS:
        for cost, shape in few_rows_shapes(n, k, 16, norm, sms):
            assert 1 <= shape.clusters(sms) <= sms // shape.split
            assert cost > 2 * n * k / 4800  # 4,800 bytes per nanosecond is the rate of the memory


def test_rows_are_padded_to_few_numbers() -> None:
    """Each number of rows needs its own compiled kernel."""
    assert [padded(m) for m in (1, 8, 9, 24, 25, MOST_ROWS)] == [8, 8, 16, 24, 32, 32]


@pytest.mark.parametrize(
    ("m", "dtype", "takes"), [(16, torch.bfloat16, True), (17, torch.bfloat16, False), (16, torch.int8, False)]
)
def test_other_rows_take_another_kernel(m: int, dtype: torch.dtype, takes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "is_hopper", lambda device: True)
    monkeypatch.setattr(few_rows, "num_sms", lambda device: SMS)
    x, w = torch.zeros(m, 1024, dtype=dtype), torch.zeros(4096, 1024, dtype=dtype)
    assert (few_rows.few_rows_shape_of(x, w) is not None) == takes


@pytest.mark.parametrize(
    ("m", "k", "takes"), [(32, 1024, True), (33, 1024, False), (16, 12288, False)], ids=["0.6B", "33 rows", "8B"]
)
def test_rows_of_codes_take_another_kernel(m: int, k: int, takes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "is_hopper", lambda device: True)
    monkeypatch.setattr(few_rows, "num_sms", lambda device: SMS)
    form, strips = Form(128), 4096 // STRIP
    records = torch.empty(strips, k // form.chunk, form.record_bytes // 4, dtype=torch.int32, device="meta")
    weight = Packed(records, torch.empty(strips, dtype=torch.int32, device="meta"), k, form)
    x = torch.empty(m, k, dtype=torch.bfloat16, device="meta")
    assert (few_rows.few_rows_shape_of(x, weight) is not None) == takes


@pytest.mark.parametrize(("n", "k"), [(1024, 72), (1000, 1024), (16, 1024)])
def test_what_cannot_be_cut_is_none(n: int, k: int) -> None:
    assert few_rows_shape(n, k, 16, True, SMS) is None
