"""The `emberforge` command."""

from serve_app.cli.commands import main

__all__ = ["main"]
