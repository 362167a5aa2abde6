"""A Hugging Face model folder -> one frozen `ModelConfig`.

Every key that changes a vector is either honoured or refused by name: a model that loads gives the vectors its
authors meant. HF's two spellings of a key (`rope_parameters`/`rope_theta`, `dtype`/`torch_dtype`) are read here
and nowhere else.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from engine.errors import ModelError

Pooling = Literal["mean", "cls", "last_token"]
Family = Literal["bert", "qwen3"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the forward pass and the tokenizer need to know, in the field's words.

    `max_input_length` counts tokens, special ones included. `prompts` maps a name to the text put in front.
    """

    family: Family
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_act: str
    norm_eps: float
    max_position_embeddings: int
    causal: bool
    pooling: Pooling
    max_input_length: int
    type_vocab_size: int = 0
    rope_theta: float = 0.0
    lower_case: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    stored_dtype: str = "float32"


def load_model_config(folder: Path, pooling: Pooling | None = None) -> ModelConfig:
    """Read `config.json` and the sentence-transformers files beside it.

    Args:
        folder: a model folder as the Hub has it.
        pooling: overrides the folder's own pooling; needed where the folder names none.
    Raises: ModelError naming the file, the key and what would help.
    """
    hf = _read_json(folder / "config.json")
    if hf is None:
        raise ModelError(f"{folder} has no config.json: it is not a model folder in the Hugging Face layout")
    architectures = hf.get("architectures") or []
    architecture = architectures[0] if architectures else f"(none, model_type {hf.get('model_type')!r})"
    if architecture not in _PARSERS:
        raise ModelError(
            f"{folder / 'config.json'}: architecture {architecture} is not supported; supported are {', '.join(sorted(_PARSERS))}"
        )
    keys = _Keys(folder / "config.json", hf)
    fields = _PARSERS[architecture](keys)
    prompts, default_prompt_name = _read_prompts(folder)
    limit, lower_case = _read_transformer_module(folder, fields["max_position_embeddings"])
    return ModelConfig(
        architecture=architecture,
        pooling=pooling or _read_pooling(folder, fields["hidden_size"]),
        max_input_length=limit,
        lower_case=lower_case,
        prompts=prompts,
        default_prompt_name=default_prompt_name,
        stored_dtype=str(keys.get("dtype", keys.get("torch_dtype", "float32")) or "float32"),
        **fields,
    )


class _Keys:
    """One config file; every failed look-up names the file and the key."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path, self.values = path, values

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def number(self, key: str, default: float | None = None) -> Any:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ModelError(f"{self.path}: {key} is {value!r}, expected a positive number")
        return value

    def refuse(self, key: str, allowed: tuple[Any, ...], why: str) -> None:
        """Stop when a key that changes the vectors holds something other than `allowed` (absent is fine)."""
        if key in self.values and self.values[key] not in allowed:
            raise ModelError(f"{self.path}: {key} = {self.values[key]!r} is not supported ({why})")


def _parse_bert(keys: _Keys) -> dict[str, Any]:
    keys.refuse("position_embedding_type", ("absolute", None), "only absolute positions")
    keys.refuse("is_decoder", (False, None), "only encoders")
    keys.refuse("add_cross_attention", (False, None), "only encoders")
    keys.refuse("hidden_act", ("gelu",), "only exact GeLU")
    heads = keys.number("num_attention_heads")
    _check_divides(keys, "hidden_size", "num_attention_heads")
    return {
        "family": "bert",
        "vocab_size": keys.number("vocab_size"),
        "hidden_size": keys.number("hidden_size"),
        "intermediate_size": keys.number("intermediate_size"),
        "n_layers": keys.number("num_hidden_layers"),
        "n_heads": heads,
        "n_kv_heads": heads,
        "head_dim": keys.number("hidden_size") // heads,
        "hidden_act": keys.get("hidden_act", "gelu"),
        "norm_eps": keys.number("layer_norm_eps", 1e-12),
        "max_position_embeddings": keys.number("max_position_embeddings"),
        "type_vocab_size": keys.number("type_vocab_size", 2),
        "causal": False,
    }


def _parse_qwen3(keys: _Keys) -> dict[str, Any]:
    keys.refuse("hidden_act", ("silu",), "only SwiGLU")
    keys.refuse("attention_bias", (False, None), "Qwen3 projections have no bias")
    keys.refuse("use_sliding_window", (False, None), "sliding windows come with a later family")
    layer_types = set(keys.get("layer_types") or ["full_attention"])
    if layer_types != {"full_attention"}:
        raise ModelError(f"{keys.path}: layer_types {sorted(layer_types)} are not supported (only full_attention)")
    heads, kv_heads = keys.number("num_attention_heads"), keys.number("num_key_value_heads")
    _check_divides(keys, "num_attention_heads", "num_key_value_heads")
    return {
        "family": "qwen3",
        "vocab_size": keys.number("vocab_size"),
        "hidden_size": keys.number("hidden_size"),
        "intermediate_size": keys.number("intermediate_size"),
        "n_layers": keys.number("num_hidden_layers"),
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "head_dim": keys.number("head_dim", 128),
        "hidden_act": "silu",
        "norm_eps": keys.number("rms_norm_eps", 1e-6),
        "max_position_embeddings": keys.number("max_position_embeddings"),
        "rope_theta": _rope_theta(keys),
        "causal": _is_causal(keys),
    }


def _rope_theta(keys: _Keys) -> float:
    """Plain RoPE's base, from transformers 5's `rope_parameters` or the Hub's flat keys."""
    rope = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{keys.path}: RoPE of type {kind!r} ({rope}) is not supported (only plain, full-width RoPE)")
    theta = rope.get("rope_theta", keys.get("rope_theta"))
    if not isinstance(theta, int | float) or theta <= 0:
        raise ModelError(f"{keys.path}: rope_theta is {theta!r}, expected a positive number")
    return float(theta)


