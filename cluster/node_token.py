"""The token that all nodes of a cluster share, and where a machine keeps it: who has it may run code on every node."""

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.files import ClusterError


@dataclass(frozen=True, slots=True)
class Token:
    """Where the token is that all nodes of a cluster share. `file` is None where RAY_AUTH_TOKEN holds it."""

    file: Path | None = None

    @property
    def variables(self) -> dict[str, str]:
        """What Ray must find in its environment, besides what is there already."""
        return {"RAY_AUTH_MODE": "token"} | ({"RAY_AUTH_TOKEN_PATH": str(self.file)} if self.file else {})


def home_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the token and the record of the node are kept: EMBERFORGE_HOME, else ~/.emberforge."""
    return Path(environ.get("EMBERFORGE_HOME") or Path.home() / ".emberforge").expanduser().absolute()


def find_token(home: Path, environ: Mapping[str, str]) -> Token | None:
    """RAY_AUTH_TOKEN, else the file RAY_AUTH_TOKEN_PATH names, else ours. Raises: ClusterError for a file without a token."""
    if environ.get("RAY_AUTH_TOKEN"):
        return Token()
    named = environ.get("RAY_AUTH_TOKEN_PATH")
    file = Path(named).expanduser().absolute() if named else home / "token"
    if not named and not file.exists():
        return None
    try:
        empty = not file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ClusterError(f"the token in {file} cannot be read ({error}): copy it from the head again") from error
    if empty:
        raise ClusterError(f"{file} holds no token: copy it from the head again, or remove it before you start a head")
    return Token(file)


def head_token(home: Path, environ: Mapping[str, str]) -> Token:
    """The token there is, or a new one that only its owner may read."""
    found = find_token(home, environ)
    if found is not None:
        return found
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = home / "token"
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
        out.write(secrets.token_hex(32))
    return Token(file)


def worker_token(home: Path, environ: Mapping[str, str]) -> Token:
    """Raises: ClusterError where there is none; a new one would be the wrong one."""
    found = find_token(home, environ)
    if found is None:
        raise ClusterError(f"this node has no token: copy the head's to {home / 'token'}, or set RAY_AUTH_TOKEN to it")
    return found


def client_environment() -> dict[str, str]:
    """What a process on this machine needs in its environment to talk to the cluster. Raises: ClusterError without a token."""
    return worker_token(home_folder(), os.environ).variables
