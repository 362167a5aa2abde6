"""Vectors of spans against their definition: the hidden states of the whole text, pooled over the span's tokens."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine import Engine, InvalidInput
from engine.loop import EngineLoop
from engine.model.config import Pooling
from engine.options import EmbedOptions, TokenIds, check_outputs
from engine.run.pack import BatchPacker
from engine.schedule.request import Request

Spans = tuple[tuple[int, int], ...]
POOLINGS: dict[Pooling, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(0),
    "max": lambda x: x.amax(0),
    "mean_sqrt_len": lambda x: x.sum(0) / len(x) ** 0.5,
    "weighted_mean": lambda x: (x * torch.arange(1, len(x) + 1).unsqueeze(1)).sum(0) / (len(x) * (len(x) + 1) / 2),
}
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def sequence(length: int, seed: int = 0) -> TokenIds:
    return np.random.default_rng(seed).integers(5, 300, size=length).astype(np.int32)


# Texts of 30, 1, 64 and 9 tokens. Their spans: side by side; the whole text; overlapping, out of order and one twice; none.
TEXTS = [sequence(length, seed) for seed, length in enumerate((30, 1, 64, 9))]
SPANS: list[Spans] = [((0, 10), (10, 30)), ((0, 1),), ((3, 60), (0, 64), (63, 64), (5, 9), (3, 60)), ()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_spans_are_pooled_like_texts(tiny: Callable[..., Path], kind: str, pooling: Pooling, device: str) -> None:
    engine = Engine.load(tiny(kind), dtype="float32", device=device, pooling=pooling)
    assert engine.config.outputs == ("tokens", "chunks")
    options = [EmbedOptions(normalize=False, outputs=("chunks",), spans=spans) for spans in SPANS]
    output = engine.launch(TEXTS, options, ("chunks", "tokens")).wait()
    for row, spans in enumerate(SPANS):
        hidden = torch.tensor(np.asarray(output.ragged["tokens"][row]))
        chunks = output.ragged["chunks"][row]
        assert chunks.shape == (len(spans), 64)
        for chunk, (start, stop) in zip(chunks, spans, strict=True):
            np.testing.assert_allclose(chunk, POOLINGS[pooling](hidden[start:stop]).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_span_over_everything_is_the_text(tiny: Callable[..., Path], pooling: Pooling) -> None:
    engine = Engine.load(tiny("bert"), dtype="float32", device="cpu", pooling=pooling)
    for more in ({}, {"normalize": False}, {"dimensions": 16}):
        options = [EmbedOptions(outputs=("chunks",), spans=((0, len(ids)),), **more) for ids in TEXTS]  # type: ignore[arg-type]
        output = engine.launch(TEXTS, options, ("chunks",)).wait()
        for row, vector in enumerate(output.vectors):
            (chunk,) = output.ragged["chunks"][row]
            assert len(chunk) == (options[row].dimensions or 64)
            np.testing.assert_allclose(chunk, vector[: len(chunk)], rtol=1e-5, atol=1e-6)


def test_dense_layers_normalisation_and_dimensions_come_after(tiny: Callable[..., Path], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = shutil.copytree(tiny("bert"), tmp_path / "model")
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense"), ("Normalize", "3_Normalize")]
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "2_Dense").mkdir()
    layer = {"in_features": 64, "out_features": 24, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}
    (folder / "2_Dense" / "config.json").write_text(json.dumps(layer))
    torch.manual_seed(0)
    weight, bias = torch.randn(24, 64), torch.randn(24)
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
    engine = Engine.load(folder, dtype="float32", device="cpu", pooling="mean")
    options = EmbedOptions(dimensions=10, outputs=("chunks",), spans=((2, 7), (0, 30)))
    output = engine.launch(TEXTS[:1], [options], ("chunks", "tokens")).wait()
    hidden = torch.tensor(np.asarray(output.ragged["tokens"][0]))
    for chunk, (start, stop) in zip(output.ragged["chunks"][0], options.spans, strict=True):
        expected = F.normalize(torch.tanh(weight @ hidden[start:stop].mean(0) + bias)[:10], dim=0)
        np.testing.assert_allclose(chunk[:10], expected.numpy(), rtol=1e-4, atol=1e-5)


def test_jobs_get_their_own_chunks_cut_to_their_dimensions(tiny: Callable[..., Path]) -> None:
    engine = Engine.load(tiny("bert"), dtype="float32", device="cpu", pooling="mean")
    loop = EngineLoop(engine, 4096)
    first = EmbedOptions(outputs=("chunks",), spans=((0, 10), (10, 30)))
    jobs = [
        Request([TEXTS[0]], first),
        Request([TEXTS[1]], EmbedOptions()),
        Request([TEXTS[2], TEXTS[0]], first),
        Request([TEXTS[0]], first),
    ]
    jobs.append(Request([TEXTS[0]], EmbedOptions(pooled=False, dimensions=8, outputs=("chunks",), spans=((5, 6),))))
    loop.submit(jobs)
    results = [job.future.result(10) for job in jobs]
    loop.stop()
    whole = engine.launch([TEXTS[0], TEXTS[2]], [first] * 2, ("chunks",)).wait().ragged["chunks"]
    for result, at, row in ((results[0], 0, 0), (results[2], 0, 1), (results[2], 1, 0), (results[3], 0, 0)):
        np.testing.assert_allclose(result.ragged["chunks"][at], whole[row], atol=1e-6)
    assert results[1].ragged == {}
    assert results[4].vectors is None
    assert results[4].ragged["chunks"][0].shape == (1, 8)
    assert np.linalg.norm(results[4].ragged["chunks"][0]) == pytest.approx(1, abs=1e-5)


def test_overlapping_spans_are_pooled_some_at_a_time() -> None:
    lengths, spans = [10, 6], tuple((start, 6) for start in range(6))
    options = [EmbedOptions(outputs=("chunks",), spans=spans)] * 2
    parts = BatchPacker("mean", 8, None).pack_spans(lengths, options)
    assert all(part.num_tokens <= 16 for part in parts)
    rows = [row for part in parts for row in part.token_ids.split(part.lengths)]
    assert [row.tolist() for row in rows] == [list(range(first + start, first + 6)) for first in (0, 10) for start in range(6)]


@pytest.mark.parametrize("span", [(0, 0), (3, 2), (-1, 2), (0, 31), (30, 31)])
def test_a_span_outside_of_its_text_is_refused(tiny: Callable[..., Path], span: tuple[int, int]) -> None:
    options = EmbedOptions(outputs=("chunks",), spans=((0, 1), span))
    message = rf"span \[{span[0]}, {span[1]}\) is not within the input's 30 tokens"
    with pytest.raises(InvalidInput, match=message):
        check_outputs(options, ("tokens", "chunks"), "mean", [30])
    engine = Engine.load(tiny("bert"), dtype="float32", device="cpu", pooling="mean")
    with pytest.raises(InvalidInput, match=message):
        engine.launch(TEXTS[:1], [options], ("chunks",))


@pytest.mark.parametrize(
    ("pooling", "wanted"), [("cls", "chunks"), ("last_token", "chunks"), ("mean", "sparse"), ("splade", "chunks")]
)
def test_what_a_model_does_not_give_is_refused(tiny: Callable[..., Path], pooling: Pooling, wanted: Any) -> None:
    engine = Engine.load(tiny("bert_lm"), dtype="float32", device="cpu", pooling=pooling)
    options = EmbedOptions(outputs=(wanted,), spans=((0, 1),))
    named = pooling if pooling in ("cls", "last_token") else wanted
    with pytest.raises(InvalidInput, match=named):
        check_outputs(options, engine.config.outputs, engine.config.pooling, [30])
    with pytest.raises(InvalidInput, match=f"pooling {pooling} has no output {wanted}"):
        engine.launch(TEXTS[:1], [options], (wanted,))
    check_outputs(EmbedOptions(), engine.config.outputs, engine.config.pooling, [30])
