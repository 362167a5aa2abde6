"""A process that tokenises the texts of a job.

Tokenising holds Python's interpreter for 8 us a text. In the process of a fast engine the engine's threads would wait for the
interpreter.
"""

import signal
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from queue import Queue
from threading import Thread
from typing import Any

from engine.errors import EmberError
from engine.options import EncodeOptions, TokenIds
from engine.sequences import Sequences
from engine.text.tokenizer import Tokenizer
from serve_app.corpus.files import CorpusError
from serve_app.corpus.folder import GO_ON
from serve_app.corpus.job import Row

# Calls that tokenise at a time. The library uses all cores; while one call is in the library, the other one is in Python.
_CALLS = 2


class TokenizerProcess:
    """Several threads may call `encode`. The process ends with `close`, or with this process."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises: CorpusError if the process does not start."""
        context = get_context("spawn")  # a fork would copy the locks of the engine's threads
        pipes = [context.Pipe() for _ in range(_CALLS)]
        self._process = context.Process(target=_serve, args=([there for _, there in pipes],), daemon=True)
        self._process.start()
        self._free: Queue[Connection] = Queue()
        for here, there in pipes:
            there.close()  # so that `recv` notices the end of the process
            self._free.put(here)
        self._call(tokenizer)

    def encode(self, rows: Sequence[Row], options: EncodeOptions) -> list[TokenIds]:
        """The ids of each row: of its text, or of its pair of texts.

        Raises: as `Tokenizer`; CorpusError if the process has ended.
        """
        ids, ends = self._call((rows, options))
        return [ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def _call(self, message: object) -> Any:
        connection = self._free.get()
        try:
            connection.send(message)
            answer = connection.recv()
        except (EOFError, OSError):
            raise CorpusError(f"the process that tokenises has ended; {GO_ON}") from None
        finally:
            self._free.put(connection)
        if isinstance(answer, EmberError):
            raise answer
        return answer

    def close(self) -> None:
        """Ends the process. Calls under way raise CorpusError."""
        self._process.terminate()
        self._process.join()


def _serve(connections: Sequence[Connection]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process too; the parent decides about the end
    # Not an argument: if this process fails to start, `Process.start` waits forever for somebody to read large arguments.
    tokenizer = connections[0].recv()
    connections[0].send(None)
    threads = [Thread(target=_answer_calls, args=(tokenizer, each)) for each in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _answer_calls(tokenizer: Tokenizer, connection: Connection) -> None:
    with suppress(EOFError, OSError):  # the parent has ended
        while True:
            rows, options = connection.recv()
            try:
                connection.send(_encoded(tokenizer, rows, options))
            except EmberError as error:
                connection.send(error)


def _encoded(tokenizer: Tokenizer, rows: Sequence[Row], options: EncodeOptions) -> tuple[TokenIds, list[int]]:
    """The ids of all rows in one array, and the end of each row in it. An array for each row would cross the pipe slowly."""
    if len(rows[0]) == 1:
        sequences = tokenizer.encode([text for (text,) in rows], options)
    else:
        sequences = Sequences.of(tokenizer.encode_pairs([(query, text) for query, text in rows], options))
    return sequences.token_ids, sequences.bounds[1:]
