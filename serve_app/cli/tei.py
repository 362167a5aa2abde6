"""Translates TEI's options and environment variables for `emberforge serve` and `config`. One table has all options.

A variable of TEI has the name of the flag in upper case (`--model-id`, `MODEL_ID`). Other programs also use names like PORT and
API_KEY. So we read TEI's variables only if `--model-id` or `MODEL_ID` names the model (docs/decisions/011).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

from serve_app.settings import Settings, SettingsError

# TEI's default address and port.
_DEFAULT_HOST, _DEFAULT_PORT = "0.0.0.0", 3000  # noqa: S104


@dataclass(frozen=True, slots=True)
class Option:
    """One option of TEI. It sets one of our settings or a variable of a library, or has no effect, or is refused."""

    name: str
    tei_default: str
    differs: str = ""  # the difference from TEI, for docs/coming-from/tei.md
    setting: str = ""  # our setting, if it has another name
    variable: str = ""  # the variable of a library that is set instead
    no_effect: str = ""  # why it has no effect
    refused: str = ""  # why it cannot be accepted
    takes_value: bool = True

    @property
    def env(self) -> str:
        return self.name.replace("-", "_").upper()

    @property
    def key(self) -> str:
        """The name of our setting for this option, if there is one."""
        return self.setting or self.name.replace("-", "_")


OPTIONS = (
    Option("model-id", "required", "names one model; `emberforge serve A B` names several", setting="models"),
    Option("revision", "none", "becomes `MODEL@REVISION`, a form that every option for a model accepts", setting="models"),
    Option("tokenization-workers", "cores", no_effect="the server tokenises short texts at once, and long ones with all cores"),
    Option("dtype", "float16 on a GPU", "default auto: bfloat16 if the chip supports it"),
    Option("served-model-name", "the model id"),
    Option("pooling", "the model's own"),
    Option("max-concurrent-requests", "512", "counts requests, not inputs"),
    Option("max-batch-tokens", "16384", "default measured on a GPU, 2048 on a CPU; a longer input is a batch of its own"),
    Option("max-batch-requests", "none", no_effect="only tokens limit a batch"),
    Option("max-client-batch-size", "32", "default 2048"),
    Option("auto-truncate", "true"),
    Option("default-prompt-name", "none"),
    Option("default-prompt", "none", "an empty text turns the model's own default off"),
    Option("dense-path", "2_Dense", refused="the engine always applies the Dense modules that the model's modules.json names"),
    Option("hf-token", "none", variable="HF_TOKEN"),
    Option("hf-api-token", "none", variable="HF_TOKEN"),
    Option("hostname", "0.0.0.0", "HOSTNAME counts only if it is an IP address", setting="host"),  # noqa: S104
    Option("port", "3000", "default 3000 too if the model is named with `--model-id` or MODEL_ID, else 8000"),
    Option("uds-path", "a temporary file", no_effect="the engine runs in the server's own process"),
    Option("huggingface-hub-cache", "none", variable="HF_HUB_CACHE"),
    Option("payload-limit", "2000000", "default 8000000"),
    Option("api-key", "none", "further keys in `--api-keys-file`"),
    Option("json-output", "off", no_effect="logs are JSON unless they go to a terminal", takes_value=False),
    Option("disable-spans", "off", no_effect="logs have no spans", takes_value=False),
    Option(
        "otlp-endpoint",
        "none",
        "OTLP over HTTP (usually port 4318) instead of gRPC",
        variable="OTEL_EXPORTER_OTLP_ENDPOINT",
    ),
    Option("otlp-service-name", "text-embeddings-inference.server", "default emberforge", variable="OTEL_SERVICE_NAME"),
    Option("prometheus-port", "9000", no_effect="metrics are at /metrics of the server's own port, as in TEI's HTTP build"),
    Option("cors-allow-origin", "any", "pages may send any header and read all headers of a response"),
)


@dataclass(slots=True)
class Given:
    """TEI's options, translated."""

    flags: dict[str, Any] = field(default_factory=dict)  # by setting
    variables: dict[str, tuple[str, str]] = field(default_factory=dict)  # by setting: the name and the value of the variable
    environment: dict[str, str] = field(default_factory=dict)  # variables for this process and its children
    notes: list[str] = field(default_factory=list)  # for the operator


def is_setting(option: Option) -> bool:
    """Whether the option sets one of our settings, under the same or another name."""
    return option.key in Settings.model_fields and option.name not in ("model-id", "revision")


