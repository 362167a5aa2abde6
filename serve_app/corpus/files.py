"""Reads the files of a corpus as Arrow tables with a fixed number of rows, in the order of the corpus.

The order is that of the given files; files in a folder are in the order of their paths. A row has the same number in every run.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from io import BufferedReader, TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from engine.errors import EmberError

_KINDS = {".parquet": "parquet", ".pq": "parquet", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".txt": "text"}
_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
_NAMES = "parquet, jsonl, csv or txt files; the latter three also compressed as gz, bz2 or zst"

MANIFEST = "_emberforge.json"  # it is in each folder of results

_BATCH_ROWS = 1024
# Bytes of a text file that are parsed at once. A row cannot be larger.
_BLOCK_BYTES = 16 << 20


class CorpusError(EmberError):
    """A corpus, an output folder or a server cannot be used. The text names the file, row or address, and what to do."""


class Corpus:
    """The rows of several files. All files have the columns of the first one."""

    def __init__(self, inputs: Sequence[Path], wanted: Sequence[str]) -> None:
        """
        Args:
            inputs: files and folders. In a folder, all files of a known kind count.
            wanted: the columns that hold texts.
        Raises: CorpusError.
        """
        self.paths = [path for each in inputs for path in _found(each)]
        self._sizes = [path.stat().st_size for path in self.paths]
        self._wanted = wanted
        self.schema = self._read_schema()
        self._num_rows = self._counted_rows()
        self._rows_read = self._bytes_read = 0
        self._open: BinaryIO | None = None

    @property
    def fingerprint(self) -> dict[str, str]:
        """The size and the time of each file, to notice changes."""
        states = {str(path.absolute()): path.stat() for path in self.paths}
        return {path: f"{state.st_size} bytes, changed at {state.st_mtime_ns} ns" for path, state in states.items()}

    @property
    def estimated_rows(self) -> int | None:
        """The number of rows: exact for Parquet files, for other files estimated from the bytes that were read so far."""
        if self._num_rows is not None or not self._rows_read:
            return self._num_rows
        num_bytes = self._bytes_read + (self._open.tell() if self._open else 0)
        return round(self._rows_read * sum(self._sizes) / num_bytes) if num_bytes else None

    def tables(self, num_rows: int, done: set[int]) -> Iterator[tuple[int, pa.Table]]:
        """Yields (index, table) for each `num_rows` rows; the last table may have fewer rows. Skips the tables in `done`.

        Raises: CorpusError for a file that cannot be read.
        """
        index = next(each for each in range(len(done) + 1) if each not in done)
        parts: list[pa.RecordBatch] = []
        missing = num_rows  # rows that the table still needs
        for batch in self._batches(index * num_rows):
            while batch.num_rows:
                parts.append(batch.slice(0, missing))
                batch = batch.slice(missing)
                missing -= parts[-1].num_rows
                if not missing:
                    if index not in done:
                        yield index, pa.Table.from_batches(parts)
                    index, parts, missing = index + 1, [], num_rows
        if parts and index not in done:
            yield index, pa.Table.from_batches(parts)

    def _batches(self, first_row: int) -> Iterator[pa.RecordBatch]:
        """The rows from `first_row` on."""
        self._rows_read = self._bytes_read = 0
        for path, size in zip(self.paths, self._sizes, strict=True):
            try:
                batches = self._read_parquet(path, first_row) if _kind(path) == "parquet" else self._read_text(path)
                for batch in batches:
                    batch.validate(full=True)  # the reader of JSON lines takes texts that are not UTF-8
                    behind = min(batch.num_rows, max(0, first_row - self._rows_read))
                    self._rows_read += batch.num_rows
                    if behind < batch.num_rows:
                        yield self._conform(path, batch.slice(behind))
            except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                raise CorpusError(f"{path} cannot be read: {error}") from error
            self._bytes_read += size

    def _read_parquet(self, path: Path, first_row: int) -> Iterator[pa.RecordBatch]:
        """Skips row groups that end before `first_row`. Reads columns in small parts, because a row group may be large."""
        with pa.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            groups = list(range(file.num_row_groups))
            while groups and self._rows_read + file.metadata.row_group(groups[0]).num_rows <= first_row:
                self._rows_read += file.metadata.row_group(groups.pop(0)).num_rows
            yield from file.iter_batches(_BATCH_ROWS, groups, use_threads=False)

    def _read_text(self, path: Path) -> Iterator[pa.RecordBatch]:
        with path.open("rb") as self._open:
            yield from _parsed(path, self._open, self._wanted)
        self._open = None

    def _conform(self, path: Path, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with the columns of the corpus, in their order and types."""
        try:
            return batch.select(self.schema.names).cast(self.schema)
        except (KeyError, pa.ArrowException) as error:
            raise CorpusError(f"{path} does not have the columns of {self.paths[0]}: {error}") from error

    def _read_schema(self) -> pa.Schema:
        """The columns of the first file."""
        path = self.paths[0]
        try:
            if _kind(path) == "parquet":
                schema = pa.parquet.read_schema(path)
            else:
                with path.open("rb") as file:
                    schema = next(_parsed(path, file, self._wanted)).schema
        except StopIteration:
            raise CorpusError(f"{path} has no rows") from None
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise CorpusError(f"{path} cannot be read: {error}") from error
        if len(set(schema.names)) < len(schema.names):
            twice = next(name for name in schema.names if schema.names.count(name) > 1)
            raise CorpusError(f"{path} has two columns with the name {twice!r}; rename one")
        for name in self._wanted:
            if name not in schema.names:
                raise CorpusError(f"{path} has no column {name!r}; its columns are {', '.join(schema.names)}")
            kind = schema.field(name).type
            kind = kind.value_type if pa.types.is_dictionary(kind) else kind
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
                raise CorpusError(f"{path}: column {name!r} has the type {kind}, expected text")
        return schema.remove_metadata()

    def _counted_rows(self) -> int | None:
        if any(_kind(path) != "parquet" for path in self.paths):
            return None
        try:
            return sum(int(pa.parquet.read_metadata(path).num_rows) for path in self.paths)
        except (pa.ArrowException, OSError) as error:
            raise CorpusError(f"a file of the corpus cannot be read: {error}") from error


