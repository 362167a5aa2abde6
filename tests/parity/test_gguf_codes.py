"""Blocks of GGUF files that stay in their codes: values against the `gguf` package, and models against the dequantised models."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_gguf
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from test_kept_codes import check_all_stay, keep_on_a_cpu, log_probs, matrices, packed_layers

from engine import Engine, load
from engine.hub import EMBEDDED_GENERATOR, resolve_model
from engine.kernels.linear_packed import unpacked
from engine.kernels.packed import Packed
from engine.model import footprint
from engine.model.folder import load_model_config
from engine.model.gguf_codes import read_matrix
from engine.model.gguf_weights import GGUFWeights
from engine.model.keys import Keys
from engine.model.quantized.kept import packed
from engine.model.quantized.layout import Codes
from engine.run.stages import sizes_of

Tiny = Callable[..., Path]
# Rows of Q4_K are multiples of 256 values.
SHAPE = {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "max_position_embeddings": 512}
# Some layers of Q4_K_M files have Q6_K.
MIXED = MappingProxyType({"blk.0.attn_v.weight": Kind.Q6_K, "blk.1.ffn_down.weight": Kind.IQ4_XS})
KINDS = [Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q5_0, Kind.Q5_1, Kind.Q5_K, Kind.Q6_K, Kind.Q8_0]
STAYS = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.name))
ROUNDED = (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)  # scales have more bits than fp16


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def stored(tmp_path: Path, kind: Kind) -> tuple[Codes, NDArray[np.float32]]:
    """A matrix that we read from a file, and the values of the `gguf` package."""
    blocks = tiny_gguf.random_blocks((48, 512), kind, 0)
    path = tiny_gguf.write(tmp_path / "one.gguf", "qwen3", {}, {"blk.0.attn_v.weight": blocks}, kind)
    found = read_matrix(GGUFWeights(path), "model.layers.0.self_attn.v_proj.weight", lambda rows: rows)
    assert isinstance(found, Codes)
    return found, gguf.quants.dequantize(blocks, kind)


@STAYS
def test_the_values_are_those_of_the_file(tmp_path: Path, kind: Kind) -> None:
    found, expected = stored(tmp_path, kind)
    assert 0.02 < expected.std() < 0.05
    np.testing.assert_array_equal(found.dequantized(torch.float32).numpy(), expected)


@STAYS
def test_records_hold_the_values_but_for_scales_that_are_rounded(tmp_path: Path, kind: Kind) -> None:
    """Q4_0 and others have scales in fp16. A scale of Q4_K has 17 bits. fp16 keeps 11 of them: an error of up to 2^-11."""
    found, expected = stored(tmp_path, kind)
    kept = unpacked(packed(found), torch.float32).numpy()
    if kind not in ROUNDED:
        np.testing.assert_array_equal(kept, expected)
        return
    largest = (1 << found.bits) * found.scales.abs()
    if found.mins is not None:
        largest += found.mins.abs()
    # A number with fp16's least exponent has fewer bits.
    bound = largest.repeat_interleave(found.form.group, dim=1).numpy() * 2**-11 + (1 << found.bits) * 2**-25
    error = np.abs(kept - expected)
    assert (error <= bound).all()
    in_bf16 = np.abs(torch.from_numpy(expected).to(torch.bfloat16).float().numpy() - expected)
    assert 0 < error.mean() < 0.5 * in_bf16.mean()


@STAYS
def test_each_byte_of_a_file_counts(tmp_path: Path, kind: Kind) -> None:
    """If a byte of codes, scales or mins changes, the values change."""
    blocks = tiny_gguf.random_blocks((1, 256), kind, 0)
    _, size = gguf.GGML_QUANT_SIZES[kind]
    (name,) = tensors = {"blk.0.attn_v.weight": blocks}
    for place in range(size):
        tensors[name] = blocks.copy()
        tensors[name][0, place] ^= 0x51
        path = tiny_gguf.write(tmp_path / "one.gguf", "qwen3", {}, tensors, kind)
        found = read_matrix(GGUFWeights(path), "model.layers.0.self_attn.v_proj.weight", lambda rows: rows)
        assert isinstance(found, Codes)
        expected = gguf.quants.dequantize(tensors[name], kind)
        assert not np.array_equal(expected, gguf.quants.dequantize(blocks, kind), equal_nan=True), place
        np.testing.assert_array_equal(found.dequantized(torch.float32).numpy(), expected, err_msg=str(place))


def generator(tiny: Tiny, at: Path, family: str, kind: Kind, kinds: Mapping[str, Kind] = MappingProxyType({})) -> Path:
    """The folder of a GGUF file with random matrices in the layers. All other tensors are those of a tiny checkpoint."""
    folder = tiny(f"{family}_lm", **SHAPE)
    keys = Keys(folder / "config.json", json.loads((folder / "config.json").read_text()))
    tensors = tiny_gguf.converted(folder, family, 4, 2)
    matrix_kinds = {name: kinds.get(name, kind) for name, tensor in tensors.items() if tensor.ndim > 1 and name.startswith("blk")}
    for seed, (name, its) in enumerate(matrix_kinds.items()):
        tensors[name] = tiny_gguf.random_blocks(tensors[name].shape, its, seed)
    metadata = tiny_gguf.config_metadata(keys, family) | tiny_gguf.tokenizer_metadata()
    return resolve_model(tiny_gguf.write(at / f"{family}.gguf", family, metadata, tensors, kinds=matrix_kinds))


@STAYS
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3"])
def test_the_same_model_as_dequantised(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, family: str, kind: Kind
) -> None:
    check_all_stay(generator(tiny, tmp_path, family, kind), monkeypatch, caplog, atol=2e-2 if kind in ROUNDED else 1e-4)


def test_types_in_one_layer_may_differ(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """V of the first layer has another type than Q and K, so the engine multiplies with V separately. IQ4_XS is dequantised."""
    folder = generator(tiny, tmp_path, "qwen3", Kind.Q4_K, MIXED)
    expected = log_probs(Engine.load(folder, dtype="float32", device="cpu"))
    keep_on_a_cpu(monkeypatch)
    with caplog.at_level(logging.INFO):
        engine = Engine.load(folder, dtype="float32", device="cpu")
    assert packed_layers(engine) == 8
    assert "13 matrices stay in their codes, 1 with blocks of IQ4_XS are dequantised" in caplog.text
    np.testing.assert_allclose(log_probs(engine), expected, atol=2e-2)


def with_words(
    tiny: Tiny, at: Path, kind: Kind, tied: bool, words: Kind | None = None, family: str = "qwen3", vocab_size: int = 304
) -> Path:
    """The folder of a GGUF file with random blocks in the layers and the word embeddings, and in the head if it is not tied.

    `words`: the type of the word embeddings, if it is another one than `kind`.
    """
    folder = tiny(f"{family}_lm", **SHAPE, tie_word_embeddings=tied)
    keys = Keys(folder / "config.json", json.loads((folder / "config.json").read_text()))
    tensors = tiny_gguf.converted(folder, family, 4, 2)
    for name in {"token_embd.weight", "output.weight"} & tensors.keys():  # the kernels take 16 rows at a time, tiny ones have 300
        tensors[name] = np.pad(tensors[name], ((0, vocab_size - len(tensors[name])), (0, 0)))
    kinds = {name: kind for name, each in tensors.items() if each.ndim > 1}
    kinds["token_embd.weight"] = words or kind
    for seed, (name, its) in enumerate(kinds.items()):
        tensors[name] = tiny_gguf.random_blocks(tensors[name].shape, its, seed)
    metadata = tiny_gguf.config_metadata(keys, family) | tiny_gguf.tokenizer_metadata(vocab_size)
    return resolve_model(tiny_gguf.write(at / f"{family}.gguf", family, metadata, tensors, kinds=kinds))


def head_of(engine: Engine) -> Any:
    assert engine.network.language_head is not None
    return engine.network.language_head._out.weight


def words_of(engine: Engine) -> Any:
    return engine.network.model.words


HEADS = pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_K, Kind.Q6_K, Kind.Q8_0], ids=lambda kind: str(kind.name))
TIED = pytest.mark.parametrize("tied", [True, False], ids=["tied", "a head of its own"])


@HEADS
@TIED
def test_words_and_head_stay_in_their_codes(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: Kind, tied: bool
) -> None:
    folder = with_words(tiny, tmp_path, kind, tied)
    plain = Engine.load(folder, dtype="float32", device="cpu")
    assert isinstance(head_of(plain), torch.Tensor)
    assert isinstance(words_of(plain), torch.Tensor)
    keep_on_a_cpu(monkeypatch)
    with caplog.at_level(logging.INFO):
        engine = Engine.load(folder, dtype="float32", device="cpu")
    head, words = head_of(engine), words_of(engine)
    assert (head.records is words.records) == tied
    assert f"{folder}: {15 if tied else 16} matrices stay in their codes, none is dequantised" in caplog.text
    file = GGUFWeights(folder / "model.gguf")
    for name, kept in (("model.embed_tokens.weight", words), *(() if tied else (("lm_head.weight", head),))):
        assert isinstance(kept, Packed)
        exact = file.tensor(name)
        torch.testing.assert_close(unpacked(kept, torch.float32), exact, rtol=0, atol=1e-3 if kind in ROUNDED else 0)
    np.testing.assert_allclose(log_probs(engine), log_probs(plain), atol=2e-2 if kind in ROUNDED else 1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_words_of_other_families(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Gemma multiplies the embedded words by a number. Its head has the words without this number."""
    folder = with_words(tiny, tmp_path, Kind.Q8_0, True, family=family)
    expected = log_probs(Engine.load(folder, dtype="float32", device="cpu"))
    keep_on_a_cpu(monkeypatch)
    engine = Engine.load(folder, dtype="float32", device="cpu")
    assert isinstance(words_of(engine), Packed)
    np.testing.assert_allclose(log_probs(engine), expected, atol=1e-4)


