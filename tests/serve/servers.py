"""Server classes with an engine that is slow or broken on purpose, for what a fast one would hide."""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engine.engine import Engine
from engine.flight import Flight, Landed
from engine.pooling import EmbedOptions
from engine.tokenizer import TokenIds
from serve_app.model_server import ModelServer
from serve_app.settings import Settings


class SlowEngine(Engine):
    """Each forward pass takes a quarter of a second longer."""

    def launch(
        self, sequences: Sequence[TokenIds], options: Sequence[EmbedOptions] | None = None, want_hidden: bool = False
    ) -> Flight:
        time.sleep(0.25)
        return super().launch(sequences, options, want_hidden)


class PoisonEngine(Engine):
    """A sequence that holds id 13 comes out as NaN, one that holds 14 breaks the whole forward pass."""

    def launch(
        self, sequences: Sequence[TokenIds], options: Sequence[EmbedOptions] | None = None, want_hidden: bool = False
    ) -> Flight:
        if any(14 in ids for ids in sequences):
            raise RuntimeError("the device fell over")
        output = super().launch(sequences, options, want_hidden).wait()
        poisoned = np.array([13 in ids for ids in sequences])
        return Landed(replace(output, vectors=np.where(poisoned[:, None], np.nan, output.vectors)))


class SlowServer(ModelServer):
    def load_engine(self, model: str, settings: Settings, num_threads: int) -> Engine:
        return SlowEngine.load(model, dtype="float32", max_batch_tokens=64, num_threads=num_threads)


class PoisonServer(ModelServer):
    def load_engine(self, model: str, settings: Settings, num_threads: int) -> Engine:
        return PoisonEngine.load(model, dtype="float32", num_threads=num_threads)
