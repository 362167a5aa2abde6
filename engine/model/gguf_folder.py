"""Makes a small model folder in the Hugging Face layout for a GGUF file. The weights stay in the file.

config.json is computed from the metadata by llama.cpp's rules. An error names the key of a value that the engine cannot honour.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import ModelError
from engine.model.gguf import ROPE_DIVISORS, Header
from engine.model.gguf_tokenizer import build_tokenizer

# Keys of the metadata that the engine does not compute. With any other value than these they would change the results.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "use_parallel_residual": (False,),
    "attention.causal": (True,),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_beta_fast": (32,),
    "rope.scaling.yarn_beta_slow": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
}
# transformers' (architecture, model_type).
_MODELS = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
# The names of sentence-transformers for llama.cpp's poolings.
_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}
# llama.cpp recognises Gemma 3 27B by its number of layers. That model scales its scores by another width.
_LAYERS_OF_GEMMA3_27B = 62


def write_folder(header: Header, folder: Path) -> None:
    """Writes config.json, generation_config.json, tokenizer.json, tokenizer_config.json, and the link model.gguf.

    A model that embeds also gets 1_Pooling/config.json.
    Raises: ModelError for a model that the engine would not compute as its authors meant. It names the key or the tensor.
    """
    _refuse(header)
    pooling = _pooling(header)
    header.names()
    config, tokens = model_config(header), _token_ids(header)
    tokenizer = build_tokenizer(header)
    texts = {name.replace("_id", ""): header.metadata["tokenizer.ggml.tokens"][each] for name, each in tokens.items()}
    ends = [tokens.get("eos_token_id"), header.token_id("eot_token_id")]
    generation = tokens | {"eos_token_id": list(dict.fromkeys(each for each in ends if each is not None))}
    about = texts | {"model_max_length": config["max_position_embeddings"], "tokenizer_class": "PreTrainedTokenizerFast"}
    template = header.metadata.get("tokenizer.chat_template")
    about |= {"chat_template": template} if isinstance(template, str) else {}
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {"config.json": config | tokens, "generation_config.json": generation, "tokenizer_config.json": about}
    if pooling is not None:
        files["1_Pooling/config.json"] = {"pooling_mode": pooling}
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "model.gguf").symlink_to(header.path.absolute())


def model_config(header: Header) -> dict[str, Any]:
    """The content of config.json. Raises: ModelError naming the key that is missing or wrong."""
    architecture = header.architecture
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(f"{header.path} has no tokenizer.ggml.tokens; convert the model with its tokenizer")
    hidden_size, n_heads = header.whole("embedding_length"), header.whole("attention.head_count")
    head_dim = header.whole("attention.key_length", header.whole("rope.dimension_count", hidden_size // n_heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if header.whole(key, head_dim) != head_dim:
            raise ModelError(
                f"{header.path}: {architecture}.{key} is {header.own(key)}, only a head's whole width {head_dim} works"
            )
    n_layers = header.whole("block_count")
    if n_layers > len(header.tensors):
        raise ModelError(f"{header.path}: {architecture}.block_count is {n_layers}, the file has {len(header.tensors)} tensors")
    names = _MODELS[architecture]
    if architecture == "llama" and header.own("attention.sliding_window"):
        names = ("MistralForCausalLM", "mistral")
    return {
        "architectures": [names[0]],
        "model_type": names[1],
        "hidden_size": hidden_size,
        "intermediate_size": header.whole("feed_forward_length"),
        "num_hidden_layers": n_layers,
        "num_attention_heads": n_heads,
        "num_key_value_heads": header.whole("attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "max_position_embeddings": header.whole("context_length"),
        "rms_norm_eps": _shortest(header.number("attention.layer_norm_rms_epsilon")),
        "vocab_size": len(tokens),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **(_gemma3(header, head_dim) if architecture == "gemma3" else _plain(header, names[1], head_dim)),
    }


def _plain(header: Header, model_type: str, head_dim: int) -> dict[str, Any]:
    context = header.whole("context_length")
    window = header.whole("attention.sliding_window", context)
    if model_type.startswith("qwen") and window < context:
        raise ModelError(f"{header.path}: {header.architecture}.attention.sliding_window = {window} is not supported")
    rope = {"rope_theta": _shortest(header.number("rope.freq_base", 10000.0))} | _scaling(header, head_dim)
    return {"hidden_act": "silu", "rope_parameters": rope} | ({"sliding_window": window} if model_type == "mistral" else {})


def _scaling(header: Header, head_dim: int) -> dict[str, Any]:
    """The kind of RoPE, and its keys.

    Raises: ModelError for a kind that the engine does not compute. Source: `load_hparams` of llama.cpp.
    """
    kind, name = header.own("rope.scaling.type"), f"{header.architecture}.rope.scaling.type"
    keys = (each for each in ("rope.scaling.factor", "rope.scale_linear") if header.own(each) not in (None, 0))
    factor = header.number(next(keys, "rope.scaling.factor"), 1)
    if kind not in (None, "none", "linear", "yarn"):
        raise ModelError(f"{header.path}: {name} = {kind!r:.80} is not supported (only none, linear, yarn)")
    is_scaled = kind != "none" and factor != 1
    if (divisors := header.tensors.get(ROPE_DIVISORS)) is not None:
        if is_scaled or divisors.kind != "F32" or divisors.shape != (head_dim // 2,):
            raise ModelError(
                f"{header.path}: {ROPE_DIVISORS} of shape {list(divisors.shape)} in {divisors.kind}, {name} = {kind} and the "
                f"factor {factor} are not supported (only {head_dim // 2} numbers in F32 without another scaling)"
            )
        found = np.fromfile(header.path, "<f4", head_dim // 2, offset=divisors.start)
        return {"rope_type": "divisors", "divisors": found.tolist()}
    if not is_scaled:
        return {"rope_type": "default"}
    if kind != "yarn":
        return {"rope_type": "linear", "factor": factor}
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": header.whole("rope.scaling.original_context_length", header.whole("context_length")),
    }


def _gemma3(header: Header, head_dim: int) -> dict[str, Any]:
    n_layers, pattern = header.whole("block_count"), header.own("attention.sliding_window_pattern")
    local = pattern if isinstance(pattern, list) else _local_layers(header)
    width = header.whole("embedding_length") // header.whole("attention.head_count")
    whole = {"rope_theta": _shortest(header.number("rope.freq_base", 1e6))} | _scaling(header, head_dim)
    in_window = {"rope_theta": _shortest(header.number("rope.freq_base_swa", 1e4)), "rope_type": "default"}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width if n_layers == _LAYERS_OF_GEMMA3_27B else head_dim,
        "sliding_window": header.whole("attention.sliding_window", header.whole("context_length")),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in local],
        "rope_parameters": {"full_attention": whole, "sliding_attention": in_window},
    }


def _local_layers(header: Header) -> list[bool]:
    """Whether each layer has a window. By default all layers have one except every sixth."""
    if header.own("attention.sliding_window") is None:
        return [False] * header.whole("block_count")
    every = header.whole("attention.sliding_window_pattern", 6)
    return [(index + 1) % every > 0 for index in range(header.whole("block_count"))]


def _refuse(header: Header) -> None:
    for key, neutral in _NEUTRAL.items():
        value = header.own(key)
        if value is not None and value not in neutral:
            raise ModelError(
                f"{header.path}: {header.architecture}.{key} = {value!r:.80} is not supported (only {neutral[-1]!r})"
            )


def _pooling(header: Header) -> str | None:
    """The pooling of a model that embeds, such as Qwen3-Embedding. None for a model that generates."""
    kind = header.own("pooling_type")
    if kind is None or kind == 0:
        return None
    if not isinstance(kind, int) or kind not in _POOLINGS:
        raise ModelError(
            f"{header.path}: {header.architecture}.pooling_type = {kind!r:.80} is not supported (only 0, which means none, "
            f"{', '.join(f'{number} {name}' for number, name in _POOLINGS.items())}; 4 is a reranker: "
            "load its safetensors instead)"
        )
    return _POOLINGS[kind]


def _token_ids(header: Header) -> dict[str, int]:
    """The special tokens that the file names, under transformers' names."""
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    found = {name: header.token_id(key) for name, key in names.items()}
    return {name: each for name, each in found.items() if each is not None}


def _shortest(value: float) -> float:
    """The shortest decimal number that rounds to the same float32, such as 1e-5. The authors wrote this number."""
    return float(str(np.float32(value)))
