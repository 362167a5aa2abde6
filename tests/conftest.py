"""Fixtures the whole suite shares: the embedded model and tiny random checkpoints saved by transformers."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "true"
os.environ["RAY_AUTH_MODE"] = "token"

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from engine.hub import EMBEDDED_MODEL, resolve_model

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@dataclass(frozen=True)
class Tiny:
    """How transformers makes a tiny random checkpoint of a kind. An encoder has [CLS] and [SEP] around a text and cls pooling,
    others an end-of-text token and last-token pooling."""

    config: type[Any]
    model: type[Any]
    shape: dict[str, Any]
    encoder: bool = True


_SHAPE = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
_GROUPED = _SHAPE | {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256}
_NARROW = _SHAPE | {"num_key_value_heads": 2, "max_position_embeddings": 256}
_GEMMA3 = _GROUPED | {"num_hidden_layers": 4, "sliding_window": 10, "sliding_window_pattern": 3}
TINY = {
    "bert": Tiny(transformers.BertConfig, transformers.BertModel, _SHAPE | {"max_position_embeddings": 128}),
    "qwen3": Tiny(transformers.Qwen3Config, transformers.Qwen3Model, _GROUPED, encoder=False),
    "qwen3_lm": Tiny(transformers.Qwen3Config, transformers.Qwen3ForCausalLM, _GROUPED, encoder=False),
    "qwen2": Tiny(transformers.Qwen2Config, transformers.Qwen2Model, _NARROW, encoder=False),
    "qwen2_lm": Tiny(transformers.Qwen2Config, transformers.Qwen2ForCausalLM, _NARROW, encoder=False),
    "mistral": Tiny(transformers.MistralConfig, transformers.MistralModel, _GROUPED, encoder=False),
    "mistral_lm": Tiny(transformers.MistralConfig, transformers.MistralForCausalLM, _GROUPED, encoder=False),
    "llama": Tiny(transformers.LlamaConfig, transformers.LlamaModel, _GROUPED, encoder=False),
    "gemma3": Tiny(transformers.Gemma3TextConfig, transformers.Gemma3TextModel, _GEMMA3, encoder=False),
    "gemma3_lm": Tiny(transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM, _GEMMA3, encoder=False),
    "llama_lm": Tiny(transformers.LlamaConfig, transformers.LlamaForCausalLM, _GROUPED, encoder=False),
}


@pytest.fixture(scope="session")
def minilm() -> Path:
    return resolve_model(EMBEDDED_MODEL)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny(kind, sharded, **config)`: a random checkpoint saved by transformers, made once per arguments."""
    made: dict[str, Path] = {}

    def make(kind: str, sharded: bool = False, **config: Any) -> Path:
        key = json.dumps([kind, sharded, config], sort_keys=True)
        if key not in made:
            made[key] = _save(kind, sharded, config, tmp_path_factory.mktemp(kind))
        return made[key]

    return make


def _save(kind: str, sharded: bool, config: dict[str, Any], folder: Path) -> Path:
    torch.manual_seed(0)
    vocab = 300
    made_of = TINY[kind]
    hf_config: Any = made_of.config(vocab_size=vocab, **(made_of.shape | config))
    model: Any = made_of.model(hf_config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, or their handling is not tested
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size="60KB" if sharded else "10GB")
    _save_tokenizer(folder, vocab, made_of.encoder)
    pooling = "cls" if made_of.encoder else "lasttoken"
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": hf_config.hidden_size, "pooling_mode": pooling})
    )
    return folder


def _save_tokenizer(folder: Path, vocab: int, encoder: bool) -> None:
    """Words w0, w1, ...; special tokens around a text as the family has them."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "<|endoftext|>"]
    words = specials + [f"w{i}" for i in range(vocab - len(specials))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(specials)
    single = "[CLS] $A [SEP]" if encoder else "$A <|endoftext|>"
    used = [(word, words.index(word)) for word in specials if word in single]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=used)
    tokenizer.save(str(folder / "tokenizer.json"))
