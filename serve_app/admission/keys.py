"""API keys: which requests have a valid one, and the file of keys.

The server stores the SHA-256 of a key. `emberforge keys add` makes keys of 256 random bits, which nobody can guess. A hash that
is slow on purpose (scrypt) would protect such keys no better, and would cost each request milliseconds. A key that you choose
yourself for `--api-key` should be as random.
"""

import fcntl
import hashlib
import logging
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from time import monotonic

from cluster.settings import ServerSettings, hash_key
from engine.errors import EmberError

log = logging.getLogger(__name__)

# The shortest time between two checks of the keys file. The file is read again if it has changed.
_LOOK_EVERY_S = 1.0
_HEAD = "# API keys of emberforge, a name and a SHA-256 a line. Made by `emberforge keys`.\n"
_LINE = re.compile(r"(?P<name>\S+)\s+sha256:(?P<digest>[0-9a-fA-F]{64})")


class KeysError(EmberError):
    """A keys file cannot be read or changed. The text names the file and the line."""


class Keys:
    """The valid keys. Called from one thread."""

    def __init__(self, one: str | None, file: Path | None) -> None:
        """Args:
            one: the hash of one more key, from `Settings.api_key`.
        Raises: KeysError if the file is not a keys file.
        """
        self._one = frozenset([_digest(one)] if one else ())
        self._file = file
        self._seen = _signature(file)
        self._digests = self._one | (_read_digests(file) if file else frozenset())
        self._looked_at = monotonic()

    @classmethod
    def of(cls, settings: ServerSettings) -> "Keys | None":
        """The keys of these settings. None if requests need no key."""
        if settings.api_key is None and settings.api_keys_file is None:
            return None
        return cls(settings.api_key, Path(settings.api_keys_file) if settings.api_keys_file else None)

    def admit(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether the headers have a valid key as `Authorization: Bearer KEY`. Header names are in lower case."""
        if self._file is not None and monotonic() - self._looked_at > _LOOK_EVERY_S:
            self._look(self._file)
        given = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        # The time of a look-up tells something about hashes. Nobody can choose a key by its hash.
        return hashlib.sha256(key.strip()).digest() in self._digests

    def _look(self, file: Path) -> None:
        """Read the file again if it has changed. The old keys stay valid while the file is not a keys file."""
        self._looked_at = monotonic()
        signature = _signature(file)
        if signature == self._seen:
            return
        self._seen = signature
        try:
            self._digests = self._one | _read_digests(file)
            log.info("%s was read again", file)
        except KeysError as error:
            log.error("%s; the keys it had before stay valid", error)


def read_keys(file: Path) -> dict[str, str]:
    """The hash (`sha256:HEX`) of each key in a file, by the key's name. Raises: KeysError naming the line at fault."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise KeysError(f"the keys file {file} cannot be read ({error}); make one with: emberforge keys add NAME") from error
    keys: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:  # the text does not quote the line: the line may contain a key in clear
            raise KeysError(f"{file}, line {number} is not `NAME sha256:HEX`; use `emberforge keys add` and `remove`")
        if match["name"] in keys:
            raise KeysError(f"{file}, line {number}: there is a key {match['name']!r} already; remove one of the lines")
        keys[match["name"]] = "sha256:" + match["digest"].lower()
    return keys


def add_key(file: Path, name: str) -> str:
    """Add a new key under `name`, and return the key. It is stored nowhere else. Raises: KeysError."""
    if not name or name.startswith("#") or any(char.isspace() for char in name):
        raise KeysError(f"{name!r} is no name of a key: it must not be empty, hold spaces or begin with #")
    key = "ef-" + secrets.token_urlsafe(32)
    with _changing(file):
        keys = read_keys(file) if file.exists() else {}
        if name in keys:
            raise KeysError(f"{file} has a key {name!r} already; choose another name, or remove it first")
        _write_keys(file, keys | {name: hash_key(key)})
    return key


def remove_key(file: Path, name: str) -> None:
    """Raises: KeysError if the file has no key of that name."""
    with _changing(file):
        keys = read_keys(file)
        if name not in keys:
            raise KeysError(f"{file} has no key {name!r}; there is {', '.join(keys) or 'none'}")
        _write_keys(file, {other: value for other, value in keys.items() if other != name})


@contextmanager
def _changing(file: Path) -> Iterator[None]:
    """One command at a time changes the files of a folder. Raises: KeysError."""
    try:
        folder = os.open(file.resolve().parent, os.O_RDONLY)
    except OSError as error:
        raise KeysError(f"the keys file {file} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _write_keys(file: Path, keys: Mapping[str, str]) -> None:
    """Replace the file in one step: a server that reads it meanwhile gets the old content or the new one."""
    file = file.resolve()  # a symbolic link stays a link
    try:
        with NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, prefix=f".{file.name}.", delete=False) as new:
            new.write(_HEAD + "".join(f"{name} {value}\n" for name, value in keys.items()))
        if file.exists():
            old = file.stat()
            os.chmod(new.name, old.st_mode & 0o777)
        os.replace(new.name, file)
    except OSError as error:
        raise KeysError(f"the keys file {file} cannot be written: {error.strerror}") from error


def _read_digests(file: Path) -> frozenset[bytes]:
    return frozenset(_digest(value) for value in read_keys(file).values())


def _digest(value: str) -> bytes:
    return bytes.fromhex(value.removeprefix("sha256:"))


def _signature(file: Path | None) -> tuple[int, int, int] | None:
    """Values that change when the file's content changes. None if there is no file."""
    try:
        stat = os.stat(file) if file is not None else None
    except OSError:
        return None
    return (stat.st_ino, stat.st_size, stat.st_mtime_ns) if stat else None