def parameter_name(option: Option) -> str:
    """The name of the command's parameter for an option that is not one of our settings."""
    return option.name.replace("-", "_")


def translate(flags: Mapping[str, Any], env: Mapping[str, str]) -> Given:
    """Translates TEI's options from the command line and the environment.

    Args:
        flags: the value of every flag by parameter, TEI's and ours. None, False or [] means not given.
    Raises: SettingsError for an option that is not supported, or a model that is named twice.
    """
    given = Given()
    named = {option.name: value for option in OPTIONS if (value := flags.get(parameter_name(option))) and not is_setting(option)}
    as_tei = "model-id" in named or bool(env.get("MODEL_ID"))
    for option in OPTIONS:
        if option.name in named:
            _take(given, option, f"--{option.name}", named[option.name])
        elif as_tei and _counts(option, env):
            _take(given, option, option.env, env[option.env])
    _name_model(given, named, flags, env if as_tei else {})
    if as_tei:
        given.variables.setdefault("port", ("TEI's default port", str(_DEFAULT_PORT)))
        given.variables.setdefault("host", ("TEI's default address", _DEFAULT_HOST))
        read = [option.env for option in OPTIONS if _counts(option, env)]
        if read:
            given.notes.append(f"TEI's variables from the environment: {', '.join(read)}")
    elif "API_KEY" in env:
        given.notes.append("API_KEY is not read, because no model is named with --model-id; give --api-key or EMBERFORGE_API_KEY")
    return given


def with_values(arguments: Sequence[str]) -> list[str]:
    """Adds a value after every switch on the command line, because TEI accepts its switches without a value too."""
    spelled: list[str] = []
    for index, argument in enumerate(arguments):
        spelled.append(argument)
        following = arguments[index + 1] if index + 1 < len(arguments) else ""
        if argument in _SWITCHES and following.lower() not in _BOOLEANS:
            spelled.append("true")
    return spelled


_SWITCHES = ("--auto-truncate", "--trust-remote-code", "--access-log")
_BOOLEANS = ("true", "false", "1", "0", "yes", "no", "on", "off", "t", "f", "y", "n")


def _take(given: Given, option: Option, source: str, value: Any) -> None:
    if is_setting(option):
        given.variables[option.key] = (source, value)
    elif option.variable:
        given.environment.setdefault(option.variable, value)
    elif option.refused:
        raise SettingsError(f"{source} = {value!r}: {option.refused}")
    elif option.no_effect:
        given.notes.append(f"{source} has no effect here: {option.no_effect}")


def _counts(option: Option, env: Mapping[str, str]) -> bool:
    """Whether TEI's variable is set and used."""
    value = env.get(option.env)
    if value is None:
        return False
    if option.variable.startswith("HF_"):  # huggingface_hub reads its own variables; HF_API_TOKEN is not among them
        return option.name == "hf-api-token" and bool(value) and "HF_TOKEN" not in env
    if option.variable:  # OpenTelemetry's own variable has precedence
        return bool(value) and option.variable not in env
    if option.name == "hostname":  # in a container HOSTNAME is the container's id; TEI ignores it too
        return _is_address(value)
    if not option.takes_value:
        return value.lower() not in ("", "false", "0", "no", "off", "f", "n")
    return (
        bool(value) or option.name == "api-key"
    )  # an empty key is a mistake and raises later; other empty variables count as not given


def _name_model(given: Given, named: Mapping[str, Any], flags: Mapping[str, Any], env: Mapping[str, str]) -> None:
    """Translates `--model-id` and `--revision` into our `models`."""
    models = list(flags.get("models") or ())
    if "model-id" in named and models:
        raise SettingsError(f"the model is named twice: {', '.join(models)} and --model-id {named['model-id']}; name it once")
    if "model-id" in named:
        models = [named["model-id"]]
    revision = named.get("revision")
    if models:
        revision = revision or (env.get("REVISION") if "model-id" in named else None)
    elif env.get("MODEL_ID"):
        given.variables["models"] = ("MODEL_ID", _at(env["MODEL_ID"], revision or env.get("REVISION")))
        return
    if revision and len(models) != 1:
        raise SettingsError(f"--revision {revision} needs exactly one model; with several models write MODEL@{revision}")
    if models:
        given.flags["models"] = [_at(models[0], revision)] if revision else models


def _at(model: str, revision: str | None) -> str:
    return f"{model}@{revision}" if revision else model


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
