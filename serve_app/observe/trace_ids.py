"""Decides whether a new trace is sampled, before a span exists.

OpenTelemetry's SDK first makes an id, a sampling result and a context, and then a span that records nothing. This takes 5 us, or
20 us among a request's other work. Most requests are not sampled, so their decision must cost less.
"""

from random import getrandbits

from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler, TraceIdRatioBased

_LIMIT = TraceIdRatioBased.TRACE_ID_LIMIT


class TraceIds(RandomIdGenerator):
    """Random ids for spans and traces. The id of a new trace can be drawn before its span."""

    # A drawn id is sampled if its lower half is below this bound: the rule of `TraceIdRatioBased`.
    _bound = _LIMIT + 1
    _drawn: int | None = None

    def heed(self, sampler: Sampler) -> None:
        """Takes the share of a sampler by ratio. With another sampler `is_dropped` is always False, so that the SDK asks it."""
        root = sampler._root if isinstance(sampler, ParentBased) else sampler
        if root is ALWAYS_OFF:
            self._bound = 0
        elif type(root) is TraceIdRatioBased:
            self._bound = root.bound

    def is_dropped(self) -> bool:
        """Draws the id of a new trace. True if the sampler would drop it. If it is False, the next new trace has this id."""
        drawn = getrandbits(128)
        if drawn & _LIMIT >= self._bound:
            return True
        self._drawn = drawn
        return False

    def generate_trace_id(self) -> int:
        drawn, self._drawn = self._drawn, None
        return drawn or super().generate_trace_id()
