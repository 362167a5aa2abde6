"""Tensor maps: how TMA, Hopper's copy engine, finds a tile of a tensor."""

from functools import lru_cache

from cuda.core import TensorMapDescriptor, TensorMapDescriptorOptions
from cuda.core.utils import StridedMemoryView
from torch import Tensor

WIDTH = 128  # bytes of a row TMA fetches at a time, as many as its swizzle spans
_SWIZZLE, _PROMOTION = type(TensorMapDescriptorOptions.swizzle), type(TensorMapDescriptorOptions.l2_promotion)


def tensor_map(x: Tensor, rows: tuple[int, ...]) -> TensorMapDescriptor:
    """Of a tensor whose last dimension is contiguous, the others any multiple of 16 bytes apart.

    Args:
        rows: how many of each dimension but the last a box holds; of the last it is `WIDTH` bytes.
    """
    size = x.element_size()
    strides = tuple(size * each for each in x.stride())
    return _map_of(x.data_ptr(), tuple(x.shape), strides, size, (*rows, WIDTH // size))


@lru_cache(maxsize=4096)
def _map_of(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int, box: tuple[int, ...]
) -> TensorMapDescriptor:
    """Kept, since a model meets the same buffers again and again; it says where a tensor lies, and keeps none alive."""
    view = StridedMemoryView.from_cuda_array_interface(_Memory(address, shape, strides, size), stream_ptr=-1)
    return view.as_tensor_map(box, swizzle=_SWIZZLE.SWIZZLE_128B, l2_promotion=_PROMOTION.L2_128B)


class _Memory:
    """Numbers of `size` bytes on the device, whatever they mean."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": f"<u{size}",
            "version": 3,
        }
