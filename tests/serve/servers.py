"""Server classes with an engine that is slow or broken on purpose, for what a fast one would hide."""

import time
from collections.abc import Sequence

import torch

from engine.engine import Engine, Output
from engine.tokenizer import TokenIds
from serve_app.model_server import ModelServer
from serve_app.settings import Settings


class SlowEngine(Engine):
    """Each forward pass takes a quarter of a second longer."""

    def run(self, sequences: Sequence[TokenIds], want_hidden: bool = False) -> Output:
        time.sleep(0.25)
        return super().run(sequences, want_hidden)


class PoisonEngine(Engine):
    """A sequence that holds id 13 comes out as NaN, one that holds 14 breaks the whole forward pass."""

    def run(self, sequences: Sequence[TokenIds], want_hidden: bool = False) -> Output:
        if any(14 in ids for ids in sequences):
            raise RuntimeError("the device fell over")
        output = super().run(sequences, want_hidden)
        with torch.inference_mode():
            for row, ids in enumerate(sequences):
                if 13 in ids:
                    output.pooled[row] = torch.nan
        return output


class SlowServer(ModelServer):
    def load_engine(self, model: str, settings: Settings, num_threads: int) -> Engine:
        return SlowEngine.load(model, dtype="float32", max_batch_tokens=64, num_threads=num_threads)


class PoisonServer(ModelServer):
    def load_engine(self, model: str, settings: Settings, num_threads: int) -> Engine:
        return PoisonEngine.load(model, dtype="float32", num_threads=num_threads)
