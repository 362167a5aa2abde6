"""Gives the output of a pass to the requests that own its rows, and finds rows that are not finite.

Short sequences share a tile of the attention kernel. A sequence with NaN makes its neighbours NaN, because a weight of 0 times
NaN is NaN. So a sequence that is not finite, and was not alone in its pass, is computed again alone. It fails only if it is not
finite then either. Sequences with keys in pages share no tile, and fail at once.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import NotFinite
from engine.model.config import OutputName
from engine.run.flight import Output, Vectors
from engine.schedule.request import Request, Slice
from engine.step import Step

# The arrays of one sequence besides its vector.
_Arrays = Mapping[OutputName, NDArray[Any]]
_Ragged = dict[OutputName, list[NDArray[Any]]]


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The result of a request.

    `vectors` is [n, dims] float32, None if the request asks for no vectors. `ragged` has an array for each input and each of the
    request's `outputs`: "tokens" [tokens, hidden_size], "colbert" [tokens - 1, colbert_size] and "chunks" [len(spans), dims],
    float32; "sparse" [entries] of `heads.ragged.SPARSE`. `queue_s` is the wait for the first pass, `inference_s` the time of
    the passes that gave results, `num_passes` their number.
    """

    vectors: Vectors | None
    ragged: _Ragged
    queue_s: float
    inference_s: float
    num_passes: int = 0


def deliver(step: Step, output: Output, finite: NDArray[np.bool_], seconds: float) -> list[Slice]:
    """Gives each request its rows. A request with all of its rows ends. `finite` belongs to the output.

    Returns: the slices that are not finite and were not alone, to be computed again alone.
    """
    again: list[Slice] = []
    if not step.slices:
        return again
    arrays, finite = _arrays(step, output, finite)
    counted: set[Request] = set()
    for part, first, stop in _runs(step.slices):
        request = part.request
        if request not in counted:
            counted.add(request)
            request.num_passes += 1
        if np.count_nonzero(finite[first:stop]) == stop - first:  # a tenth of the time of `all`
            _hand_over(step, output, part, first, stop, arrays, seconds)
            continue
        for sequence, row in enumerate(range(first, stop), part.sequence):
            alone = request.whole(sequence, sequence + 1)
            if finite[row]:
                _hand_over(step, output, alone, row, row + 1, arrays, seconds)
            elif len(step.sequences) == 1 or step.pieces:
                request.fail(NotFinite())
            else:
                again.append(alone)
    return again


def _arrays(step: Step, output: Output, finite: NDArray[np.bool_]) -> tuple[list[_Arrays], NDArray[np.bool_]]:
    """For each sequence: the arrays that its request asks for, and whether all values of the sequence are finite.

    The first list is empty if the pass has no such arrays.
    """
    given: list[_Arrays] = []
    if output.ragged:
        given = [{name: output.ragged[name][row] for name in each.outputs} for row, each in enumerate(step.options)]
        finite = finite & [all(map(_is_finite, arrays.values())) for arrays in given]
    if step.rows is None:
        return given, finite
    return [given[row] for row in step.rows] if given else given, finite[step.rows]


def _runs(slices: list[Slice]) -> Iterator[tuple[Slice, int, int]]:
    """The first of consecutive slices of one request, and the rows [first, stop) of their sequences in the pass."""
    start, first, stop = slices[0], 0, 0
    for part in slices:
        if part.request is not start.request:
            yield start, first, stop
            start, first = part, stop
        stop += part.num_seqs
    yield start, first, stop


def _own(array: NDArray[Any]) -> NDArray[Any]:
    """The array, contiguous. A small part of a larger array is copied, because a view would keep the larger array alive."""
    whole = array.base
    if isinstance(whole, np.ndarray) and whole.nbytes > 2 * array.nbytes:
        return array.copy()
    return np.ascontiguousarray(array)


def _copy(vectors: Vectors, rows: slice | NDArray[np.intp], target: Vectors) -> None:
    if isinstance(rows, slice) or not vectors.flags.c_contiguous:
        target[:] = vectors[rows]
    else:  # twice as fast, because the line above makes a copy first
        np.take(vectors, rows, axis=0, out=target, mode="clip")


def _is_finite(array: NDArray[Any]) -> bool:
    return bool(np.isfinite(array["value"] if array.dtype.names else array).all())


def _hand_over(step: Step, output: Output, part: Slice, start: int, stop: int, arrays: list[_Arrays], seconds: float) -> None:
    """Gives a request its results in the rows [start, stop) of a pass. The first one is for the first sequence of `part`.

    `arrays` is empty if the pass has none.
    """
    request: Request = part.request
    first, count = part.sequence, stop - start
    if request.options.pooled:
        rows = slice(start, stop) if step.rows is None else step.rows[start:stop]
        if count == len(request.sequences):
            request.vectors = _own(output.vectors[rows, : request.options.dimensions])
        else:
            vectors = output.vectors[:, : request.options.dimensions]
            if request.vectors is None:
                request.vectors = np.empty((len(request.sequences), vectors.shape[1]), dtype=vectors.dtype)
            _copy(vectors, rows, request.vectors[first : first + count])
    if arrays:
        request.arrays[first] = [{name: _own(each) for name, each in of_one.items()} for of_one in arrays[start:stop]]
    request.num_done += count
    request.inference_s += seconds
    if request.num_done == len(request.sequences):
        _succeed(request)


def _succeed(request: Request) -> None:
    arrays = [each for first in sorted(request.arrays) for each in request.arrays[first]]
    ragged = {name: [each[name] for each in arrays] for name in request.options.outputs}
    assert request.first_scheduled_at is not None, "a finished request was scheduled"
    queue_s = request.first_scheduled_at - request.submitted_at
    with suppress(InvalidStateError):  # the caller has left during the last pass
        request.future.set_result(Embeddings(request.vectors, ragged, queue_s, request.inference_s, request.num_passes))
