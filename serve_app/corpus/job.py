"""Runs a job: sends the rows of a corpus to a worker and writes the results to a folder.

The worker has the texts of several files at once, so that the device is not idle at the end of a file.
"""

import gc
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from engine.errors import EmptyInput, InvalidInput, NotFinite, TokenizerError
from serve_app.corpus.files import Corpus
from serve_app.corpus.folder import Folder
from serve_app.corpus.progress import Progress

_FILES_IN_FLIGHT = 3
# Errors that concern one row. All other errors end the job.
_OF_A_ROW = (InvalidInput, EmptyInput, TokenizerError, NotFinite)

# A text, or a query and a text.
Row = tuple[str, ...]


class Results(NamedTuple):
    values: NDArray[Any]  # [n, D] numbers, [n] numbers or [n] texts
    num_tokens: int


class Worker(Protocol):
    """Computes rows: the engine of this process, or a server. Several threads may call `compute`."""

    @property
    def rows_per_call(self) -> int: ...

    @property
    def num_calls(self) -> int:
        """The number of calls in flight."""
        ...

    def compute(self, rows: Sequence[Row]) -> Results:
        """Raises: InvalidInput, EmptyInput, TokenizerError or NotFinite for rows that cannot be computed; EmberError."""
        ...

    def close(self) -> None:
        """Ends the calls in flight with an error."""
        ...


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns with the texts, in the order of `Row`, and the column for the results."""

    texts: tuple[str, ...]
    result: str


class _Part(NamedTuple):
    """The results of some rows. `faults` has the reason for each row without a result, by the row's position."""

    values: NDArray[Any]
    faults: dict[int, str]
    num_tokens: int


def run(
    corpus: Corpus,
    folder: Folder,
    worker: Worker,
    columns: Columns,
    progress: Progress,
    on_progress: Callable[[str], None],
) -> None:
    """Computes the missing files of the folder. `on_progress` gets a message about a row, or an empty text.

    Raises: CorpusError; EmberError of the worker.
    """
    empty = worker.compute([("a",) * len(columns.texts)]).values[:0]
    pool = ThreadPoolExecutor(worker.num_calls, thread_name_prefix="corpus")
    in_flight: deque[tuple[int, pa.Table, list[Future[_Part]]]] = deque()

    def write_first() -> None:
        index, others, futures = in_flight.popleft()
        arrays: list[NDArray[Any]] = []
        faults: dict[int, str] = {}
        row = 0
        for future in futures:
            part = future.result()
            faults |= {row + position: reason for position, reason in part.faults.items()}
            arrays.append(part.values)
            row += len(part.values)
            progress.num_tokens += part.num_tokens
            progress.num_rows += len(part.values)
            progress.estimated_rows = corpus.estimated_rows
            on_progress("")
        for position, reason in faults.items():
            on_progress(progress.add_fault(index * folder.rows_per_file + position, reason))
        folder.write(index, columns.result, np.concatenate(arrays), faults, others)
        # A request of the engine is in a cycle with its future, which holds the vectors. Python would free them much later.
        gc.collect()

    gc.freeze()  # so that the collection after each file does not search the objects that exist now
    try:
        for index, table in corpus.tables(folder.rows_per_file, folder.done):
            texts, others = table.select(columns.texts), table.drop_columns(list(columns.texts))
            starts = range(0, table.num_rows, worker.rows_per_call)
            parts = [texts.slice(start, worker.rows_per_call) for start in starts]
            in_flight.append((index, others, [pool.submit(_compute, worker, empty, part) for part in parts]))
            if len(in_flight) == _FILES_IN_FLIGHT:
                write_first()
        while in_flight:
            write_first()
    finally:
        gc.unfreeze()
        pool.shutdown(wait=False, cancel_futures=True)
        worker.close()


def _compute(worker: Worker, empty: NDArray[Any], texts: pa.Table) -> _Part:
    """Computes some rows. Models do not accept empty texts, so a row without a text gets no result.

    Args:
        empty: an array without results, with their shape and type.
    """
    rows = list(zip(*(column.to_pylist() for column in texts.columns), strict=True))
    faults = {position: "it has no text" for position, row in enumerate(rows) if not all(row)}
    present = {position: row for position, row in enumerate(rows) if position not in faults}
    try:
        values, num_tokens = worker.compute(list(present.values())) if present else Results(empty, 0)
    except _OF_A_ROW:  # compute each row separately, because the other rows are valid
        found = [Results(empty, 0)]
        for position, row in present.items():
            try:
                found.append(worker.compute([row]))
            except _OF_A_ROW as error:
                faults[position] = str(error)
        values, num_tokens = np.concatenate([each.values for each in found]), sum(each.num_tokens for each in found)
    if faults:
        computed, values = values, np.zeros((len(rows), *empty.shape[1:]), empty.dtype)
        values[[position for position in range(len(rows)) if position not in faults]] = computed
    return _Part(values, faults, num_tokens)
