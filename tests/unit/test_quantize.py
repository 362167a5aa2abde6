"""Quantised vectors: sentence-transformers' own numbers, the default range, and the file of calibrated ranges."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cluster.catalogue import CATALOGUE
from engine.errors import InvalidInput, ModelError
from serve_app.compute.quantize import RANGES_FILE, check_dtype, quantize, read_ranges

# A model with vectors of four dimensions.
CONFIG = replace(CATALOGUE["sentence-transformers/all-MiniLM-L6-v2"], hidden_size=4)


def normalised(rows: int, dimensions: int, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((rows, dimensions)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["binary", "ubinary"])
def test_bits_equal_those_of_sentence_transformers(dtype: str) -> None:
    from sentence_transformers.util.quantization import quantize_embeddings  # takes seconds

    vectors = normalised(50, 64)
    vectors[0, :8] = [0.0, -0.0, 1e-30, -1e-30, 1, -1, 0, 1]
    ours, theirs = quantize(vectors, dtype, {}), quantize_embeddings(vectors, dtype)  # type: ignore[arg-type]
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours, theirs)
    assert int(quantize(vectors, "ubinary", {})[0, 0]) == 0b00101001


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_integers_equal_those_of_sentence_transformers(dtype: str) -> None:
    from sentence_transformers.util.quantization import quantize_embeddings  # takes seconds

    calibration, vectors = normalised(200, 48, seed=1), normalised(50, 48)
    ranges = np.stack([calibration.min(axis=0), calibration.max(axis=0)])
    ranges[:, 5] = 0.01  # a dimension that never varied
    ours = quantize(vectors, dtype, {48: ranges})  # type: ignore[arg-type]
    theirs = quantize_embeddings(vectors, dtype, ranges=ranges)  # type: ignore[arg-type]
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours, theirs)
    assert ours.min() == np.iinfo(ours.dtype).min  # some values lie outside the calibrated range
    assert ours.max() == np.iinfo(ours.dtype).max


@pytest.mark.parametrize("dimensions", [8, 64, 384, 4096])
def test_the_default_range_keeps_zero_signs_and_proportions(dimensions: int) -> None:
    reach = min(1.0, 8 / dimensions**0.5)
    vectors = np.zeros((1, dimensions), dtype=np.float32)
    vectors[0, :6] = [0.0, reach, -reach, reach / 2, -reach / 2, 2 * reach]
    assert quantize(vectors, "int8", {})[0, :6].tolist() == [0, 127, -127, 64, -63, 127]
    assert quantize(vectors, "uint8", {})[0, :3].tolist() == [128, 255, 1]
    real = normalised(20, dimensions)
    coarse = quantize(real, "int8", {}).astype(np.float32)
    cosines = (real * coarse).sum(axis=1) / np.linalg.norm(coarse, axis=1)
    assert cosines.min() > 0.999


def test_what_cannot_be_quantised_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="`ubinary` packs 8 dimensions into a byte, and 100 is not"):
        check_dtype("ubinary", 100, True, {})
    with pytest.raises(InvalidInput, match=r"normalised.*64 dimensions.*int8_ranges\.json"):
        check_dtype("int8", 64, False, {})
    check_dtype("int8", 64, False, {64: np.zeros((2, 64), dtype=np.float32)})
    check_dtype("binary", 64, False, {})
    check_dtype("float", 100, False, {})


def test_ranges_come_from_the_models_folder(tmp_path: Path) -> None:
    assert read_ranges(tmp_path, CONFIG) == {}
    (tmp_path / RANGES_FILE).write_text(json.dumps({"4": [[-1] * 4, [1] * 4], "2": [[0, 0], [0.5, 1]]}))
    ranges = read_ranges(tmp_path, CONFIG)
    assert sorted(ranges) == [2, 4]
    assert ranges[2].dtype == np.float32
    assert quantize(np.float32([[0.51, 0.5]]), "uint8", ranges).tolist() == [[255, 127]]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("{", r"int8_ranges\.json is not JSON"),
        ("[]", r"int8_ranges\.json must be a JSON object"),
        ('{"5": []}', "'5' is not a number of dimensions from 1 to 4"),
        ('{"all": []}', "'all' is not a number"),
        ('{"2": [[0, 0, 0], [1, 1, 1]]}', "2 must hold 2 minima"),
        ('{"2": [[0], [1, 1]]}', "2 must hold 2 minima"),
        ('{"2": [[0, 0], [1, -1]]}', "in order"),
        ('{"2": [[0, 0], [1, NaN]]}', "finite"),
        ('{"2": "x"}', "2 must hold"),
    ],
)
def test_a_bad_file_of_ranges_stops_the_start(tmp_path: Path, content: str, part: str) -> None:
    (tmp_path / RANGES_FILE).write_text(content)
    with pytest.raises(ModelError, match=part) as caught:
        read_ranges(tmp_path, CONFIG)
    assert RANGES_FILE in str(caught.value)