def _is_causal(keys: _Keys) -> bool:
    """Qwen3 is causal unless the checkpoint says otherwise, in either of the two spellings in use."""
    if keys.get("use_bidirectional_attention"):
        return False
    return keys.get("is_causal", True) is not False


def _check_divides(keys: _Keys, total: str, parts: str) -> None:
    if keys.number(total) % keys.number(parts):
        raise ModelError(f"{keys.path}: {total} = {keys.get(total)} is not a multiple of {parts} = {keys.get(parts)}")


_PARSERS: dict[str, Callable[[_Keys], dict[str, Any]]] = {
    "BertModel": _parse_bert,
    "BertForMaskedLM": _parse_bert,
    "Qwen3Model": _parse_qwen3,
    "Qwen3ForCausalLM": _parse_qwen3,
}


def _read_transformer_module(folder: Path, positions: int) -> tuple[int, bool]:
    """(max_input_length, lower_case) from sentence_bert_config.json, bounded by the position table."""
    path = folder / "sentence_bert_config.json"
    module = _read_json(path) or {}
    limit = module.get("max_seq_length")
    if limit is None:
        limit = _tokenizer_limit(folder, positions)
    if not isinstance(limit, int) or limit <= 0:
        raise ModelError(f"{path}: max_seq_length is {limit!r}, expected a positive whole number")
    return min(limit, positions), bool(module.get("do_lower_case"))


def _tokenizer_limit(folder: Path, positions: int) -> int:
    """`model_max_length` where it means something: transformers writes 1e30 for "not known"."""
    limit = (_read_json(folder / "tokenizer_config.json") or {}).get("model_max_length")
    return int(limit) if isinstance(limit, int | float) and 0 < limit < 1e9 else positions


def _read_prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    path = folder / "config_sentence_transformers.json"
    config = _read_json(path) or {}
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{path}: prompts must map names to strings")
    if default is not None and default not in prompts:
        raise ModelError(f"{path}: default_prompt_name {default!r} is not one of the prompts {sorted(prompts)}")
    return prompts, default


def _read_pooling(folder: Path, hidden_size: int) -> Pooling:
    for module in cast(list[dict[str, str]], _read_json(folder / "modules.json") or []):
        kind = module.get("type", "").rsplit(".", 1)[-1]
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise ModelError(f"{folder / 'modules.json'}: module {kind} is not supported yet")
    path = folder / "1_Pooling" / "config.json"
    config = _read_json(path)
    if config is None:
        raise ModelError(
            f"{folder} does not say how to pool (no 1_Pooling/config.json): "
            f"choose one of {', '.join(get_args(Pooling))} with --pooling"
        )
    if config.get("include_prompt", True) is not True:
        raise ModelError(f"{path}: include_prompt = false is not supported")
    width = config.get("word_embedding_dimension", config.get("embedding_dimension", hidden_size))
    if width != hidden_size:
        raise ModelError(f"{path}: pools {width} dimensions, the model has {hidden_size}")
    return _pooling_mode(path, config)


def _pooling_mode(path: Path, config: dict[str, Any]) -> Pooling:
    """The one mode that is set: `pooling_mode` (sentence-transformers 5 on) or a `pooling_mode_*` flag."""
    named = {"mean": "mean", "cls": "cls", "lasttoken": "last_token"}
    flags = {
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_cls_token": "cls",
        "pooling_mode_lasttoken": "lasttoken",
        "pooling_mode_max_tokens": "max",
        "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
        "pooling_mode_weightedmean_tokens": "weightedmean",
    }
    mode = config.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else list(mode or [])
    modes = modes or [name for flag, name in flags.items() if config.get(flag)]
    if len(modes) != 1 or modes[0] not in named:
        raise ModelError(f"{path}: pooling {modes or 'nothing'} is not supported; supported is one of {list(named)}")
    return cast(Pooling, named[modes[0]])


def _read_json(path: Path) -> Any:
    """The file's content, or None where there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
