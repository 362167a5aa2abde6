"""A model folder that cannot be served as meant is refused by name: config, pooling, weights, tokenizer."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from engine import Engine, ModelError
from engine.hub import _HUB_FILES, _HUB_SKIP, resolve_model
from engine.model_config import Pooling
from engine.model_folder import load_model_config
from engine.models.decoder import DecoderConfig
from engine.models.gemma3 import Gemma3Config

Tiny = Callable[..., Path]


@pytest.fixture
def copy(tiny: Tiny, tmp_path: Path) -> Callable[..., Path]:
    def make(kind: str, **config: Any) -> Path:
        folder = tmp_path / kind
        shutil.copytree(tiny(kind), folder)
        edit(folder / "config.json", config)
        return folder

    return make


def edit(path: Path, changes: dict[str, Any]) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value != "DELETE"}))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("bert", {"architectures": ["RobertaModel"]}, "RobertaModel is not supported; supported are BertForMaskedLM, BertModel"),
        ("bert", {"architectures": []}, "model_type 'bert'"),
        ("bert", {"hidden_act": "relu"}, "hidden_act = 'relu' is not supported"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"hidden_size": 0}, "hidden_size is 0"),
        ("bert", {"num_attention_heads": 5}, "hidden_size = 64 is not a multiple of num_attention_heads = 5"),
        ("bert", {"vocab_size": "DELETE"}, "vocab_size is None"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "sliding_window is None, layers [0, 1, 2] need one"),
        ("qwen3", {"layer_types": ["full_attention"] * 2}, "layer_types ['full_attention'] for 2 of 3 layers"),
        ("qwen3", {"layer_types": ["linear_attention"] * 3}, "layer_types ['linear_attention']"),
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported (only SwiGLU)"),
        ("qwen2", {"num_attention_heads": 6}, "hidden_size = 64 is not a multiple of num_attention_heads = 6"),
        ("qwen2", {"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple of num_key_value_heads = 3"),
        ("qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "'yarn'"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "all of Mistral's layers have the same window"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("gemma3", {"attention_bias": True}, "attention_bias"),
        ("gemma3", {"hidden_activation": "silu"}, "hidden_activation = 'silu' is not supported (only the tanh form of GeLU)"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"is_causal": False}, "is_causal = False is not supported (Gemma says use_bidirectional_attention)"),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}}},
            "'linear'",
        ),
        ("gemma3", {"rope_parameters": "DELETE", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "'linear'"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0, "factor": 8.0}}, "'llama3'"),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "'yarn'"),
        ("qwen3", {"rope_parameters": "DELETE"}, "rope_theta is None"),
    ],
)
def test_a_key_that_cannot_be_honoured_is_refused(
    copy: Callable[..., Path], kind: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        load_model_config(copy(kind, **changes))
    assert message in str(caught.value)


def test_both_spellings_of_rope_are_read(copy: Callable[..., Path]) -> None:
    flat = copy("qwen3", rope_parameters="DELETE", rope_theta=1_000_000)
    assert load_model_config(flat).rope_theta == 1_000_000.0


def test_causality_follows_the_checkpoint(copy: Callable[..., Path]) -> None:
    folder = copy("qwen3")
    assert load_model_config(folder).causal
    edit(folder / "config.json", {"is_causal": False})
    assert not load_model_config(folder).causal


def test_gemma3_is_the_same_in_the_hubs_spelling(copy: Callable[..., Path]) -> None:
    """As google/embeddinggemma-300m has it: flat keys, a pattern of layers."""
    bases = {"full_attention": {"rope_theta": 700.0}, "sliding_attention": {"rope_theta": 70.0}}
    folder = copy("gemma3", rope_parameters=bases, use_bidirectional_attention=True, sliding_window=512)
    config = load_model_config(folder)
    assert isinstance(config, Gemma3Config)
    assert (config.window, config.local_layers, config.causal) == (256, (0, 1, 3), False)
    assert (config.rope_theta, config.local_rope_theta) == (700.0, 70.0)
    flat = {"rope_parameters": "DELETE", "rope_theta": 700.0, "rope_local_base_freq": 70.0, "rope_scaling": None}
    pattern = {"layer_types": "DELETE", "sliding_window_pattern": 3}
    edit(folder / "config.json", flat | pattern)
    assert load_model_config(folder) == config
    edit(folder / "config.json", {"rope_theta": "DELETE", "rope_local_base_freq": "DELETE"})
    assert load_model_config(folder) == replace(config, rope_theta=1e6, local_rope_theta=1e4)


def test_gtes_qwen2_is_bidirectional_unless_it_says_otherwise(copy: Callable[..., Path]) -> None:
    """Its own code is, by default; config.json says so only in later revisions."""
    code = "Alibaba-NLP/gte-Qwen2-7B-instruct--modeling_qwen.Qwen2Model"
    folder = copy("qwen2", auto_map={"AutoModel": "modeling_qwen.Qwen2Model"}, is_causal="DELETE")
    for changes, causal in (
        ({}, False),
        ({"auto_map": {"AutoModel": code}}, False),
        ({"is_causal": True}, True),
        ({"is_causal": False}, False),
        ({"auto_map": "DELETE"}, False),
        ({"is_causal": "DELETE"}, True),
    ):
        edit(folder / "config.json", changes)
        assert load_model_config(folder).causal == causal


def test_a_window_is_what_transformers_makes_of_it(copy: Callable[..., Path]) -> None:
    folder = copy("mistral", sliding_window="DELETE")
    config = load_model_config(folder)
    assert isinstance(config, DecoderConfig)
    assert (config.window, config.local_layers) == (4095, (0, 1, 2))
    edit(folder / "config.json", {"sliding_window": None})
    assert load_model_config(folder) == replace(config, window=None, local_layers=())
    edit(folder / "config.json", {"sliding_window": 4096, "is_causal": False})
    assert load_model_config(folder) == replace(config, window=4096, causal=False)
    qwen2 = load_model_config(copy("qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=2, layer_types="DELETE"))
    assert isinstance(qwen2, DecoderConfig)
    assert (qwen2.window, qwen2.local_layers) == (8, (2,))


def test_pooling_is_read_overridden_or_asked_for(copy: Callable[..., Path]) -> None:
    folder = copy("bert")
    assert load_model_config(folder).pooling == "cls"
    assert load_model_config(folder, "mean").pooling == "mean"
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text('{"pooling_mode_mean_tokens": true, "pooling_mode_max_tokens": true}')
    with pytest.raises(ModelError, match=r"pooling \['mean', 'max'\] is not supported"):
        load_model_config(folder)
    for flag, pooling_mode in (
        ("pooling_mode_max_tokens", "max"),
        ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len"),
        ("pooling_mode_weightedmean_tokens", "weighted_mean"),
    ):
        pooling.write_text(json.dumps({"pooling_mode_mean_tokens": False, flag: True}))
        assert load_model_config(folder).pooling == pooling_mode
    pooling.write_text('{"pooling_mode_lasttoken": true, "include_prompt": false}')
    with pytest.raises(ModelError, match="include_prompt"):
        load_model_config(folder)
    pooling.unlink()
    with pytest.raises(ModelError, match="--pooling"):
        load_model_config(folder)


def with_modules(folder: Path, *kinds: str, **dense: Any) -> Path:
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": f"{i}_{kind}" if i else ""} for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for i, kind in enumerate(kinds):
        if kind == "Dense":
            (folder / f"{i}_Dense").mkdir(exist_ok=True)
            shape = {
                "in_features": 64,
                "out_features": 64,
                "bias": True,
                "activation_function": "torch.nn.modules.linear.Identity",
            }
            (folder / f"{i}_Dense" / "config.json").write_text(json.dumps(shape))
            edit(folder / f"{i}_Dense" / "config.json", dense)
    return folder


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ("Transformer WordWeights Pooling", "module WordWeights is not supported"),
        ("Transformer Pooling Normalize Dense", "Dense after Normalize is not supported"),
        ("Transformer Dense Pooling", "Pooling after Dense is not supported"),
    ],
)
@pytest.mark.parametrize("pooling", [None, "mean"])
def test_modules_we_do_not_have_are_refused(copy: Callable[..., Path], kinds: str, message: str, pooling: Pooling | None) -> None:
    with pytest.raises(ModelError, match=r"modules\.json") as caught:
        load_model_config(with_modules(copy("bert"), *kinds.split()), pooling)
    assert message in str(caught.value)


def test_a_module_outside_of_the_folder_is_refused(copy: Callable[..., Path]) -> None:
    folder = copy("bert")
    (folder / "modules.json").write_text('[{"type": "Pooling", "path": "../1_Pooling"}]')
    with pytest.raises(ModelError, match="expected the name of a folder"):
        load_model_config(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"activation_function": "os.system"},
            "activation_function os.system is not supported; supported are ('Identity', 'Tanh'",
        ),
        ({"activation_function": "torch.nn.modules.activation.PReLU"}, "activation.PReLU is not supported"),
        ({"activation_function": "somewhere.Tanh"}, "somewhere.Tanh is not supported"),
        ({"use_residual": True}, "use_residual"),
        ({"module_input_name": "token_embeddings"}, "module_input_name"),
        ({"module_output_name": "other"}, "module_output_name"),
        ({"in_features": 32}, "in_features is 32, what comes before has 64 dimensions"),
        ({"out_features": "DELETE"}, "out_features is None"),
    ],
)
def test_a_dense_layer_that_cannot_be_honoured_is_refused(
    copy: Callable[..., Path], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=r"2_Dense.config\.json") as caught:
        load_model_config(with_modules(copy("bert"), "Transformer", "Pooling", "Dense", **changes))
    assert message in str(caught.value)


def test_the_weights_of_a_dense_layer_are_safetensors_and_all_of_them_known(copy: Callable[..., Path]) -> None:
    folder = with_modules(copy("bert"), "Transformer", "Pooling", "Dense")
    (folder / "2_Dense" / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(ModelError, match=r"2_Dense has no model\.safetensors \(other weight formats are never loaded\)"):
        Engine.load(folder)
    tensors = {"linear.weight": torch.zeros(64, 64), "linear.bias": torch.zeros(64)}
    save_file(tensors | {"residual.weight": torch.zeros(4)}, folder / "2_Dense" / "model.safetensors")
    with pytest.raises(ModelError, match=r"residual\.weight"):
        Engine.load(folder)
    save_file(tensors, folder / "2_Dense" / "model.safetensors")
    assert Engine.load(folder, dtype="float32").config.embedding_size == 64


def test_the_hub_gives_dense_layers_and_nothing_that_is_not_read() -> None:
    files = ["model-00001-of-00002.safetensors", "2_Dense/model.safetensors", "2_Dense/config.json", "1_Pooling/config.json"]
    others = ["2_Dense/pytorch_model.bin", "onnx/model.safetensors", "gguf/1_Dense/model.safetensors", "modeling_qwen.py"]
    assert list(filter_repo_objects(files + others, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_SKIP)) == files


def test_every_tensor_is_used_or_reported(copy: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    folder = copy("bert")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"embeddings.position_ids": torch.zeros(1, 4)}, folder / "model.safetensors")
    with caplog.at_level("INFO", logger="engine.weights"):
        Engine.load(folder, dtype="float32")
    assert "embeddings.position_ids" in caplog.text
    assert "pooler.dense.weight" in caplog.text
    save_file(tensors | {"projection.weight": torch.zeros(4)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"projection\.weight"):
        Engine.load(folder)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("encoder.layer.1.output.dense.weight", None, "is missing"),
        ("encoder.layer.1.output.dense.weight", torch.zeros(3, 3), r"has shape \[3, 3\], config.json asks for \[64, 96\]"),
        ("encoder.layer.1.output.dense.bias", torch.zeros(64, dtype=torch.int8), "quantised"),
    ],
)
def test_a_tensor_at_fault_is_named(copy: Callable[..., Path], name: str, tensor: torch.Tensor | None, message: str) -> None:
    folder = copy("bert")
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors | ({} if tensor is None else {name: tensor}), folder / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        Engine.load(folder)


def test_files_that_are_missing_or_broken_are_named(copy: Callable[..., Path], tiny: Tiny, tmp_path: Path) -> None:
    folder = copy("bert")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Engine.load(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be loaded"):
        Engine.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        Engine.load(folder)
    sharded = tmp_path / "sharded"
    shutil.copytree(tiny("bert", sharded=True), sharded)
    shard = min(sharded.glob("*.safetensors"))
    shard.rename(sharded / "elsewhere")
    with pytest.raises(ModelError, match=shard.name):
        Engine.load(sharded)
    (sharded / "elsewhere").rename(shard)
    shard.write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        Engine.load(sharded)


def test_weights_that_are_not_finite_stop_the_load(copy: Callable[..., Path]) -> None:
    folder = copy("bert")
    tensors = load_file(folder / "model.safetensors")
    tensors["encoder.layer.0.output.dense.bias"][0] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="not finite"):
        Engine.load(folder)


def test_dtypes_that_would_give_wrong_vectors_are_refused(tiny: Tiny) -> None:
    with pytest.raises(ModelError, match="float16 is not supported on a CPU"):
        Engine.load(tiny("bert"), dtype="float16", device="cpu")


def test_a_model_that_is_nowhere_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a folder"):
        resolve_model(str(tmp_path / "nothing"))
    with pytest.raises(ModelError, match="neither a folder here nor"):
        resolve_model("someone/no-such-model")


def test_a_hub_model_in_the_cache_is_found_offline(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / "abc"
    shutil.copytree(tiny("bert"), snapshot)
    refs = tmp_path / "models--someone--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    assert resolve_model("someone/tiny") == snapshot
