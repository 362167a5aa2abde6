"""Facts about a model's network for gateways. The process that builds the gateways reads them: gateways import no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from cluster.model_folder import read_model
from cluster.model_spec import ModelSpec
from engine.model.config import ModelConfig
from serve_app.gateway.config import GatewayArgs


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The configuration of a model without the fields of its family, and the number of its parameters."""

    config: ModelConfig
    num_parameters: int


Facts = Mapping[ModelSpec, ModelFacts]


def read_facts(args: GatewayArgs) -> Facts:
    """The facts of each model and each trial in `args`. Imports torch. Raises: ModelError."""
    return {spec: facts_of(spec) for spec in _specs(args)}


def facts_of(spec: ModelSpec) -> ModelFacts:
    """Like `read_facts`, for one model."""
    from engine.model.footprint import num_parameters

    _, config = read_model(spec)
    # A family's own class is in a module that imports torch, and unpickling would import the module.
    plain = ModelConfig(**{each.name: getattr(config, each.name) for each in fields(ModelConfig)})
    return ModelFacts(plain, num_parameters(config))


def _specs(args: GatewayArgs) -> Iterator[ModelSpec]:
    for model in args.models:
        yield model.spec
        if model.trial is not None:
            yield model.trial.spec
