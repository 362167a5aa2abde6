"""The command that installs packages, for errors about packages that are missing."""

import shlex
import sys


def install(packages: str) -> str:
    """The command that installs packages for this Python. A bare `pip` may belong to another one."""
    return f"{shlex.quote(sys.executable)} -m pip install {packages}"
