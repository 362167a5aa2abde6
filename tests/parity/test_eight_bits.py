"""Layers in 8 bits in plain torch: the accuracy of a real model's vectors, and the refusals."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import Engine, ModelError, devices
from engine.closeness import CLOSENESS
from engine.hub import EMBEDDED_MODEL
from engine.model.config import DtypeName
from engine.model.layers import gated
from loadtests.report import RESULTS
from loadtests.traces import ragged_texts, short_texts

_VALUES, _BEHIND_ATTENTION = r"(v_proj|value|value_proj|v_lin)\.weight$", r"(o_proj|attention\.output\.dense|out_lin)\.weight$"
TEXTS = [*ragged_texts(40, seed=0, median_words=40), *short_texts(40, seed=1)]


@pytest.mark.parametrize(("dtype", "least"), [("int8", 0.999), ("float8", 0.997)])
def test_a_real_models_vectors_stay_close_to_float32s(dtype: DtypeName, least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "LEAST_CAPABILITY", {})  # allows the dtype on a CPU
    exact = Engine.load(EMBEDDED_MODEL, dtype="float32", device="cpu").embed(TEXTS)
    found = Engine.load(EMBEDDED_MODEL, dtype=dtype, device="cpu").embed(TEXTS)
    cosines = (exact * found).sum(axis=1)
    assert cosines.mean() >= least
    assert abs(cosines.mean() - CLOSENESS[dtype].mean_cosine) < 0.5 * (1 - least)
    assert (np.abs(np.linalg.norm(found, axis=1) - 1) < 1e-5).all()


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "gemma3", "bert", "distilbert", "deberta"])
def test_values_of_any_size_fit_attentions_results(
    kind: str, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test multiplies V's columns by powers of two and divides the next matrix's columns by them. The model stays the same.

    In e4m3 without a scale for each column, values would be out of range or zero.
    """
    monkeypatch.setattr(devices, "LEAST_CAPABILITY", {})
    plain, uneven = tiny(kind), tmp_path / "model"
    shutil.copytree(plain, uneven)
    tensors = load_file(plain / "model.safetensors")
    num_kv_heads = json.loads((plain / "config.json").read_text()).get("num_key_value_heads", 4)
    for name in [each for each in tensors if re.search(_VALUES, each)]:
        layer = name.split(".attention.")[0].split(".self_attn.")[0] + "."
        (out,) = (each for each in tensors if each.startswith(layer) and re.search(_BEHIND_ATTENTION, each))
        rows, columns = len(tensors[name]), tensors[out].shape[1]
        factor = torch.exp2(torch.randint(-14, 15, (rows,), generator=torch.Generator().manual_seed(0)).float())
        tensors[name] *= factor[:, None]
        if (bias := name.removesuffix("weight") + "bias") in tensors:
            tensors[bias] *= factor
        tensors[out] /= factor.view(num_kv_heads, 1, -1).expand(-1, columns // rows, -1).flatten()
    save_file(tensors, uneven / "model.safetensors", metadata={"format": "pt"})
    exact = Engine.load(plain, dtype="float32", device="cpu").embed(TEXTS)
    same, even, found = (
        Engine.load(folder, dtype=dtype, device="cpu").embed(TEXTS)
        for folder, dtype in ((uneven, "float32"), (plain, "float8"), (uneven, "float8"))
    )
    np.testing.assert_allclose(same, exact, atol=1e-4)
    lost, lost_uneven = (1 - (exact * each).sum(axis=1).mean() for each in (even, found))
    assert 0 < lost < 0.02
    assert lost_uneven < 1.3 * lost


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_up_of_any_size_fits_swiglus_results(
    kind: str, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test multiplies up's rows by powers of two and divides down's columns by them. The model stays the same."""
    monkeypatch.setattr(devices, "LEAST_CAPABILITY", {})
    plain, uneven = tiny(kind), tmp_path / "model"
    shutil.copytree(plain, uneven)
    tensors = load_file(plain / "model.safetensors")
    for name in [each for each in tensors if each.endswith("up_proj.weight")]:
        factor = torch.exp2(torch.randint(-14, 15, (len(tensors[name]),), generator=torch.Generator().manual_seed(0)).float())
        tensors[name] *= factor[:, None]
        tensors[name.replace("up_proj", "down_proj")] /= factor
    save_file(tensors, uneven / "model.safetensors", metadata={"format": "pt"})
    exact = Engine.load(plain, dtype="float32", device="cpu").embed(TEXTS)
    even, found = (Engine.load(folder, dtype="float8", device="cpu").embed(TEXTS) for folder in (plain, uneven))
    lost, lost_uneven = (1 - (exact * each).sum(axis=1).mean() for each in (even, found))
    assert 0 < lost < 0.02
    assert lost_uneven < 1.3 * lost


def test_rows_of_gate_and_up_in_turn_lose_as_little(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs have the rows in turn. On those before Hopper, SwiGLU's results get a scale for each row."""
    monkeypatch.setattr(devices, "LEAST_CAPABILITY", {})
    folder = tiny("qwen3")
    exact = Engine.load(folder, dtype="float32", device="cpu").embed(TEXTS)
    apart = Engine.load(folder, dtype="float8", device="cpu").embed(TEXTS)
    monkeypatch.setattr(gated, "runs_on", lambda weight: True)
    in_turn = Engine.load(folder, dtype="float8", device="cpu").embed(TEXTS)
    lost, lost_in_turn = (1 - (exact * each).sum(axis=1).mean() for each in (apart, in_turn))
    assert not np.array_equal(apart, in_turn)
    assert 0 < lost_in_turn < 1.3 * lost


def test_info_says_what_was_measured() -> None:
    rows: list[dict[str, Any]] = []
    for name in ("eight_bits", "four_bits_cpu"):
        rows += json.loads((RESULTS / f"{name}.json").read_text())["tables"]["Beside float32"]
    measured = {row["dtype"]: (row["mean cosine"], row["top-10 overlap"]) for row in rows if row["dtype"] in CLOSENESS}
    said = {dtype: (each.mean_cosine, each.top_10_overlap) for dtype, each in CLOSENESS.items()}
    assert {dtype: pytest.approx(values, abs=1e-4) for dtype, values in measured.items()} == said


@pytest.mark.parametrize(
    ("kind", "dtype", "is_slower"), [("bert", "int8", True), ("bert", "float8", False), ("qwen3", "int8", False)]
)
def test_a_model_that_8_bits_make_slower_says_so(
    tiny: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    dtype: DtypeName,
    is_slower: bool,
) -> None:
    monkeypatch.setattr(devices, "LEAST_CAPABILITY", {})
    folder = tiny(kind)
    Engine.load(folder, dtype=dtype, device="cpu")
    assert (f"{folder}: BERT models of hidden size 384 or less are slower in int8 than in bfloat16" in caplog.text) == is_slower


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


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "least"), [("int8", 0.999), ("float8", 0.997)])
def test_on_a_gpu_too(dtype: DtypeName, least: float) -> None:
    if torch.cuda.get_device_capability() < devices.LEAST_CAPABILITY[devices.DTYPES[dtype]]:
        pytest.skip(f"this GPU has no {dtype}")
    exact = Engine.load(EMBEDDED_MODEL, dtype="float32", device="cpu").embed(TEXTS)
    assert (exact * Engine.load(EMBEDDED_MODEL, dtype=dtype, device="cuda").embed(TEXTS)).sum(axis=1).mean() >= least
