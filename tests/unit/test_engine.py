"""`Engine.embed`, the call of the library, without an engine loop and without a server."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emberforge import BackendError, Engine
from engine.errors import OutOfMemory
from engine.options import TokenIds
from engine.run.flight import Finished

BAD = 7


@pytest.fixture
def engine(tiny: Callable[..., Path]) -> Engine:
    return Engine.load(tiny("bert"), dtype="float32", device="cpu", max_batch_tokens=64)


def inputs(*lengths: int) -> list[list[int]]:
    return [list(range(10, 10 + length)) for length in lengths]


def test_nothing_has_no_vectors(engine: Engine) -> None:
    assert engine.embed([]).shape == (0, engine.config.embedding_size)


def test_many_passes_give_what_one_gives(engine: Engine) -> None:
    texts = inputs(3, 60, 9, 1, 30, 30, 64)
    together = engine.embed(texts, dimensions=8)
    np.testing.assert_allclose(together, np.concatenate([engine.embed([text], dimensions=8) for text in texts]), atol=1e-6)
    assert together.flags.c_contiguous


def test_what_does_not_fit_into_memory_is_split(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, passes = engine.runner.launch, list[int]()

    def little(sequences: Sequence[TokenIds], *arguments: Any) -> Any:
        if len(sequences) > 2:
            raise OutOfMemory("no room")
        passes.append(len(sequences))
        return launch(sequences, *arguments)

    expected = engine.embed(inputs(3, 4, 5, 6, 7))
    monkeypatch.setattr(engine.runner, "launch", little)
    np.testing.assert_allclose(engine.embed(inputs(3, 4, 5, 6, 7)), expected, atol=1e-6)
    assert sum(passes) == 5


@pytest.mark.parametrize("lengths", [(5, 6, 7), (40, 40, 7, 40)])
def test_an_input_that_is_not_finite_is_named(engine: Engine, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    launch = engine.runner.launch

    def spoiling(sequences: Sequence[TokenIds], *arguments: Any) -> Any:
        output = launch(sequences, *arguments).wait()
        if any(len(ids) == BAD for ids in sequences):
            output.vectors[:] = np.nan  # NaN also reaches neighbours in the same attention tile
        return Finished(output)

    monkeypatch.setattr(engine.runner, "launch", spoiling)
    with pytest.raises(BackendError, match=r"^input 2: the model gave a vector that is not finite"):
        engine.embed(inputs(*lengths))
