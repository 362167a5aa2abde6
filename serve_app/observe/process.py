"""What each process of a server does first: its logs and its traces get their way out."""

from cluster import logs
from serve_app.observe import traces


def observe_process(name: str) -> None:
    """Raises: TracesError."""
    logs.set_up(name)
    traces.set_up(name)
