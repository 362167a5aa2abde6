"""The header of a GGUF file: a model's metadata, its tokenizer, and the places of its tensors. No torch here.

The `gguf` package is not used for the header, because it trusts every size in it and takes 3 s for 49,000 tokens.
Source: docs/gguf.md of ggml-org/ggml.
"""

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelError

_DOWNLOAD = "it is damaged or was not downloaded whole; download it again"
# struct's letter for each kind of scalar. 8 is a text, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
# The most bytes of one text or one array of the header. Published tokenizers have less than 8 MiB.
_MOST_BYTES = 1 << 26
# The types that are not quantised.
PLAIN = ("F32", "F16", "BF16")

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9]\d*)\.(\w+)\.(weight|bias)")
ROPE_DIVISORS = "rope_freqs.weight"  # of Llama 3.1 and later
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The place of a tensor in the file."""

    shape: tuple[int, ...]  # in torch's order, rows first
    kind: str  # ggml's name for the type, e.g. "Q4_K"
    start: int  # in bytes from the beginning of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A GGUF file's metadata and the places of its tensors. Every place lies within the file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @property
    def architecture(self) -> str:
        """The architecture's name in GGUF. Raises: ModelError for an architecture that is not supported."""
        name = self.metadata.get("general.architecture")
        if name not in ARCHITECTURES:
            raise ModelError(f"{self.path}: architecture {name!r:.80} is not supported in GGUF ({', '.join(ARCHITECTURES)} are)")
        return str(name)

    def own(self, key: str) -> Any:
        """The architecture's value for `key`, such as `llama.block_count`. None if the file has none."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def number(self, key: str, default: float | None = None) -> float:
        """The same as `own`, for a positive number. Raises: ModelError for any other value."""
        value = self.own(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelError(f"{self.path}: {self.architecture}.{key} is {value!r:.80}, expected a positive number")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        """The same as `number`, for a whole number."""
        value = self.number(key, default)
        if not isinstance(value, int):
            raise ModelError(f"{self.path}: {self.architecture}.{key} is {value!r}, expected a whole number")
        return value

    def token_id(self, key: str) -> int | None:
        """The id `tokenizer.ggml.<key>`. None: the file has none. Raises: ModelError for an id outside the vocabulary."""
        value, tokens = self.metadata.get(f"tokenizer.ggml.{key}"), self.metadata.get("tokenizer.ggml.tokens", [])
        if value is not None and not (type(value) is int and 0 <= value < len(tokens)):
            raise ModelError(f"{self.path}: tokenizer.ggml.{key} is {value!r:.80}, expected a token of {len(tokens)}")
        return value

    def names(self) -> dict[str, str]:
        """The names in the file by transformers' names for the tensors.

        Raises: ModelError naming tensors that the architecture does not have, such as those of experts.
        """
        parts = _GEMMA_NAMES if self.architecture == "gemma3" else _LAYER_NAMES
        found, unknown = {}, []
        for name in self.tensors:
            layer = _LAYER_TENSOR.fullmatch(name)
            if name == ROPE_DIVISORS and self.architecture == "llama":
                continue  # config.json has them
            if layer is not None and layer[2] in parts:
                found[f"model.layers.{layer[1]}.{parts[layer[2]]}.{layer[3]}"] = name
            elif name in _TOP_NAMES:
                found[_TOP_NAMES[name]] = name
            else:
                unknown.append(name)
        if unknown:
            raise ModelError(
                f"{self.path}: {len(unknown)} tensors are not part of our {self.architecture}, so the results would "
                f"be wrong without them: {', '.join(unknown[:8])}"
            )
        return found


def read_header(path: Path) -> Header:
    """Reads the header and no tensors. Raises: ModelError naming the file and its fault."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _read_header(_Reader(path, content))
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise ModelError(f"{path} cannot be read as GGUF: {error}") from error


