"""Tiny GGUF files, written as llama.cpp's converter writes them."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers

from engine.model.keys import Keys

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
}
_GEMMA_NAMES = _NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
SPECIALS = ["<|start|>", "<|end|>", "<think>"]  # the last token is user-defined
MERGES = [f"{a} {b}" for a, b in zip("thequickbr", "heuicklmro", strict=True)]


def byte_level_tokens(vocab_size: int = 300) -> list[str]:
    """All bytes, the merged tokens, the special tokens, and padding up to `vocab_size`."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *dict.fromkeys(merge.replace(" ", "") for merge in MERGES), *SPECIALS]
    return tokens + [f"[PAD{index}]" for index in range(len(tokens), vocab_size)]


def tokenizer_metadata(vocab_size: int = 300, pre: str = "gpt-2") -> dict[str, Any]:
    tokens = byte_level_tokens(vocab_size)
    start = tokens.index(SPECIALS[0])
    types = [5 if token.startswith("[PAD") else 1 for token in tokens]
    types[start : start + 3] = [3, 3, 4]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": start,
        "tokenizer.ggml.eos_token_id": start + 1,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0]['content'] }}",
    }


def config_metadata(keys: Keys, architecture: str) -> dict[str, Any]:
    """The metadata of a transformers config.json."""
    hf = keys.values
    named = {
        "context_length": hf["max_position_embeddings"],
        "embedding_length": hf["hidden_size"],
        "block_count": hf["num_hidden_layers"],
        "feed_forward_length": hf["intermediate_size"],
        "attention.head_count": hf["num_attention_heads"],
        "attention.head_count_kv": hf["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": hf["rms_norm_eps"],
        "attention.key_length": hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
    }
    rope = hf["rope_parameters"]
    if architecture == "gemma3":
        named |= {"rope.freq_base": rope["full_attention"]["rope_theta"], "attention.sliding_window": hf["sliding_window"]}
        named |= {"attention.sliding_window_pattern": [kind == "sliding_attention" for kind in hf["layer_types"]]}
    else:
        named |= {"rope.freq_base": rope["rope_theta"]}
        named |= {"attention.sliding_window": hf["sliding_window"]} if hf["architectures"][0].startswith("Mistral") else {}
    return {f"{architecture}.{key}": value for key, value in named.items()}


def converted(folder: Path, architecture: str, n_heads: int, n_kv_heads: int) -> dict[str, np.ndarray]:
    """A checkpoint's tensors with llama.cpp's names, rows and norms."""
    found = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        parts = name.removeprefix("model.").rsplit(".", 1)
        layer, prefix = parts[0], ""
        if layer.startswith("layers."):
            _, index, layer = layer.split(".", 2)
            prefix = f"blk.{index}."
        ours = (_GEMMA_NAMES if architecture == "gemma3" else _NAMES)[layer]
        if architecture == "llama" and ours in ("attn_q", "attn_k"):
            heads = n_heads if ours == "attn_q" else n_kv_heads
            tensor = tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        if architecture == "gemma3" and layer.endswith("norm"):
            tensor = tensor + 1
        found[f"{prefix}{ours}.{parts[1]}"] = np.ascontiguousarray(tensor)
    return found


def random_blocks(shape: Sequence[int], kind: GGMLQuantizationType, seed: int) -> np.ndarray:
    """A matrix in blocks of random bytes. The fp16 numbers of a block give values with a standard deviation near 0.03.

    The `gguf` package cannot quantise to the types whose scales are quantised, too.
    """
    numbers = {
        "Q4_0": {0: 0.006},
        "Q4_1": {0: 0.006, 2: -0.045},
        "Q4_K": {0: 1.5e-4, 2: 1.1e-3},
        "Q5_0": {0: 0.003},
        "Q5_1": {0: 0.003, 2: -0.047},
        "Q5_K": {0: 7.3e-5, 2: 1.1e-3},
        "Q6_K": {208: 2e-5},
        "Q8_0": {0: 4e-4},
        "IQ4_XS": {0: 2.5e-5},
    }
    random = np.random.default_rng(seed)
    values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (shape[0], shape[1] // values, num_bytes), np.uint8)
    for at, number in numbers[kind.name].items():
        spread = number * random.uniform(0.7, 1.3, blocks.shape[:2])
        blocks[:, :, at : at + 2] = spread.astype(np.float16)[:, :, None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def write(
    path: Path,
    architecture: str,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray],
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
    kinds: Mapping[str, GGMLQuantizationType] = MappingProxyType({}),
) -> Path:
    """Writes matrices in the type `kind`, or in their type in `kinds`, and other tensors in F32. Bytes stay as they are."""
    writer = gguf.GGUFWriter(path, architecture, endianess=endianess)
    _add_metadata(writer, metadata)
    for name, tensor in tensors.items():
        its = kinds.get(name, kind)
        if tensor.ndim > 1 and its != GGMLQuantizationType.F32:
            stored = tensor if tensor.dtype == np.uint8 else gguf.quants.quantize(tensor, its)
            writer.add_tensor(name, stored, raw_dtype=its)
        else:
            writer.add_tensor(name, tensor.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_zeros(
    path: Path, architecture: str, metadata: dict[str, Any], tensors: Mapping[str, tuple[Sequence[int], GGMLQuantizationType]]
) -> Path:
    """Writes a file whose tensors take no space on the disk. `tensors` has the shape and type of each tensor."""
    writer, end = gguf.GGUFWriter(path, architecture), 0
    _add_metadata(writer, metadata)
    for name, (shape, kind) in tensors.items():
        values, size = gguf.GGML_QUANT_SIZES[kind]
        num_bytes = math.prod(shape) // values * size
        writer.add_tensor_info(name, shape, np.dtype(np.float32), num_bytes, kind)
        end += gguf.GGUFWriter.ggml_pad(num_bytes, writer.data_alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + writer.data_alignment + end)
    return path


def _add_metadata(writer: gguf.GGUFWriter, metadata: dict[str, Any]) -> None:
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
