"""Unsupported model folders are refused, and the error names the config, pooling, weights or tokenizer."""

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
from engine.hub import resolve_model
from engine.model.config import Pooling
from engine.model.decoder import DecoderConfig
from engine.model.families.gemma3 import Gemma3Config
from engine.model.folder import load_model_config
from engine.model.generation import read_generation
from engine.model.keys import Keys
from engine.model.rope import Rope
from engine.revision import MODEL_FILES, OTHER_FILES

Tiny = Callable[..., Path]


_SCALED = {"rope_theta": 1e4, "factor": 4}
_YARN = _SCALED | {"rope_type": "yarn"}
_LLAMA3 = _SCALED | {"rope_type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4}


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
        ("bert", {"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5, expected a whole number of 1 or more"),
        ("bert", {"vocab_size": float("inf")}, "vocab_size is inf"),
        ("bert", {"vocab_size": 10**400}, "vocab_size is 1000"),
        ("bert", {"layer_norm_eps": float("nan")}, "layer_norm_eps is nan, expected a positive number"),
        ("bert", {"layer_norm_eps": 10**400}, "layer_norm_eps is 1000"),
        ("bert", {"transformers_weights": "other.safetensors"}, "transformers_weights = 'other.safetensors' is not supported"),
        ("bert", {"architectures": "BertModel"}, "architectures is 'BertModel', expected a list"),
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
        ("deberta", {"pos_att_type": [False, "p2c"]}, "pos_att_type = [False, 'p2c']"),
        ("deberta", {"max_relative_positions": "48"}, "max_relative_positions is '48'"),
        ("deberta", {"embedding_size": 32}, "embedding_size = 32"),
        ("deberta", {"attention_head_size": 32}, "attention_head_size = 32"),
        ("deberta", {"position_buckets": -1}, "position_buckets is -1"),
        ("deberta", {"position_buckets": 256}, "position_buckets = 256 are too many for 128 relative positions"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("qwen3", {"rope_parameters": "default"}, "rope_parameters is 'default', expected an object"),
        ("qwen3", {"layer_types": 3}, "layer_types is 3, expected a list"),
        ("qwen3", {"layer_types": [["full_attention"]] * 3}, "layer_types"),
        ("qwen2", {"auto_map": "modeling_qwen.Qwen2Model"}, "auto_map is 'modeling_qwen.Qwen2Model', expected an object"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": "2", "layer_types": "DELETE"}, "max_window_layers is '2'"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "sliding_window is None, layers [0, 1, 2] need one"),
        ("qwen3", {"layer_types": ["full_attention"] * 2}, "layer_types ['full_attention'] for 2 of 3 layers"),
        ("qwen3", {"layer_types": ["linear_attention"] * 3}, "layer_types ['linear_attention']"),
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported (only SwiGLU)"),
        ("qwen2", {"num_attention_heads": 6}, "hidden_size = 64 is not a multiple of num_attention_heads = 6"),
        ("qwen2", {"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple of num_key_value_heads = 3"),
        ("qwen3", {"head_dim": 33}, "head_dim is 33, expected an even number"),
        (
            "qwen2",
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            "only plain, linear, llama3, yarn, divisors, of",
        ),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "all of Mistral's layers have the same window"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("gemma3", {"attention_bias": True}, "attention_bias"),
        ("gemma3", {"hidden_activation": "silu"}, "hidden_activation = 'silu' is not supported (only the tanh form of GeLU)"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"is_causal": None}, "is_causal = None"),
        ("gemma3", {"is_causal": False}, "is_causal = False is not supported (Gemma says use_bidirectional_attention)"),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0}}},
            "'yarn'",
        ),
        ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 8.0}}}, "'linear'"),
        ("gemma3", {"rope_parameters": "DELETE", "rope_scaling": {"rope_type": "linear", "factor": -8.0}}, "factor is -8.0"),
        ("gemma3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}}, "one set for each type of layer"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("gemma3", {"rope_parameters": {"full_attention": "default"}}, "full_attention is 'default', expected an object"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"rope_parameters": _LLAMA3 | {"factor": None}}, "factor is None"),
        ("llama", {"rope_parameters": _LLAMA3 | {"low_freq_factor": 0}}, "low_freq_factor is 0"),
        ("llama", {"rope_parameters": _LLAMA3 | {"high_freq_factor": 1}}, "low_freq_factor is 1, expected less than high_freq_f"),
        (
            "llama",
            {"rope_parameters": _LLAMA3, "original_max_position_embeddings": 0.5},
            "original_max_position_embeddings is 0.5",
        ),
        ("qwen3", {"rope_parameters": _YARN | {"rope_theta": 1.0}}, "YaRN with rope_theta = 1 and 4 times 256 positions"),
        ("qwen3", {"rope_parameters": _YARN | {"factor": 1e9}}, "and 1e+09 times 256 positions is not supported"),
        ("qwen3", {"rope_parameters": _YARN | {"mscale": "x", "mscale_all_dim": 1}}, "mscale is 'x'"),
        ("qwen3", {"rope_parameters": _YARN | {"attention_factor": 0}}, "attention_factor is 0"),
        ("qwen3", {"rope_parameters": "DELETE"}, "rope_theta is None"),
        ("qwen3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "differs from rope_parameters {"),
        ("gte_ntk", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "differs from rope_parameters {"),
        ("modernbert", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "differs from rope_parameters {"),
        ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "differs from rope_parameters {"),
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
        ("gte", {"type_vocab_size": -1}, "type_vocab_size is -1"),
        ("gte", {"position_embedding_type": "absolute"}, "position_embedding_type"),
        ("gte", {"layer_norm_type": "rms_norm"}, "layer_norm_type"),
        ("gte", {"logn_attention_scale": True}, "logn_attention_scale"),
        ("gte", {"pack_qkv": False}, "pack_qkv"),
        ("gte", {"num_attention_heads": 5}, "hidden_size = 64 is not a multiple of num_attention_heads = 5"),
        ("gte", {"rope_parameters": "DELETE"}, "rope_theta is None"),
        ("gte_ntk", {"rope_parameters": {"type": "ntk", "rope_theta": 1.0, "factor": 2, "mixed_b": 0.5}}, "mixed_b"),
        ("gte_ntk", {"rope_parameters": {"type": "ntk", "rope_theta": 1.0}}, "factor is None"),
        ("gte_ntk", {"rope_parameters": {"type": "dynamic", "rope_theta": 1.0, "factor": 2.0}}, "'dynamic'"),
        ("gte", {"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
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
        ("bert_classifier", {"id2label": {"0": "a", "2": "b"}}, "does not name every label from 0 up"),
        ("bert_classifier", {"id2label": {}}, "id2label {} does not name every label"),
        ("bert_classifier", {"id2label": ["a", "b"]}, "id2label ['a', 'b'] does not name every label"),
        ("bert_classifier", {"id2label": {"0": "a"}, "num_labels": 2}, "id2label names 1 labels, num_labels is 2"),
        ("bert_classifier", {"num_labels": 0}, "num_labels is 0"),
        (
            "deberta_classifier",
            {"pooler_hidden_act": "gelu_new"},
            "pooler_hidden_act = 'gelu_new' is not supported (one of gelu,",
        ),
        ("deberta_classifier", {"pooler_hidden_act": ["gelu"]}, "pooler_hidden_act = ['gelu']"),
        ("deberta_classifier", {"pooler_hidden_size": 32}, "pooler_hidden_size = 32"),
        (
            "modernbert_classifier",
            {"classifier_pooling": "max"},
            "classifier_pooling = 'max' is not supported (only cls and mean)",
        ),
        ("modernbert_classifier", {"classifier_activation": "relu6"}, "classifier_activation = 'relu6'"),
    ],
)
def test_a_key_that_cannot_be_honoured_is_refused(
    copy: Callable[..., Path], kind: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        load_model_config(copy(kind, **changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(("kind", "key"), [("bert", "hidden_size"), ("qwen3", "head_dim"), ("qwen3", "max_position_embeddings")])
def test_a_whole_number_may_be_written_with_a_point(copy: Callable[..., Path], kind: str, key: str) -> None:
    folder = copy(kind)
    config, value = load_model_config(folder), json.loads((folder / "config.json").read_text())[key]
    edit(folder / "config.json", {key: float(value)})
    assert repr(load_model_config(folder)) == repr(config)


@pytest.mark.parametrize(
    "file",
    [
        "config.json",
        "modules.json",
        "1_Pooling/config.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
        "tokenizer_config.json",
    ],
)
def test_a_file_that_is_not_an_object_is_named(copy: Callable[..., Path], file: str) -> None:
    folder = copy("bert")
    (folder / file).write_text("[1]")
    with pytest.raises(ModelError, match=rf"{file} must be"):
        load_model_config(folder)


def test_labels_are_in_the_order_of_their_indices(copy: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    names = {str(index): f"name {index}" for index in (10, *range(10))}
    folder = copy("bert_classifier", id2label=names)
    assert load_model_config(folder).labels == tuple(f"name {index}" for index in range(11))
    with pytest.raises(ModelError, match=r"classifier\.weight has shape \[2, 64\], config\.json asks for \[11, 64\]"):
        Engine.load(folder)
    edit(folder / "config.json", {"id2label": "DELETE", "num_labels": 3})
    assert load_model_config(folder).labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    edit(folder / "config.json", {"num_labels": "DELETE"})  # transformers' default
    assert load_model_config(folder).labels == ("LABEL_0", "LABEL_1")
    assert load_model_config(folder, "cls").task == load_model_config(folder, "mean").task == "classifier"
    assert caplog.text.count("pooling mean is not used") == 1


@pytest.mark.parametrize(
    ("problem", "labels", "expected"),
    [
        ("regression", 3, (False, True)),
        ("regression", 1, (False, False)),  # a reranker's score is a probability
        ("multi_label_classification", 3, (True, False)),
        (None, 3, (False, False)),
    ],
)
def test_the_problem_type_says_what_scores_are(
    copy: Callable[..., Path], problem: str | None, labels: int, expected: tuple[bool, bool]
) -> None:
    config = load_model_config(copy("bert_classifier", problem_type=problem, id2label="DELETE", num_labels=labels))
    assert (config.multi_label, config.regression) == expected


def test_the_first_jina_rerankers_are_known_by_their_name(copy: Callable[..., Path], tmp_path: Path) -> None:
    """Their config.json names only the body, and no labels."""
    folder = copy("jina_bert_classifier", architectures=["JinaBertModel"], id2label="DELETE", label2id="DELETE")
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: tensors[name][:1].contiguous() for name in ("classifier.weight", "classifier.bias")}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="--pooling"):
        load_model_config(folder)
    folder.rename(tmp_path / "jina-reranker-v1-tiny-en")
    engine = Engine.load(tmp_path / "jina-reranker-v1-tiny-en", dtype="float32")
    assert (engine.config.task, engine.config.labels) == ("reranker", ("LABEL_0",))


def test_positions_that_are_not_for_texts_do_not_count(copy: Callable[..., Path]) -> None:
    folder = copy("roberta")
    assert load_model_config(folder).max_input_length == 128
    edit(folder / "config.json", {"pad_token_id": "DELETE"})  # transformers' default is 1
    assert load_model_config(folder).max_input_length == 128
    edit(folder / "config.json", {"pad_token_id": 0})
    assert load_model_config(folder).max_input_length == 129
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 514}')
    assert load_model_config(folder).max_input_length == 129


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"])
def test_each_file_name_of_the_transformer_module_is_read(copy: Callable[..., Path], kind: str) -> None:
    folder = copy("roberta")
    (folder / f"sentence_{kind}_config.json").write_text('{"max_seq_length": 16, "do_lower_case": true}')
    config = load_model_config(folder)
    assert (config.max_input_length, config.lower_case) == (16, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"processing_kwargs": {"text": {"max_length": 8, "truncation": True}}}, "max_length = 8 in text is not supported"),
        ({"processing_kwargs": {"common": {"add_special_tokens": False}}}, "add_special_tokens = False in common"),
        ({"processing_kwargs": {"chat_template": {"enable_thinking": False}}}, "enable_thinking = False in chat_template"),
        ({"document_length": 8}, "document_length = 8 is not supported (queries and documents have one limit)"),
        ({"query_length": 8}, "query_length = 8"),
        ({"query_expansion": {"strategy": "fixed", "length": 32}}, "query_expansion = {"),
        ({"modality_config": {"text": {"method_output_name": ["hidden_states", 1]}}}, "only last_hidden_state"),
        ({"modality_config": {"text": {}, "message": {"format": "flat"}}}, "message in modality_config is not supported"),
        ({"modality_config": []}, "modality_config is [], expected an object"),
        ({"config_kwargs": {"num_hidden_layers": 2}}, "num_hidden_layers = 2 in config_kwargs"),
        ({"config_args": {"num_hidden_layers": 2}}, "num_hidden_layers = 2 in config_args"),
        ({"processor_kwargs": {"truncation_side": "left"}}, "truncation_side = 'left' in processor_kwargs"),
        ({"tokenizer_args": {"model_max_length": 16}}, "model_max_length = 16 in tokenizer_args"),
    ],
)
def test_a_setting_of_the_transformer_module_that_changes_vectors_is_refused(
    copy: Callable[..., Path], changes: dict[str, Any], message: str
) -> None:
    folder = copy("bert")
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 64} | changes))
    with pytest.raises(ModelError, match=r"sentence_bert_config\.json") as caught:
        load_model_config(folder)
    assert message in str(caught.value)


