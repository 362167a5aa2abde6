"""API keys: who may call, what is kept of a key, and the file that holds several.

What is kept is a key's SHA-256. `emberforge keys add` makes keys of 256 random bits: there is nothing to guess, so a hash that
is slow on purpose (scrypt) would protect them no better, and would cost every request milliseconds. A key of your own choice
for `--api-key` should be as random as those.
"""

import hashlib
import logging
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from hmac import compare_digest
from pathlib import Path
from tempfile import NamedTemporaryFile
from time import monotonic

from cluster.settings import ServerSettings, hash_key
from engine.errors import EmberError

log = logging.getLogger(__name__)

# How often a keys file is looked at, at most; it is read only when it has changed.
_LOOK_EVERY_S = 1.0
_HEAD = "# API keys of emberforge, a name and a SHA-256 a line. Made by `emberforge keys`.\n"
_LINE = re.compile(r"(?P<name>\S+)\s+sha256:(?P<digest>[0-9a-fA-F]{64})")


class KeysError(EmberError):
    """A keys file cannot be read or changed as asked; names it and the line."""


class Keys:
    """The keys that requests may carry. Called from one thread."""

    def __init__(self, one: str | None, file: Path | None) -> None:
        """Args:
            one: the hash of a key beside the file's, as `Settings.api_key` has it.
        Raises: KeysError where the file is not one of keys.
        """
        self._one = [_digest(one)] if one else []
        self._file = file
        self._seen = _signature(file)
        self._digests = self._one + (_read_digests(file) if file else [])
        self._looked_at = monotonic()

    @classmethod
    def of(cls, settings: ServerSettings) -> "Keys | None":
        """None where requests need no key."""
        if settings.api_key is None and settings.api_keys_file is None:
            return None
        return cls(settings.api_key, Path(settings.api_keys_file) if settings.api_keys_file else None)

    def admit(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether these raw headers, names in lower case, have one of the keys as `Authorization: Bearer KEY`."""
        if self._file is not None and monotonic() - self._looked_at > _LOOK_EVERY_S:
            self._look(self._file)
        given = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        digest = hashlib.sha256(key.strip()).digest()
        found = False
        for known in self._digests:  # all of them, whichever it is: how long that takes says nothing
            found |= compare_digest(digest, known)
        return found

    def _look(self, file: Path) -> None:
        """Read the file again if it has changed; while it is not one of keys, those it had stay."""
        self._looked_at = monotonic()
        signature = _signature(file)
        if signature == self._seen:
            return
        self._seen = signature
        try:
            self._digests = self._one + _read_digests(file)
            log.info("%s was read again", file)
        except KeysError as error:
            log.error("%s; the keys it had before stay valid", error)


def read_keys(file: Path) -> dict[str, str]:
    """Name -> hash (`sha256:HEX`) of every key in a file. Raises: KeysError naming the line that is none."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise KeysError(f"the keys file {file} cannot be read ({error}); make one with: emberforge keys add NAME") from error
    keys: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:  # the line is not shown: somebody may have put a key there in clear
            raise KeysError(f"{file}, line {number} is not `NAME sha256:HEX`; use `emberforge keys add` and `remove`")
        if match["name"] in keys:
            raise KeysError(f"{file}, line {number}: there is a key {match['name']!r} already; remove one of the lines")
        keys[match["name"]] = "sha256:" + match["digest"].lower()
    return keys


def add_key(file: Path, name: str) -> str:
    """A new key under `name`, which is returned and kept nowhere. Raises: KeysError."""
    keys = read_keys(file) if file.exists() else {}
    if not name or name.startswith("#") or any(char.isspace() for char in name):
        raise KeysError(f"{name!r} is no name of a key: it must not be empty, hold spaces or begin with #")
    if name in keys:
        raise KeysError(f"{file} has a key {name!r} already; choose another name, or remove it first")
    key = "ef-" + secrets.token_urlsafe(32)
    _write_keys(file, keys | {name: hash_key(key)})
    return key


def remove_key(file: Path, name: str) -> None:
    """Raises: KeysError where there is none of that name."""
    keys = read_keys(file)
    if name not in keys:
        raise KeysError(f"{file} has no key {name!r}; there is {', '.join(keys) or 'none'}")
    _write_keys(file, {other: value for other, value in keys.items() if other != name})


def _write_keys(file: Path, keys: Mapping[str, str]) -> None:
    """All at once: a server that looks meanwhile reads the old file or the new one."""
    file = file.resolve()  # a link stays one
    try:
        with NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, prefix=f".{file.name}.", delete=False) as new:
            new.write(_HEAD + "".join(f"{name} {value}\n" for name, value in keys.items()))
        if file.exists():
            old = file.stat()
            os.chmod(new.name, old.st_mode & 0o777)
        os.replace(new.name, file)
    except OSError as error:
        raise KeysError(f"the keys file {file} cannot be written: {error.strerror}") from error


def _read_digests(file: Path) -> list[bytes]:
    return [_digest(value) for value in read_keys(file).values()]


def _digest(value: str) -> bytes:
    return bytes.fromhex(value.removeprefix("sha256:"))


def _signature(file: Path | None) -> tuple[int, int, int] | None:
    """What changes when a file's content does; None where there is none."""
    try:
        stat = os.stat(file) if file is not None else None
    except OSError:
        return None
    return (stat.st_ino, stat.st_size, stat.st_mtime_ns) if stat else None
