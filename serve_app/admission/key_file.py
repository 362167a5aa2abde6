"""The file of API keys, and the commands that change it.

The file has a line for each key: `NAME sha256:HEX`, then the key's limits as `limit=value`, separated by spaces. The commands
record each change as a line of JSON in a second file beside the keys file.

The file stores the SHA-256 of a key. `emberforge keys add` makes keys of 256 random bits, which nobody can guess. A slow hash
such as scrypt would not protect such keys better, and would cost each request milliseconds. A key that you choose yourself for
`--api-key` should be equally random.
"""

import fcntl
import json
import os
import pwd
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final, Literal, cast, get_args

from cluster.settings import hash_key
from engine.errors import EmberError

_HEAD = "# API keys of emberforge. Each line has a name, a SHA-256 and limits. Made by `emberforge keys`.\n"
_LINE = re.compile(r"(?P<name>\S+)\s+sha256:(?P<digest>[0-9a-fA-F]{64})(?P<limits>(\s+\S+)*)")
# The same as `engine.options.Priority`. That module imports numpy, which would slow the commands down.
Priority = Literal["interactive", "batch"]
# The value that removes a limit.
NONE: Final = "none"


class KeysError(EmberError):
    """A keys file cannot be read or changed. The text names the file and the line."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a key. The fields' names are those in the file. None or an empty tuple means no limit."""

    models: tuple[str, ...] = ()
    tokens_per_minute: int | None = None
    requests_in_flight: int | None = None
    priority: Priority = "interactive"  # the highest one
    expires: datetime | None = None  # with a time zone

    def changed(self, given: Mapping[str, str]) -> "Limits":
        """These limits with the given values replaced. The values are texts as in the file, or `none`.

        Raises: ValueError naming the limit. It does not quote the value.
        """
        values: dict[str, Any] = {}
        for name, text in given.items():
            read, expected = _READERS[name]
            try:
                values[name] = getattr(Limits(), name) if text == NONE else read(text)
            except ValueError:
                raise ValueError(f"{name} is not {expected}") from None
        return replace(self, **values)

    def __str__(self) -> str:
        """The limits as text, as in the file."""
        given = [(each.name, getattr(self, each.name)) for each in fields(self)]
        return " ".join(f"{name}={_text(value)}" for name, value in given if value != getattr(Limits(), name))


@dataclass(frozen=True, slots=True)
class Key:
    """A line of the file."""

    name: str
    hashed: str  # as `sha256:HEX`
    limits: Limits = Limits()

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.hashed.removeprefix("sha256:"))


