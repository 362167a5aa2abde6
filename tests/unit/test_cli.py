"""The command: its start time, and its one-line errors instead of tracebacks."""

import errno
import io
import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.serve
import torch
from ray.exceptions import RayActorError
from typer.main import get_command
from typer.testing import CliRunner

from cluster import machine_limits
from cluster.local_ray import free_port
from cluster.serve_progress import last_words
from engine.errors import InvalidInput, ModelError
from engine.model.config import GenerationConfig
from engine.options import SamplingOptions
from serve_app import app
from serve_app.cli import commands
from serve_app.cli.commands import cli
from serve_app.cli.devices import chosen_devices, show_only
from serve_app.cli.generate import Options, Writer, check_refused
from serve_app.cli.serve import (
    _address,
    _check_environment,
    _check_gateways,
    _check_machine,
    _check_port,
    _deploy,
    _for_this_machine,
    _in_one_sentence,
)
from serve_app.settings import Settings, SettingsError
from serve_app.version import VERSION

SERVE = "The deployment failed to start 3 times in a row. See controller logs for details. Error:\n"
TRACE = 'RuntimeError: Traceback (most recent call last):\n  File "engine.py", line 1, in load\n    raise ModelError(text)\n'


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([f"{SERVE}{TRACE}engine.errors.ModelError: config.json: 3 heads\n"], "config.json: 3 heads"),
        ([f"{SERVE}{TRACE}serve_app.settings.SettingsError: a: b"], "a: b"),
        ([f"{SERVE}{TRACE}torch.OutOfMemoryError: CUDA out of memory"], "torch.OutOfMemoryError: CUDA out of memory"),
        (["", f"{SERVE}{TRACE}ValueError: no"], "ValueError: no"),
        (["Running replicas are healthy."], ""),
        ([], ""),
    ],
)
def test_a_failed_start_is_told_in_the_replicas_own_last_words(messages: list[str], words: str) -> None:
    assert last_words(messages) == words


def started(error: BaseException, port: int) -> str:
    with pytest.raises(ModelError) as caught, _in_one_sentence(port):
        raise error
    return str(caught.value)


def test_whatever_ends_a_start_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    problems: list[str] = []
    monkeypatch.setattr(machine_limits, "problems", lambda: problems)
    port = free_port()
    traced = RuntimeError("Traceback\n  File x\nTimed out waiting for file /tmp/ray/port\n")
    assert started(traced, port) == "the server did not start: Timed out waiting for file /tmp/ray/port"
    assert started(TimeoutError(), port) == "the server did not start: TimeoutError"
    assert started(ModelError("as it is"), port) == "as it is"
    with socket.create_server(("127.0.0.1", port)):
        assert f"process {os.getpid()} (python) uses port {port} now" in started(traced, port)
        problems.append("/tmp has 0 MiB left")
        assert started(traced, port).endswith("/tmp/ray/port; /tmp has 0 MiB left")


HAPROXY = """HAProxy crashed during startup: [NOTICE]   (1) : haproxy version is 2.8.25-5cf5d0683
[ALERT]    (1) : Binding [/a:52] for frontend prometheus: cannot bind socket (Address already in use) for [127.0.0.1:{}]
[ALERT]    (1) : [/bin/haproxy.main()] Some protocols failed to start their listeners! Exiting."""


@pytest.mark.parametrize("text", [HAPROXY, "Failed to bind to address '127.0.0.1:{}'."])
def test_a_port_that_another_process_took_during_the_start_is_told(text: str) -> None:
    port, taken = free_port(), free_port()
    error = RuntimeError(text.format(taken))
    with socket.create_server(("127.0.0.1", taken)):
        told = started(error, port)
        assert told.startswith(f"the server did not start: process {os.getpid()} (python) took port {taken}, which")
        assert told.endswith("; start again, and other ports are chosen")
        assert "choose another port with --port" in started(error, taken)


def deploy(monkeypatch: pytest.MonkeyPatch, error: Exception, status: Any) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(app, "run", fail)
    monkeypatch.setattr(ray.serve, "status", status)
    _deploy(Settings(), 2, 0)


