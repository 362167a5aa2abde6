"""SPLADE against transformers' masked-LM logits and sentence-transformers' SparseEncoder, in fp32 on tiny checkpoints."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling

from engine import Engine, ModelError
from engine.heads import splade
from engine.heads.ragged import SPARSE
from engine.loop import EngineLoop
from engine.model.folder import load_model_config
from engine.options import EmbedOptions
from engine.schedule.queue import MOST_SEQS
from engine.schedule.request import Request

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.gpu),
]
KINDS = ["bert_lm", "distilbert_lm", "roberta_lm", "xlm_roberta_lm", "camembert", "mpnet_lm", "modernbert_lm"]
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in KINDS},
    **{f"{kind} untied": (kind, {"tie_word_embeddings": False}) for kind in KINDS},
    "modernbert_lm biases": ("modernbert_lm", {"classifier_bias": True, "norm_bias": True}),
    "modernbert_lm no decoder bias": ("modernbert_lm", {"decoder_bias": False}),
}
LENGTHS = [1, 7, 64, 2, 33, 7, 128, 15]
RAW = EmbedOptions(normalize=False, outputs=("sparse",))


def sequences(lengths: list[int] = LENGTHS) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(5, 300, size=length).astype(np.int32) for length in lengths]


def reference(folder: Path, batch: list[np.ndarray]) -> torch.Tensor:
    """Vectors by the definition. Texts are padded to the longest one, and a mask excludes the padding."""
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids, mask = (torch.zeros(len(batch), max(map(len, batch)), dtype=torch.long) for _ in range(2))
    ids[:] = model.config.pad_token_id if model.config.pad_token_id is not None else 0
    for row, each in enumerate(batch):
        ids[row, : len(each)], mask[row, : len(each)] = torch.from_numpy(each.astype(np.int64)), 1
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=mask).logits
    return (torch.log1p(torch.relu(logits)) * mask.unsqueeze(-1)).amax(dim=1)


@pytest.fixture(params=HEADS.values(), ids=HEADS.keys(), scope="module")
def folder(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> Path:
    kind, config = request.param
    return tiny(kind, **config)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [[33], LENGTHS], ids=["alone", "ragged"])
def test_vectors_equal_transformers(folder: Path, lengths: list[int], device: str) -> None:
    engine, batch = Engine.load(folder, dtype="float32", device=device, pooling="splade"), sequences(lengths)
    assert engine.config.outputs == ("sparse",)
    output = engine.launch(batch, [RAW] * len(batch), ("sparse",)).wait()
    expected = reference(folder, batch)
    torch.testing.assert_close(torch.from_numpy(output.vectors), expected, rtol=1e-4, atol=2e-5)
    for row, vector in enumerate(output.vectors):
        entries = output.ragged["sparse"][row]
        assert entries.dtype == SPARSE
        assert entries["index"].tolist() == np.flatnonzero(vector).tolist()
        np.testing.assert_array_equal(entries["value"], vector[vector > 0])
        assert len(entries) < vector.size or lengths[row] > 1  # for one token, a random head gives weight 0 to some words


def test_logits_of_a_few_tokens_at_a_time_give_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, batch = Engine.load(folder, dtype="float32", device="cpu", pooling="splade"), sequences()
    whole = engine.launch(batch, [RAW] * len(batch)).wait().vectors
    monkeypatch.setattr(splade, "CHUNK_BYTES", 10 * 304 * 4)  # steps of ten tokens, and of two vectors
    np.testing.assert_allclose(engine.launch(batch, [RAW] * len(batch)).wait().vectors, whole, rtol=1e-5, atol=1e-6)


def test_options_hold_for_wide_vectors_too(tiny: Callable[..., Path]) -> None:
    engine, (ids,) = Engine.load(tiny("bert_lm"), dtype="float32", device="cpu", pooling="splade"), sequences([9])
    options = [EmbedOptions(False), EmbedOptions(True), EmbedOptions(False, 100), EmbedOptions(True, 100)]
    plain, normal, cut, both = engine.launch([ids] * 4, options).wait().vectors
    np.testing.assert_allclose(normal, plain / np.linalg.norm(plain), rtol=1e-5)
    np.testing.assert_allclose(cut[:100], plain[:100], rtol=1e-5)
    np.testing.assert_allclose(both[:100], plain[:100] / np.linalg.norm(plain[:100]), rtol=1e-5)
    assert not cut[100:].any()
    assert not both[100:].any()


def test_a_head_that_is_stored_twice_is_the_tied_one(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Old versions of transformers saved the decoder beside the equal word embeddings, and its bias under another name."""
    folder = shutil.copytree(tiny("bert_lm"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
    tensors["cls.predictions.decoder.bias"] = tensors.pop("cls.predictions.bias")
    save_file(tensors, folder / "model.safetensors")
    ours = Engine.load(folder, dtype="float32", device="cpu", pooling="splade").launch(sequences(), [RAW] * len(LENGTHS)).wait()
    torch.testing.assert_close(torch.from_numpy(ours.vectors), reference(tiny("bert_lm"), sequences()), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "decoder"),
    [
        ("bert_lm", "cls.predictions.decoder"),
        ("distilbert_lm", "vocab_projector"),
        ("roberta_lm", "lm_head.decoder"),
        ("mpnet_lm", "lm_head.decoder"),
        ("modernbert_lm", "decoder"),
    ],
)
def test_a_stored_decoder_with_other_values_is_not_tied(
    tiny: Callable[..., Path], tmp_path: Path, kind: str, decoder: str
) -> None:
    folder = shutil.copytree(tiny(kind), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"{decoder}.weight": torch.randn(300, 64) * 0.3, f"{decoder}.bias": torch.randn(300)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    ours = Engine.load(folder, dtype="float32", device="cpu", pooling="splade").launch(sequences(), [RAW] * len(LENGTHS)).wait()
    torch.testing.assert_close(torch.from_numpy(ours.vectors), reference(folder, sequences()), rtol=1e-4, atol=2e-5)


def test_a_pass_has_so_many_sequences_that_their_vectors_fit(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.load(tiny("bert_lm"), dtype="float32", device="cpu", pooling="splade")
    assert engine.max_batch_seqs == MOST_SEQS
    monkeypatch.setattr(splade, "_VECTOR_BYTES", 3 * 4 * 304)
    batches: list[int] = []
    launch = engine.launch
    monkeypatch.setattr(engine, "launch", lambda ids, *more: batches.append(len(ids)) or launch(ids, *more))
    batch = [ids.tolist() for ids in sequences([3] * 8)]
    vectors = engine.embed(batch, normalize=False)
    assert batches == [3, 3, 2]
    loop = EngineLoop(engine, 1000, max_batch_seqs=engine.max_batch_seqs)
    jobs = [Request(sequences([3] * 8), RAW), Request(sequences([4]), RAW)]
    loop.submit(jobs)
    result = jobs[0].future.result(10)
    np.testing.assert_allclose(result.vectors, vectors, rtol=1e-5, atol=1e-6)
    assert [each["index"].tolist() for each in result.ragged["sparse"]] == [np.flatnonzero(each).tolist() for each in vectors]
    jobs[1].future.result(10)
    loop.stop()
    assert batches[3:] == [3, 3, 3]


@pytest.fixture(params=["relu", "log1p_relu"])
def saved(request: pytest.FixtureRequest, tiny: Callable[..., Path], tmp_path: Path) -> tuple[Path, SparseEncoder]:
    body = shutil.copytree(tiny("bert_lm"), tmp_path / "body")
    shutil.rmtree(body / "1_Pooling")
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}  # this class rebuilds no tokenizer
    (body / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    modules = [Transformer(str(body), transformer_task="fill-mask"), SpladePooling(activation_function=request.param)]
    theirs = SparseEncoder(modules=modules, device="cpu")
    theirs.save(str(tmp_path / "model"))
    return tmp_path / "model", theirs


WORDS = ["w1 w2 w3", "w9", "w200 w5 w77 " * 20, "w17 w4 nothing w8", "w30 " * 7]


def test_vectors_equal_a_sparse_encoder(saved: tuple[Path, SparseEncoder]) -> None:
    folder, theirs = saved
    engine = Engine.load(folder, dtype="float32", device="cpu")
    assert engine.config.pooling == "splade"
    expected = theirs.encode(WORDS, convert_to_sparse_tensor=False)
    np.testing.assert_allclose(engine.embed(WORDS, normalize=False), expected.numpy(), rtol=1e-4, atol=2e-5)


def test_a_sparse_encoders_keys_are_honoured_or_refused(saved: tuple[Path, SparseEncoder]) -> None:
    folder, _ = saved
    path = folder / "1_SpladePooling" / "config.json"
    given = json.loads(path.read_text())
    for key, value in (("pooling_strategy", "sum"), ("activation_function", "gelu"), ("word_embedding_dimension", 64)):
        path.write_text(json.dumps(given | {key: value}))
        with pytest.raises(ModelError, match=f"{key} = {value!r}") as caught:
            load_model_config(folder)
        assert str(path) in str(caught.value)
    path.write_text(json.dumps(given | {"word_embedding_dimension": 300}))
    modules = [{"type": "sentence_transformers.sparse_encoder.models.MLMTransformer", "path": ""}]  # the type of older versions
    modules += [{"type": "sentence_transformers.sparse_encoder.models.SpladePooling", "path": "1_SpladePooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    for config in (load_model_config(folder), load_model_config(folder, "splade")):
        assert config.pooling == "splade"
        assert config.splade is not None
        assert config.splade.log_twice == (given["activation_function"] == "log1p_relu")


@pytest.mark.parametrize("kind", ["bert", "deberta_lm", "gte_lm", "nomic_bert_lm", "qwen3_lm"])
def test_without_such_a_head_there_is_no_splade(tiny: Callable[..., Path], kind: str) -> None:
    architecture = json.loads((tiny(kind) / "config.json").read_text())["architectures"][0]
    with pytest.raises(ModelError, match=rf"config\.json: pooling splade needs .*BertForMaskedLM.*; not {architecture}"):
        load_model_config(tiny(kind), "splade")


def test_an_untied_head_without_its_decoder_is_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("bert_lm"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"cls\.predictions\.decoder\.weight is missing"):
        Engine.load(folder, pooling="splade")


@pytest.mark.parametrize("device", DEVICES)
def test_bf16_is_near(tiny: Callable[..., Path], device: str) -> None:
    batch = sequences()
    exact = reference(tiny("bert_lm"), batch).numpy()
    ours = (
        Engine.load(tiny("bert_lm"), dtype="bfloat16", device=device, pooling="splade").launch(batch, [RAW] * len(batch)).wait()
    )
    cosines = (ours.vectors * exact).sum(1) / np.linalg.norm(ours.vectors, axis=1) / np.linalg.norm(exact, axis=1)
    assert cosines.min() > 0.999
