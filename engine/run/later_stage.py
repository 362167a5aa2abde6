"""The stages of a pipeline after the first one, each in a process of its own: on another node, or on another device of one.

A later stage has some layers, their keys and values, and nothing else. Tokenizer, scheduler, word embeddings and heads are in the
process of the first stage (`engine/run/ring_pipeline.py`). The last stage sends its hidden states there.
"""

import logging
import queue
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from engine import cut
from engine.devices import DtypeName, compute_dtype, current
from engine.errors import EngineStopped
from engine.load import choose, load_layers, packer_of, read_config
from engine.model.config import KvCacheDtype, ModelConfig, Pooling, with_kv_cache_dtype
from engine.run import reserve
from engine.run.cuda_layers import CudaLayers
from engine.run.kv_cache import KVCache
from engine.run.layers import layers_of
from engine.run.ring import NOTHING, Kind, Message, Place, Received, Ring, with_text
from engine.run.stages import facts_of
from engine.run.work import read

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
            packer = packer_of(part, model, wide, self._device)
            self._layers = layers_of(model, packer, self._device, cache, part, self._dtype)
        log.info("layers %d to %d of %s on %s", layers.start, layers.stop - 1, self._folder, self._device)

    def run(self, place: Place) -> None:
        """Computes passes until the ring ends. Raises: DeviceLost if it ends because a process is lost."""
        wide, inbox = compute_dtype(self._dtype), queue.SimpleQueue[Received | EngineStopped | None]()
        ring = Ring(place, self._address, self._device, wide, self._config.hidden_size)
        ring.start(inbox.put, inbox.put)
        is_last = place.stage == place.num_stages - 1
        while isinstance(received := inbox.get(), Received):
            with current(self._device):
                ring.send(self._computed(ring, received, is_last))
            del received  # the next pass may be long in coming
        if received is not None:
            raise received
        ring.send(Message(Kind.END, NOTHING))
        ring.leave()

    def _computed(self, ring: Ring, received: Received, is_last: bool) -> Message:
        """The message for the next stage. An error ends the pass alone. Raises: DeviceLost if the ring has ended."""
        hidden = received.hidden
        if hidden is None:  # the pass has failed in an earlier stage
            return Message(received.kind, received.about)
        try:
            with torch.inference_mode():
                work = read(received.about)
                if isinstance(self._layers, CudaLayers):
                    assert ring.arrivals is not None, "the ring of a GPU counts arrivals"
                    leaving = self._layers.queue(work, hidden, ring.arrivals, is_last)
                    return Message(Kind.PASS, received.about, leaving)
                output = self._layers.forward(work, hidden.wait().to(self._device), is_last)
                return Message(Kind.PASS, received.about, output.cpu())
        except EngineStopped:
            raise
        except Exception as error:
            log.exception("a pass failed")
            return with_text(Kind.FAILED, str(error) or repr(error))