def test_a_deploy_whose_controller_died_says_the_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def dead() -> None:
        raise RayActorError()

    with pytest.raises(TimeoutError, match="too long"):
        deploy(monkeypatch, TimeoutError("too long"), dead)
    failed = SimpleNamespace(deployments={"a": SimpleNamespace(message=f"{SERVE}{TRACE}ValueError: no")})
    with pytest.raises(ModelError, match=r"^the server did not start: ValueError: no$"):
        deploy(monkeypatch, RayActorError(), lambda: SimpleNamespace(applications={"a": failed}))


def test_a_full_disk_is_found_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_limits, "problems", lambda: ["/tmp has 3 MiB left", "/dev/shm has 1 MiB left"])
    with pytest.raises(SettingsError, match=r"^/tmp has 3 MiB left; /dev/shm has 1 MiB left$"):
        _check_machine()


def test_more_gateways_than_the_machine_can_run_are_refused() -> None:
    _check_gateways(8, num_cpus=2)
    _check_gateways(64, num_cpus=64)
    with pytest.raises(SettingsError, match=r"^gateways is 9, .* this machine has 2 cores: give at most 8$"):
        _check_gateways(9, num_cpus=2)


def test_doctor_shows_a_name_that_looks_like_markup() -> None:
    result = CliRunner().invoke(cli, ["doctor", "/no[/]thing"])
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert "model        /no[/]thing cannot be used" in result.output


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(cli, ["--version"])
    assert (result.exit_code, result.output) == (0, f"emberforge {VERSION}\n")


def test_a_full_disk_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(number: int) -> None:
        def raise_it(_arguments: list[str]) -> None:
            raise OSError(number, os.strerror(number), "/tmp/x")

        monkeypatch.setattr(commands, "cli", raise_it)

    fail(errno.ENOSPC)
    with pytest.raises(SystemExit):
        commands.run()
    assert capsys.readouterr().err.startswith("error: the disk is full for /tmp/x (No space left on device): free some space")
    fail(errno.EBADF)
    with pytest.raises(OSError, match="Bad file"):
        commands.run()


def test_a_plan_is_shown_in_a_locale_without_unicode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models, nodes = tmp_path / "models.yaml", tmp_path / "nodes.yaml"
    models.write_text("models: [{name: modèle, model: all-MiniLM-L6-v2}]", encoding="utf-8")
    nodes.write_text("nodes: [{name: a, ram_gib: 32}]")
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "ascii", write_through=True))
    monkeypatch.setattr(sys, "argv", ["emberforge", "plan", "--models", str(models), "--inventory", str(nodes)])
    with pytest.raises(SystemExit) as ended:
        commands.run()
    assert ended.value.code == 0
    assert rb"mod\xe8le" in shown.getvalue()


# Modules whose import takes a tenth of a second or more, including the modules that they import.
SLOW = {"torch", "ray", "grpc", "transformers", "starlette", "numpy", "huggingface_hub", "prometheus_client"}
COMMAND = """
import json, os, sys

def execve(program, arguments, environ):
    said = {"arguments": arguments, "key": environ.get("EMBERFORGE_API_KEY"), "modules": list(sys.modules)}
    print(json.dumps(said), flush=True)
    os._exit(0)

os.execve = execve
sys.orig_argv = ["python", *sys.argv]
from serve_app.cli import main
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print(json.dumps({"modules": list(sys.modules)}))
"""


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """What a new process reports at its end, or before it restarts itself. `modules` are the modules that it has imported."""
    script = tmp_path / "emberforge"
    script.write_text(COMMAND)
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, script, *arguments], env=environ, capture_output=True, text=True, check=True)
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["keys", "list"], ["serve", "--help"], ["plan", "--help"], ["node", "--help"]])
def test_a_command_imports_only_what_it_needs(tmp_path: Path, arguments: list[str]) -> None:
    file = tmp_path / "keys"
    file.write_text("# no key yet\n")
    modules = run(tmp_path, *arguments, *(["--file", str(file)] if "list" in arguments else []))["modules"]
    assert "typer" in modules
    assert SLOW & set(modules) == set()


