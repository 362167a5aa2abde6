"""The stages of a pipeline after the first one, each in a process of its own: on another node, or on another device of one.

A later stage has some layers, their keys and values, and nothing else. Tokenizer, scheduler, word embeddings and heads are in the
process of the first stage (`engine/run/ring_pipeline.py`). The last stage sends its hidden states there.
"""

import logging
import queue
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine import cut
from engine.devices import DtypeName, compute_dtype, current
from engine.errors import EngineStopped
from engine.load import choose, load_layers, read_config
from engine.model.base import Model
from engine.model.config import KvCacheDtype, ModelConfig, Pooling, with_kv_cache_dtype
from engine.options import TokenIds
from engine.run import reserve
from engine.run.kv_cache import KVCache
from engine.run.pack import BatchPacker
from engine.run.ring import NOTHING, Kind, Message, Place, Ring, with_text
from engine.run.runner import with_cache
from engine.run.stages import facts_of
from engine.schedule.piece import Piece

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StageOptions:
    """The options of `Engine.load` that a later stage also needs, with the dtype that the first stage has chosen."""

    model: str
    dtype: DtypeName
    pooling: Pooling | None = None
    max_batch_tokens: int | None = None
    max_input_tokens: int | None = None
    kv_cache_dtype: KvCacheDtype = "auto"


class LaterStage(Protocol):
    """A later stage, as the process of the first stage sees it. The calls go to a `StageProcess` in the stage's process."""

    def open(self, options: StageOptions, num_stages: int) -> "Future[cut.Device]": ...

    def load(self, layers: range, cache_tokens: int | None) -> "Future[None]": ...

    def run(self, place: Place) -> "Future[None]":
        """The future ends with the stage."""
        ...


class StageProcess:
    """The later stage of this process. Calls come in the order of the methods."""

    def __init__(self, address: str, device: str = "auto", num_threads: int | None = None) -> None:
        """
        Args:
            address: of this machine, by which the stage before reaches it.
            device: of this stage.
            num_threads: CPU threads of one operation; None keeps torch's own choice.
        """
        self._address, self._where = address, device
        if num_threads is not None:
            torch.set_num_threads(num_threads)

    def open(self, options: StageOptions, num_stages: int) -> cut.Device:
        """Reads the model's configuration. Returns: the facts about this stage's device. Raises: ModelError."""
        self._folder, config = self._read(options)
        self._config = with_kv_cache_dtype(config, options.kv_cache_dtype)
        self._dtype, self._device = choose(self._config, options.dtype, self._where)
        return facts_of(self._config, self._dtype, self._device, num_stages, options.max_batch_tokens, self._address)

    @staticmethod
    def _read(options: StageOptions) -> tuple[Path, ModelConfig]:
        model, tokens = options.model, options.max_input_tokens
        return read_config(model, options.pooling, None, None, tokens, "emberforge", trust_remote_code=False)

    def load(self, layers: range, cache_tokens: int | None) -> None:
        """Loads these layers, and makes their cache of `cache_tokens`; None for a model without one. Raises: ModelError."""
        part = replace(self._config, part=layers)
        wide = compute_dtype(self._dtype)
        with torch.inference_mode(), reserve.reservation(self._device):
            model = load_layers(self._folder, part, self._dtype, self._device)
            cache = None if cache_tokens is None else KVCache(part, cache_tokens, wide, self._device)
        packer = BatchPacker(part.pooling, part.embedding_size, None, part.tells_segments, model.shares_prefixes)
        self._layers = Layers(model, packer, self._device, cache)
        log.info("layers %d to %d of %s on %s", layers.start, layers.stop - 1, self._folder, self._device)

    def run(self, place: Place) -> None:
        """Computes passes until the ring ends. Raises: DeviceLost if it ends because a process is lost."""
        wide, inbox = compute_dtype(self._dtype), queue.SimpleQueue[Message | EngineStopped | None]()
        ring = Ring(place, self._address, self._device, wide, self._config.hidden_size)
        ring.start(inbox.put, inbox.put)
        is_last = place.stage == place.num_stages - 1
        while isinstance(message := inbox.get(), Message):
            ring.send(self._computed(message, is_last) if message.kind == Kind.PASS else message)
            del message  # the next pass may be long in coming
        if message is not None:
            raise message
        ring.send(Message(Kind.END, NOTHING))
        ring.leave()

    def _computed(self, message: Message, is_last: bool) -> Message:
        """The pass for the next stage. An error ends the pass alone."""
        try:
            with torch.inference_mode(), current(self._device):
                assert message.hidden is not None, "a pass has hidden states"
                work = read(message.about)
                batch_hidden = self._layers.forward(work, message.hidden, is_last)
            return message._replace(hidden=batch_hidden)
        except Exception as error:
            log.exception("a pass failed")
            return with_text(Kind.FAILED, str(error) or repr(error))


@dataclass(frozen=True, slots=True)
class Work:
    """A pass, as later stages need it: pieces of streams, or whole sequences of a model without a cache."""

    pieces: Sequence[Piece] = ()
    sequences: Sequence[TokenIds] = ()
    all_rows: bool = False  # the last stage gives the rows of all tokens, and not only those that pooling reads
    whole: bool = True  # as in `BatchPacker.pack`


@dataclass(frozen=True, slots=True)
class Layers:
    """Some layers of a model, and their cache."""

    model: Model
    packer: BatchPacker
    device: torch.device
    cache: KVCache | None

    def forward(self, work: Work, hidden: Tensor | None, is_last: bool) -> Tensor:
        """
        Args:
            hidden: [T, C] of the stage before; None for the first stage.
        Returns: [T, C]; of the last stage without `work.all_rows` [B, C].
        """
        sequences = [piece.token_ids for piece in work.pieces] or work.sequences
        batch = self.packer.pack(sequences, device=self.device, whole=work.whole)
        if work.pieces:
            assert self.cache is not None, "only a generation model has pieces"
            batch = with_cache(batch, work.pieces, self.cache)
        return self.model.forward(replace(batch, hidden=hidden), pooled_only=is_last and not work.all_rows)


def written(work: Work) -> NDArray[np.int32]:
    """A pass as numbers: four of the pass, then three of each piece, and its pages; or lengths and ids of the sequences."""
    head = [len(work.pieces), len(work.sequences), work.all_rows, work.whole]
    if work.pieces:
        numbers = [number for piece in work.pieces for number in (len(piece.token_ids), piece.start, len(piece.pages))]
        pages = [page for piece in work.pieces for page in piece.pages]
        return np.array([*head, *numbers, *pages], np.int32)
    return np.concatenate([np.array([*head, *map(len, work.sequences)], np.int32), *work.sequences])


def read(about: NDArray[np.int32]) -> Work:
    """The pass of `written`. The ids of pieces are zeros, because only the first stage reads them."""
    num_pieces, num_sequences, all_rows, whole = about[:4].tolist()
    rest = about[4:]
    if not num_pieces:
        lengths, ids = rest[:num_sequences], rest[num_sequences:]
        return Work((), np.split(ids, np.cumsum(lengths[:-1])), bool(all_rows), bool(whole))
    numbers, at, pieces = rest[: 3 * num_pieces].reshape(-1, 3).tolist(), 3 * num_pieces, []
    for length, start, num_pages in numbers:
        pages = tuple(rest[at : at + num_pages].tolist())
        pieces.append(Piece(np.zeros(length, np.int32), start, pages, None))
        at += num_pages
    return Work(pieces, (), bool(all_rows), bool(whole))