def test_settings_of_the_transformer_module_that_change_nothing_are_fine(copy: Callable[..., Path]) -> None:
    neutral = {
        "max_seq_length": 64,
        "transformer_task": "feature-extraction",
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "module_output_name": "token_embeddings",
        "processing_kwargs": {"text": {"padding": True, "truncation": True}, "chat_template": {"add_generation_prompt": True}},
        "unpad_inputs": False,
        "query_length": None,
        "model_args": {"trust_remote_code": True},
        "tokenizer_args": {"trust_remote_code": True, "padding_side": "left"},
        "config_args": {},
    }
    folder = copy("bert")
    (folder / "sentence_bert_config.json").write_text(json.dumps(neutral))
    assert load_model_config(folder).max_input_length == 64


def test_both_spellings_of_rope_are_read(copy: Callable[..., Path]) -> None:
    flat = copy("qwen3", rope_parameters="DELETE", rope_theta=1_000_000)
    assert load_model_config(flat).rope.theta == 1_000_000.0
    rope = {"rope_type": "default", "rope_theta": 1_000_000}
    edit(flat / "config.json", {"rope_theta": 10_000, "rope_parameters": rope, "rope_scaling": rope})
    assert load_model_config(flat).rope.theta == 1_000_000.0


def test_both_spellings_of_modernberts_layers_are_read(copy: Callable[..., Path]) -> None:
    folder = copy("modernbert", rope_parameters={kind: {"rope_theta": theta} for kind, theta in _THETAS.items()})
    nested = load_model_config(folder)
    assert (nested.global_rope, nested.local_rope) == (Rope(80_000.0), Rope(5_000.0))
    assert nested.local_layers == (1, 2)
    flat = {"layer_types": "DELETE", "rope_parameters": "DELETE", "global_attn_every_n_layers": 3}
    edit(folder / "config.json", flat | {"global_rope_theta": 80_000, "local_rope_theta": 5_000})
    assert load_model_config(folder) == nested
    edit(folder / "config.json", {"local_rope_theta": None, "global_attn_every_n_layers": 2})
    assert load_model_config(folder).local_rope.theta == 80_000.0
    assert load_model_config(folder).local_layers == (1, 3)


