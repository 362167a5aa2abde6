"""Server classes with engines that are slow or broken on purpose. A fast engine would hide the behaviour under test."""

import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cluster.model_spec import ModelSpec
from cluster.settings import ServerSettings
from engine.engine import Engine
from engine.errors import EngineStopped
from engine.model.config import OutputName
from engine.options import EmbedOptions, EncodeOptions, TokenIds
from engine.results import Embeddings
from engine.run.flight import Finished, Flight
from serve_app.admission.qos import Qos
from serve_app.replica.model_server import ModelServer
from serve_app.replica.pool import PoolServer
from serve_app.replica.watched import WatchedModel

log = logging.getLogger("serve_app.servers")

Deploy = Callable[..., Any]  # the types of the fixtures `deployed`, `deployed_together` and `clustered`
DeployTogether = Callable[..., Any]
Clustered = Callable[..., Any]
# The environment variable with the path of a file (`DyingPool`, `HangingServer`) or of a folder (`KilledPool`, `KilledServer`).
MARKER = "EMBERFORGE_TEST_MARKER"


class SlowEngine(Engine):
    """Each forward pass takes a quarter of a second longer."""

    def launch(
        self, sequences: Sequence[TokenIds], options: Sequence[EmbedOptions] | None = None, outputs: tuple[OutputName, ...] = ()
    ) -> Flight:
        time.sleep(0.25)
        output = super().launch(sequences, options, outputs).wait()
        return Finished(replace(output, device_s=output.device_s + 0.25))


class HangingEngine(Engine):
    """The first pass with token id 14 in any replica takes an hour. Later passes are normal."""

    def launch(
        self, sequences: Sequence[TokenIds], options: Sequence[EmbedOptions] | None = None, outputs: tuple[OutputName, ...] = ()
    ) -> Flight:
        if any(14 in ids for ids in sequences) and _first(os.environ[MARKER]):
            time.sleep(3600)
        return super().launch(sequences, options, outputs)


class PoisonEngine(Engine):
    """A sequence with token id 13 gives NaN. A sequence with token id 14 makes the whole forward pass fail."""

    def launch(
        self, sequences: Sequence[TokenIds], options: Sequence[EmbedOptions] | None = None, outputs: tuple[OutputName, ...] = ()
    ) -> Flight:
        if any(14 in ids for ids in sequences):
            raise RuntimeError("the device fell over")
        output = super().launch(sequences, options, outputs).wait()
        poisoned = np.array([13 in ids for ids in sequences])
        return Finished(replace(output, vectors=np.where(poisoned[:, None], np.nan, output.vectors)))


class SlowServer(ModelServer):
    def load_engine(self, spec: ModelSpec, num_threads: int) -> Engine:
        return SlowEngine.load(spec.model, dtype="float32", max_batch_tokens=64, num_threads=num_threads)


class HangingServer(ModelServer):
    def load_engine(self, spec: ModelSpec, num_threads: int) -> Engine:
        return HangingEngine.load(spec.model, dtype="float32", num_threads=num_threads)


class PoisonServer(ModelServer):
    def load_engine(self, spec: ModelSpec, num_threads: int) -> Engine:
        return PoisonEngine.load(spec.model, dtype="float32", num_threads=num_threads)


class SlowPool(PoolServer):
    def load_engine(self, spec: ModelSpec, num_threads: int) -> Engine:
        return SlowEngine.load(spec.model, dtype="float32", max_batch_tokens=64, num_threads=num_threads)


class PoisonPool(PoolServer):
    def load_engine(self, spec: ModelSpec, num_threads: int) -> Engine:
        return PoisonEngine.load(spec.model, dtype="float32", num_threads=num_threads)


class BrokenPool(PoolServer):
    """Fails every request at once."""

    async def embed(self, sequences: Sequence[TokenIds], options: EmbedOptions, qos: Qos) -> Embeddings:
        raise EngineStopped("the device fell over")


class DyingPool(PoolServer):
    """The first text that ends with the token of "die" ends its replica."""

    async def embed(self, sequences: Sequence[TokenIds], options: EmbedOptions, qos: Qos) -> Embeddings:
        die = self._engine.tokenizer.encode(["die"], EncodeOptions())[0][1]
        if any(ids[-2] == die for ids in sequences) and _first(os.environ[MARKER]):
            log.warning("last words")
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().embed(sequences, options, qos)


class _Killing:
    """Each text that ends with the token of "kill" ends its replica. Each death creates a file."""

    def __init__(self, model: Any) -> None:
        self.info, self.tokenizer, self._model = model.info, model.tokenizer, model

    async def embed(self, sequences: Sequence[TokenIds], options: EmbedOptions, qos: Qos) -> Embeddings:
        kill = self.tokenizer.encode(["kill"], EncodeOptions())[0][1]
        if any(ids[-2] == kill for ids in sequences):
            (Path(os.environ[MARKER]) / str(os.getpid())).touch()
            os._exit(1)
        return await self._model.embed(sequences, options, qos)


class KilledPool(PoolServer):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._model = _Killing(self._model)


class KilledServer(ModelServer):
    def __init__(self, spec: ModelSpec, settings: ServerSettings, num_threads: int | None) -> None:
        super().__init__(spec, settings, num_threads)
        assert isinstance(self._model, WatchedModel)
        self._model._model = _Killing(self._model._model)


def _first(marker: str) -> bool:
    """Whether this is the first call with this marker in all processes."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
