"""The `emberforge` command.

This module imports only the standard library: a key on the command line must be hidden before slow imports begin.
"""

import os
import sys

from serve_app.cli.hidden import without_secrets


def main() -> None:
    """Runs the command. Starts the process anew first if the command line holds a key or a token.

    `ps` shows a command line to every user, and Ray keeps it with the job. The new command line has the secrets no more: they
    travel as environment variables.
    """
    arguments, secrets = without_secrets(sys.orig_argv)
    if secrets:
        os.execve(sys.executable, arguments, os.environ | secrets)  # noqa: S606
    from serve_app.cli.commands import run

    run()
