"""The command: how long it takes to begin, and what it says where others would print a traceback."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli.serve import _address, _check_environment, _check_port, _for_this_machine, _last_words
from serve_app.settings import Settings, SettingsError

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
    assert _last_words(messages) == words


# Modules that take a tenth of a second or more to import, alone or with what they import.
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
    """What a process of its own has imported at the command's end, or where it would start itself anew."""
    script = tmp_path / "emberforge"
    script.write_text(COMMAND)
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, script, *arguments], env=environ, capture_output=True, text=True, check=True)
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.parametrize("arguments", [["--help"], ["keys", "list"], ["serve", "--help"], ["plan", "--help"], ["node", "--help"]])
def test_a_command_imports_only_what_it_needs(tmp_path: Path, arguments: list[str]) -> None:
    file = tmp_path / "keys"
    file.write_text("# no key yet\n")
    modules = run(tmp_path, *arguments, *(["--file", str(file)] if "list" in arguments else []))["modules"]
    assert "typer" in modules
    assert SLOW & set(modules) == set()


def test_a_key_is_hidden_before_anything_slow_is_imported(tmp_path: Path) -> None:
    """`ps` shows the command line until then."""
    said = run(tmp_path, "serve", "--api-key", "secret", "--port", "1")
    assert (said["key"], said["arguments"][-3:]) == ("secret", ["serve", "--port", "1"])
    assert (SLOW | {"pydantic", "typer", "rich", "yaml"}) & set(said["modules"]) == set()


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
    given: dict[str, Any], in_image: bool, host: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if in_image:
        monkeypatch.setenv("EMBERFORGE_IMAGE", "1")
    assert _for_this_machine(Settings(**given)).host == host
    assert ("--host 0.0.0.0 opens" in capsys.readouterr().err) == (host == "127.0.0.1")


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
        with pytest.raises(SettingsError, match=rf"cannot listen on {host}:{port} .*; choose another with --port"):
            _check_port(host, port, "--port")
    _check_port(host, port, "--port")
