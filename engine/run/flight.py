"""A launched forward pass, and its output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.model.config import OutputName
from engine.schedule.stream import Token

Vectors = NDArray[np.float32]
NO_VECTORS: Vectors = np.empty((0, 1), dtype=np.float32)
NOTHING_CHOSEN: NDArray[np.int32] = np.empty((0, 4), dtype=np.int32)


class Ragged(Protocol):
    """One array for each sequence of a pass, by the sequence's row."""

    def __getitem__(self, row: int, /) -> NDArray[Any]: ...


@dataclass(frozen=True, slots=True)
class Output:
    """The output of one forward pass, on the host. It is the second of the engine's two central interfaces."""

    # [B, embedding_size]: pooled, cut to the sequence's dimensions (zeros follow), and normalised; or all NaN. B is the number of
    # sequences, or of pieces that end a sequence.
    vectors: Vectors
    ragged: Mapping[OutputName, Ragged] = field(default_factory=dict)  # other outputs that requests ask for
    device_s: float = 0.0  # seconds that the device took, by its own clock; 0 if not measured
    # The next token of each stream that got one, in the order of the pass. None if the logits are not finite.
    tokens: Sequence[Token | None] = ()
    # [n, 4]: the chosen tokens of a cohort's streams, in the form of `kernels.sample`.
    together: NDArray[np.int32] = field(default_factory=lambda: NOTHING_CHOSEN)
    # The scored tokens of each piece that asks for them, in the order of the pass. None if the logits are not finite.
    scores: Sequence[Sequence[Token] | None] = ()

    @property
    def finite(self) -> NDArray[np.bool_]:
        """[B]: False for a vector with values that are not finite."""
        return np.isfinite(self.vectors[:, 0])


class Flight(Protocol):
    """The result of `launch`: a pass that may still be running."""

    @property
    def done(self) -> bool:
        """Whether `wait` returns at once."""
        ...

    def synchronize(self) -> None:
        """Return when the pass has ended or failed."""
        ...

    def wait(self) -> Output:
        """Wait for the output. Raises: BackendError if this pass has failed, DeviceLost if later passes would fail, too."""
        ...


@dataclass(frozen=True, slots=True)
class Finished:
    """The flight of a pass that has ended when `launch` returns, as on the CPU."""

    output: Output
    done: bool = True

    def synchronize(self) -> None: ...

    def wait(self) -> Output:
        return self.output
