"""Finds or makes the token that all nodes of a cluster share. Anybody with the token can run code on every node."""

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.files import ClusterError


@dataclass(frozen=True, slots=True)
class Token:
    """The place of the token that all nodes of a cluster share. `file` is None if the variable RAY_AUTH_TOKEN holds it."""

    file: Path | None = None

    @property
    def variables(self) -> dict[str, str]:
        """The variables that Ray needs in addition to those that are already set."""
        return {"RAY_AUTH_MODE": "token"} | ({"RAY_AUTH_TOKEN_PATH": str(self.file)} if self.file else {})


def home_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of the token and of the node's record: EMBERFORGE_HOME, else ~/.emberforge."""
    return Path(environ.get("EMBERFORGE_HOME") or Path.home() / ".emberforge").expanduser().absolute()


def find_token(home: Path, environ: Mapping[str, str]) -> Token | None:
    """RAY_AUTH_TOKEN, else the file in RAY_AUTH_TOKEN_PATH, else our file. Raises: ClusterError for a file without a token."""
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
    """The existing token, or a new one in a file that only the owner can read."""
    found = find_token(home, environ)
    if found is not None:
        return found
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = home / "token"
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
        out.write(secrets.token_hex(32))
    return Token(file)


def worker_token(home: Path, environ: Mapping[str, str]) -> Token:
    """The existing token. Raises: ClusterError if there is none, because a new token would not be the head's."""
    found = find_token(home, environ)
    if found is None:
        raise ClusterError(f"this node has no token: copy the head's to {home / 'token'}, or set RAY_AUTH_TOKEN to it")
    return found


def client_environment() -> dict[str, str]:
    """The variables that a process on this machine needs to talk to the cluster. Raises: ClusterError without a token."""
    return worker_token(home_folder(), os.environ).variables
