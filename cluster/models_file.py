"""Reads models.yaml: the models of a cluster, the number of their replicas, and the nodes where they may run."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cluster.files import parse_yaml, read_yaml
from cluster.model_spec import ModelOptions, ModelSpec, pool_name
from cluster.numbers import MOST, MOST_RATE, MOST_S, MOST_TOKENS, Float, Int
from cluster.settings import ServerSettings


class ModelEntry(ModelSpec):
    """One model of models.yaml: its spec, and the values for placement and routing.

    `context` and `streams` are for generation models. A card gets a replica only if its KV cache holds `streams` streams of
    `context` tokens at once. `cluster/generation.py` has the defaults.
    """

    min_replicas: Int = Field(1, ge=0, le=MOST)
    max_replicas: Int | None = Field(None, gt=0, le=MOST)  # None: min_replicas, at least one
    aliases: tuple[str, ...] = ()
    nodes: tuple[str, ...] | None = None
    not_nodes: tuple[str, ...] = ()
    # Measured by the operator, by node class; for a generation model, of decode.
    tokens_per_s: dict[str, Annotated[Float, Field(gt=0, le=MOST_RATE)]] = {}
    context: Int | None = Field(None, gt=0, le=MOST_TOKENS)  # tokens of the longest stream: prompt and answer
    streams: Int | None = Field(None, gt=0, le=MOST)
    # Cards that share the layers: of one node, or of several where no node holds the model. None: the fewest that hold it.
    pipeline: Int | None = Field(None, gt=0, le=MOST)
    # A new version runs beside the old one for some time, and gets this percentage of the requests. None: it replaces
    # the old one.
    canary: Int | None = Field(None, ge=1, le=50)
    canary_s: Float = Field(300.0, gt=0, le=MOST_S)

    @model_validator(mode="after")
    def _limits_agree(self) -> "ModelEntry":
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas is {self.max_replicas}, less than min_replicas, {self.min_replicas}")
        return self

    @model_validator(mode="after")
    def _has_one_device(self) -> "ModelEntry":
        if self.devices:
            raise ValueError(
                "devices is for `emberforge serve`: in a cluster Ray chooses the cards; write pipeline: NUMBER of cards"
            )
        return self

    @model_validator(mode="after")
    def _cache_has_one_size(self) -> "ModelEntry":
        if self.streams is not None and self.cache_tokens is not None:
            raise ValueError("streams and cache_tokens are both set, but each sets the size of the KV cache; leave one out")
        return self

    @property
    def most_replicas(self) -> int:
        return self.max_replicas or max(1, self.min_replicas)


class ModelsFile(BaseModel):
    """models.yaml. `default` answers requests that name no model; without `default` the first model answers them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    models: tuple[ModelEntry, ...] = Field(min_length=1)
    default: str | None = None
    gateways: Int = Field(1, gt=0, le=MOST)  # replicas of the gateway
    network_gbit_s: Float = Field(1.0, gt=0, le=MOST_RATE)  # between the nodes, for models whose stages are on several nodes
    asleep: Literal["wait", "refuse"] = "wait"  # what happens to a request that starts a sleeping model
    settings: ServerSettings = ServerSettings()

    @model_validator(mode="before")
    @classmethod
    def _settings_hold_for_all_models(cls, content: Any) -> Any:
        given = content.get("settings") if isinstance(content, dict) else None
        misplaced = next((name for name in ModelOptions.model_fields if name in given), None) if isinstance(given, dict) else None
        if misplaced:
            raise ValueError(f"settings.{misplaced} cannot be set for all models at once: put it into each model's entry")
        return content

    @model_validator(mode="after")
    def _names_are_distinct(self) -> "ModelsFile":
        names = Counter(name for entry in self.models for name in {entry.name, *entry.aliases})
        twice = next((name for name, count in names.items() if count > 1), None)
        if twice:
            raise ValueError(f"two models are called {twice!r}; names and aliases must differ")
        if self.default is not None and self.default not in names:
            raise ValueError(f"default is {self.default!r}, but no model has this name; the models are {', '.join(names)}")
        slugs = Counter(pool_name(entry.name) for entry in self.models)
        slug, count = slugs.most_common(1)[0]
        if count > 1:
            raise ValueError(f"{count} models would have pools called {slug!r}; give them names with different last parts")
        return self


def load_models(path: Path) -> ModelsFile:
    """Reads models.yaml. Raises: ClusterError naming the place, the value and the allowed values."""
    return read_yaml(path, ModelsFile)


def parse_models(text: str) -> ModelsFile:
    """Like `load_models`, from the text of a models.yaml."""
    return parse_yaml(text, "models.yaml", ModelsFile)
