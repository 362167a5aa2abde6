"""A forward pass on its way through the device, and its output."""

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
    """An array for each sequence of a pass, by the sequence's row."""

    def __getitem__(self, row: int, /) -> NDArray[Any]: ...


@dataclass(frozen=True, slots=True)
class Output:
    """The output of one forward pass, on the host. The second of the engine's two thin waists."""

    # [B, embedding_size]: pooled, cut to a sequence's dimensions (zeros follow), normalised; or all NaN. B counts the sequences,
    # or the pieces that end one.
    vectors: Vectors
    ragged: Mapping[OutputName, Ragged] = field(default_factory=dict)  # what requests ask for besides vectors
    device_s: float = 0.0  # seconds that the device took, by its own clock; 0 where nobody measured
    # The next token of each stream that got one, in the order of the pass; None where the logits are not finite.
    tokens: Sequence[Token | None] = ()
    # [n, 4]: what was chosen for the streams of a cohort, as `kernels.sample` gives it.
    together: NDArray[np.int32] = field(default_factory=lambda: NOTHING_CHOSEN)
    # The scored tokens of each piece that asks for them, in the order of the pass; None where the logits are not finite.
    scores: Sequence[Sequence[Token] | None] = ()

    @property
    def finite(self) -> NDArray[np.bool_]:
        """[B]: False where a vector's values are not finite."""
        return np.isfinite(self.vectors[:, 0])


class Flight(Protocol):
    """What `launch` returns: a pass that may still be running."""

    @property
    def done(self) -> bool:
        """Whether `wait` returns at once."""
        ...

    def synchronize(self) -> None:
        """Return when the pass has ended, well or not."""
        ...

    def wait(self) -> Output:
        """Wait for the output. Raises: BackendError when this pass failed, DeviceLost when every further one would."""
        ...


@dataclass(frozen=True, slots=True)
class Finished:
    """The flight of a pass that had ended when `launch` returned: a pass on the CPU."""

    output: Output
    done: bool = True

    def synchronize(self) -> None: ...

    def wait(self) -> Output:
        return self.output
