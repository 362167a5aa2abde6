"""The settings of a server that hold for all of its models: addresses, limits, keys.

`serve_app.settings` adds the models and their options, and reads all of them. This module imports neither torch nor Ray.
"""

import hashlib
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from cluster.numbers import Float, Int

_HASHED = re.compile(r"sha256:[0-9a-f]{64}")


def _split(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _api_key(value: Any) -> Any:
    """Hashes a key that is given as plain text, because Serve keeps the settings in its configuration and shows them.

    The hash has the form of a line in a keys file.
    """
    if not isinstance(value, str) or _HASHED.fullmatch(value):
        return value
    if not value.strip():
        raise ValueError("the key is empty, and no request could match it; leave the setting out to serve everyone")
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

    host: str = Field(  # `emberforge serve` takes 127.0.0.1 if neither an address nor a key is given
        "0.0.0.0",  # noqa: S104
        description="Address to listen on; without an API key `serve` listens on 127.0.0.1 by default",
    )
    port: Int = Field(8000, ge=1, le=65535, description="Port to listen on")
    grpc_port: Int | None = Field(None, ge=1, le=65535, description="Port of TEI's gRPC services [default: none]")
    max_concurrent_requests: Int = Field(
        512,
        ge=1,
        description="The most requests in flight at a server, or at each gateway of a cluster; further requests get 429. "
        "The default of `serve` with more than four gateways is 128 for each gateway",
    )
    max_client_batch_size: Int = Field(2048, ge=1, description="The most inputs in a request; a request with more gets 422")
    payload_limit: Int = Field(8_000_000, ge=1, description="The most bytes of a request body; a larger body gets 413")
    auto_truncate: bool = Field(True, description="Truncate inputs over the model's limit if the request has no `truncate`")
    request_timeout_s: Float = Field(
        60.0,
        gt=0,
        description="Timeout of a request in seconds, for generated text until its first token; then the request gets 504",
    )
    send_timeout_s: Float = Field(
        30.0, gt=0, description="Seconds that a client may stop reading a stream; then the server closes the connection"
    )
    api_key: Annotated[str | None, BeforeValidator(_api_key)] = Field(
        None,
        description="The API key that every request needs; the server keeps only its SHA-256 [default: requests need no key]",
    )
    api_keys_file: Annotated[str | None, BeforeValidator(_path)] = Field(
        None, description="A file of API keys, made by `emberforge keys`; the server follows its changes [default: none]"
    )
    cors_allow_origin: Names = Field(
        ("*",), description="Origins of web pages that may call this server from a browser; * means all"
    )
    access_log: bool = Field(False, description="Write a log line for each request")
    cache_bytes: Int = Field(
        0, ge=0, description="Size in bytes of a replica's cache, which keeps vectors of earlier inputs; 0 for no cache"
    )
    share_cache_between_keys: bool = Field(
        False,
        description="All API keys share the cache. Times then show whether another key has sent the same input",
    )
    usage_log: Annotated[str | None, BeforeValidator(_path)] = Field(
        None,
        description="A file of usage by API key and model, one line per minute, for `emberforge keys usage`. "
        "It needs api_keys_file or api_key; otherwise the server does not start [default: none]",
    )

    @model_validator(mode="after")
    def _ports_differ(self) -> "ServerSettings":
        if self.grpc_port == self.port:
            raise ValueError(f"port and grpc_port are both {self.port}; HTTP and gRPC need different ports")
        return self

    @model_validator(mode="after")
    def _usage_has_keys(self) -> "ServerSettings":
        if self.usage_log is not None and not self.has_keys:
            raise ValueError("usage_log counts by API key, and there is no key; give api_keys_file or api_key, or no usage_log")
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
