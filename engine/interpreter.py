"""Sets how often the threads of a process take turns in Python's interpreter."""

import sys

# Python's default is 5 ms. A thread waits that long for each other thread that computes in Python, and after each operation of a
# pass it waits again. Next to a busy event loop 300 operations took 10 s, and 21 ms with this interval (docs/decisions/025).
# A gateway's event loop waits for its tokenising threads (docs/decisions/065).
_SWITCH_INTERVAL_S = 0.0002


def switch_often() -> None:
    """Sets a short switch interval for this process."""
    sys.setswitchinterval(min(_SWITCH_INTERVAL_S, sys.getswitchinterval()))
