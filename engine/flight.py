"""A batch on its way through the device, and what comes out of it."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Output:
    """What one forward pass gives, on the host. The second of the engine's two thin waists."""

    vectors: Vectors  # [B, embedding_size]: pooled, cut (zeros follow) and normalised as each sequence's options say, or all NaN
    hidden: Vectors | None = None  # [T, hidden_size], only where asked for

    @property
    def finite(self) -> NDArray[np.bool_]:
        """[B]: False where a vector's values are not finite."""
        return np.isfinite(self.vectors[:, 0])


class Flight(Protocol):
    """Handed out by `launch`; the pass may still be running."""

    @property
    def landed(self) -> bool:
        """Whether `wait` returns at once."""
        ...

    def wait(self) -> Output:
        """The results. Raises: BackendError when this pass failed, DeviceLost when every further one would."""
        ...


@dataclass(frozen=True, slots=True)
class Landed:
    """A flight that was over when it began: a pass on the CPU."""

    output: Output
    landed: bool = True

    def wait(self) -> Output:
        return self.output
