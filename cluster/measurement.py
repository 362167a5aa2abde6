"""Stores the result of `emberforge doctor --measure` beside the node's record, and checks whether it is still valid."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from engine.model.config import DtypeName

What = Literal["embed", "decode", "prefill"]
_FILE = "measured.json"
# If other processes used more than this percentage of the GPU's or CPU's time, a measurement is not used.
BUSY_PERCENT = 10


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Circumstances(_Frozen):
    """The circumstances on which a measurement depends. If one changes, the rates may change."""

    card: str  # the GPU's name; without a GPU the CPU's name and the number of cores
    driver: str = ""  # the version of the GPU's driver
    torch: str
    kernels: str = ""  # a digest of our CUDA sources; empty without a GPU

    def changes(self, now: "Circumstances") -> list[str]:
        """The circumstances that have changed, as text."""
        named = {"card": "card", "driver": "driver", "torch": "torch", "kernels": "emberforge's kernels"}
        return [
            f"{words} {getattr(self, name) or 'none'} then and {getattr(now, name) or 'none'} now"
            for name, words in named.items()
            if getattr(self, name) != getattr(now, name)
        ]


class KernelResult(_Frozen):
    """Like `engine.measure.kernel_checks.Checked`. `error` is None if it is not finite."""

    kernel: str
    shape: str
    error: float | None
    tolerance: float
    problem: str | None = None
    is_right: bool


class DeviceRate(_Frozen):
    """`per_s`: FLOP/s of a GEMM of square matrices of `size`, else bytes/s of copies of `size` bytes."""

    what: Literal["GEMM", "copy", "host to device"]
    dtype: DtypeName | None = None
    size: int
    per_s: float


class ModelRate(_Frozen):
    """Tokens/s of our engine with a published model's shape and random weights.

    `streams` is 1 unless `what` is decode. `length` is the number of tokens of a stream in the middle of the measurement, of a
    prompt, or 0 for texts of mixed lengths. `predicted` is the prediction of a plan for such a card without this measurement.
    """

    model: str
    dtype: DtypeName
    what: What
    streams: int = 1
    length: int = 0
    tokens_per_s: float
    predicted: float


class Measurement(_Frozen):
    """The results of one run. `left_out` has a sentence for each part that was not measured."""

    measured_at: str  # UTC, ISO 8601
    emberforge: str
    circumstances: Circumstances
    capability: tuple[int, int] | None = None
    memory_gib: float
    free_gib: float  # at the start
    others_percent: int | None = None  # percentage of the device's time that other processes used before the start
    kernels: tuple[KernelResult, ...] = ()
    rates: tuple[DeviceRate, ...] = ()
    models: tuple[ModelRate, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def day(self) -> str:
        return self.measured_at[:10]

    @property
    def copy_per_s(self) -> float | None:
        """Bytes/s read and written."""
        return max((rate.per_s for rate in self.rates if rate.what == "copy"), default=None)

    def gemm_per_s(self, dtype: DtypeName) -> float | None:
        """FLOP/s of the largest size, which the chip's power limits, as in a model's passes."""
        rates = (rate for rate in self.rates if rate.what == "GEMM" and rate.dtype == dtype)
        largest = max(rates, key=lambda rate: rate.size, default=None)
        return None if largest is None else largest.per_s


def save(measurement: Measurement, home: Path) -> Path:
    """Writes the file atomically. Returns: its path."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = home / f"{_FILE}.part"
    part.write_text(measurement.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return part.replace(home / _FILE)


def usable(home: Path, now: Circumstances) -> tuple[Measurement | None, str | None]:
    """Returns: (the measurement that is valid for this machine now, the reason if there is none).

    Both are None if this machine was never measured.
    """
    again = "run emberforge doctor --measure there again"
    try:
        found = Measurement.model_validate_json((home / _FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, None
    except (OSError, ValidationError, ValueError):
        return None, f"its measurement cannot be read, so it is not used: {again}"
    if changes := found.circumstances.changes(now):
        return None, f"its measurement of {found.day} is not used ({'; '.join(changes)}): {again}"
    if (found.others_percent or 0) >= BUSY_PERCENT:
        busy = f"other processes used {found.others_percent} % of its time"
        return None, f"its measurement of {found.day} is not used ({busy}): {again} when they are idle"
    return found, None


def own_version() -> str:
    try:
        return version("emberforge")
    except PackageNotFoundError:
        return "unknown"
