"""Layers in 8 bits, in plain torch: what a real model's vectors lose, and where they are refused."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import Engine, ModelError, devices
from engine.devices import CLOSENESS, DtypeName
from engine.hub import EMBEDDED_MODEL
from loadtests.report import RESULTS
from loadtests.traces import ragged_texts, short_texts

TEXTS = [*ragged_texts(40, seed=0, median_words=40), *short_texts(40, seed=1)]


@pytest.mark.parametrize(("dtype", "least"), [("int8", 0.999), ("float8", 0.997)])
def test_a_real_models_vectors_stay_close_to_float32s(dtype: DtypeName, least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "LEAST_CAPABILITY", {})  # on a CPU too, for this test
    exact = Engine.load(EMBEDDED_MODEL, dtype="float32", device="cpu").embed(TEXTS)
    found = Engine.load(EMBEDDED_MODEL, dtype=dtype, device="cpu").embed(TEXTS)
    cosines = (exact * found).sum(axis=1)
    assert cosines.mean() >= least
    assert abs(cosines.mean() - CLOSENESS[dtype].mean_cosine) < 0.5 * (1 - least)
    assert (np.abs(np.linalg.norm(found, axis=1) - 1) < 1e-5).all()


def test_info_says_what_was_measured() -> None:
    rows = json.loads((RESULTS / "eight_bits.json").read_text())["tables"]["Beside float32"]
    measured = {row["dtype"]: (row["mean cosine"], row["top-10 overlap"]) for row in rows if row["dtype"] in CLOSENESS}
    said = {dtype: (each.mean_cosine, each.top_10_overlap) for dtype, each in CLOSENESS.items()}
    assert {dtype: pytest.approx(values, abs=1e-4) for dtype, values in measured.items()} == said


@pytest.mark.parametrize("dtype", ["int8", "float8"])
def test_a_cpu_refuses_them(dtype: DtypeName) -> None:
    with pytest.raises(ModelError, match=rf"{dtype} needs a GPU of compute capability 8\.[09] or more, this is a CPU"):
        Engine.load(EMBEDDED_MODEL, dtype=dtype, device="cpu")


def test_a_matrix_of_another_shape_is_named(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "LEAST_CAPABILITY", {})
    with pytest.raises(ModelError, match=r"a matrix of 88 x 64 cannot be in 8 bits.*use bfloat16"):
        Engine.load(tiny("bert", intermediate_size=88), dtype="float8", device="cpu")


def test_another_networks_layers_are_not_ours_to_quantise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "LEAST_CAPABILITY", {})
    with pytest.raises(ModelError, match="leave out --backend transformers"):
        Engine.load(EMBEDDED_MODEL, dtype="int8", device="cpu", backend="transformers")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "least"), [("int8", 0.999), ("float8", 0.997)])
def test_on_a_gpu_too(dtype: DtypeName, least: float) -> None:
    if torch.cuda.get_device_capability() < devices.LEAST_CAPABILITY[devices.DTYPES[dtype]]:
        pytest.skip(f"this GPU has no {dtype}")
    exact = Engine.load(EMBEDDED_MODEL, dtype="float32", device="cpu").embed(TEXTS)
    assert (exact * Engine.load(EMBEDDED_MODEL, dtype=dtype, device="cuda").embed(TEXTS)).sum(axis=1).mean() >= least