_THETAS = {"full_attention": 80_000.0, "sliding_attention": 5_000.0}


def test_both_spellings_of_gtes_rope_are_read(copy: Callable[..., Path]) -> None:
    folder = copy("gte_ntk")
    nested = load_model_config(folder)
    assert nested.rope.theta == 4000.0
    edit(folder / "config.json", {"rope_parameters": "DELETE", "rope_theta": 500})
    edit(folder / "config.json", {"rope_scaling": {"type": "ntk", "factor": 8.0}})
    assert load_model_config(folder) == nested
    edit(folder / "config.json", {"rope_scaling": None})
    plain = load_model_config(folder)
    assert plain.rope == Rope(500.0)
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
    with caplog.at_level("INFO", logger="engine.model.families.nomic_bert"):
        assert load_model_config(folder).max_input_length == 2048
    assert "no dynamic NTK scaling" in caplog.text
    edit(folder / "config.json", {"rotary_scaling_factor": "DELETE"})  # the authors' default is 1.0
    assert load_model_config(folder).max_input_length == 2048


def test_nomics_padded_vocabulary_is_counted(copy: Callable[..., Path]) -> None:
    assert load_model_config(copy("nomic_bert_authors", pad_vocab_size_multiple=64)).vocab_size == 320


def test_causality_follows_the_checkpoint(copy: Callable[..., Path]) -> None:
    folder = copy("qwen3")
    assert load_model_config(folder).causal
    for bidirectional in (False, None, 0):  # the values that are false in transformers
        edit(folder / "config.json", {"is_causal": bidirectional})
        assert not load_model_config(folder).causal


