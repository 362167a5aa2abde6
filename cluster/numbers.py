"""The types of numbers in the operators' files.

YAML reads yes, no, on and off as booleans. pydantic would take a boolean as 1 or 0, so `canary: yes` would mean 1 %.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected a number; YAML reads yes, no, on and off as booleans")
    return value


Int = Annotated[int, BeforeValidator(_no_boolean)]
Float = Annotated[float, BeforeValidator(_no_boolean)]
