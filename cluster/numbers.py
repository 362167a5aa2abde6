"""The types of numbers in the operators' files, and their upper limits.

YAML reads yes, no, on and off as booleans. pydantic would take a boolean as 1 or 0, so `canary: yes` would mean 1 %.

The limits are far above real values. Without them, the plan would loop for hours, or exceed 64-bit integers.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator

MOST = 100_000  # of replicas, streams, cards or cores
MOST_TOKENS = 10**9  # of a cache, a batch or an input
MOST_GIB = 10**6
MOST_RATE = 10**12  # tokens/s or Gbit/s
MOST_S = 10**9


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected a number; YAML reads yes, no, on and off as booleans")
    return value


Int = Annotated[int, BeforeValidator(_no_boolean)]
Float = Annotated[float, BeforeValidator(_no_boolean)]
