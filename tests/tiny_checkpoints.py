"""Tiny random checkpoints of each kind of model, saved by transformers.

`tests/conftest.py` imports this module only to save a new checkpoint, because all these classes take 3 s to import.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from parity import gte_reference, jina_bert_reference, nomic_bert_reference
from tiny_tokenizer import save_tokenizer

transformers.logging.disable_progress_bar()


@dataclass(frozen=True)
class Tiny:
    """The recipe of a tiny random checkpoint of a kind.

    The tokenizer of an encoder puts [CLS] and [SEP] around a text, and the pooling is cls. The tokenizer of another model adds
    an end-of-text token, and the pooling is last-token.
    """

    config: type[Any]
    model: type[Any]
    shape: dict[str, Any]
    encoder: bool = True


_SHAPE = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
_DISTILLED = {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96, "max_position_embeddings": 128}
_DISENTANGLED = _SHAPE | {
    "max_position_embeddings": 128, "relative_attention": True, "position_buckets": 16, "norm_rel_ebd": "layer_norm",
    "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
}  # fmt: skip
_GROUPED = _SHAPE | {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256}
# The window is much shorter than the texts of the tests. Two local layers lie between two global layers.
_LOCAL = _SHAPE | {"num_hidden_layers": 4, "local_attention": 16, "max_position_embeddings": 128, "pad_token_id": 0}
_NOMIC = {
    "n_embd": 64, "n_layer": 3, "n_head": 4, "n_inner": 96, "n_positions": 128, "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu", "type_vocab_size": 2, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
    "rotary_scaling_factor": None, "qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True,
    "moe_every_n_layers": 0, "num_experts": 0, "moe_top_k": 0,
}  # fmt: skip
_EXPERTS = {"moe_every_n_layers": 2, "num_experts": 4, "moe_top_k": 2, "type_vocab_size": 1, "n_layer": 4}
_GTE = _SHAPE | {"max_position_embeddings": 128, "pad_token_id": 0, "type_vocab_size": 2}
_NTK = {"rope_parameters": {"type": "ntk", "rope_theta": 500.0, "factor": 8.0}}
_JINA = _SHAPE | {"max_position_embeddings": 128, "layer_norm_eps": 1e-12, "type_vocab_size": 2, "qk_post_norm": False}
_JINA |= {"position_embedding_type": "alibi", "feed_forward_type": "geglu"}
_JINA_CODE = {"qk_post_norm": True, "auto_map": {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"}}
_NARROW = _SHAPE | {"num_key_value_heads": 2, "max_position_embeddings": 256}
_GEMMA3 = _GROUPED | {"num_hidden_layers": 4, "sliding_window": 10, "sliding_window_pattern": 3}
TINY = {
    "bert": Tiny(transformers.BertConfig, transformers.BertModel, _SHAPE | {"max_position_embeddings": 128}),
    "bert_lm": Tiny(transformers.BertConfig, transformers.BertForMaskedLM, _SHAPE | {"max_position_embeddings": 128}),
    "roberta": Tiny(transformers.RobertaConfig, transformers.RobertaModel, _SHAPE | {"max_position_embeddings": 130}),
    "roberta_lm": Tiny(transformers.RobertaConfig, transformers.RobertaForMaskedLM, _SHAPE | {"max_position_embeddings": 130}),
    "camembert": Tiny(transformers.CamembertConfig, transformers.CamembertForMaskedLM, _SHAPE | {"max_position_embeddings": 130}),
    "xlm_roberta": Tiny(transformers.XLMRobertaConfig, transformers.XLMRobertaModel, _SHAPE | {"max_position_embeddings": 130}),
    "xlm_roberta_lm": Tiny(
        transformers.XLMRobertaConfig, transformers.XLMRobertaForMaskedLM, _SHAPE | {"max_position_embeddings": 130}
    ),
    "distilbert": Tiny(transformers.DistilBertConfig, transformers.DistilBertModel, _DISTILLED),
    "distilbert_lm": Tiny(transformers.DistilBertConfig, transformers.DistilBertForMaskedLM, _DISTILLED),
    "mpnet": Tiny(transformers.MPNetConfig, transformers.MPNetModel, _SHAPE | {"max_position_embeddings": 130}),
    "mpnet_lm": Tiny(transformers.MPNetConfig, transformers.MPNetForMaskedLM, _SHAPE | {"max_position_embeddings": 130}),
    "deberta": Tiny(transformers.DebertaV2Config, transformers.DebertaV2Model, _DISENTANGLED),
    "deberta_lm": Tiny(transformers.DebertaV2Config, transformers.DebertaV2ForMaskedLM, _DISENTANGLED),
    "qwen3": Tiny(transformers.Qwen3Config, transformers.Qwen3Model, _GROUPED, encoder=False),
    "qwen3_lm": Tiny(transformers.Qwen3Config, transformers.Qwen3ForCausalLM, _GROUPED, encoder=False),
    "modernbert": Tiny(transformers.ModernBertConfig, transformers.ModernBertModel, _LOCAL),
    "modernbert_lm": Tiny(transformers.ModernBertConfig, transformers.ModernBertForMaskedLM, _LOCAL),
    "nomic_bert": Tiny(transformers.NomicBertConfig, transformers.NomicBertModel, _SHAPE | {"max_position_embeddings": 128}),
    "nomic_bert_lm": Tiny(transformers.NomicBertConfig, transformers.NomicBertForMaskedLM, _SHAPE),
    "nomic_bert_authors": Tiny(nomic_bert_reference.NomicConfig, nomic_bert_reference.NomicBertModel, _NOMIC),
    "nomic_bert_moe": Tiny(nomic_bert_reference.NomicConfig, nomic_bert_reference.NomicBertModel, _NOMIC | _EXPERTS),
    "gte": Tiny(transformers.GteConfig, transformers.GteModel, _GTE),
    "gte_lm": Tiny(transformers.GteConfig, transformers.GteForMaskedLM, _GTE),
    "gte_ntk": Tiny(gte_reference.NewConfig, gte_reference.NewModel, _GTE | _NTK),
    "jina_bert": Tiny(jina_bert_reference.JinaConfig, jina_bert_reference.JinaBertModel, _JINA),
    "jina_bert_code": Tiny(jina_bert_reference.JinaConfig, jina_bert_reference.JinaBertModel, _JINA | _JINA_CODE),
    "qwen2": Tiny(transformers.Qwen2Config, transformers.Qwen2Model, _NARROW, encoder=False),
    "qwen2_lm": Tiny(transformers.Qwen2Config, transformers.Qwen2ForCausalLM, _NARROW, encoder=False),
    "mistral": Tiny(transformers.MistralConfig, transformers.MistralModel, _GROUPED, encoder=False),
    "mistral_lm": Tiny(transformers.MistralConfig, transformers.MistralForCausalLM, _GROUPED, encoder=False),
    "llama": Tiny(transformers.LlamaConfig, transformers.LlamaModel, _GROUPED, encoder=False),
    "gemma3": Tiny(transformers.Gemma3TextConfig, transformers.Gemma3TextModel, _GEMMA3, encoder=False),
    "gemma3_lm": Tiny(transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM, _GEMMA3, encoder=False),
    "llama_lm": Tiny(transformers.LlamaConfig, transformers.LlamaForCausalLM, _GROUPED, encoder=False),
}
# Classifiers with the shape of a kind above.
_CLASSIFIERS: dict[str, type[Any]] = {
    "bert": transformers.BertForSequenceClassification,
    "roberta": transformers.RobertaForSequenceClassification,
    "camembert": transformers.CamembertForSequenceClassification,
    "xlm_roberta": transformers.XLMRobertaForSequenceClassification,
    "distilbert": transformers.DistilBertForSequenceClassification,
    "mpnet": transformers.MPNetForSequenceClassification,
    "deberta": transformers.DebertaV2ForSequenceClassification,
    "modernbert": transformers.ModernBertForSequenceClassification,
    "nomic_bert": transformers.NomicBertForSequenceClassification,
    "gte": transformers.GteForSequenceClassification,
    "gte_ntk": gte_reference.NewForSequenceClassification,
    "jina_bert": jina_bert_reference.JinaBertForSequenceClassification,
    "qwen3": transformers.Qwen3ForSequenceClassification,
    "qwen2": transformers.Qwen2ForSequenceClassification,
    "mistral": transformers.MistralForSequenceClassification,
    "llama": transformers.LlamaForSequenceClassification,
    "gemma3": transformers.Gemma3TextForSequenceClassification,
}
TINY |= {f"{kind}_classifier": replace(TINY[kind], model=model) for kind, model in _CLASSIFIERS.items()}


def save(kind: str, sharded: bool, config: dict[str, Any], folder: Path) -> Path:
    """Saves a checkpoint of the kind into the folder, and returns the folder. The weights are the same at each call."""
    torch.manual_seed(0)
    vocab = 300
    made_of = TINY[kind]
    hf_config: Any = made_of.config(vocab_size=vocab, **(made_of.shape | config))
    model: Any = made_of.model(hf_config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms, too: their initial values 0 and 1 would hide mistakes
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size="60KB" if sharded else "10GB")
    save_tokenizer(folder, vocab, made_of.encoder)
    if kind.endswith("_classifier"):  # a classifier's head has its own pooling
        return folder
    pooling = "cls" if made_of.encoder else "lasttoken"
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": hf_config.hidden_size, "pooling_mode": pooling})
    )
    return folder
