"""The settings of a server that hold for all of its models: addresses, limits, keys.

`serve_app.settings` adds the models and their options, and reads all of them. This module imports neither torch nor Ray.
"""

import hashlib
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

_HASHED = re.compile(r"sha256:[0-9a-f]{64}")


def _split(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _api_key(value: Any) -> Any:
    """Hashes a key that is given in clear, because Serve keeps the settings in its configuration and shows them.

    The hash has the form of a line in a keys file.
    """
    if not isinstance(value, str) or _HASHED.fullmatch(value):
        return value
    if not value.strip():
        raise ValueError("it is empty, which would lock everyone out; leave it away to serve everyone")
    return hash_key(value.strip())  # a key that comes from a file often ends with a newline


def hash_key(key: str) -> str:
    """The SHA-256 of an API key, as `sha256:HEX`."""
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def _path(value: Any) -> Any:
    return str(Path(value).expanduser().absolute()) if isinstance(value, str | Path) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_split)]


class ServerSettings(BaseModel):
    """The settings that gateways and replicas share. The field descriptions are the help texts of the command line."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field(  # `emberforge serve` takes 127.0.0.1 where neither an address nor a key is given
        "0.0.0.0",  # noqa: S104
        description="Address to listen on; `serve` without a key takes 127.0.0.1 unless told",
    )
    port: int = Field(8000, ge=1, le=65535, description="Port to listen on")
    grpc_port: int | None = Field(None, ge=1, le=65535, description="Port of TEI's gRPC services [default: none]")
    max_concurrent_requests: int = Field(
        512,
        ge=1,
        description="Requests in flight at a server, or at each gateway of a cluster; more get 429. `serve` with more than four "
        "gateways takes 128 for each of them unless told",
    )
    max_client_batch_size: int = Field(2048, ge=1, description="Inputs in one request; more get 422")
    payload_limit: int = Field(8_000_000, ge=1, description="Bytes of a request body; more get 413")
    auto_truncate: bool = Field(True, description="Cut inputs over the model's limit, where the request does not say")
    request_timeout_s: float = Field(
        60.0, gt=0, description="Seconds a request may take, or generated text until its first token; then 504"
    )
    send_timeout_s: float = Field(
        30.0, gt=0, description="Seconds that a client may leave a stream of events unread; then its connection is closed"
    )
    api_key: Annotated[str | None, BeforeValidator(_api_key)] = Field(
        None, description="A key that requests must then carry; kept as its SHA-256 [default: requests need none]"
    )
    api_keys_file: Annotated[str | None, BeforeValidator(_path)] = Field(
        None, description="File of such keys, made by `emberforge keys`, read again when it changes [default: none]"
    )
    cors_allow_origin: Names = Field(("*",), description="Origins whose pages a browser lets call this server; * is any")
    access_log: bool = Field(False, description="Write a log line for each request")
    cache_bytes: int = Field(
        0, ge=0, description="Bytes of vectors a replica keeps for inputs it has seen before; 0 for no cache"
    )
    share_cache_between_keys: bool = Field(
        False, description="Answer an API key from the cache with vectors of other keys' inputs; times then tell what others sent"
    )
    usage_log: Annotated[str | None, BeforeValidator(_path)] = Field(
        None, description="File that gets a line a minute for each API key and model, for `emberforge keys usage` [default: none]"
    )

    @model_validator(mode="after")
    def _ports_differ(self) -> "ServerSettings":
        if self.grpc_port == self.port:
            raise ValueError(f"port and grpc_port are both {self.port}; HTTP and gRPC need one each")
        return self

    @model_validator(mode="after")
    def _usage_has_keys(self) -> "ServerSettings":
        if self.usage_log is not None and not self.has_keys:
            raise ValueError("usage_log counts by API key, and there is none; give api_keys_file or api_key, or no usage_log")
        return self

    @property
    def has_keys(self) -> bool:
        """Whether requests need an API key."""
        return self.api_key is not None or self.api_keys_file is not None

    @property
    def grpc_options(self) -> dict[str, Any]:
        """The part of a Serve config that turns gRPC on. Empty without a gRPC port."""
        if self.grpc_port is None:
            return {}
        servicers = ["serve_app.grpc.services.add_services"]
        return {"grpc_options": {"port": self.grpc_port, "grpc_servicer_functions": servicers}}
