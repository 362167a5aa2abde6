"""A model folder that cannot be served as meant is refused by name: config, pooling, weights, tokenizer."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import Engine, ModelError
from engine.hub import resolve_model
from engine.model_folder import load_model_config

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
        ("bert", {"architectures": ["GPT2Model"]}, "GPT2Model is not supported; supported are "),
        ("bert", {"architectures": []}, "model_type 'bert'"),
        ("bert", {"hidden_act": "relu"}, "hidden_act = 'relu' is not supported"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"hidden_size": 0}, "hidden_size is 0"),
        ("bert", {"num_attention_heads": 5}, "hidden_size = 64 is not a multiple of num_attention_heads = 5"),
        ("bert", {"vocab_size": "DELETE"}, "vocab_size is None"),
        ("roberta", {"hidden_act": "relu"}, "hidden_act = 'relu' is not supported"),
        ("roberta", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("roberta", {"is_decoder": True}, "is_decoder"),
        ("roberta", {"add_cross_attention": True}, "add_cross_attention"),
        ("roberta", {"pad_token_id": None}, "pad_token_id is None"),
        ("roberta", {"pad_token_id": -1}, "pad_token_id is -1"),
        ("roberta", {"pad_token_id": 129}, "max_position_embeddings = 130 leaves no position for a text: they begin at 130"),
        ("distilbert", {"activation": "relu"}, "activation = 'relu' is not supported"),
        ("distilbert", {"n_heads": 5}, "dim = 64 is not a multiple of n_heads = 5"),
        ("distilbert", {"hidden_dim": "DELETE"}, "hidden_dim is None"),
        ("mpnet", {"hidden_act": "relu"}, "hidden_act = 'relu' is not supported"),
        ("mpnet", {"relative_attention_num_buckets": 64}, "relative_attention_num_buckets = 64"),
        ("mpnet", {"max_position_embeddings": 2}, "leaves no position for a text"),
        ("deberta", {"hidden_act": "relu"}, "hidden_act = 'relu' is not supported"),
        ("deberta", {"relative_attention": "DELETE"}, "relative_attention = False is not supported (only True)"),
        ("deberta", {"share_att_key": "DELETE"}, "share_att_key = False"),
        ("deberta", {"norm_rel_ebd": "none"}, "norm_rel_ebd = 'none'"),
        ("deberta", {"position_biased_input": "DELETE"}, "position_biased_input = True"),
        ("deberta", {"type_vocab_size": 2}, "type_vocab_size = 2"),
        ("deberta", {"conv_kernel_size": 3}, "conv_kernel_size = 3"),
        ("deberta", {"pos_att_type": "c2p"}, "pos_att_type = 'c2p'"),
        ("deberta", {"pos_att_type": None}, "pos_att_type = None"),
        ("deberta", {"embedding_size": 32}, "embedding_size = 32"),
        ("deberta", {"attention_head_size": 32}, "attention_head_size = 32"),
        ("deberta", {"position_buckets": -1}, "position_buckets is -1"),
        ("deberta", {"position_buckets": 256}, "position_buckets = 256 are too many for 128 relative positions"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "sliding_attention"),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "'yarn'"),
        ("qwen3", {"rope_parameters": "DELETE"}, "rope_theta is None"),
        ("nomic_bert", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ("nomic_bert", {"head_dim": 32}, "head_dim = 32 is not supported"),
        ("nomic_bert", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0}}, "'dynamic'"),
        ("nomic_bert_authors", {"activation_function": "gelu_new"}, "activation_function = 'gelu_new' is not supported"),
        ("nomic_bert_authors", {"rotary_emb_fraction": 0.5}, "rotary_emb_fraction = 0.5"),
        ("nomic_bert_authors", {"rotary_emb_fraction": "DELETE"}, "rotary_emb_fraction is None"),
        ("nomic_bert_authors", {"rotary_emb_interleaved": True}, "rotary_emb_interleaved"),
        ("nomic_bert_authors", {"rotary_emb_scale_base": 512}, "rotary_emb_scale_base"),
        ("nomic_bert_authors", {"prenorm": True}, "prenorm"),
        ("nomic_bert_authors", {"parallel_block": True}, "parallel_block"),
        ("nomic_bert_authors", {"use_rms_norm": True}, "use_rms_norm"),
        ("nomic_bert_authors", {"norm_mlp": True}, "norm_mlp"),
        ("nomic_bert_authors", {"causal": True}, "causal"),
        ("nomic_bert_authors", {"num_heads_kv": 2}, "num_heads_kv = 2 is not supported (no grouped queries)"),
        ("nomic_bert_authors", {"n_head": 5}, "n_embd = 64 is not a multiple of n_head = 5"),
        ("nomic_bert_moe", {"activation_function": "swiglu"}, "in a mixture of experts, only exact GeLU"),
        ("nomic_bert_moe", {"moe_normalize_expert_weights": True}, "moe_normalize_expert_weights"),
        ("nomic_bert_moe", {"num_shared_experts": 1}, "num_shared_experts"),
        ("nomic_bert_moe", {"expert_choice_router": True}, "expert_choice_router"),
        ("nomic_bert_moe", {"ffn_div": 2}, "ffn_div"),
        ("nomic_bert_moe", {"moe_top_k": 5}, "moe_top_k = 5 of num_experts = 4"),
        ("nomic_bert_moe", {"num_experts": 0}, "num_experts is 0"),
        ("gte", {"hidden_act": "silu"}, "hidden_act = 'silu' is not supported"),
        ("gte", {"position_embedding_type": "absolute"}, "position_embedding_type"),
        ("gte", {"layer_norm_type": "rms_norm"}, "layer_norm_type"),
        ("gte", {"logn_attention_scale": True}, "logn_attention_scale"),
        ("gte", {"pack_qkv": False}, "pack_qkv"),
        ("gte", {"num_attention_heads": 5}, "hidden_size = 64 is not a multiple of num_attention_heads = 5"),
        ("gte", {"rope_parameters": "DELETE"}, "rope_theta is None"),
        ("gte_ntk", {"rope_parameters": {"type": "ntk", "rope_theta": 1.0, "factor": 2, "mixed_b": 0.5}}, "mixed_b"),
        ("gte_ntk", {"rope_parameters": {"type": "ntk", "rope_theta": 1.0}}, "factor is None"),
        ("gte_ntk", {"rope_parameters": {"type": "dynamic", "rope_theta": 1.0, "factor": 2.0}}, "'dynamic'"),
        ("jina_bert", {"position_embedding_type": "absolute"}, "position_embedding_type = 'absolute' is not supported"),
        ("jina_bert", {"position_embedding_type": "DELETE"}, "position_embedding_type = 'absolute'"),
        ("jina_bert", {"feed_forward_type": "reglu"}, "feed_forward_type = 'reglu' is not supported (only 'geglu')"),
        ("jina_bert", {"feed_forward_type": "DELETE"}, "feed_forward_type = 'original'"),
        ("jina_bert", {"is_decoder": True}, "is_decoder"),
        ("jina_bert", {"add_cross_attention": True}, "add_cross_attention"),
        ("jina_bert", {"num_attention_heads": 5}, "hidden_size = 64 is not a multiple of num_attention_heads = 5"),
        ("modernbert", {"hidden_activation": "relu"}, "hidden_activation = 'relu' is not supported"),
        ("modernbert", {"num_attention_heads": 5}, "hidden_size = 64 is not a multiple of num_attention_heads = 5"),
        ("modernbert", {"layer_types": ["full_attention"]}, "one of full_attention and sliding_attention for each of 4 layers"),
        ("modernbert", {"layer_types": ["chunked_attention"] * 4}, "layer_types ['chunked_attention'"),
        ("modernbert", {"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}}, "one set for each type of layer"),
        ("modernbert", {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}, "'yarn'"),
        ("modernbert", {"rope_parameters": "DELETE", "rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
        ("modernbert", {"rope_parameters": "DELETE", "local_rope_theta": -1}, "rope_theta is -1"),
    ],
)
def test_a_key_that_cannot_be_honoured_is_refused(
    copy: Callable[..., Path], kind: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        load_model_config(copy(kind, **changes))
    assert message in str(caught.value)


def test_positions_that_are_not_for_texts_do_not_count(copy: Callable[..., Path]) -> None:
    folder = copy("roberta")
    assert load_model_config(folder).max_input_length == 128
    edit(folder / "config.json", {"pad_token_id": "DELETE"})  # transformers' default is 1
    assert load_model_config(folder).max_input_length == 128
    edit(folder / "config.json", {"pad_token_id": 0})
    assert load_model_config(folder).max_input_length == 129
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 514}')
    assert load_model_config(folder).max_input_length == 129


def test_both_spellings_of_rope_are_read(copy: Callable[..., Path]) -> None:
    flat = copy("qwen3", rope_parameters="DELETE", rope_theta=1_000_000)
    assert load_model_config(flat).rope_theta == 1_000_000.0


def test_both_spellings_of_modernberts_layers_are_read(copy: Callable[..., Path]) -> None:
    folder = copy("modernbert", rope_parameters={kind: {"rope_theta": theta} for kind, theta in _THETAS.items()})
    nested = load_model_config(folder)
    assert (nested.global_theta, nested.local_theta) == (80_000.0, 5_000.0)
    assert nested.is_local == (False, True, True, False)
    flat = {"layer_types": "DELETE", "rope_parameters": "DELETE", "global_attn_every_n_layers": 3}
    edit(folder / "config.json", flat | {"global_rope_theta": 80_000, "local_rope_theta": 5_000})
    assert load_model_config(folder) == nested
    edit(folder / "config.json", {"local_rope_theta": None, "global_attn_every_n_layers": 2})
    assert load_model_config(folder).local_theta == 80_000.0
    assert load_model_config(folder).is_local == (False, True, False, True)


_THETAS = {"full_attention": 80_000.0, "sliding_attention": 5_000.0}


def test_both_spellings_of_gtes_rope_are_read(copy: Callable[..., Path]) -> None:
    folder = copy("gte_ntk")
    nested = load_model_config(folder)
    assert nested.rope_theta == 4000.0
    edit(folder / "config.json", {"rope_parameters": "DELETE", "rope_theta": 500})
    edit(folder / "config.json", {"rope_scaling": {"type": "ntk", "factor": 8.0}})
    assert load_model_config(folder) == nested
    edit(folder / "config.json", {"rope_scaling": None})
    plain = load_model_config(folder)
    assert (plain.rope_theta, plain.rope_scale) == (500.0, 1.0)
    edit(folder / "config.json", {"rope_scaling": {"type": "ntk", "factor": 0.5}})
    assert load_model_config(folder) == plain


def test_jinas_second_implementation_is_known_by_the_code_it_names(copy: Callable[..., Path]) -> None:
    folder = copy("jina_bert_code", feed_forward_type="DELETE")
    assert load_model_config(folder).qk_post_norm
    edit(folder / "config.json", {"auto_map": "DELETE", "_name_or_path": "jinaai/jina-bert-v2-qk-post-norm"})
    assert load_model_config(folder).qk_post_norm
    edit(folder / "config.json", {"_name_or_path": "jinaai/jina-bert-implementation", "feed_forward_type": "geglu"})
    assert not load_model_config(folder).qk_post_norm
    with pytest.raises(ModelError, match=r"mlp\.gated_layers\.weight is missing"):
        Engine.load(folder)


def test_nomics_inputs_end_where_rope_would_depend_on_other_texts(
    copy: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = copy("nomic_bert_authors", n_positions=8192, max_trained_positions=2048)
    assert load_model_config(folder).max_input_length == 8192  # plain RoPE at any length
    edit(folder / "config.json", {"rotary_scaling_factor": 2.0})
    with caplog.at_level("INFO", logger="engine.models.nomic_bert"):
        assert load_model_config(folder).max_input_length == 2048
    assert "no dynamic NTK scaling" in caplog.text
    edit(folder / "config.json", {"rotary_scaling_factor": "DELETE"})  # the authors' default is 1.0
    assert load_model_config(folder).max_input_length == 2048


def test_nomics_padded_vocabulary_is_counted(copy: Callable[..., Path]) -> None:
    assert load_model_config(copy("nomic_bert_authors", pad_vocab_size_multiple=64)).vocab_size == 320


def test_causality_follows_the_checkpoint(copy: Callable[..., Path]) -> None:
    folder = copy("qwen3")
    assert load_model_config(folder).causal
    edit(folder / "config.json", {"is_causal": False})
    assert not load_model_config(folder).causal


def test_pooling_is_read_overridden_or_asked_for(copy: Callable[..., Path]) -> None:
    folder = copy("bert")
    assert load_model_config(folder).pooling == "cls"
    assert load_model_config(folder, "mean").pooling == "mean"
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text('{"pooling_mode_mean_tokens": true, "pooling_mode_max_tokens": true}')
    with pytest.raises(ModelError, match="max"):
        load_model_config(folder)
    pooling.write_text('{"pooling_mode_lasttoken": true, "include_prompt": false}')
    with pytest.raises(ModelError, match="include_prompt"):
        load_model_config(folder)
    pooling.unlink()
    with pytest.raises(ModelError, match="--pooling"):
        load_model_config(folder)


def test_a_module_we_do_not_have_is_refused(copy: Callable[..., Path]) -> None:
    folder = copy("bert")
    (folder / "modules.json").write_text('[{"type": "sentence_transformers.models.Dense"}]')
    with pytest.raises(ModelError, match="Dense"):
        load_model_config(folder)


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
