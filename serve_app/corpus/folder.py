"""Writes the output folder: one file for each `rows_per_file` rows of the corpus, and a manifest of the job.

A file gets its name when it is complete and on the disk. So a job can be killed at any moment: existing files are complete, and
the next run computes the missing files.
"""

import fcntl
import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from serve_app.corpus.files import MANIFEST, CorpusError

Format = Literal["parquet", "npy"]

GO_ON = "the same command resumes the job"


class Folder:
    """The output folder. It is locked by this process until `close`, or until the process ends."""

    def __init__(self, path: Path, form: Format, rows_per_file: int, job: Mapping[str, Any]) -> None:
        """
        Args:
            job: all other values that change the files. The manifest holds them.
        Raises: CorpusError if the folder has results of another job, or if another process writes into it.
        """
        self.path, self.rows_per_file, self._format = path, rows_per_file, form
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDONLY)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CorpusError(f"another process writes into {path}; wait for its end, or choose another folder") from None
        except OSError as error:
            raise CorpusError(f"{path} cannot be written: {error.strerror}") from error
        self.done = self._complete()
        self._check_manifest({**job, "format": form, "rows_per_file": rows_per_file})

    @property
    def num_rows(self) -> int:
        """The number of rows in the complete files. Only the last file of a corpus may have fewer than `rows_per_file` rows.

        Raises: CorpusError if the last file cannot be read.
        """
        if not self.done:
            return 0
        path = self._path(max(self.done))
        try:
            is_npy = self._format == "npy"
            last = len(np.load(path, mmap_mode="r")) if is_npy else int(pa.parquet.read_metadata(path).num_rows)
        except (EOFError, OSError, ValueError) as error:
            raise CorpusError(f"{path} cannot be read: {error}; delete this file, then {GO_ON}") from error
        return (len(self.done) - 1) * self.rows_per_file + last

    def write(self, index: int, name: str, values: NDArray[Any], faults: Collection[int], others: pa.Table) -> None:
        """Writes the results of the file with this index.

        Args:
            values: a result for each row: [n, D] numbers, [n] numbers or [n] texts.
            faults: the rows without a result. They get nulls.
            others: the other columns of these rows.
        Raises: CorpusError.
        """
        path = self._path(index)
        if faults and self._format == "npy":
            row = index * self.rows_per_file + min(faults)
            raise CorpusError(f"row {row} has no result, and npy has no nulls: remove the row, or choose --format parquet")
        temporary = path.with_name(f"{path.name}.tmp")
        try:
            with temporary.open("wb") as file:
                if self._format == "npy":
                    np.save(file, values)
                else:
                    table = others.append_column(name, _column(values, faults))
                    # Not a dictionary: nearly all vectors differ, so it would hold each of them.
                    pa.parquet.write_table(table, file, use_dictionary=others.column_names)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
            os.fsync(self._fd)
        except (OSError, pa.ArrowException) as error:
            reason = getattr(error, "strerror", None) or error
            raise CorpusError(f"{path} cannot be written: {reason}; solve this problem, then {GO_ON}") from error

    def close(self) -> None:
        os.close(self._fd)

    def _path(self, index: int) -> Path:
        return self.path / f"part-{index:05}.{self._format}"

    def _complete(self) -> set[int]:
        """The indices of the existing files."""
        names = (re.fullmatch(r"part-(\d+)\.(parquet|npy)", each.name) for each in self.path.iterdir())
        return {int(name[1]) for name in names if name}

    def _check_manifest(self, job: Mapping[str, Any]) -> None:
        """Checks the manifest, or writes it if the folder has none. Raises: CorpusError if the files are of another job."""
        path = self.path / MANIFEST
        if not path.exists():
            if self.done:
                raise CorpusError(f"{self.path} has files of an unknown job, without {MANIFEST}; choose another folder")
            temporary = path.with_name(f"{path.name}.tmp")
            temporary.write_text(json.dumps(job, indent=1) + "\n", encoding="utf-8")
            temporary.rename(path)
            return
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CorpusError(f"{path} cannot be read: {error}; choose another folder") from error
        if difference := _difference(before, json.loads(json.dumps(job))):
            raise CorpusError(f"{self.path} has results of another job: {difference}; choose another folder, or delete this one")


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first value that differs, as text. Empty if no value differs."""
    for key in dict.fromkeys([*before, *now]):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            if inner := _difference(old, new):
                return f"{key}: {inner}"
        elif old != new:
            return f"{key} was {json.dumps(old)}, and is {json.dumps(new)} now"
    return ""


def _column(values: NDArray[Any], faults: Collection[int]) -> pa.Array:
    missing = np.zeros(len(values), dtype=bool)
    missing[list(faults)] = True
    if values.ndim == 1:
        return pa.array(values, pa.string() if values.dtype == object else None, mask=missing)
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1], mask=pa.array(missing))
