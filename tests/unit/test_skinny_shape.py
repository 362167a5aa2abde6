"""The division of a skinny product among blocks. The division is computed without a GPU."""

import pytest
import torch

from engine.codes import Form
from engine.kernels import gemm_skinny
from engine.kernels.gemm_skinny import padded, skinny_shape, skinny_shapes

SMS = 132
SHARED_BYTES = 227 << 10  # of a multiprocessor of sm_90
# N and K of Qwen3 0.6B, 4B, 8B and 14B, and of a head.
PRODUCTS = [(4096, 1024), (1024, 3072), (19456, 2560), (2560, 9728), (24576, 4096), (4096, 12288), (34816, 5120), (151936, 2560)]


@pytest.mark.parametrize(("n", "k"), PRODUCTS)
@pytest.mark.parametrize(
    ("itemsize", "m"),
    [(each, m) for each, more in ((1, (256, 512)), (2, (96, 128))) for m in (1, 8, 9, 17, 32, 33, 64, 65, *more)],
)
def test_every_shape_fits(n: int, k: int, m: int, itemsize: int) -> None:
    shapes = [shape for _, shape in skinny_shapes(n, k, padded(m, itemsize), SMS, itemsize)]
    needs_waves = itemsize == 2 and m > 64 and n > SMS * (320 if m <= 96 else 256)  # with the most rows of W of a block
    assert bool(shapes) != needs_waves
    for shape in shapes:
        assert shape.rows == min(padded(m, itemsize), 128)
        assert shape.rows >= min(m, 128)
        assert shape.values == itemsize
        assert shape.shared_bytes() <= SHARED_BYTES
        assert shape.threads <= (544 if shape.rows == 128 else 1024)
        in_a_box = shape.block_n // shape.boxes
        assert (in_a_box % 8, shape.block_n % 16) == (0, 0)
        assert in_a_box <= 256, "TMA fetches at most 256 rows"
        if itemsize == 2 and shape.rows > 64:
            tiles = -(-n // shape.block_n)
            assert shape.split * tiles <= 2 * SMS
            own = shape.rows * (shape.block_n + 4)
            received = -(-shape.rows // shape.split) * shape.split * shape.block_n if shape.split > 1 else 0
            assert shape.stages * (shape.block_n + shape.rows) * 128 >= 4 * (own + received), "all sums lie in the ring"
        behind = -shape.block_n % 64 * 128  # bytes that the last warpgroup reads behind the last stage's rows of W
        assert shape.stages * (shape.block_n + shape.rows) * 128 - shape.rows * 128 + behind <= shape.shared_bytes()


@pytest.mark.parametrize(("n", "k"), PRODUCTS)
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize("form", [Form(128), Form(16, 6), Form(32, 5, "mins"), Form(128, 8)], ids=str)
def test_every_shape_of_codes_fits(n: int, k: int, rows: int, form: Form) -> None:
    shapes = [shape for _, shape in skinny_shapes(n, k, rows, SMS, form)]
    assert shapes
    for shape in shapes:
        records = shape.block_n // 16 * (128 // form.chunk) * form.record_bytes
        boxes = 2 * rows * 128  # of x
        assert shape.stages * (records + boxes) <= shape.shared_bytes() <= SHARED_BYTES
        assert shape.stages * (records + boxes) >= rows * (shape.block_n + 4) * 4, "the sums lie in the ring"
        assert shape.block_n // 16 <= 32, "a lane copies the records of 16 rows"
        # The kernels need up to 96, 96, 128 and 168 registers of a thread.
        assert shape.threads <= {16: 672, 32: 672, 64: 544, 128: 288}[rows]


@pytest.mark.parametrize(("n", "k"), PRODUCTS)
@pytest.mark.parametrize("m", [1, 9, 33, 64, 65, 256])
def test_every_shape_with_scales_of_blocks_fits(n: int, k: int, m: int) -> None:
    shapes = [shape for _, shape in skinny_shapes(n, k, padded(m, 1), SMS, 1, in_blocks=True)]
    assert shapes
    for shape in shapes:
        assert shape.in_blocks
        assert shape.block_n % 32 == 0, "a step's scales are whole vectors of 16 bytes"
        assert shape.stages * (shape.block_n + shape.rows) * 128 + shape.stages * shape.block_n // 2 <= shape.shared_bytes()
        assert shape.shared_bytes() <= SHARED_BYTES
        # The kernels need up to 120 registers of a thread, and 208 with 128 rows.
        assert shape.threads <= (288 if shape.rows == 128 else 544)
    assert not list(skinny_shapes(n + 16, k, padded(m, 1), SMS, 1, in_blocks=True))


def test_codes_need_steps_of_128_columns() -> None:
    assert skinny_shape(960, 576, 64, SMS, Form(64)) is None


@pytest.mark.parametrize(("n", "k"), PRODUCTS)
@pytest.mark.parametrize("sms", [16, 60, 78, 114, 132])
def test_a_smaller_chip_has_a_shape_too(n: int, k: int, sms: int) -> None:
    assert skinny_shape(n, k, 64, sms) is not None


@pytest.mark.parametrize(("n", "k"), PRODUCTS)
def test_the_chosen_one_has_work_for_half_the_chip(n: int, k: int) -> None:
    shape = skinny_shape(n, k, 64, SMS)
    assert shape is not None
    assert shape.split * -(-n // shape.block_n) >= 0.48 * SMS


def test_more_than_64_rows_are_for_matrices_of_one_wave() -> None:
    of_14b, head = (34816, 5120), (151936, 2560)
    assert skinny_shape(*of_14b, 96, SMS) is not None
    assert skinny_shape(*of_14b, 128, SMS) is None
    assert skinny_shape(*head, 96, SMS) is None


@pytest.mark.parametrize(("n", "k", "itemsize"), [(1024, 72, 2), (1000, 1024, 2), (1024, 320, 1)])
def test_what_cannot_be_cut_is_none(n: int, k: int, itemsize: int) -> None:
    assert skinny_shape(n, k, 64, SMS, itemsize) is None


@pytest.mark.parametrize(
    ("m", "dtype", "takes"),
    [
        (64, torch.bfloat16, True),
        (128, torch.bfloat16, True),
        (129, torch.bfloat16, False),
        (64, torch.float16, False),
        (256, torch.float8_e4m3fn, True),
        (257, torch.float8_e4m3fn, False),
        (512, torch.int8, True),
        (513, torch.int8, False),
    ],
)
def test_the_most_rows_of_each_dtype(m: int, dtype: torch.dtype, takes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_skinny, "is_hopper", lambda device: True)
    monkeypatch.setattr(gemm_skinny, "num_sms", lambda device: SMS)
    x, w = torch.zeros(m, 1024, dtype=dtype), torch.zeros(4096, 1024, dtype=dtype)
    assert (gemm_skinny.skinny_shape_of(x, w) is not None) == takes
