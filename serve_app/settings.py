"""Reads the settings of `emberforge serve` once, from file, environment and command line, into one frozen model.

The command line overrides the environment. The environment overrides the file.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from cluster.files import load_yaml
from cluster.model_spec import ModelOptions, ModelSpec, pool_name
from cluster.numbers import Int
from cluster.settings import Names, ServerSettings
from engine.errors import EmberError
from engine.model_id import EMBEDDED_MODEL, is_path, split_revision

# The name of the gateways' application.
GATEWAY = "gateway"
ENV_PREFIX = "EMBERFORGE_"
# Variables with our prefix that are not settings. Other code reads them, for every command.
_NOT_SETTINGS = (
    "EMBERFORGE_CONFIG",
    "EMBERFORGE_HOME",
    "EMBERFORGE_IMAGE",
    "EMBERFORGE_KERNEL_CACHE",
    "EMBERFORGE_ON_ONE_MACHINE",
)


def _split_each(value: Any) -> Any:
    """Splits the values at commas. The command line gives a list with the value of each flag, and one value may hold several."""
    said = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(each, str) for each in said):
        return value
    return tuple(name.strip() for each in said for name in each.split(","))


Devices = Annotated[tuple[str, ...], BeforeValidator(_split_each)]


class SettingsError(EmberError):
    """A setting is unknown or has a wrong value. The text names the setting, the value and what to do."""


class Settings(ServerSettings, ModelOptions):
    """All settings of one server: its own settings, its models, and the options that all models share.

    The field descriptions are the help texts of the command line and of docs/settings.md.
    """

    models: Names = Field(
        (EMBEDDED_MODEL,), description="Models to serve: local folders or Hub ids; the default needs no network", min_length=1
    )
    served_model_name: Names = Field((), description="Names that clients use, one for each model [default: the model's own name]")
    gateways: Int | None = Field(
        None,
        ge=0,
        description="Number of gateways, the processes that take requests; with 0 the replicas of a single model take them "
        "[default: by cores and model]",
    )
    num_threads: Int | None = Field(None, ge=1, description="CPU threads of a replica [default: the cores that Ray gives it]")
    devices: Devices = Field(
        (),
        description="Numbers of the GPUs of this machine that share the layers of a decoder model, for example 0,1; "
        "or cpu [default: one GPU for each replica, or the CPU]",
    )

    @model_validator(mode="after")
    def _names_are_distinct(self) -> "Settings":
        if self.served_model_name and len(self.served_model_name) != len(self.models):
            raise ValueError(
                f"served_model_name has {len(self.served_model_name)} names for {len(self.models)} models; "
                "give one name for each model, or no names"
            )
        if self.gateways == 0 and len(self.models) > 1:
            raise ValueError("gateways is 0, but several models need a gateway: set 1 or more")
        if not all(name == "cpu" or (name.isascii() and name.isdigit()) for name in self.devices):
            raise ValueError(f"devices is {','.join(self.devices)}, expected the numbers of GPUs, or cpu, separated by commas")
        if self.devices and len(self.models) > 1:
            raise ValueError(f"devices is for one model, but there are {len(self.models)}: start a server for each model")
        slugs = [pool_name(name) for name in self.names]
        if len(set(slugs)) != len(slugs):
            raise ValueError(f"the models have the same name ({', '.join(slugs)}); give different names with served_model_name")
        if (len(slugs) > 1 or self.gateways) and GATEWAY in slugs:
            raise ValueError(
                f"{GATEWAY} is the name of the server's gateway and cannot be a model's name; choose another served_model_name"
            )
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The name clients use for each model."""
        return self.served_model_name or tuple(split_revision(model)[0] for model in self.models)

    @property
    def num_gateways(self) -> int:
        """The number of gateways. 0: the replicas of the only model take the requests."""
        return self.gateways if self.gateways is not None else int(len(self.models) > 1)

    @property
    def specs(self) -> tuple[ModelSpec, ...]:
        """Each model with its name and its options."""
        devices = tuple(name if name == "cpu" else f"cuda:{name}" for name in self.devices)
        return tuple(
            ModelSpec(name=name, model=model, devices=devices, **self.options)
            for model, name in zip(self.models, self.names, strict=True)
        )


def load_settings(
    flags: Mapping[str, Any],
    env: Mapping[str, str] = os.environ,
    config: Path | None = None,
    tei: Mapping[str, tuple[str, Any]] | None = None,
) -> Settings:
    """Merges TEI's variables, `config` (YAML), `EMBERFORGE_*` variables and `flags`, in this order; the later source wins.

    Args:
        flags: by setting; None for a flag that was not given.
        tei: by setting, the name of TEI's variable and its value (`cli/tei.py`).
    Raises: SettingsError naming the source of the value, the value, and the allowed values.
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
    # Folders become absolute, because a replica has another working directory. The model keeps the name it was given.
    folders = tuple(str(Path(model).expanduser().resolve()) if is_path(model) else model for model in settings.models)
    names = settings.served_model_name if folders == settings.models else settings.names
    return settings.model_copy(update={"models": folders, "served_model_name": names})


def _read_file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        content = load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SettingsError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(content, dict | None):
        raise SettingsError(f"--config {path} must have lines of the form `name: value`, one for each setting")
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
