"""BGE-M3's three outputs against an independent implementation, in fp32 on a tiny random checkpoint."""

import json
import shutil
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from parity.bge_m3_reference import bge_m3, save_layers
from safetensors.torch import save_file

from engine import BackendError, Engine, InvalidInput, ModelError
from engine.heads.ragged import SPARSE
from engine.heads.tokens import LexicalHead
from engine.loop import EngineLoop
from engine.model.config import OutputName
from engine.model.folder import load_model_config
from engine.model.footprint import num_parameters
from engine.options import EmbedOptions
from engine.schedule.request import Request

LENGTHS = [1, 7, 64, 2, 33, 7, 128, 15]
NAMES: tuple[OutputName, ...] = ("colbert", "sparse", "tokens")
SUBSETS = [subset for size in (1, 2, 3) for subset in combinations(NAMES, size)]
SPECIALS = {"cls_token": "[CLS]", "eos_token": "[SEP]", "pad_token": "[PAD]", "unk_token": {"content": "[UNK]", "lstrip": False}}


@pytest.fixture
def folder(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    made = shutil.copytree(tiny("xlm_roberta"), tmp_path / "model")
    (made / "tokenizer_config.json").write_text(json.dumps(SPECIALS))
    save_layers(made, 64, 48)
    return made


def sequences() -> list[np.ndarray]:
    """Ids of few different tokens, so that many tokens repeat. Special tokens are among them, except 1: it has no position."""
    rng, few = np.random.default_rng(0), np.array([0, *range(2, 40)], dtype=np.int32)
    return [rng.choice(few, size=length) for length in LENGTHS]


@pytest.mark.parametrize("want", SUBSETS, ids=", ".join)
def test_any_of_the_outputs_come_out_of_one_pass(folder: Path, want: tuple[OutputName, ...]) -> None:
    engine, batch = Engine.load(folder, dtype="float32", device="cpu"), sequences()
    assert engine.config.outputs == ("tokens", "sparse", "colbert")
    output = engine.launch(batch, None, want).wait()
    assert set(output.ragged) == set(want)
    for row, ids in enumerate(batch):
        expected = bge_m3(folder, ids.tolist())
        np.testing.assert_allclose(output.vectors[row], expected.dense.numpy(), rtol=1e-4, atol=2e-5)
        if "sparse" in want:
            entries = output.ragged["sparse"][row]
            assert entries.dtype == SPARSE
            assert entries["index"].tolist() == sorted(expected.lexical)
            np.testing.assert_allclose(
                entries["value"], [expected.lexical[i] for i in sorted(expected.lexical)], rtol=1e-4, atol=2e-5
            )
        if "colbert" in want:
            np.testing.assert_allclose(output.ragged["colbert"][row], expected.colbert.numpy(), rtol=1e-4, atol=2e-5)
        if "tokens" in want:
            assert output.ragged["tokens"][row].shape == (len(ids), 64)


def test_jobs_of_one_pass_get_what_each_asked_for(folder: Path) -> None:
    engine, batch = Engine.load(folder, dtype="float32", device="cpu"), sequences()
    loop = EngineLoop(engine, 4096)
    wants: list[EmbedOptions] = [
        EmbedOptions(outputs=("sparse",)),
        EmbedOptions(),
        EmbedOptions(pooled=False, outputs=("sparse", "colbert")),
        EmbedOptions(outputs=("sparse",)),
    ]
    jobs = [Request(batch, options) for options in wants]
    loop.submit(jobs)
    results = [job.future.result(10) for job in jobs]
    loop.stop()
    assert [set(each.ragged) for each in results] == [{"sparse"}, set(), {"sparse", "colbert"}, {"sparse"}]
    assert results[2].vectors is None
    for result in (results[1], results[3]):
        np.testing.assert_allclose(result.vectors, results[0].vectors, atol=1e-6)
    for index, ids in enumerate(batch):
        expected = bge_m3(folder, ids.tolist())
        np.testing.assert_allclose(results[2].ragged["colbert"][index], expected.colbert.numpy(), rtol=1e-4, atol=2e-5)
        for result in (results[0], results[2], results[3]):
            assert result.ragged["sparse"][index]["index"].tolist() == sorted(expected.lexical)


def test_weights_that_are_not_finite_fail_who_asked_for_them(folder: Path) -> None:
    engine, batch = Engine.load(folder, dtype="float32", device="cpu"), sequences()
    head = engine.network.outputs["sparse"]
    assert isinstance(head, LexicalHead)
    assert head._layer.bias is not None
    with torch.inference_mode():
        head._layer.bias[:] = torch.nan
    loop = EngineLoop(engine, 4096)
    bad, good = Request(batch[1:2], EmbedOptions(outputs=("sparse",))), Request(batch[1:2], EmbedOptions())
    loop.submit([bad, good])
    with pytest.raises(BackendError, match="not finite"):
        bad.future.result(10)
    assert good.future.result(10).vectors.shape == (1, 64)
    loop.stop()


def test_layers_are_read_from_either_format_and_one_may_be_missing(folder: Path) -> None:
    plain = num_parameters(load_model_config(folder))
    tensors = torch.load(folder / "sparse_linear.pt", weights_only=True)
    expected = Engine.load(folder, dtype="float32", device="cpu").launch(sequences(), None, ("sparse",)).wait()
    (folder / "sparse_linear.pt").unlink()
    config = load_model_config(folder)
    assert (config.outputs, config.lexical, config.colbert_size) == (("tokens", "colbert"), False, 48)
    assert plain - num_parameters(config) == 65
    with pytest.raises(InvalidInput, match="sparse"):
        Engine.load(folder, dtype="float32", device="cpu").launch(sequences(), None, ("sparse",))
    save_file(tensors, folder / "sparse_linear.safetensors")
    (folder / "colbert_linear.pt").unlink()
    assert load_model_config(folder).outputs == ("tokens", "sparse")
    assert plain - num_parameters(load_model_config(folder)) == 48 * 65
    again = Engine.load(folder, dtype="float32", device="cpu").launch(sequences(), None, ("sparse",)).wait()
    for row in range(len(LENGTHS)):
        assert again.ragged["sparse"][row].tolist() == expected.ragged["sparse"][row].tolist()


def test_a_layer_that_is_not_one_is_named(folder: Path) -> None:
    path = folder / "sparse_linear.pt"
    for content in ({"weight": torch.zeros(1, 32), "bias": torch.zeros(1)}, {"weight": torch.zeros(1, 64)}, torch.zeros(3)):
        torch.save(content, path)
        with pytest.raises(ModelError, match=r"sparse_linear\.pt holds .*expected (weight|tensors by name)"):
            load_model_config(folder)
    torch.save({"weight": torch.zeros(2, 64), "bias": torch.zeros(2)}, path)
    with pytest.raises(ModelError, match="sparse_linear gives 2 weights for a token"):
        load_model_config(folder)
    path.write_bytes(b"neither")
    with pytest.raises(ModelError, match=r"sparse_linear\.pt cannot be read"):
        load_model_config(folder)
    torch.save(Exploding(), path)
    with pytest.raises(ModelError, match=r"sparse_linear\.pt holds more than tensors"):
        load_model_config(folder)


class Exploding:
    def __reduce__(self) -> tuple[object, ...]:
        return (exit, ("code of a pickle was run",))


def test_bf16_is_near(folder: Path) -> None:
    batch = sequences()
    exact, low = (
        Engine.load(folder, dtype=dtype, device="cpu").launch(batch, None, NAMES).wait() for dtype in ("float32", "bfloat16")
    )  # type: ignore[arg-type]
    for row in range(len(batch)):
        cosines = (exact.ragged["colbert"][row] * low.ragged["colbert"][row]).sum(1)
        assert cosines.min(initial=1) > 0.999
        weights = dict(exact.ragged["sparse"][row].tolist())
        for index, value in low.ragged["sparse"][row].tolist():
            assert value == pytest.approx(weights.get(index, 0), abs=0.03)