@pytest.mark.parametrize("key", ["temperature", "top_k", "max_new_tokens"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), pytest.param(10**400, id="huge"), True, "1"])
def test_a_setting_for_generation_that_is_no_number_is_named(tmp_path: Path, key: str, value: Any) -> None:
    path = tmp_path / "generation_config.json"
    with pytest.raises(ModelError, match=rf"generation_config\.json: {key} is .*, expected a number of 0 or more"):
        read_generation(Keys(tmp_path / "config.json", {}), Keys(path, {key: value}))


def test_gemma3_is_the_same_in_the_hubs_spelling(copy: Callable[..., Path]) -> None:
    """google/embeddinggemma-300m spells its config with flat keys and a pattern of layers."""
    bases = {"full_attention": {"rope_theta": 700.0}, "sliding_attention": {"rope_theta": 70.0}}
    folder = copy("gemma3", rope_parameters=bases, use_bidirectional_attention=True, sliding_window=512)
    config = load_model_config(folder)
    assert isinstance(config, Gemma3Config)
    assert (config.window, config.local_layers, config.causal) == (256, (0, 1, 3), False)
    assert (config.rope, config.local_rope) == (Rope(700.0), Rope(70.0))
    flat = {"rope_parameters": "DELETE", "rope_theta": 700.0, "rope_local_base_freq": 70.0, "rope_scaling": None}
    pattern = {"layer_types": "DELETE", "sliding_window_pattern": 3}
    edit(folder / "config.json", flat | pattern)
    assert load_model_config(folder) == config
    edit(folder / "config.json", {"rope_theta": "DELETE", "rope_local_base_freq": "DELETE"})
    assert load_model_config(folder) == replace(config, rope=Rope(1e6), local_rope=Rope(1e4))


