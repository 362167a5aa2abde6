"""TEI's command line and environment: the effect of each option, and the order of sources."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.cli import tei
from serve_app.cli.hidden import without_secrets
from serve_app.settings import Settings, SettingsError, load_settings


def settings_of(flags: Mapping[str, Any], env: Mapping[str, str]) -> Settings:
    given = tei.translate(flags, env)
    ours = {name: value for name, value in flags.items() if name in Settings.model_fields}
    return load_settings(ours | given.flags, env, tei=given.variables)


def test_a_containers_environment_is_enough() -> None:
    env = {
        "MODEL_ID": "org/x",
        "REVISION": "refs/pr/2",
        "PORT": "80",
        "HOSTNAME": "3f2a9c1b77de",
        "DTYPE": "float16",
        "POOLING": "last-token",
        "MAX_CLIENT_BATCH_SIZE": "64",
        "MAX_BATCH_TOKENS": "8192",
        "AUTO_TRUNCATE": "false",
        "API_KEY": "secret",
        "CORS_ALLOW_ORIGIN": "https://a.example",
        "PAYLOAD_LIMIT": "",
    }
    settings = settings_of({}, env)
    assert settings.models == ("org/x@refs/pr/2",)
    assert settings.names == ("org/x",)
    assert (settings.host, settings.port, settings.dtype, settings.pooling) == ("0.0.0.0", 80, "float16", "last_token")
    assert (settings.max_client_batch_size, settings.max_batch_tokens, settings.auto_truncate) == (64, 8192, False)
    assert settings.api_key is not None
    assert settings.cors_allow_origin == ("https://a.example",)


def test_others_variables_mean_nothing_unless_the_model_is_named_teis_way() -> None:
    env = {"PORT": "80", "API_KEY": "somebody else's", "DTYPE": "int3", "HF_API_TOKEN": "t"}
    assert settings_of({"models": ["org/x"]}, env) == Settings(models=("org/x",))
    assert settings_of({"models": ["org/x"]}, env | {"MODEL_ID": ""}) == Settings(models=("org/x",))
    given = tei.translate({"models": ["org/x"]}, env)
    assert given.environment == {}
    # The note warns a user who expects that API_KEY protects the server.
    assert [note.partition(" ")[0] for note in given.notes] == ["API_KEY"]


def test_ours_win_over_teis_variables_and_flags_over_all(tmp_path: Path) -> None:
    env = {"MODEL_ID": "org/x", "PORT": "80", "EMBERFORGE_PORT": "81", "MAX_BATCH_TOKENS": "1"}
    assert settings_of({}, env).port == 81
    assert settings_of({"port": "82"}, env).port == 82
    file = tmp_path / "settings.yaml"
    file.write_text("max_batch_tokens: 2\n")
    given = tei.translate({}, env)
    assert load_settings(given.flags, env, file, tei=given.variables).max_batch_tokens == 2
    assert settings_of({"models": ["org/mine"]}, env).models == ("org/mine",)
    assert settings_of({"model_id": "org/mine"}, env).models == ("org/mine",)
    assert settings_of({}, env | {"EMBERFORGE_MODELS": "org/mine"}).models == ("org/mine",)


def test_teis_port_goes_with_teis_way_to_name_the_model() -> None:
    assert settings_of({"model_id": "org/x"}, {}).port == 3000
    assert settings_of({"model_id": "org/x"}, {"EMBERFORGE_PORT": "5"}).port == 5
    assert settings_of({"models": ["org/x"]}, {}).port == 8000


def test_a_hostname_counts_where_it_is_an_address() -> None:
    assert settings_of({}, {"MODEL_ID": "org/x", "HOSTNAME": "127.0.0.1"}).host == "127.0.0.1"
    assert settings_of({}, {"MODEL_ID": "org/x", "HOSTNAME": "::1"}).host == "::1"
    assert settings_of({}, {"MODEL_ID": "org/x", "HOSTNAME": "worker-7"}).host == "0.0.0.0"


def test_a_revision_goes_with_one_model() -> None:
    assert settings_of({"models": ["org/x"], "revision": "v1"}, {}).models == ("org/x@v1",)
    assert settings_of({"model_id": "org/x"}, {"REVISION": "v1"}).models == ("org/x@v1",)
    assert settings_of({"models": ["org/x"]}, {"MODEL_ID": "org/y", "REVISION": "v1"}).models == ("org/x",)
    with pytest.raises(SettingsError, match="MODEL@v1"):
        settings_of({"models": ["org/x", "org/y"], "revision": "v1"}, {})


@pytest.mark.parametrize(
    ("flags", "env", "parts"),
    [
        ({"models": ["org/x"], "model_id": "org/y"}, {}, ["named twice", "org/x", "org/y"]),
        ({"dense_path": "2_Dense"}, {}, ["--dense-path = '2_Dense'", "modules.json"]),
        ({"model_id": "org/x"}, {"DENSE_PATH": "2_Dense"}, ["DENSE_PATH = '2_Dense'"]),
        ({"model_id": "org/x", "pooling": "attention"}, {}, ["--pooling = 'attention'", "mean"]),
        ({}, {"MODEL_ID": "org/x", "PORT": "tcp://1.2.3.4:80"}, ["PORT = 'tcp://1.2.3.4:80'"]),
        ({}, {"MODEL_ID": "org/x", "API_KEY": ""}, ["API_KEY", "empty"]),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(flags: dict[str, Any], env: dict[str, str], parts: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        settings_of(flags, env)
    for part in parts:
        assert part in str(caught.value)


def test_what_has_no_effect_is_said_and_the_hubs_own_is_handed_on() -> None:
    flags = {"otlp_endpoint": "http://x:4318", "json_output": True, "hf_token": "t", "huggingface_hub_cache": "/cache"}
    given = tei.translate({"model_id": "org/x"} | flags, {"HF_TOKEN": "other", "HF_API_TOKEN": "old", "DISABLE_SPANS": "false"})
    assert given.environment == {"HF_TOKEN": "t", "HF_HUB_CACHE": "/cache", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318"}
    assert [note.split(" has ")[0] for note in given.notes] == ["--json-output"]
    environ = {"OTLP_ENDPOINT": "http://x:4318", "OTLP_SERVICE_NAME": "a", "OTEL_SERVICE_NAME": "b"}
    assert tei.translate({"model_id": "org/x"}, environ).environment == {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318"}
    assert tei.translate({"models": ["org/x"]}, environ).environment == {}
    assert tei.translate({"model_id": "org/x"}, {"HF_API_TOKEN": "old"}).environment == {"HF_TOKEN": "old"}
    assert tei.translate({"model_id": "org/x"}, {"HF_TOKEN": "new", "HF_API_TOKEN": "old"}).environment == {}


@pytest.mark.parametrize(
    ("given", "spelled"),
    [
        (["--auto-truncate"], ["--auto-truncate", "true"]),
        (["--auto-truncate", "--port", "1"], ["--auto-truncate", "true", "--port", "1"]),
        (["--trust-remote-code", "a/b"], ["--trust-remote-code", "true", "a/b"]),
        (["--access-log", "a/b"], ["--access-log", "true", "a/b"]),
        (["--auto-truncate", "false"], ["--auto-truncate", "false"]),
        (["--auto-truncate=false", "x"], ["--auto-truncate=false", "x"]),
    ],
)
def test_auto_truncate_is_taken_with_a_value_and_without(given: list[str], spelled: list[str]) -> None:
    assert tei.with_values(given) == spelled


def test_secrets_leave_the_command_line() -> None:
    line = ["python", "emberforge", "serve", "--api-key", "s1", "--port", "1", "--hf-token=s2=", "--json-output"]
    kept, secrets = without_secrets(line)
    assert kept == ["python", "emberforge", "serve", "--port", "1", "--json-output"]
    assert secrets == {"EMBERFORGE_API_KEY": "s1", "HF_TOKEN": "s2="}
    assert without_secrets(["serve", "--api-key"]) == (["serve", "--api-key"], {})  # the parser complains


@pytest.mark.slow
def test_the_command_line_takes_every_option_of_teis() -> None:
    command = [str(Path(sys.executable).parent / "emberforge"), "config"]
    for option in tei.OPTIONS:
        if not option.refused and option.name != "default-prompt":  # an error together with default-prompt-name
            value = {"port": "80", "dtype": "float16", "pooling": "last-token", "auto-truncate": "false"}.get(option.name, "7")
            command += [f"--{option.name}", value] if option.takes_value else [f"--{option.name}"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("EMBERFORGE_")}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load(done.stdout)
    assert config["http_options"] == {"host": "7", "port": 80}
    settings = config["applications"][0]["args"]["settings"]
    assert (settings["models"], settings["auto_truncate"], settings["pooling"]) == (["7@7"], False, "last_token")
    assert settings["api_key"].startswith("sha256:")
    assert "has no effect here" in done.stderr