def read_keys(file: Path) -> dict[str, Key]:
    """The keys of a file by name. Raises: KeysError naming the wrong line."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise KeysError(
            f"the keys file {file} cannot be read ({error}); make one with: emberforge keys add NAME --file {file}"
        ) from error
    keys: dict[str, Key] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:  # the error does not quote the line, because the line may contain a key as plain text
            raise KeysError(f"{file}, line {number} is not `NAME sha256:HEX LIMITS`; use `emberforge keys add` and `remove`")
        if match["name"] in keys:
            raise KeysError(f"{file}, line {number}: the key {match['name']!r} is in the file twice; remove one of the lines")
        given = dict(each.partition("=")[::2] for each in match["limits"].split())
        if unknown := set(given) - set(_READERS):
            raise KeysError(f"{file}, line {number}: {len(unknown)} limits are unknown; limits are {', '.join(_READERS)}")
        try:
            limits = Limits().changed(given)
        except ValueError as error:
            raise KeysError(f"{file}, line {number}: {error}") from None
        keys[match["name"]] = Key(match["name"], "sha256:" + match["digest"].lower(), limits)
    return keys


def add_key(file: Path, name: str, given: Mapping[str, str] | None = None) -> str:
    """Adds a new key with these limits, and returns the key. The file holds only its hash.

    Raises: KeysError, also for a key that has expired already. `limit_key` may end a key with such a time.
    """
    if not name or name.startswith("#") or any(char.isspace() for char in name):
        raise KeysError(f"{name!r} cannot be a key's name: a name must not be empty, contain spaces or begin with #")
    given = given or {}
    limits = _changed(Limits(), given)
    if limits.expires is not None and limits.expires <= (now := datetime.now(UTC)):
        raise KeysError(f"expires {given['expires']!r} has passed: it is {_text(now)}; give a later time")
    key = "ef-" + secrets.token_urlsafe(32)
    with _changing(file):
        keys = read_keys(file) if file.exists() else {}
        if name in keys:
            raise KeysError(f"{file} already has a key {name!r}; choose another name, or remove that key first")
        _record(file, "add", name, limits)
        _write_keys(file, [*keys.values(), Key(name, hash_key(key), limits)])
    return key


def limit_key(file: Path, name: str, given: Mapping[str, str]) -> Limits:
    """Changes these limits of a key. Returns: all limits of the key. Raises: KeysError if the file has no key of that name."""
    with _changing(file):
        keys = read_keys(file)
        key = _existing(file, keys, name)
        limits = _changed(key.limits, given)
        _record(file, "limit", name, limits, before=key.limits)
        _write_keys(file, (keys | {name: replace(key, limits=limits)}).values())
    return limits


def remove_key(file: Path, name: str) -> None:
    """Removes a key. Raises: KeysError if the file has no key of that name."""
    with _changing(file):
        keys = read_keys(file)
        key = _existing(file, keys, name)
        _record(file, "remove", name, key.limits)
        _write_keys(file, (each for each in keys.values() if each is not key))


def read_time(text: str) -> datetime:
    """Reads a time in the form of the file. Raises: KeysError."""
    try:
        return _time(text)
    except ValueError:
        raise KeysError(f"{text!r} is not {_READERS['expires'][1]}") from None


def audit_file(file: Path) -> Path:
    """The path of the record of changes of a keys file."""
    file = file.resolve()
    return file.with_name(file.name + ".audit.jsonl")


def _existing(file: Path, keys: Mapping[str, Key], name: str) -> Key:
    if name not in keys:
        raise KeysError(f"{file} has no key {name!r}; {'its keys are ' + ', '.join(keys) if keys else 'it has no keys'}")
    return keys[name]


def _changed(limits: Limits, given: Mapping[str, str]) -> Limits:
    """The limits with the values of a command. Raises: KeysError naming the limit and its value."""
    for name, text in given.items():
        try:
            limits = limits.changed({name: text})
        except ValueError as error:
            raise KeysError(f"{error}: {text!r}") from None
    return limits


@contextmanager
def _changing(file: Path) -> Iterator[None]:
    """Locks a folder, so that only one command at a time changes its files. Raises: KeysError."""
    try:
        folder = os.open(file.resolve().parent, os.O_RDONLY)
    except OSError as error:
        raise KeysError(f"the keys file {file} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _record(file: Path, action: str, name: str, limits: Limits, before: Limits | None = None) -> None:
    """Records a change before it is made. If this fails, the change is not made. Raises: KeysError."""
    entry = {"at": _text(datetime.now(UTC)), "user": _user(), "host": socket.gethostname(), "action": action, "key": name}
    if sudo_user := os.environ.get("SUDO_USER"):
        entry["sudo_user"] = sudo_user
    entry["limits"] = str(limits)
    if before is not None:
        entry["before"] = str(before)
    path = audit_file(file)
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a", encoding="utf-8") as record:
            record.write(json.dumps(entry) + "\n")
    except OSError as error:
        raise KeysError(f"the record of changes {path} cannot be written: {error.strerror}; nothing was changed") from error


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user may have no name
        return str(os.getuid())


def _write_keys(file: Path, keys: Iterable[Key]) -> None:
    """Replaces the file atomically: a server that reads it at the same time gets the old content or the new content."""
    file = file.resolve()  # a symbolic link stays a link
    try:
        with NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, prefix=f".{file.name}.", delete=False) as new:
            new.write(_HEAD + "".join(f"{key.name} {key.hashed} {key.limits}".rstrip() + "\n" for key in keys))
        if file.exists():
            old = file.stat()
            os.chmod(new.name, old.st_mode & 0o777)
        os.replace(new.name, file)
    except OSError as error:
        raise KeysError(f"the keys file {file} cannot be written: {error.strerror}") from error


def _text(value: Any) -> str:
    """A limit's value as text, as in the file."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(each.strip() for each in text.split(","))
    if any(not each or any(char.isspace() for char in each) for each in names):
        raise ValueError
    return names


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise ValueError
    return int(text)


def _priority(text: str) -> Priority:
    if text not in get_args(Priority):
        raise ValueError
    return cast(Priority, text)


def _time(text: str) -> datetime:
    """Reads a time, or a date as the beginning of its day. A time without a time zone is in UTC."""
    time = datetime.fromisoformat(text)
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).replace(microsecond=0)


# By limit: the function that reads a value, and what the function expects.
_READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "models": (_names, "a list of models' names, separated by commas without spaces"),
    "tokens_per_minute": (_count, "a whole number over 0"),
    "requests_in_flight": (_count, "a whole number over 0"),
    "priority": (_priority, "interactive or batch"),
    "expires": (_time, "a date or a time such as 2027-01-31 or 2027-01-31T18:00:00Z"),
}
