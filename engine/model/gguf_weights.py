"""The tensors of a GGUF file. Most of them are quantised.

A tensor is dequantised when it is taken, so a model needs no second copy on disk. `gguf_codes.py` keeps matrices in their codes.
Source of the order of a Llama's rows and of Gemma's norms: convert_hf_to_gguf.py of llama.cpp.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.errors import ModelError
from engine.model.gguf import StoredTensor, read_header

# Values that are dequantised at a time: 64 MiB in fp32, and a few times as much for intermediate values.
_SLICE_VALUES = 1 << 24
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFWeights:
    """The tensors of a GGUF file under transformers' names, in the order and with the values of transformers' checkpoints."""

    def __init__(self, path: Path) -> None:
        """Map the file. Raises: ModelError naming the file and its fault."""
        self._header = read_header(path)
        self._stored = self._header.names()
        self.names: tuple[str, ...] = tuple(self._stored)
        self.num_values = sum(map(self.size, self.names))
        # Copy on write, because torch refuses read-only memory. The engine never writes to it.
        self._content: np.ndarray[Any, np.dtype[np.uint8]] = np.memmap(path, np.uint8, mode="c")

    def tensor(self, name: str) -> Tensor:
        """The tensor on the CPU. F32, F16 and BF16 keep their dtype, other types become float32."""
        place, content = self.place(name), self.content(name)
        dtype = _DTYPES.get(place.kind)
        tensor = _dequantize(content.numpy(), place) if dtype is None else content.view(dtype).view(place.shape)
        if self._header.architecture == "gemma3" and name.endswith("norm.weight"):
            return tensor.float() - 1  # llama.cpp multiplies by the weight, transformers by 1 + weight
        return self.in_order(name, tensor)

    def place(self, name: str) -> StoredTensor:
        return self._header.tensors[self._stored[name]]

    def content(self, name: str) -> Tensor:
        """The tensor's bytes in the file, uint8."""
        place = self.place(name)
        return torch.from_numpy(self._content[place.start : place.start + place.num_bytes])

    def in_order(self, name: str, rows: Tensor) -> Tensor:
        """Puts rows of the tensor `name`, in any form, into transformers' order."""
        stored = self._stored[name]
        if self._header.architecture == "llama" and ".attn_q." in stored:
            return self._halves(rows, stored, "attention.head_count")
        if self._header.architecture == "llama" and ".attn_k." in stored:
            return self._halves(rows, stored, "attention.head_count_kv")
        return rows

    def size(self, name: str) -> int:
        return math.prod(self.place(name).shape)

    def close(self) -> None:
        """Release the mapping. Tensors that share the mapping stay valid and keep it alive."""
        self._content = np.empty(0, np.uint8)

    def _halves(self, tensor: Tensor, stored: str, key: str) -> Tensor:
        """Puts each head's rows back into transformers' order.

        RoPE rotates rows 2i and 2i + 1 of a head together in llama.cpp, and rows i and i + head_dim / 2 in transformers.
        """
        n_heads = self._header.whole(key, self._header.whole("attention.head_count"))
        if len(tensor) % (2 * n_heads):
            raise ModelError(f"{self._header.path}: {stored} has {len(tensor)} rows, {key} is {n_heads}")
        return tensor.reshape(n_heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _dequantize(content: np.ndarray[Any, np.dtype[np.uint8]], place: StoredTensor) -> Tensor:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind, tensor = GGMLQuantizationType[place.kind], torch.empty(place.shape)
    into = tensor.view(-1, place.shape[-1]).numpy()
    rows, step = content.reshape(len(into), -1), max(1, _SLICE_VALUES // place.shape[-1])
    with np.errstate(all="ignore"):  # a damaged scale may be infinite; the engine finds what is not finite
        for first in range(0, len(rows), step):
            into[first : first + step] = dequantize(rows[first : first + step], kind)
    return tensor
