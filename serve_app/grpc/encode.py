"""Encodes vectors as protobuf bytes."""

import numpy as np
from numpy.typing import NDArray


def packed_floats(vector: NDArray[np.float32]) -> bytes:
    """A protobuf message whose field 1, `repeated float`, is the vector.

    Parsing these bytes takes one copy. Assigning floats to a message takes far longer: 10 us instead of 1 us for 384 floats,
    108 us instead of 3 us for 4,096 floats.
    """
    size, length = vector.size * 4, bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    length.append(size)
    return b"\x0a" + length + vector.astype("<f4", copy=False).tobytes()
