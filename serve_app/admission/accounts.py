"""Counts the requests and tokens of each API key in this process, and refuses requests over the key's limits."""

from collections.abc import Callable
from contextvars import ContextVar
from math import ceil
from time import monotonic

from serve_app.admission.key_file import Limits
from serve_app.errors import Overloaded
from serve_app.observe.requests import record
from serve_app.observe.usage import Usage

# The account of the request in this context.
_calling: ContextVar["Account | None"] = ContextVar("account", default=None)


class Account:
    """One API key with its counts. Called on one event loop.

    The gateways share the limits of a key equally (docs/decisions/036).
    """

    def __init__(self, name: str, usage: Usage, num_gateways: Callable[[], int], clock: Callable[[], float] = monotonic) -> None:
        self.name, self.limits = name, Limits()
        self._usage, self._num_gateways, self._clock = usage, num_gateways, clock
        self._in_flight = 0
        self._spent, self._spent_at = 0.0, clock()  # used tokens; the number falls at the rate of the limit

    @property
    def most_requests(self) -> int | None:
        """The most requests of the key in flight in this process. None for no limit."""
        return self._share(self.limits.requests_in_flight)

    def enter(self, model: str | None) -> None:
        """Counts a request that begins. `leave` counts its end. Raises: Overloaded for a key over one of its limits."""
        self._check_tokens(model, 0)  # before the texts are tokenised
        if (most := self.most_requests) is not None and self._in_flight >= most:
            self.refused(model)
            raise Overloaded(1.0, f"the API key `{self.name}` has {self._in_flight} requests in flight; {self._told(most)}")
        self._in_flight += 1

    def leave(self) -> None:
        self._in_flight -= 1

    def spend(self, model: str, num_tokens: int) -> None:
        """Counts the tokens of a request's inputs. Raises: Overloaded if they exceed the key's remaining tokens.

        A request with more tokens than the limit needs the whole limit unused. The key then has used more than its limit.
        """
        self._check_tokens(model, num_tokens)
        self._usage.count(self.name, model, requests=1)
        self.add(model, num_tokens)

    def add(self, model: str, num_tokens: int) -> None:
        """Counts tokens that were not known before, such as an answer's. The key may then have used more than its limit."""
        if self._refilled() is not None:
            self._spent += num_tokens
        self._usage.count(self.name, model, tokens=num_tokens)

    def refused(self, model: str | None) -> None:
        """Counts a request that gets 429."""
        self._usage.count(self.name, model or "", refusals=1)

    def _check_tokens(self, model: str | None, num_tokens: int) -> None:
        most = self._refilled()
        if most is None:
            return
        over = self._spent + min(num_tokens, most) - most
        if over > 0:
            self.refused(model)
            raise Overloaded(60 * over / most, f"the API key `{self.name}` has used up its tokens per minute; {self._told(most)}")

    def _refilled(self) -> int | None:
        """Gives back the tokens of the time since the last call. Returns: the most tokens of the key. None for no limit."""
        now, most = self._clock(), self._share(self.limits.tokens_per_minute)
        self._spent = 0.0 if most is None else max(0.0, self._spent - (now - self._spent_at) * most / 60)
        self._spent_at = now
        return most

    def _share(self, limit: int | None) -> int | None:
        return None if limit is None else ceil(limit / self._num_gateways())

    def _told(self, most: int) -> str:
        """The limit, as text for a refusal."""
        num_gateways = self._num_gateways()
        return f"its limit is {most}" + (f" at each of {num_gateways} gateways" if num_gateways > 1 else "")


def calling() -> Account | None:
    """The account of the current request. None without API keys, and on routes that need no key."""
    return _calling.get()


def called_by(account: Account) -> None:
    """Sets the account of the current request. Each request runs in its own task, so nothing needs to reset it."""
    _calling.set(account)
    if (found := record.get()) is not None:
        found.key = account.name