class _Reader:
    """Reads one value after another, and never beyond the end of the file."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path, self.content, self.at = path, content, 0

    def claim(self, count: int, num_bytes: int) -> int:
        """The place of `count` items of at least `num_bytes` each. Raises: ModelError if the file is too short for them."""
        if count * num_bytes > min(len(self.content) - self.at, _MOST_BYTES):
            raise ModelError(
                f"{self.path}: {count} items of {num_bytes} bytes or more at byte {self.at} do not fit into the header of a file "
                f"of {len(self.content)} bytes; {_DOWNLOAD}"
            )
        return self.at

    def scalars(self, letter: str, count: int = 1) -> tuple[Any, ...]:
        form = f"<{count}{letter}"
        at = self.claim(count, struct.calcsize(f"<{letter}"))
        self.at += struct.calcsize(form)
        return struct.unpack_from(form, self.content, at)

    def number(self, letter: str) -> int:
        return int(self.scalars(letter)[0])

    def text(self) -> str:
        length = self.number("Q")
        at = self.claim(length, 1)
        self.at += length
        try:
            return self.content[at : at + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: the text at byte {at} is not UTF-8; {_DOWNLOAD}") from error

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalars(_SCALARS[kind])[0]
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            raise ModelError(f"{self.path}: a value at byte {self.at} has the unknown type {kind}; {_DOWNLOAD}")
        inner, count = self.number("I"), self.number("Q")
        if inner in _SCALARS:
            return list(self.scalars(_SCALARS[inner], count))
        if inner != _TEXT:
            raise ModelError(f"{self.path}: an array at byte {self.at} has items of the type {inner}, expected numbers or texts")
        self.claim(count, 8)
        return [self.text() for _ in range(count)]


def _read_header(reader: _Reader) -> Header:
    path = reader.path
    if reader.content[:4] != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file: it begins with {reader.content[:4]!r}")
    reader.at = 4
    version = reader.number("I")
    if version & 0xFFFF == 0:
        raise ModelError(f"{path} is big-endian, which is not supported; use the little-endian file")
    if version not in (2, 3):
        raise ModelError(f"{path} has version {version} of GGUF, expected 2 or 3; convert the model again")
    num_tensors, num_values = reader.number("Q"), reader.number("Q")
    reader.claim(num_values, 13)
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = reader.text()
        if key in metadata:
            raise ModelError(f"{path} has the key {key!r:.80} twice; {_DOWNLOAD}")
        metadata[key] = reader.value(reader.number("I"))
    if metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(f"{path} is one of {metadata['split.count']!s:.80} parts; join them with llama-gguf-split --merge")
    reader.claim(num_tensors, 24)
    places: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name, num_axes = reader.text(), reader.number("I")
        if name in places or not 1 <= num_axes <= 4:
            raise ModelError(f"{path}: tensor {name!r:.80} is there twice, or has {num_axes} axes; {_DOWNLOAD}")
        places[name] = reader.scalars("Q", num_axes)[::-1], reader.number("I"), reader.number("Q")
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
        raise ModelError(f"{path}: general.alignment is {alignment!r}, expected a multiple of 8")
    start = -(-reader.at // alignment) * alignment
    return Header(path, metadata, {name: _placed(reader, name, *each, start, alignment) for name, each in places.items()})


def _placed(
    reader: _Reader, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int, alignment: int
) -> StoredTensor:
    from gguf import quants
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    known = kind in set(GGMLQuantizationType)
    type_name = GGMLQuantizationType(kind).name if known else str(kind)
    if type_name not in PLAIN and not hasattr(quants, type_name):
        raise ModelError(
            f"{reader.path}: tensor {name} has the type {type_name}, which is not supported; use a Q8_0 or Q4_K_M file"
        )
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if 0 in shape or shape[-1] % block or offset % alignment:
        raise ModelError(
            f"{reader.path}: tensor {name} has shape {list(shape)} at offset {offset}, expected rows of a multiple of {block} "
            f"values and an offset of a multiple of {alignment}; {_DOWNLOAD}"
        )
    num_bytes = math.prod(shape) // block * block_bytes
    end = start + offset + num_bytes
    if end > len(reader.content):
        raise ModelError(
            f"{reader.path} is cut off: tensor {name} ends at byte {end}, the file at {len(reader.content)}; {_DOWNLOAD}"
        )
    return StoredTensor(shape, type_name, start + offset, num_bytes)
