"""Gives the output of a pass to the requests that own its rows, and finds rows that are not finite.

Short sequences share a tile of the attention kernel. A sequence with NaN makes its neighbours NaN, because a weight of 0 times
NaN is NaN. So a sequence that is not finite, and was not alone in its pass, is computed again alone. It fails only if it is not
finite then either. Sequences with keys in pages share no tile, and fail at once.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
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
    if len(step.slices) == 1 and not output.ragged and finite[0]:  # the fastest way for a query, without grouping
        (part,) = step.slices
        part.request.num_passes += 1
        _hand_over(part.request, part.sequence, _rows(step, output, part.request, 0, 1), _ONE_WITHOUT_ARRAYS, seconds)
        return again
    arrays, finite = _arrays(step, output, finite)
    counted: set[Request] = set()
    for first, stop in _runs(step.slices, finite):
        part = step.slices[first]
        request = part.request
        if request not in counted:
            counted.add(request)
            request.num_passes += 1
        if finite[first]:
            vectors = _rows(step, output, request, first, stop)
            _hand_over(request, part.sequence, vectors, arrays[first:stop], seconds)
        elif len(step.sequences) == 1 or step.pieces:
            request.fail(NotFinite())
        else:
            again.append(part)
    return again


def _arrays(step: Step, output: Output, finite: NDArray[np.bool_]) -> tuple[list[_Arrays], NDArray[np.bool_]]:
    """For each slice: the arrays that its request asks for, and whether all values of the slice are finite."""
    given = [_NO_ARRAYS] * len(step.sequences)
    if output.ragged:
        given = [{name: output.ragged[name][row] for name in each.outputs} for row, each in enumerate(step.options)]
        finite = finite & [all(map(_is_finite, arrays.values())) for arrays in given]
    if step.rows is None:
        return given, finite
    return [given[row] for row in step.rows], finite[step.rows]


_NO_ARRAYS: _Arrays = {}
_ONE_WITHOUT_ARRAYS = [_NO_ARRAYS]


def _runs(slices: list[Slice], finite: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """[first, stop) of consecutive slices of one request. A slice that is not finite is a separate run."""
    whole = finite.tolist()
    first = 0
    for (_, is_whole), group in groupby(range(len(slices)), lambda row: (id(slices[row].request), whole[row])):
        rows = list(group)
        if is_whole:
            yield first, first + len(rows)
        else:
            yield from ((row, row + 1) for row in rows)
        first += len(rows)


def _rows(step: Step, output: Output, request: Request, first: int, stop: int) -> Vectors | None:
    if not request.options.pooled:
        return None
    rows = slice(first, stop) if step.rows is None else step.rows[first:stop]
    return _own(output.vectors[rows, : request.options.dimensions])


def _own(array: NDArray[Any]) -> NDArray[Any]:
    """The array, or a contiguous copy if the array is a small part of a larger one, which it would keep alive."""
    whole = array.base
    if isinstance(whole, np.ndarray) and whole.nbytes > 2 * array.nbytes:
        return array.copy()
    return np.ascontiguousarray(array)


def _is_finite(array: NDArray[Any]) -> bool:
    return bool(np.isfinite(array["value"] if array.dtype.names else array).all())


def _hand_over(request: Request, first: int, vectors: Vectors | None, arrays: list[_Arrays], seconds: float) -> None:
    """Gives a request the results of its sequences from `first` on."""
    request.results[first] = vectors, [{name: _own(each) for name, each in of_one.items()} for of_one in arrays]
    request.num_done += len(arrays)
    request.inference_s += seconds
    if request.num_done == len(request.sequences):
        _succeed(request)


def _succeed(request: Request) -> None:
    parts, ragged = [request.results[index] for index in sorted(request.results)], _Ragged()
    vectors = parts[0][0]
    if len(parts) > 1 and vectors is not None:
        vectors = np.concatenate([part for part, _ in parts])
    if request.options.outputs:
        ragged = {name: [arrays[name] for _, part in parts for arrays in part] for name in request.options.outputs}
    assert request.first_scheduled_at is not None, "a finished request was scheduled"
    queue_s = request.first_scheduled_at - request.submitted_at
    with suppress(InvalidStateError):  # the caller has left during the last pass
        request.future.set_result(Embeddings(vectors, ragged, queue_s, request.inference_s, request.num_passes))
