"""Tensor maps: descriptions of tensors, with which TMA, Hopper's copy engine, finds a box of a tensor."""

from functools import lru_cache

from cuda.core import TensorMapDescriptor, TensorMapDescriptorOptions
from cuda.core._tensor_map import TensorMapDataType  # the only other way to name bf16 is the package ml_dtypes
from cuda.core.utils import StridedMemoryView
from torch import Tensor, bfloat16

WIDTH = 128  # bytes of a row that TMA fetches at a time: the span of the swizzle
_SWIZZLE, _PROMOTION = type(TensorMapDescriptorOptions.swizzle), type(TensorMapDescriptorOptions.l2_promotion)
_SWIZZLES = {0: _SWIZZLE.NONE, 64: _SWIZZLE.SWIZZLE_64B, WIDTH: _SWIZZLE.SWIZZLE_128B}  # by the bytes of a box's row


def tensor_map(x: Tensor, rows: tuple[int, ...]) -> TensorMapDescriptor:
    """Returns the map of a tensor whose last dimension is contiguous. Other strides are multiples of 16 bytes.

    Args:
        rows: the size of a box in each dimension but the last. In the last dimension a box has `WIDTH` bytes, which are swizzled.
    """
    return _map(x, (*rows, WIDTH // x.element_size()), WIDTH)


def map_of_sums(x: Tensor, box: tuple[int, int]) -> TensorMapDescriptor:
    """Returns the map of a matrix in bf16 to which TMA may add. The 64 or 128 bytes of a box's row are swizzled."""
    assert x.dtype == bfloat16, "TMA adds in the map's own dtype"
    return _map(x, box, 2 * box[1], TensorMapDataType.BFLOAT16)


def plain_map(x: Tensor, box: tuple[int, ...]) -> TensorMapDescriptor:
    """The same as `tensor_map`, with boxes of any size up to 256 in each dimension. They are not swizzled."""
    return _map(x, box, 0)


def _map(x: Tensor, box: tuple[int, ...], swizzled: int, dtype: TensorMapDataType | None = None) -> TensorMapDescriptor:
    size = x.element_size()
    return _map_of(x.data_ptr(), tuple(x.shape), tuple(size * each for each in x.stride()), size, box, swizzled, dtype)


@lru_cache(maxsize=4096)
def _map_of(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    size: int,
    box: tuple[int, ...],
    swizzled: int,
    dtype: TensorMapDataType | None,
) -> TensorMapDescriptor:
    """Cached, since a model uses the same buffers again and again. A map holds an address and keeps no tensor alive."""
    view = StridedMemoryView.from_cuda_array_interface(_Memory(address, shape, strides, size), stream_ptr=-1)
    return view.as_tensor_map(box, data_type=dtype, swizzle=_SWIZZLES[swizzled], l2_promotion=_PROMOTION.L2_128B)


class _Memory:
    """Device memory as numbers of `size` bytes, without a dtype."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": f"<u{size}",
            "version": 3,
        }