def test_a_key_is_hidden_before_anything_slow_is_imported(tmp_path: Path) -> None:
    """Until the key is hidden, `ps` shows it."""
    said = run(tmp_path, "serve", "--api-key", "secret", "--port", "1")
    assert (said["key"], said["arguments"][-3:]) == ("secret", ["serve", "--port", "1"])
    assert (SLOW | {"pydantic", "typer", "rich", "yaml"}) & set(said["modules"]) == set()


@pytest.mark.slow
def test_the_public_import_is_light_and_has_the_engine() -> None:
    code = """
import sys
import emberforge
assert "torch" not in sys.modules
from emberforge import Engine, InvalidInput
import engine.engine, engine.errors
assert Engine is engine.engine.Engine and InvalidInput is engine.errors.InvalidInput
assert all(hasattr(emberforge, name) for name in emberforge.__all__)
try:
    emberforge.Motor
except AttributeError as error:
    assert str(error) == "module 'emberforge' has no attribute 'Motor'"
"""
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code], env=environ, check=True)


@pytest.mark.parametrize(
    ("given", "in_image", "host"),
    [
        ({}, False, "127.0.0.1"),
        ({}, True, "0.0.0.0"),
        ({"host": "0.0.0.0"}, False, "0.0.0.0"),
        ({"host": "192.0.2.1"}, False, "192.0.2.1"),
        ({"api_key": "secret"}, False, "0.0.0.0"),
    ],
)
def test_a_server_without_a_key_is_for_this_machine(
    given: dict[str, Any], in_image: bool, host: str, monkeypatch: pytest.MonkeyPatch, log_lines: Any
) -> None:
    if in_image:
        monkeypatch.setenv("EMBERFORGE_IMAGE", "1")
    assert _for_this_machine(Settings(**given)).host == host
    assert any("--host 0.0.0.0 opens" in each["message"] for each in log_lines()) == (host == "127.0.0.1")


def test_a_ray_without_a_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(SettingsError, match="RAY_AUTH_MODE is 'disabled'"):
        _check_environment()
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    _check_environment()


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("10.0.0.1", "http://10.0.0.1:8000"),
    ],
)
def test_the_servers_own_address_is_a_url(host: str, address: str) -> None:
    assert _address(Settings(host=host)) == address


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_in_use_is_named(host: str) -> None:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"cannot listen on {host}:{port} .*; choose another port with --port"):
            _check_port(host, port, "--port")
    _check_port(host, port, "--port")


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_of_another_machine_is_named(host: str) -> None:
    with pytest.raises(SettingsError, match=rf"cannot listen on {host}:8000 .*; choose an address of this machine with --host"):
        _check_port(host, 8000, "--port")


