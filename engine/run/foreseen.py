"""Which pass chose a token that the host does not know yet, and the CUDA event after which the first stage may read it."""

from collections import deque

import numpy as np
import torch

from engine.run.streams import Laid

# The number of last passes whose events are kept. Earlier passes have ended, because fewer are in flight.
_KEPT = 16


class Foreseen:
    """The passes that chose the last tokens of the cache's pages."""

    def __init__(self, num_pages: int) -> None:
        self._number = 0  # the number of passes so far
        self._chosen_by = np.zeros(num_pages, np.int64)  # for each page, the number of the pass that chose its last token
        self._events: deque[tuple[int, torch.cuda.Event]] = deque(maxlen=_KEPT)  # (number, its tokens are at the first stage)

    def event(self, laid: Laid) -> torch.cuda.Event | None:
        """The event after which the first stage has this pass's tokens that the host does not know. None if there are none."""
        pages = laid.foreseen_pages
        if not len(pages):
            return None
        number = self._chosen_by[pages].max()
        return next((event for its_number, event in self._events if its_number >= number), None)

    def chosen(self, laid: Laid, arrived: torch.cuda.Event) -> None:
        """The choice of a pass's tokens is queued. `arrived`: the event after which the first stage may read them."""
        self._number += 1
        self._chosen_by[laid.last_pages] = self._number
        self._events.append((self._number, arrived))
