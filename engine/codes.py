"""The forms of matrices in codes of 4 to 8 bits. No torch here, because gateways read checkpoints' configs."""

from dataclasses import dataclass
from typing import Literal

STRIP = 16  # rows of a matrix whose records are consecutive
_BITS = (4, 5, 6, 8)
MOST_BITS = max(_BITS)
PART_VALUES = 1 << 25  # of a head that are written out in 16 bits at a time
_GROUPS = (16, 32, 64, 128)  # columns that may share a scale
_LEAST_GROUP_WITH_MORE = 32  # if the group also has a zero or a min
_FLOATS = {4: "e2m1", 8: "e4m3"}  # by the bits of a code
E4M3_DIVISOR = 256  # codes of 8 bits stand for e4m3 / 256, so that fp16 holds the scales

Beside = Literal["zeros", "mins"]


@dataclass(frozen=True, slots=True)
class Form:
    """The format of a matrix's records."""

    group: int  # columns that share a scale
    bits: int = 4  # of a code
    beside: Beside | None = None  # what each group has besides its scale
    is_float: bool = False  # codes are numbers, in e2m1 or e4m3

    @property
    def chunk(self) -> int:
        """The columns of a record: 64, or one larger group."""
        return max(64, self.group)

    @property
    def record_bytes(self) -> int:
        return 2 * self.bits * self.chunk + 32 * self._numbers

    @property
    def slot_bytes(self) -> int:
        """The bytes of a record in shared memory, where each lane has a copy of its scales."""
        return 2 * self.bits * self.chunk + 128 * self._numbers

    @property
    def defines(self) -> dict[str, int]:
        return {
            "GROUP": self.group,
            "BITS": self.bits,
            "FLOATS": int(self.is_float),
            "ZEROS": int(self.beside is not None),
            "MINS": int(self.beside == "mins"),
        }

    def fits(self, n: int, k: int) -> bool:
        """Returns whether the kernels take a matrix [n, k] of this form."""
        if self.bits not in _BITS or self.group not in _GROUPS or n % STRIP or k % self.chunk:
            return False
        if self.is_float and self.bits not in _FLOATS:
            return False
        return self.beside is None or (self.group >= _LEAST_GROUP_WITH_MORE and self.bits < 8 and not self.is_float)

    def __str__(self) -> str:
        kind = _FLOATS[self.bits] if self.is_float else f"{self.bits} bits"
        return f"{kind}, groups of {self.group}{'' if self.beside is None else f', {self.beside}'}"

    @property
    def _numbers(self) -> int:
        """Scales, and zeros or mins, of a row in a record."""
        return self.chunk // self.group * (1 if self.beside is None else 2)