def test_words_that_do_not_fit_are_dequantised(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = with_words(tiny, tmp_path, Kind.Q6_K, False, vocab_size=300)
    keep_on_a_cpu(monkeypatch)
    with caplog.at_level(logging.INFO):
        engine = Engine.load(folder, dtype="float32", device="cpu")
    assert isinstance(head_of(engine), torch.Tensor)
    assert isinstance(words_of(engine), torch.Tensor)
    assert "14 matrices stay in their codes, 2 with 6 bits, groups of 16, 300 x 256 values are dequantised" in caplog.text
    config = load_model_config(folder)
    assert footprint.language_head_form(config, torch.bfloat16, on_gpu=True) is None
    assert footprint.word_bytes(config, torch.bfloat16, on_gpu=True) == 2 * 300 * 256


@HEADS
@TIED
def test_the_footprint_counts_words_and_head(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, tied: bool
) -> None:
    folder = with_words(tiny, tmp_path, kind, tied, Kind.Q4_0)
    config = load_model_config(folder)
    values = config.vocab_size * config.hidden_size
    plain = replace(config, quantization=None)
    num_tables = 1 if tied else 2

    def kept_bytes(dtype: torch.dtype, on_gpu: bool = True) -> int:
        words, head = (each(config, dtype, on_gpu) for each in (footprint.word_bytes, footprint.language_head_bytes))
        return words if tied else words + head

    for dtype in (torch.bfloat16, footprint.INT4):  # int4 rounds the layers, and leaves the words as they are
        assert kept_bytes(dtype, on_gpu=False) == 2 * num_tables * values
        saved = footprint.bytes_saved(config, dtype, on_gpu=True) - footprint.layer_bytes_saved(config, dtype, on_gpu=True)
        assert saved == 2 * num_tables * values - kept_bytes(dtype) > 0
    saved = footprint.bytes_saved(config, torch.bfloat16, on_gpu=True)
    weights = [footprint.footprint(each, torch.bfloat16, "gpu").weights for each in (plain, config)]
    assert weights[0] - weights[1] == saved
    parts = [replace(config, part=range(layer, layer + 1)) for layer in range(2)]  # the last stage has the head, or a copy
    copied = 2 * values - footprint.language_head_bytes(config, torch.bfloat16, on_gpu=True) if tied else 0
    assert saved + copied == sum(footprint.bytes_saved(part, torch.bfloat16, on_gpu=True) for part in parts)
    sizes = sizes_of(config, torch.bfloat16, on_gpu=True)
    all_bytes = 2 * (footprint.num_parameters(config) + tied * values) - saved - copied
    assert sum(sizes.layer_bytes) + sizes.words_bytes + sizes.head_bytes == all_bytes
    assert sizes.words_bytes == footprint.word_bytes(config, torch.bfloat16, on_gpu=True) < 2 * values
    assert footprint.language_head_bytes(config, torch.bfloat16, on_gpu=True) < sizes.head_bytes < 2 * values
    keep_on_a_cpu(monkeypatch)
    engine = Engine.load(folder, dtype="float32", device="cpu")
    there = words_of(engine).records.nbytes + (0 if tied else head_of(engine).records.nbytes)
    assert there == kept_bytes(torch.bfloat16)


def test_slices_of_a_matrix_give_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head is read and packed in slices of rows."""
    for kind in (Kind.Q4_K, Kind.Q6_K, Kind.Q8_0):
        whole = packed(stored(tmp_path, kind)[0])
        with monkeypatch.context() as patch:
            patch.setattr("engine.model.gguf_codes._SLICE_VALUES", 20 * 512)
            patch.setattr("engine.kernels.packed._SLICE_VALUES", 32 * 512)
            assert torch.equal(packed(stored(tmp_path, kind)[0]).records, whole.records)


@pytest.mark.parametrize(
    ("kind", "kinds", "bits"),
    [
        (Kind.Q4_0, {}, 4.5),
        (Kind.Q4_1, {}, 5),
        (Kind.Q4_K, {}, 5),
        (Kind.Q5_0, {}, 5.5),
        (Kind.Q5_K, {}, 6),
        (Kind.Q6_K, {}, 7),
        (Kind.Q8_0, {}, 8.5),
        (Kind.Q4_K, MIXED, None),
        (Kind.Q4_0, {"blk.0.attn_v.weight": Kind.Q4_1, "blk.1.ffn_up.weight": Kind.Q4_1}, None),
    ],
    ids=["Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_K", "Q6_K", "Q8_0", "Q4_K, Q6_K and IQ4_XS", "only one has mins"],
)
def test_the_footprint_counts_what_is_there(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, kinds: dict[str, Kind], bits: float | None
) -> None:
    folder = generator(tiny, tmp_path, "qwen3", kind, kinds)
    config = load_model_config(folder)
    values = footprint.num_quantized(config)
    counted = 2 * values - footprint.bytes_saved(config, torch.bfloat16, on_gpu=True)
    assert footprint.bytes_saved(config, torch.bfloat16, on_gpu=False) == 0
    parts = [replace(config, part=range(layer, layer + 1)) for layer in range(2)]  # two stages of a pipeline
    assert 2 * values - counted == sum(footprint.bytes_saved(part, torch.bfloat16, on_gpu=True) for part in parts)
    rounded = 2 * values - footprint.bytes_saved(config, footprint.INT4, on_gpu=True)
    keep_on_a_cpu(monkeypatch)
    weights: list[Any] = [each.weight for each in matrices(Engine.load(folder, dtype="float32", device="cpu"))]
    there = [weight.records.nbytes if isinstance(weight, Packed) else 2 * weight.numel() for weight in weights]
    assert sum(there) == counted
    if bits is not None:
        assert counted * 8 == bits * values
        assert rounded * 8 == (bits if bits <= 5 else 4.25) * values
    else:
        assert rounded < counted, "--dtype int4 rounds the others"


def test_the_embedded_model_keeps_its_values() -> None:
    """SmolLM2-135M is in Q4_1, so scales and mins are exact. The file has Llama's rows of Q and K in another order."""
    folder = resolve_model(EMBEDDED_GENERATOR)
    config, file = load_model_config(folder), GGUFWeights(folder / "model.gguf")
    assert config.quantization is not None
    assert footprint.layer_bytes_saved(config, torch.bfloat16, on_gpu=True) == footprint.num_quantized(config) * 11 // 8
    words = 49_152 * 576  # in Q8_0: 17 bytes for 16 values
    assert (
        footprint.bytes_saved(config, torch.bfloat16, on_gpu=True) == footprint.num_quantized(config) * 11 // 8 + words * 15 // 16
    )
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
        name = f"model.layers.17.{part}.weight"
        found = read_matrix(file, name, lambda rows: rows)
        assert isinstance(found, Codes)
        assert torch.equal(unpacked(packed(found), torch.float32), file.tensor(name)), name


def test_a_file_without_blocks_is_not_quantised(tiny: Tiny, tmp_path: Path) -> None:
    folder = tiny("qwen3_lm", **SHAPE)
    keys = Keys(folder / "config.json", json.loads((folder / "config.json").read_text()))
    metadata = tiny_gguf.config_metadata(keys, "qwen3") | tiny_gguf.tokenizer_metadata()
    path = tiny_gguf.write(tmp_path / "x.gguf", "qwen3", metadata, tiny_gguf.converted(folder, "qwen3", 4, 2), Kind.BF16)
    assert load_model_config(resolve_model(path)).quantization is None


@pytest.mark.gpu
@HEADS
@TIED
def test_words_in_codes_on_a_gpu(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, tied: bool) -> None:
    folder = with_words(tiny, tmp_path, kind, tied)
    exact = log_probs(Engine.load(folder, dtype="float32", device="cpu"))
    kept = Engine.load(folder, dtype="bfloat16", device="cuda")
    assert isinstance(head_of(kept), Packed)
    assert isinstance(words_of(kept), Packed)
    monkeypatch.setattr(load, "multiplies_codes", lambda device: False)
    plain = Engine.load(folder, dtype="bfloat16", device="cuda")
    assert isinstance(head_of(plain), torch.Tensor)
    error, theirs = (np.median(np.abs(log_probs(each) - exact)) for each in (kept, plain))
    assert 0 < error <= 1.25 * theirs


@pytest.mark.gpu
@STAYS
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_on_a_gpu(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, kind: Kind) -> None:
    """Steps of a few streams and prompts of many rows are as close to fp32 as the dequantised model in bf16.

    The test compares medians: with random weights, greedy decoding has ties, and after a tie the answers have other tokens.
    """
    folder = generator(tiny, tmp_path, family, kind, MIXED)
    exact = log_probs(Engine.load(folder, dtype="float32", device="cpu"))
    kept = Engine.load(folder, dtype="bfloat16", device="cuda")
    assert packed_layers(kept) == (7 if kind == Kind.Q6_K else 8)  # V is separate if Q and K have another type
    monkeypatch.setattr(load, "multiplies_codes", lambda device: False)
    plain = Engine.load(folder, dtype="bfloat16", device="cuda")
    assert packed_layers(plain) == 0
    error, theirs = (np.median(np.abs(log_probs(each) - exact)) for each in (kept, plain))
    assert 0 < error <= 1.25 * theirs
