"""Vectors as protobuf bytes."""

import numpy as np
from numpy.typing import NDArray


def packed_floats(vector: NDArray[np.float32]) -> bytes:
    """A protobuf message whose field 1, `repeated float`, is the vector.

    To parse these bytes is one copy. To assign floats to a message costs far more: 10 us for 384 floats instead of 1 us,
    108 us for 4,096 instead of 3 us.
    """
    size, length = vector.size * 4, bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    length.append(size)
    return b"\x0a" + length + vector.astype("<f4", copy=False).tobytes()
