"""Settings: the order of three sources, and errors that name the source, the value and what to do."""

import subprocess
from pathlib import Path

import pytest

from cluster.local_ray import SERVE_ENV
from cluster.model_spec import pool_name
from serve_app.app import ModelArgs, Share, deploy_config, machine_share
from serve_app.cli.serve import config
from serve_app.gateway.config import GatewayArgs
from serve_app.replica.pool import PoolArgs
from serve_app.settings import Settings, SettingsError, load_settings


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("port: 1000\ndtype: fp32\nmax_client_batch_size: 5\n")
    settings = load_settings(
        {"port": "3000", "dtype": None}, {"EMBERFORGE_PORT": "2000", "EMBERFORGE_DTYPE": "bf16", "PORT": "9"}, file
    )
    assert (settings.port, settings.dtype, settings.max_client_batch_size) == (3000, "bfloat16", 5)


def test_lists_come_from_flags_and_comma_separated_variables() -> None:
    flags = load_settings({"models": ["a", "b"], "served_model_name": ["x", "y"]}, {})
    variables = load_settings({}, {"EMBERFORGE_MODELS": "a,b", "EMBERFORGE_SERVED_MODEL_NAME": "x, y"})
    assert flags == variables
    assert flags.names == ("x", "y")


@pytest.mark.parametrize(
    ("flags", "env", "parts"),
    [
        ({"port": "0"}, {}, ["--port = '0'", "greater than or equal to 1"]),
        ({"port": True}, {}, ["--port = True", "expected a number"]),  # `port: yes` in a file
        ({"port": "x"}, {}, ["--port = 'x'", "valid integer"]),
        ({}, {"EMBERFORGE_MAX_BATCH_TOKENS": "-5"}, ["EMBERFORGE_MAX_BATCH_TOKENS = '-5'", "greater than or equal to 1"]),
        ({}, {"EMBERFORGE_PRT": "5"}, ["EMBERFORGE_PRT is not a setting", "port"]),
        ({"dtype": "int2"}, {}, ["--dtype = 'int2'", "float32"]),
        ({"pooling": "attention"}, {}, ["--pooling = 'attention'", "mean"]),
        ({"backend": "vllm"}, {}, ["--backend = 'vllm'", "transformers"]),
        ({"trust_remote_code": "true"}, {}, ["needs backend transformers"]),
        ({"models": ["a", "b"], "served_model_name": ["x"]}, {}, ["1 names for 2 models"]),
        ({"models": ["org/a", "other/a"]}, {}, ["have the same name", "served_model_name"]),
        ({"models": ["a", "org/gateway"]}, {}, ["gateway is the name", "served_model_name"]),
        ({"request_timeout_s": "0"}, {}, ["--request-timeout-s = '0'", "greater than 0"]),
        (
            {"default_prompt": "a"},
            {"EMBERFORGE_DEFAULT_PROMPT_NAME": "b"},
            ["default_prompt_name and default_prompt", "set only one"],
        ),
    ],
)
def test_a_bad_value_is_named_with_the_way_out(flags: dict[str, object], env: dict[str, str], parts: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(flags, env)
    for part in parts:
        assert part in str(caught.value)


def test_the_environment_of_other_parts_is_no_setting() -> None:
    others = {"EMBERFORGE_CONFIG": "a.yaml", "EMBERFORGE_HOME": "/x", "EMBERFORGE_KERNEL_CACHE": "/y"}
    assert load_settings({}, others) == load_settings({}, {})


@pytest.mark.parametrize("content", ["prot: 1\n", "- a\n", "a: [\n", "port: 1\nport: 2\n", "port: !!bool foo\n"])
def test_a_bad_file_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    with pytest.raises(SettingsError, match=r"settings\.yaml"):
        load_settings({}, {}, file)


def test_pool_names_are_safe_in_a_path() -> None:
    assert pool_name("Qwen/Qwen3-Embedding-0.6B") == "Qwen3-Embedding-0.6B"
    assert pool_name("/models/my model/") == "my-model"
    assert pool_name("ü/é") == "-"


def test_one_model_may_have_any_name() -> None:
    assert load_settings({"models": ["org/gateway"]}, {}).names == ("org/gateway",)


SHARE = Share(2, 1.0, 0, 100)


def test_the_written_config_gives_the_same_settings_back() -> None:
    settings = load_settings({"models": ["b/y"], "max_client_batch_size": "7", "dtype": "fp32"}, {})
    (application,) = deploy_config(settings, SHARE)["applications"]
    assert application["route_prefix"] == "/"
    args = ModelArgs.model_validate(application["args"])
    assert args.model == "b/y"
    assert args.settings == settings.model_copy(update={"num_threads": 2})


def test_several_models_are_pools_behind_one_address() -> None:
    settings = load_settings({"models": ["a/x", "b/y"], "max_client_batch_size": "7", "dtype": "fp32"}, {})
    *pools, front = deploy_config(settings, SHARE)["applications"]
    assert [each["route_prefix"] for each in pools] == [None, None]
    assert (front["name"], front["route_prefix"]) == ("gateway", "/")
    args = [PoolArgs.model_validate(each["args"]) for each in pools]
    assert [(each.pool, each.spec, each.num_threads) for each in args] == [
        ("x", settings.specs[0], 2),
        ("y", settings.specs[1], 2),
    ]
    gateway = GatewayArgs.model_validate(front["args"])
    assert gateway.default == "a/x"
    assert [(each.spec, each.pools[0].name) for each in gateway.models] == [(each.spec, each.pool) for each in args]
    assert {each.settings.max_client_batch_size for each in (*args, gateway)} == {7}


def test_one_model_behind_gateways() -> None:
    settings = load_settings({"models": ["b/y"], "gateways": "3"}, {})
    pool, front = deploy_config(settings, SHARE)["applications"]
    assert (pool["name"], pool["import_path"]) == ("y", "serve_app.replica.pool:build")
    assert front["deployments"][0]["num_replicas"] == 3
    assert GatewayArgs.model_validate(front["args"]).gateways == 3
    with pytest.raises(SettingsError, match="several models need a gateway"):
        load_settings({"models": ["a/x", "b/y"], "gateways": "0"}, {})
    with pytest.raises(SettingsError, match="gateway is the name of the server's gateway"):
        load_settings({"models": ["a/gateway"], "gateways": "1"}, {})


def test_a_misspelt_key_in_the_config_is_refused() -> None:
    with pytest.raises(ValueError, match="max_batch_token"):
        ModelArgs.model_validate({"model": "x", "settings": {"models": ["x"], "max_batch_token": 5}})


def test_a_machine_is_shared_between_models() -> None:
    assert machine_share(1, 8, 0) == Share(num_threads=8, num_cpus=4.0, num_gpus=0, max_surge_percent=100)
    assert machine_share(3, 2, 0).num_threads == 1
    assert machine_share(2, 8, 1) == Share(num_threads=1, num_cpus=1, num_gpus=0.5, max_surge_percent=0)
    for num_models, num_gpus, share in ((1, 4, 1.0), (2, 2, 1.0), (3, 2, 0.5), (3, 1, 0.3333), (5, 2, 0.3333)):
        assert machine_share(num_models, 8, num_gpus).num_gpus == share


def test_one_replica_gets_all_devices_of_a_model() -> None:
    assert machine_share(1, 8, 4, ("0", "1")).num_gpus == 2
    assert machine_share(1, 8, 4, ("cpu", "cpu")) == machine_share(1, 8, 0)
    settings = load_settings({"models": ["a/x"], "devices": "1, 0"}, {})
    assert settings.devices == ("1", "0")
    assert settings.specs[0].devices == ("cuda:1", "cuda:0")
    application = deploy_config(settings, machine_share(1, 8, 4, settings.devices))["applications"][0]
    assert application["deployments"][0]["ray_actor_options"]["num_gpus"] == 2
    assert ModelArgs.model_validate(application["args"]).settings.specs == settings.specs
    assert load_settings({"models": ["a/x"], "devices": ["cpu,cpu"]}, {}).devices == ("cpu", "cpu")
    assert load_settings({}, {"EMBERFORGE_DEVICES": "0"}).devices == ("0",)
    with pytest.raises(SettingsError, match="devices is for one model, but there are 2"):
        load_settings({"models": ["a/x", "b/y"], "devices": "0,1"}, {})
    with pytest.raises(SettingsError, match="devices is 0,gpu1, expected the numbers of GPUs, or cpu"):
        load_settings({"devices": "0,gpu1"}, {})


def test_a_folder_becomes_absolute_and_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "a.gguf").touch()
    monkeypatch.chdir(tmp_path)
    settings = load_settings({"models": ["./mine", "a.gguf", "org/other"]}, {})
    assert settings.models == (str(tmp_path / "mine"), str(tmp_path / "a.gguf"), "org/other")
    assert settings.names == ("./mine", "a.gguf", "org/other")


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().port = 5  # type: ignore[misc]


def test_a_shell_takes_the_environment_of_the_written_config(capsys: pytest.CaptureFixture[str]) -> None:
    """A user pastes these lines without the signs of a comment. A value may have spaces."""
    config(load_settings({}, {}), None)
    lines = [line.removeprefix("#   ") for line in capsys.readouterr().out.splitlines() if line.startswith("#   export ")]
    script = "\n".join(["set -e", *lines, "/usr/bin/env -0"])
    done = subprocess.run(["/bin/sh", "-c", script], env={}, capture_output=True, text=True, check=True)
    given = dict(each.split("=", 1) for each in done.stdout.split("\0") if each)
    assert SERVE_ENV.items() <= given.items()
