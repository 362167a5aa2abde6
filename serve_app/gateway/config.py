"""The `args` of the gateway's application, as `emberforge plan` writes them."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from cluster.model_spec import ModelSpec
from cluster.settings import ServerSettings

Asleep = Literal["wait", "refuse"]

# Tokens/s of a replica that has not measured its rate, if no plan predicts it. Only routing uses it.
GUESSED_TOKENS_PER_S = 1_000.0


class PoolRef(BaseModel):
    """One pool of a model. `name` is also the name of the pool's Serve application.

    The number of replicas is not a field, because Serve would replace all gateways at each change of the number.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    node_class: str
    tokens_per_s: float | None = Field(None, gt=0)  # of one replica, as the plan predicts; None without a plan
    sleeps: bool = False  # whether it has no replicas while no requests come

    @property
    def assumed_tokens_per_s(self) -> float:
        """The rate that routing uses for a replica until it has measured its own."""
        return self.tokens_per_s or GUESSED_TOKENS_PER_S


class Trial(BaseModel):
    """A new version of a model, which gets a share of the requests for a limited time."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    spec: ModelSpec
    pools: tuple[PoolRef, ...] = Field(min_length=1)
    percent: int = Field(ge=1, le=99)


class GatewayModel(BaseModel):
    """One model, and the pools that serve it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    spec: ModelSpec
    aliases: tuple[str, ...] = ()
    pools: tuple[PoolRef, ...] = Field(min_length=1)
    trial: Trial | None = None


class GatewayArgs(BaseModel):
    """The `args` of the gateway's application. A misspelt key is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    models: tuple[GatewayModel, ...] = Field(min_length=1)
    default: str
    asleep: Asleep = "wait"
    gateways: int = Field(1, ge=1)  # on one machine: the number of gateways that share `settings.max_concurrent_requests`
    settings: ServerSettings = ServerSettings()
