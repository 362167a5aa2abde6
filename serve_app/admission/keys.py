"""Finds the account of a request by its API key. A thread reads the keys file again when it changes (`key_file.py`)."""

import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, sleep

from cluster.settings import ServerSettings
from serve_app.admission.accounts import Account
from serve_app.admission.key_file import Key, KeysError, read_keys
from serve_app.errors import Unauthorized
from serve_app.observe.usage import Usage

log = logging.getLogger(__name__)

# Seconds between two checks of the keys file.
_LOOK_EVERY_S = 1.0
# If the file is missing at this many checks in a row, its keys are no longer valid. A program that replaces the file in two steps
# removes it for a moment.
_LOOKS_TO_BE_GONE = 2
# Seconds of a check after which the log reports that the storage does not answer.
_SILENT_S = 30.0
# The name of the key in `ServerSettings.api_key`. No key of a file has a name with a space.
ONE_KEY = "api key"


class Keys:
    """The valid keys. HTTP and gRPC of a process share one object. `account` is called on one event loop."""

    def __init__(
        self, one: str | None, file: Path | None, usage: Usage | None = None, num_gateways: Callable[[], int] = lambda: 1
    ) -> None:
        """Args:
            one: the hash of one more key, from `ServerSettings.api_key`.
            num_gateways: how many processes share the limits of each key.
        Raises: KeysError if the file is not a keys file.
        """
        self._one = [Key(ONE_KEY, one)] if one else []
        self._file, self._usage, self._num_gateways = file, usage or Usage(lambda *_: None, None), num_gateways
        self._accounts: dict[str, Account] = {}
        self._num_misses, self._reported = 0, ""
        self._looked_at = monotonic()
        self._seen = _signature(file) if file is not None and file.exists() else None
        self._keys = self._by_digest(read_keys(file).values() if file is not None else ())
        if file is not None:
            threading.Thread(target=_look_for_ever, args=[weakref.ref(self)], name="keys", daemon=True).start()

    @classmethod
    def of(
        cls, settings: ServerSettings, usage: Usage | None = None, num_gateways: Callable[[], int] = lambda: 1
    ) -> "Keys | None":
        """The keys in these settings. None if requests need no key."""
        if not settings.has_keys:
            return None
        file = Path(settings.api_keys_file) if settings.api_keys_file else None
        return cls(settings.api_key, file, usage, num_gateways)

    def account(self, headers: Iterable[tuple[bytes, bytes]]) -> Account:
        """The account of the key in the header `Authorization: Bearer KEY`. Header names are in lower case.

        Raises: Unauthorized without a valid key.
        """
        if self._file is not None and monotonic() - self._looked_at > _SILENT_S:
            self._report(f"{self._file} cannot be checked: its storage does not answer; the previous keys stay valid")
        given = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, text = given.partition(b" ")
        # The time of this look-up depends on the hash. That is harmless, because nobody can choose a key with a given hash.
        key = self._keys.get(hashlib.sha256(text.strip()).digest()) if scheme.lower() == b"bearer" else None
        if key is None:
            raise Unauthorized
        if key.limits.expires is not None and key.limits.expires <= datetime.now(UTC):
            raise Unauthorized(f"the API key `{key.name}` has expired; ask the server's operator for another one")
        account = self._accounts.get(key.name)
        if account is None:
            account = self._accounts[key.name] = Account(key.name, self._usage, self._num_gateways)
        account.limits = key.limits
        return account

    def look(self) -> None:
        """Reads the file again if it has changed. The previous keys stay valid while the file cannot be read or is invalid.

        The keys of a deleted file become invalid, because an operator deletes the file to stop its keys.
        """
        assert self._file is not None, "only a file is checked"
        try:
            self._look(self._file)
        except (FileNotFoundError, NotADirectoryError):
            self._num_misses += 1
            if self._num_misses >= _LOOKS_TO_BE_GONE:
                self._keys, self._seen = self._by_digest(()), None
                self._report(f"{self._file} was deleted: its keys are no longer valid")
        except OSError as error:
            self._report(f"{self._file} cannot be checked ({error.strerror}); the previous keys stay valid")
        self._looked_at = monotonic()

    def _look(self, file: Path) -> None:
        """Raises: OSError."""
        signature = _signature(file)
        self._num_misses = 0
        if signature == self._seen:
            return
        try:
            self._keys = self._by_digest(read_keys(file).values())
            self._reported = ""
            log.info("%s was read again", file)
        except KeysError as error:
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from None
            self._report(f"{error}; the previous keys stay valid")
        self._seen = signature

    def _by_digest(self, keys: Iterable[Key]) -> dict[bytes, Key]:
        return {key.digest: key for key in [*keys, *self._one]}

    def _report(self, problem: str) -> None:
        """Logs a problem once while it lasts."""
        if problem != self._reported:
            self._reported = problem
            log.error(problem)


def _look_for_ever(of: "weakref.ref[Keys]") -> None:
    while True:
        sleep(_LOOK_EVERY_S)
        if (keys := of()) is None:
            return
        try:
            keys.look()
        except Exception:  # without this thread a removed key would stay valid
            log.exception("the keys file could not be read")
        del keys


def _signature(file: Path) -> tuple[int, int, int]:
    """Values that change when the file's content changes. Raises: OSError."""
    stat = os.stat(file)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