def _found(path: Path) -> list[Path]:
    """The files of an input, which is a file or a folder. Raises: CorpusError."""
    if path.is_dir():
        found = sorted(each for each in path.rglob("*") if _kind(each) and each.is_file() and not _is_result(each))
        if not found:
            raise CorpusError(f"{path} has no {_NAMES}")
        return found
    if not path.is_file():
        raise CorpusError(f"{path} is not a file or a folder")
    if _kind(path) is None:
        raise CorpusError(f"{path} is not a supported kind of file; a corpus is {_NAMES}")
    return [path]


def _is_result(path: Path) -> bool:
    """Whether a job has written the file. The folder of the results may be in the folder of the corpus."""
    return (path.parent / MANIFEST).exists()


def _kind(path: Path) -> str | None:
    name = path.with_suffix("") if path.suffix in _COMPRESSED else path
    kind = _KINDS.get(name.suffix)
    return None if kind == "parquet" and name != path else kind


def _parsed(path: Path, file: BinaryIO, wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of a text file. The first rows decide the types of the columns."""
    with suppress(StopIteration), pa.input_stream(file, _COMPRESSED.get(path.suffix)) as stream:
        match _kind(path):
            case "json":
                yield from _open_json(stream, _json_schema(path))
            case "csv":
                texts: Any = dict.fromkeys(wanted, pa.string())  # otherwise a text of digits would become a number
                options = pa.csv.ConvertOptions(column_types=texts)
                # A quoted text may contain line breaks.
                parsing = pa.csv.ParseOptions(newlines_in_values=True)
                yield from pa.csv.open_csv(stream, pa.csv.ReadOptions(block_size=_BLOCK_BYTES), parsing, options)
            case _:
                # A compressed stream has no `readline` of its own. The codec drops a byte order mark.
                lines = TextIOWrapper(BufferedReader(stream), "utf-8-sig", newline="\n")
                while texts := [line.rstrip("\r\n") for line in islice(lines, _BATCH_ROWS)]:
                    yield pa.record_batch({"text": texts})


def _open_json(stream: pa.NativeFile, schema: pa.Schema | None = None) -> pa.RecordBatchReader:
    reading = pa.json.ReadOptions(block_size=_BLOCK_BYTES)
    return pa.json.open_json(stream, reading, pa.json.ParseOptions(explicit_schema=schema))


def _json_schema(path: Path) -> pa.Schema:
    """The columns of a file of JSON lines. Arrow takes texts that are dates for times; here they are texts."""
    with pa.input_stream(str(path), _COMPRESSED.get(path.suffix)) as stream:
        return pa.schema([field.with_type(_as_text(field.type)) for field in _open_json(stream).schema])


def _as_text(kind: pa.DataType) -> pa.DataType:
    """The type with texts in place of times, also within lists and objects."""
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_as_text(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_as_text(field.type)) for field in kind])
    return kind
