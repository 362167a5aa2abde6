"""Every setting, read once from file, environment and command line (later wins) into one frozen model."""

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from engine.devices import DtypeName
from engine.errors import EmberError
from engine.hub import EMBEDDED_MODEL, split_revision
from engine.model.config import Backend, Pooling

ENV_PREFIX = "EMBERFORGE_"
_NOT_SETTINGS = ("EMBERFORGE_CONFIG", "EMBERFORGE_HOME", "EMBERFORGE_KERNEL_CACHE")  # read elsewhere, and for all commands
IDLE_PROMPTS = (
    "{model} has prompts ({names}) that a text gets only where its request says so, with prompt_name or input_type; "
    "choose one for all other texts with default_prompt_name, or none with an empty default_prompt"
)
_HASHED = re.compile(r"sha256:[0-9a-f]{64}")
_DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}


class SettingsError(EmberError):
    """A setting is unknown or has a value that cannot be used; names it, the value and the way out."""


def _split(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _dtype(value: Any) -> Any:
    return _DTYPE_ALIASES.get(value, value) if isinstance(value, str) else value


def _pooling(value: Any) -> Any:
    return value.replace("-", "_") if isinstance(value, str) else value


def _api_key(value: Any) -> Any:
    """A key in clear -> the line a keys file would have of it: settings travel through Serve's configuration and dashboard."""
    if not isinstance(value, str) or _HASHED.fullmatch(value):
        return value
    if not value.strip():
        raise ValueError("it is empty, which would lock everyone out; leave it away to serve everyone")
    return hash_key(value.strip())  # of a file or a variable, often with its line end


def hash_key(key: str) -> str:
    """What is kept of an API key."""
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def _path(value: Any) -> Any:
    return str(Path(value).expanduser().absolute()) if isinstance(value, str | Path) else value


Dtype = Annotated[Literal["auto", DtypeName], BeforeValidator(_dtype)]
Names = Annotated[tuple[str, ...], BeforeValidator(_split)]


class Settings(BaseModel):
    """What the operator chose. Field descriptions are the help of the command line and the README's table."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    models: Names = Field(
        (EMBEDDED_MODEL,), description="Models to serve: local folders or Hub ids; the default needs no network", min_length=1
    )
    served_model_name: Names = Field((), description="Names clients use, one per model [default: the model's own]")
    host: str = Field("0.0.0.0", description="Address to listen on")  # noqa: S104 - what a server in a container needs
    port: int = Field(8000, ge=1, le=65535, description="Port to listen on")
    grpc_port: int | None = Field(None, ge=1, le=65535, description="Port of TEI's gRPC services [default: none]")
    dtype: Dtype = Field(
        "auto",
        description="auto, float32, bfloat16 or float16; auto is bfloat16 where the chip has it; "
        "float8 or int8 for layers in 8 bits",
    )
    pooling: Annotated[Pooling | None, BeforeValidator(_pooling)] = Field(
        None, description=f"{', '.join(get_args(Pooling))} [default: what the model's folder says]"
    )
    backend: Backend = Field(
        "emberforge", description="Whose network runs: emberforge, or transformers for architectures we do not have, slower"
    )
    trust_remote_code: bool = Field(False, description="With backend transformers, run code that comes with a model")
    default_prompt_name: str | None = Field(
        None, description="The model's prompt for texts whose request asks for none [default: what the model's folder says]"
    )
    default_prompt: str | None = Field(
        None, description="The same, as a text; empty for none [default: what the model's folder says]"
    )
    max_batch_tokens: int | None = Field(None, ge=1, description="Token budget of one forward pass [default: by device]")
    max_input_tokens: int | None = Field(None, ge=1, description="Tokens of the longest input [default: the model's own limit]")
    num_threads: int | None = Field(None, ge=1, description="CPU threads of one replica [default: the cores Ray gives it]")
    max_concurrent_requests: int = Field(512, ge=1, description="Requests in flight per replica; more get 429")
    max_client_batch_size: int = Field(2048, ge=1, description="Inputs in one request; more get 422")
    payload_limit: int = Field(8_000_000, ge=1, description="Bytes of a request body; more get 413")
    auto_truncate: bool = Field(True, description="Cut inputs over the model's limit, where the request does not say")
    request_timeout_s: float = Field(60.0, gt=0, description="Seconds a request may take; then it is dropped with 504")
    api_key: Annotated[str | None, BeforeValidator(_api_key)] = Field(
        None, description="A key that requests must then carry; kept as its SHA-256 [default: requests need none]"
    )
    api_keys_file: Annotated[str | None, BeforeValidator(_path)] = Field(
        None, description="File of such keys, made by `emberforge keys`, read again when it changes [default: none]"
    )
    cors_allow_origin: Names = Field(("*",), description="Origins whose pages a browser lets call this server; * is any")

    cache_bytes: int = Field(
        0, ge=0, description="Bytes of vectors a replica keeps for inputs it has seen before; 0 for no cache"
    )

    @model_validator(mode="after")
    def _names_are_distinct(self) -> "Settings":
        if self.served_model_name and len(self.served_model_name) != len(self.models):
            raise ValueError(
                f"served_model_name has {len(self.served_model_name)} names for {len(self.models)} models; "
                "give one per model or none"
            )
        slugs = [pool_name(name) for name in self.names]
        if len(set(slugs)) != len(slugs):
            raise ValueError(f"models would share a name ({', '.join(slugs)}); tell them apart with served_model_name")
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> "Settings":
        if self.grpc_port == self.port:
            raise ValueError(f"port and grpc_port are both {self.port}; HTTP and gRPC need one each")
        return self

    @model_validator(mode="after")
    def _prompts_agree(self) -> "Settings":
        if self.default_prompt_name is not None and self.default_prompt is not None:
            raise ValueError("default_prompt_name and default_prompt are both set; a text gets one prompt, leave one out")
        return self

    @model_validator(mode="after")
    def _code_has_a_backend(self) -> "Settings":
        check_remote_code(self.backend, self.trust_remote_code)
        return self

    @property
    def grpc_options(self) -> dict[str, Any]:
        """What Ray Serve is told beside `http_options`; nothing where there is no gRPC."""
        if self.grpc_port is None:
            return {}
        servicers = ["serve_app.grpc.services.add_services"]
        return {"grpc_options": {"port": self.grpc_port, "grpc_servicer_functions": servicers}}

    @property
    def names(self) -> tuple[str, ...]:
        """The name clients use for each model."""
        return self.served_model_name or tuple(split_revision(model)[0] for model in self.models)


def check_remote_code(backend: Backend, trust_remote_code: bool) -> None:
    """Raises: ValueError where code is trusted that nothing would run."""
    if trust_remote_code and backend != "transformers":
        raise ValueError("trust_remote_code has no effect without backend transformers: our engine never runs a model's code")


def pool_name(name: str) -> str:
    """The part of a model's name that goes into a path: its last component, unusual characters as dashes."""
    last = name.rstrip("/").rsplit("/", 1)[-1]
    return "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in last) or "model"


def load_settings(
    flags: Mapping[str, Any],
    env: Mapping[str, str] = os.environ,
    config: Path | None = None,
    tei: Mapping[str, tuple[str, Any]] | None = None,
) -> Settings:
    """Merge TEI's variables, `config` (YAML), `EMBERFORGE_*` variables and `flags`; a flag that is None was not given.

    Args:
        tei: by setting, the variable of TEI's and its value (`cli/tei.py`); whatever is ours wins over it.
    Raises: SettingsError naming where the value stands, the value, and what is allowed.
    """
    known = Settings.model_fields
    sources: dict[str, str] = {}
    values: dict[str, Any] = {}
    for key, (source, value) in (tei or {}).items():
        sources[key], values[key] = source, value
    for key, value in _read_file(config).items():
        sources[key], values[key] = f"{key} in {config}", value
    for name, text in env.items():
        if name.startswith(ENV_PREFIX) and name not in _NOT_SETTINGS:
            key = name.removeprefix(ENV_PREFIX).lower()
            sources[key], values[key] = name, text
    for key, value in flags.items():
        if value is not None and value != []:
            sources[key], values[key] = "--" + key.replace("_", "-"), value
    unknown = [sources[key] for key in values if key not in known]
    if unknown:
        raise SettingsError(f"{unknown[0]} is not a setting; settings are {', '.join(known)}")
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        raise SettingsError(_explain(error, sources)) from None
    # A replica has another working directory; the model keeps the name it was given.
    folders = tuple(str(Path(model).resolve()) if Path(model).is_dir() else model for model in settings.models)
    names = settings.served_model_name if folders == settings.models else settings.names
    return settings.model_copy(update={"models": folders, "served_model_name": names})


def _read_file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SettingsError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(content, dict | None):
        raise SettingsError(f"--config {path} must hold `name: value` lines, one per setting")
    return content or {}


def _explain(error: ValidationError, sources: dict[str, str]) -> str:
    first = error.errors(include_url=False)[0]
    reason = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return reason
    key = str(first["loc"][0])
    hint = Settings.model_fields[key].description
    if key == "api_key":
        return f"{sources.get(key, key)}: {reason}. {key}: {hint}"
    return f"{sources.get(key, key)} = {first['input']!r}: {reason}. {key}: {hint}"
