"""The `emberforge` command.

This module imports only the standard library: it must hide a key on the command line before slow imports begin.
"""

import os
import sys

from serve_app.cli.hidden import without_secrets


def main() -> None:
    """Runs the command. If the command line holds a key or a token, it first restarts the process without them.

    `ps` shows a command line to every user, and Ray keeps it with the job. The new process gets the secrets as environment
    variables instead.
    """
    arguments, secrets = without_secrets(sys.orig_argv)
    if secrets:
        os.execve(sys.executable, arguments, os.environ | secrets)  # noqa: S606
    from serve_app.cli.commands import run

    run()
