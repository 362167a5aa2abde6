"""A model of equal shares of the device for the large requests of an owner. It decides their order.

If the requests shared the device equally, they would end in a certain order. The queue computes them one after the other in that
order. Then no request ends later than with equal shares, and most of them end sooner. This is the Fair Sojourn Protocol
(E. Friedman and S. Henderson, "Fairness and efficiency in web server protocols", SIGMETRICS 2003).
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count


@dataclass(slots=True, order=True)
class Share:
    """A request's share."""

    end: float  # tokens that each share has had when this request ends
    number: int  # requests with the same end are in the order of arrival
    has_left: bool = field(default=False, compare=False)


class Shares:
    """The requests that would not have ended yet with equal shares. Some of them have ended."""

    def __init__(self) -> None:
        self._now = 0.0  # tokens that a share has had since the start
        self._shares: list[Share] = []  # a heap
        self._num = 0  # those in the heap that have not left
        self._numbers = count()

    def end_of(self, num_tokens: int) -> float:
        """The end of a request that arrives now."""
        return self._now + num_tokens

    def join(self, num_tokens: int) -> Share:
        share = Share(self.end_of(num_tokens), next(self._numbers))
        heappush(self._shares, share)
        self._num += 1
        return share

    def leave(self, share: Share) -> None:
        """Remove the share of a request that is cancelled."""
        if share.end > self._now and not share.has_left:
            share.has_left = True
            self._num -= 1

    def took(self, num_tokens: float) -> None:
        """Distribute tokens that the device has computed."""
        while self._num:
            first = self._shares[0]
            if first.has_left:
                heappop(self._shares)
                continue
            wanted = (first.end - self._now) * self._num
            if wanted > num_tokens:
                self._now += num_tokens / self._num
                return
            num_tokens -= wanted
            self._now = first.end
            heappop(self._shares)
            self._num -= 1
