"""systemd's unit: a stop lets the requests in flight finish."""

from configparser import ConfigParser

from typer.main import get_command

from loadtests.balancer import DEPLOY
from serve_app.cli.commands import cli
from serve_app.deployment import DRAIN_S


def test_a_stop_waits_for_the_requests_in_flight() -> None:
    """SIGTERM to all processes at once, systemd's default, ends the replicas before their requests."""
    unit = ConfigParser()
    unit.read(DEPLOY / "emberforge.service")
    service = unit["Service"]
    assert service["KillMode"] == "mixed"
    assert service.getint("TimeoutStopSec") > DRAIN_S + 15  # Serve and Ray stop after the last request
    program, command, _model = service["ExecStart"].split()
    assert program == f"{service['WorkingDirectory']}/.venv/bin/emberforge"
    assert command in get_command(cli).commands  # type: ignore[attr-defined]
