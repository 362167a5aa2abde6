"""The interface between the API and its models.

A replica implements the protocols with its own engine (`replica/local.py`), a gateway with pools (`gateway/models.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import time
from typing import Any, Protocol

from cluster.router import Report
from engine.model.config import GenerationConfig, ModelConfig, OutputName, Task
from engine.options import EmbedOptions, SamplingOptions, TokenIds
from engine.results import Embeddings
from engine.schedule.stream import Stream
from engine.text.prompts import Prompts
from engine.text.tokenizer import Tokenizer
from serve_app.admission.qos import Qos
from serve_app.compute.quantize import Ranges, read_ranges
from serve_app.errors import WrongModel, WrongTask


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """The revision and the dtype that the replicas of one pool have loaded."""

    name: str
    node_class: str
    dtypes: tuple[str, ...]
    revisions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A served model's properties. All are known before the first request."""

    model_id: str
    served_model_name: str
    dtype: str
    device: str
    pooling: str
    embedding_size: int
    max_input_length: int  # in tokens; for a generation model the tokens of prompt and answer
    max_batch_tokens: int
    created: int
    task: Task = "embedding"
    labels: tuple[str, ...] = ()  # of a classifier or reranker
    multi_label: bool = False  # whether several labels may be true at once
    regression: bool = False  # whether several labels have values of their own, not probabilities
    outputs: tuple[OutputName, ...] = ("tokens",)  # an embedding model's results besides vectors
    vocab_size: int = 0
    embeds_too: bool = False  # whether a generation model also gives vectors
    int8_ranges: Ranges = field(default_factory=dict, compare=False)
    revision: str | None = None  # of the model's files; several revisions, as during an update, are joined by commas
    pools: tuple[PoolInfo, ...] = ()  # in a cluster

    @classmethod
    def of(cls, config: ModelConfig, folder: Path, **known: Any) -> "ModelInfo":
        """Properties from the model's configuration, and all other properties from `known`.

        Raises: ModelError for a bad file of int8 ranges.
        """
        return cls(
            pooling=config.pooling,
            embedding_size=config.embedding_size,
            created=int(time()),
            task=config.task,
            labels=config.labels,
            multi_label=config.multi_label,
            regression=config.regression,
            outputs=config.outputs,
            vocab_size=config.vocab_size,
            embeds_too=config.generation is not None and config.embeds,
            int8_ranges=read_ranges(folder, config),
            **known,
        )

    @property
    def embeds(self) -> bool:
        return self.task == "embedding" or self.embeds_too

    def overview(self) -> dict[str, Any]:
        """The model, as data for the console."""
        return {
            "id": self.served_model_name,
            "model": self.model_id,
            "task": self.task,
            "embeds": self.embeds,
            "dimensions": self.embedding_size if self.embeds else None,
            "max_input_length": self.max_input_length,
            "dtype": self.dtype,
        }

    def openai_entry(self) -> dict[str, Any]:
        entry = {"id": self.served_model_name, "object": "model", "created": self.created, "owned_by": "emberforge"}
        if self.task == "generation":
            return entry | {"root": self.model_id, "parent": None, "max_model_len": self.max_input_length, "permission": []}
        return entry


def replica_overview(replica: str, report: Report) -> dict[str, Any]:
    """A replica, as data for the console. `replica` is Serve's id of the replica, empty for this process."""
    return {
        "id": replica,
        "node": report.node,
        "card": report.card,
        "dtype": report.dtype,
        "queued_tokens": report.waiting_tokens,
        "tokens_per_s": round(report.tokens_per_s),
        "busy": round(report.busy, 2),
        "pages_held": report.pages_held,
        "planned_bytes": report.planned_bytes,
        "used_bytes": report.used_bytes,
    }


class ServedModel(Protocol):
    """One model, in this process or in a pool."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    async def embed(self, sequences: Sequence[TokenIds], options: EmbedOptions, qos: Qos) -> Embeddings:
        """Raises: BackendError, EngineStopped; DeadlineOutOfReach or DeadlinePassed if `qos` has a deadline that cannot be met.

        Cancelling the call drops all sequences that are not yet in a batch.
        """
        ...


class GeneratingModel(ServedModel, Protocol):
    """One model that generates text. `embed` is only called if `info.embeds`."""

    @property
    def prompts(self) -> Prompts: ...

    @property
    def generation(self) -> GenerationConfig: ...

    def new_stream(self, prompt: TokenIds, options: SamplingOptions) -> Stream:
        """Raises: InvalidInput for ids that are not in the vocabulary, and for a prompt that fills the context."""
        ...

    def submit(self, streams: Sequence[Stream]) -> None:
        """Starts to compute the streams. `on_token`, `on_pass` and `future` of a stream get progress, often in another thread.

        Cancelling `future` ends the stream and frees its pages. Raises: EngineStopped.
        """
        ...


Check = Callable[[ModelInfo], None]


def passes(check: Check, info: ModelInfo) -> bool:
    """Whether `check` accepts the model."""
    try:
        check(info)
    except (WrongTask, WrongModel):
        return False
    return True


class ServedModels(Protocol):
    """The models behind one API."""

    def get(self, name: str | None, check: Check | None = None) -> ServedModel:
        """The model that a request names in `model`. Without a name: the first model that can do the task.

        Args:
            check: raises WrongTask or WrongModel for a model that cannot do the task. If no model can, the first one is returned.
        Raises: UnknownModel.
        """
        ...

    def models(self) -> list[dict[str, Any]]:
        """The entries of `GET /v1/models`."""
        ...

    def overview(self) -> list[dict[str, Any]]:
        """The models with their pools and replicas, for the console."""
        ...

    async def check_health(self) -> None:
        """Checks the models. Raises: Unhealthy, after at most about a second."""
        ...

    def backlog_s(self, name: str | None = None) -> float:
        """Seconds of queued work of a model, for Retry-After. Without a name: of the first model."""
        ...
