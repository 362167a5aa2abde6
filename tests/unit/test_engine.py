"""`Engine.embed`, the call of the library, without an engine loop and without a server."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_generators import folder_without_pooling

from emberforge import BackendError, Engine
from engine.errors import InvalidInput, OutOfMemory
from engine.options import SamplingOptions, TokenIds
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


@pytest.mark.parametrize(
    ("said", "eos_token", "ids"),
    [([7], None, (7,)), ([7], "[SEP]", (7, 3)), ([3, 7], "[SEP]", (3, 7)), ([7, 10**6], None, (7,)), (None, "[SEP]", (3,))],
)
def test_what_ends_an_answer(
    tiny: Callable[..., Path], tmp_path: Path, said: list[int] | None, eos_token: str | None, ids: tuple[int, ...]
) -> None:
    """An id beyond the vocabulary would fail the passes of a request with min_tokens, which forbids these ids."""
    folder = folder_without_pooling(tiny, "qwen3_lm", tmp_path / "generates")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
    engine = Engine.load(folder, dtype="float32", device="cpu", cache_tokens=256)
    assert engine.config.generation is not None
    assert engine.config.generation.eos_ids == ids
    engine.generate([[5, 6]], SamplingOptions(3, min_tokens=2, stop_ids=engine.config.generation.eos_ids))
    with pytest.raises(InvalidInput, match="stop_ids has token 1000000"):
        engine.generate([[5, 6]], SamplingOptions(3, min_tokens=2, stop_ids=(10**6,)))