@pytest.mark.parametrize(
    ("given", "host", "said"),
    [
        ({}, "127.0.0.1", "listening on 127.0.0.1 only"),
        ({"host": "0.0.0.0"}, "0.0.0.0", "0.0.0.0 is open to the network: set --api-key, or --host 127.0.0.1"),
        ({"host": "::1"}, "::1", ""),
        ({"api_key": "k" * 40}, "0.0.0.0", ""),
    ],
)
def test_an_open_server_without_a_key_is_said(
    given: dict[str, str], host: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert _for_this_machine(Settings.model_validate(given)).host == host
    assert said in caplog.text if said else not caplog.text


def help_of(command: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The line of the help for each option and argument. The terminal is wide enough for one line each."""
    monkeypatch.setenv("COLUMNS", "1000")
    lines = CliRunner().invoke(cli, [command, "--help"], catch_exceptions=False).stdout.splitlines()
    rows = [line.strip("\u2502 ").split(None, 1) for line in lines if line.startswith("\u2502")]
    return {row[0].split(",")[0]: row[1] for row in rows if len(row) == 2}


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_help_tells_the_default_of_every_option(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A switch is off by default, and its help has no default. rich reads brackets as markup, and removes them."""
    shown = help_of(command, monkeypatch)
    options = [each for each in get_command(cli).commands[command].params if not getattr(each, "is_flag", False)]
    assert len(options) > 12
    for option in options:
        if (command, option.name) != ("chat", "prompt"):  # without a prompt, the chat begins at once
            assert "[default: " in shown[option.opts[0]], option.name


def test_the_help_tells_the_default_of_every_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = help_of("serve", monkeypatch)
    for name, field in Settings.model_fields.items():
        text = shown["[MODEL]..." if name == "models" else "--" + name.replace("_", "-")]
        assert "[default: " in text, name
        if field.default is not None and not isinstance(field.default, tuple):
            assert f"[default: {field.default}]" in text
    assert "[default: all-MiniLM-L6-v2]" in shown["[MODEL]..."]
    assert "[default: stdout]" in help_of("config", monkeypatch)["--output"]
    assert "[default: every chip" in help_of("kernels", monkeypatch)["--arch"]


def test_the_devices_are_the_first_gpu_or_those_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def chosen(devices: str, num_gpus: int) -> tuple[tuple[str, ...], str]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        return chosen_devices(devices.split(",") if devices else ()), capsys.readouterr().err

    assert chosen("", 0) == chosen("cpu", 0) == chosen("cpu", 1) == (("cpu",), "")
    assert chosen("0", 0) == (("cpu",), "this machine has no GPU: the CPU computes\n")
    assert chosen("", 1) == chosen("0", 2) == (("cuda:0",), "")
    assert chosen("1", 2) == chosen("01", 2) == (("cuda:1",), "")
    assert chosen("1,0", 2) == (("cuda:1", "cuda:0"), "")
    assert chosen("cpu,cpu", 2) == (("cpu", "cpu"), "")
    for devices, problem in {
        "0,1": "has 1 GPUs",
        "0,0": "a GPU is named twice",
        "0,cpu": "or cpu",
        "0,": "or cpu",
        "1": "has 1 GPUs",
        "x": "or cpu",
        "-1": "or cpu",
    }.items():
        with pytest.raises(InvalidInput, match=f"--devices {devices}: .*{problem}"):
            chosen(devices, 1)


def test_a_server_sees_the_devices_that_were_asked_for_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert show_only(("cuda:3", "cuda:1")) == ("0", "1")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,1"
    assert show_only(("cuda:1",)) == ("0",)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1", "numbers count only visible GPUs"
    assert show_only(("cpu", "cpu")) == ("cpu", "cpu")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_embers_other_options_are_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match=r"--memory-fraction is not supported: .*; leave it out"):
        check_refused(["generate", "-n", "3", "--memory-fraction=0.9"])
    check_refused(["generate", "-p", "--no", "--temp", "0"])
    check_refused(["serve", "--dump-dir", "x"])  # typer refuses this unknown option


@pytest.mark.parametrize(("flag", "name"), [("-n", "n_predict"), ("--ctx-size", "ctx_size"), ("--threads", "threads")])
def test_a_number_of_nothing_is_refused_before_the_model_loads(flag: str, name: str) -> None:
    with pytest.raises(InvalidInput, match=f"{flag} is 0, expected 1 or more"):
        Writer.load(Options(model="/nowhere", **{name: 0}))


def test_the_caller_wins_over_the_authors_and_they_over_the_default() -> None:
    usual = SamplingOptions(max_tokens=256, temperature=0.7, top_k=40)
    said = GenerationConfig(tied=True, eos_ids=(2,), temperature=0.5, top_k=20)
    chosen = usual.chosen(said, temperature=0.0, seed=None, presence_penalty=1.0)
    assert chosen == SamplingOptions(max_tokens=256, temperature=0.0, top_k=20, presence_penalty=1.0, stop_ids=(2,))
    assert usual.chosen(said, stop_ids=()).stop_ids == ()
