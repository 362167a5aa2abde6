"""A batch on its way through the device, and what comes out of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.model.config import OutputName

Vectors = NDArray[np.float32]


class Ragged(Protocol):
    """An array for each sequence of a pass, by its place; a list of them, or what they are cut from when asked for."""

    def __getitem__(self, row: int, /) -> NDArray[Any]: ...


@dataclass(frozen=True, slots=True)
class Output:
    """What one forward pass gives, on the host. The second of the engine's two thin waists."""

    vectors: Vectors  # [B, embedding_size]: pooled, cut (zeros follow) and normalised as each sequence's options say, or all NaN
    ragged: Mapping[OutputName, Ragged] = field(default_factory=dict)  # what was asked for besides

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