def test_gtes_qwen2_is_bidirectional_unless_it_says_otherwise(copy: Callable[..., Path]) -> None:
    """The authors' code is bidirectional by default. Only later revisions of config.json say so."""
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


def test_trusted_code_that_does_not_run_is_named(copy: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    folder = copy("qwen3", auto_map={"AutoModel": "modeling_own.OwnModel"})
    load_model_config(folder)
    assert not caplog.text
    load_model_config(folder, trust_remote_code=True)
    assert "our own Qwen3Model is used; --backend transformers runs the folder's code" in caplog.text


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


@pytest.mark.parametrize(
    ("kind", "pooling", "settings", "message"),
    [
        ("bert", None, {"truncate_dim": 16}, "truncate_dim = 16 is not supported (a vector is cut by `dimensions`"),
        ("bert", None, {"truncate_dim": "16"}, "truncate_dim is '16'"),
        ("bert_lm", "splade", {"max_active_dims": 8}, "max_active_dims = 8 is not supported (a sparse vector keeps all"),
    ],
)
def test_sentence_transformers_cuts_are_refused(
    copy: Callable[..., Path], kind: str, pooling: Pooling | None, settings: dict[str, Any], message: str
) -> None:
    folder = copy(kind)
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"config_sentence_transformers\.json") as caught:
        load_model_config(folder, pooling)
    assert message in str(caught.value)


def test_cuts_that_change_no_vector_are_fine(copy: Callable[..., Path]) -> None:
    for kind, settings in (("bert", {"truncate_dim": 64, "max_active_dims": 8}), ("bert_classifier", {"truncate_dim": 16})):
        folder = copy(kind)
        (folder / "config_sentence_transformers.json").write_text(json.dumps(settings | {"truncate_dim": None}))
        expected = load_model_config(folder)
        (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
        assert load_model_config(folder) == expected


def test_a_default_prompt_that_is_no_name_is_named(copy: Callable[..., Path]) -> None:
    folder = copy("bert")
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"query": "q "}, "default_prompt_name": ["query"]}')
    with pytest.raises(ModelError, match=r"default_prompt_name \['query'\] is not one of the prompts \['query'\]"):
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


def test_a_dropout_module_is_left_out(copy: Callable[..., Path]) -> None:
    config = load_model_config(with_modules(copy("bert"), "Transformer", "Pooling", "Dropout", "Dense", "Dropout"))
    assert [each.folder for each in config.dense] == ["3_Dense"]
    classifier = with_modules(copy("bert_classifier"), "Transformer", "Dropout")
    assert load_model_config(classifier).task == "classifier"


