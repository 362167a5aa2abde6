"""Checks token ids that a caller gives."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import EmptyInput, InvalidInput

_WAY_OUT = "give a text, a list of token ids, or a 1-D array of whole numbers"


def checked_ids(index: int, given: object, vocab_size: int) -> NDArray[np.integer[Any]]:
    """Returns the ids of input number `index` as a 1-D array of at least one id.

    Raises: EmptyInput for no ids; InvalidInput for ids outside of the vocabulary, and for values that are not ids.
    """
    ids = _as_array(index, given)
    if not ids.size:
        raise EmptyInput("`inputs` cannot be empty")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        what = f"an array of {ids.ndim} dimensions of {ids.dtype}" if isinstance(given, np.ndarray) else "a list of other things"
        raise InvalidInput(f"input {index} is {what}; {_WAY_OUT}")
    lowest, highest = int(ids.min()), int(ids.max())
    if highest >= vocab_size:
        raise InvalidInput(f"input {index} has token id {highest}, the vocabulary ends at {vocab_size - 1}")
    if lowest < 0:
        raise InvalidInput(f"input {index} has token id {lowest}, the vocabulary begins at 0")
    return ids


def _as_array(index: int, given: object) -> NDArray[Any]:
    if not isinstance(given, (list, tuple, np.ndarray)):
        raise InvalidInput(f"input {index} is of type {type(given).__name__}; {_WAY_OUT}")
    try:
        return np.asarray(given)
    except ValueError:  # a list of lists of different lengths
        return np.array([None])