@pytest.mark.parametrize("kind", ["custom_st.Transformer", "custom_pool.Pooling", "Pooling", None])
@pytest.mark.parametrize("model", ["bert", "bert_classifier"])
def test_a_module_of_the_folders_own_code_is_refused(copy: Callable[..., Path], model: str, kind: str | None) -> None:
    folder = copy(model)
    (folder / "modules.json").write_text(json.dumps([{"type": kind, "path": ""}]))
    with pytest.raises(ModelError, match=rf"modules\.json: module {kind!r} is not supported, because it is not sentence"):
        load_model_config(folder)


def test_a_module_outside_of_the_folder_is_refused(copy: Callable[..., Path]) -> None:
    folder = copy("bert")
    (folder / "modules.json").write_text('[{"type": "sentence_transformers.models.Pooling", "path": "../1_Pooling"}]')
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
        ({"in_features": 32}, "in_features is 32, the module before has 64 dimensions"),
        ({"out_features": "DELETE"}, "out_features is None"),
    ],
)
def test_a_dense_layer_that_cannot_be_honoured_is_refused(
    copy: Callable[..., Path], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=r"2_Dense.config\.json") as caught:
        load_model_config(with_modules(copy("bert"), "Transformer", "Pooling", "Dense", **changes))
    assert message in str(caught.value)


def test_the_weights_of_a_dense_layer_are_all_known(copy: Callable[..., Path]) -> None:
    folder = with_modules(copy("bert"), "Transformer", "Pooling", "Dense")
    tensors = {"linear.weight": torch.zeros(64, 64), "linear.bias": torch.zeros(64)}
    save_file(tensors | {"residual.weight": torch.zeros(4)}, folder / "2_Dense" / "model.safetensors")
    with pytest.raises(ModelError, match=r"residual\.weight"):
        Engine.load(folder)
    save_file(tensors, folder / "2_Dense" / "model.safetensors")
    assert Engine.load(folder, dtype="float32").config.embedding_size == 64


def test_the_hub_gives_dense_layers_and_nothing_that_is_not_read() -> None:
    files = [
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "model-00001-of-00002.safetensors",
        "2_Dense/model.safetensors",
        "2_Dense/config.json",
        "1_Pooling/config.json",
        "sparse_linear.pt",
        "colbert_linear.safetensors",
    ]
    others = [
        "long.pt",
        "1/sparse_linear.pt",
        "2_Dense/pytorch_model.bin",
        "onnx/model.safetensors",
        "gguf/1_Dense/model.safetensors",
        "modeling_qwen.py",
    ]
    assert list(filter_repo_objects(files + others, allow_patterns=MODEL_FILES, ignore_patterns=OTHER_FILES)) == files


def test_every_tensor_is_used_or_reported(copy: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    folder = copy("bert")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"embeddings.position_ids": torch.zeros(1, 4)}, folder / "model.safetensors")
    with caplog.at_level("INFO", logger="engine.model.weights"):
        Engine.load(folder, dtype="float32")
    assert "embeddings.position_ids" in caplog.text
    assert "pooler.dense.weight" in caplog.text
    save_file(tensors | {"projection.weight": torch.zeros(4)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"projection\.weight"):
        Engine.load(folder)


def test_stored_frequencies_of_rope_are_reported(copy: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    folder = copy("llama")
    name, tensors = "layers.1.self_attn.rotary_emb.inv_freq", load_file(folder / "model.safetensors")
    save_file(tensors | {name: torch.zeros(16)}, folder / "model.safetensors")
    with caplog.at_level("INFO", logger="engine.model.weights"):
        Engine.load(folder, dtype="float32")
    assert name in caplog.text


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
    for content in ("{", "[" * 100_000):
        (folder / "config.json").write_text(content)
        with pytest.raises(ModelError, match=r"config\.json is not JSON"):
            Engine.load(folder)
    (folder / "config.json").write_bytes(b"\xff")
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


def test_an_adapter_is_not_left_out(copy: Callable[..., Path]) -> None:
    """sentence-transformers, and transformers with peft, would add it to the weights."""
    folder = copy("bert")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ModelError, match=r"adapter_config\.json: adapters \(LoRA\) are not supported; merge"):
        load_model_config(folder)


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
    with pytest.raises(ModelError, match="neither a folder here nor in the Hub's cache, and HF_HUB_OFFLINE forbids"):
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
