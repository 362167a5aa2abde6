"""Tiny quantised checkpoints, written by the published definition of each format, and their values in float32.

A writer chooses random codes, zeros and scales of one matrix. It returns the values of the matrix, and the tensors of the
checkpoint.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Ints = np.ndarray[Any, np.dtype[np.int64]]
Tensors = dict[str, Tensor]
# (rows, columns) -> (the values [rows, columns] in fp32, the tensors by the last part of their name)
Writer = Callable[[int, int], tuple[Tensor, Tensors]]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Form:
    """A format: the writer of a matrix, and the entry in config.json."""

    write: Writer
    config: dict[str, Any]
    key: str = "quantization_config"


def random(*shape: int) -> np.random.Generator:
    return np.random.default_rng([7, *shape])


def packed_columns(codes: Ints, bits: int = 4, order: tuple[int, ...] | None = None) -> Tensor:
    """[A, B] -> int32 [A, ceil(B * bits / 32)]. Field i of a word has the column order[i] of the word's columns."""
    a_word = 32 // bits
    words = np.zeros((len(codes), -(-codes.shape[1] // a_word)), np.uint32)
    for word in range(words.shape[1]):
        for field in range(a_word):
            column = word * a_word + (field if order is None else order[field])
            if column < codes.shape[1]:
                words[:, word] |= codes[:, column].astype(np.uint32) << np.uint32(bits * field)
    return torch.from_numpy(words.view(np.int32))


def packed_rows(codes: Ints, bits: int = 4) -> Tensor:
    """As `packed_columns`, but along the rows: [A, B] -> int32 [ceil(A * bits / 32), B]."""
    return packed_columns(codes.T, bits).T.contiguous()


def drawn(n: int, k: int, group: int, bits: int, symmetric: bool) -> tuple[Ints, Ints, Tensor]:
    """Random (codes [n, k], zeros [n, k / group], scales [n, k / group] fp16)."""
    rng = random(n, k, group, bits)
    codes = rng.integers(0, 1 << bits, (n, k))
    half = 1 << (bits - 1)
    zeros = np.full((n, k // group), half) if symmetric else rng.integers(1, 1 << bits, (n, k // group))
    scales = rng.uniform(0.02, 0.08, (n, k // group)) * 16 / (1 << bits)
    return codes, zeros, torch.from_numpy(scales).half()


def values(codes: Ints, zeros: Ints, scales: Tensor, group_of: Ints) -> Tensor:
    n, k = codes.shape
    found = torch.empty(n, k)
    for column in range(k):
        group = int(group_of[column])
        found[:, column] = torch.from_numpy(codes[:, column] - zeros[:, group]).float() * scales[:, group].float()
    return found


def in_order(k: int, group: int) -> Ints:
    return np.arange(k) // group


def shuffled(k: int, group: int) -> Ints:
    return random(k, group).permutation(in_order(k, group))


def awq(group: int, symmetric: bool = False) -> Form:
    def write(n: int, k: int) -> tuple[Tensor, Tensors]:
        codes, zeros, scales = drawn(n, k, group, 4, symmetric)
        return values(codes, zeros, scales, in_order(k, group)), {
            "qweight": packed_columns(codes.T, order=AWQ_ORDER),
            "qzeros": packed_columns(zeros.T, order=AWQ_ORDER),
            "scales": scales.T.contiguous(),
        }

    more = {"modules_to_not_convert": None, "version": "gemm", "zero_point": not symmetric}
    return Form(write, {"quant_method": "awq", "bits": 4, "group_size": group} | more)


def gptq(group: int, bits: int = 4, version: int = 1, desc_act: bool = False, symmetric: bool = False) -> Form:
    def write(n: int, k: int) -> tuple[Tensor, Tensors]:
        size = k if group == -1 else group
        codes, zeros, scales = drawn(n, k, size, bits, symmetric)
        group_of = shuffled(k, size) if desc_act else in_order(k, size)
        stored = zeros - 1 if version == 1 else zeros
        return values(codes, zeros, scales, group_of), {
            "qweight": packed_rows(codes.T, bits),
            "qzeros": packed_columns(stored.T, bits),
            "scales": scales.T.contiguous(),
            "g_idx": torch.from_numpy(group_of).int(),
        }

    more = {"sym": symmetric, "desc_act": desc_act, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    return Form(write, {"quant_method": "gptq", "bits": bits, "group_size": group, "lm_head": False} | more)


def compressed(form: str, weights: dict[str, Any], write: Writer, activations: dict[str, Any] | None = None) -> Form:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    said = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed", "ignore": ["lm_head"]}
    return Form(write, said | {"config_groups": {"group_0": group}, "kv_cache_scheme": None})


def packed(group: int | None, bits: int = 4, symmetric: bool = True, actorder: str | None = None) -> Form:
    """If `group` is None, each row has one scale."""

    def write(n: int, k: int) -> tuple[Tensor, Tensors]:
        size = k if group is None else group
        codes, zeros, scales = drawn(n, k, size, bits, symmetric)
        group_of = shuffled(k, size) if actorder == "group" else in_order(k, size)
        tensors = {
            "weight_packed": packed_columns(codes, bits),
            "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor([n, k]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = packed_rows(zeros, bits)
        if actorder == "group":
            tensors["weight_g_idx"] = torch.from_numpy(group_of).int()
        return values(codes, zeros, tensors["weight_scale"], group_of), tensors

    strategy = "channel" if group is None else "group"
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group, "symmetric": symmetric}
    return compressed("pack-quantized", weights | {"actorder": actorder, "dynamic": False}, write)


def int8(symmetric: bool = True) -> Form:
    def write(n: int, k: int) -> tuple[Tensor, Tensors]:
        rng = random(n, k)
        codes, scales = torch.from_numpy(rng.integers(-127, 128, (n, k))).to(torch.int8), torch.rand(n, 1) * 4e-3 + 1e-3
        zeros = torch.zeros(n, 1) if symmetric else torch.from_numpy(rng.integers(-100, 100, (n, 1)))
        tensors = {"weight": codes, "weight_scale": scales}
        tensors |= {} if symmetric else {"weight_zero_point": zeros.to(torch.int8)}
        return (codes.float() - zeros.float()) * scales, tensors

    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": symmetric, "dynamic": False}
    return compressed("int-quantized", weights, write, {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True})


def e4m3(n: int, k: int) -> Tensor:
    return torch.from_numpy(random(n, k).normal(0, 60, (n, k))).to(torch.float8_e4m3fn)


def spread(scales: Tensor, n: int, k: int, block: tuple[int, int]) -> Tensor:
    """A value for each block -> a value for each element, [n, k]."""
    return scales[torch.arange(n) // block[0]][:, torch.arange(k) // block[1]]


def fp8(block: tuple[int, int] | None, is_compressed: bool = False) -> Form:
    def write(n: int, k: int) -> tuple[Tensor, Tensors]:
        codes, size = e4m3(n, k), block or (n, k)
        scales = torch.from_numpy(random(n, k).uniform(3e-4, 3e-3, (-(-n // size[0]), -(-k // size[1])))).float()
        found = codes.float() * spread(scales, n, k, size)
        if block is None:
            return found, {"weight": codes, "weight_scale": scales.view(()), "input_scale": torch.tensor(0.5)}
        return found, {"weight": codes, "weight_scale" if is_compressed else "weight_scale_inv": scales}

    if is_compressed:
        weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": list(block or ()), "symmetric": True}
        return compressed("float-quantized", weights, write)
    more = {"activation_scheme": "static"} if block is None else {"activation_scheme": "dynamic", "fmt": "e4m3"}
    return Form(write, {"quant_method": "fp8"} | more | ({} if block is None else {"weight_block_size": list(block)}))


def compressed_fp8(strategy: str) -> Form:
    def write(n: int, k: int) -> tuple[Tensor, Tensors]:
        codes = e4m3(n, k)
        if strategy == "tensor":
            scale = torch.tensor([n / k * 1e-3])
            return codes.float() * scale, {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor([0.5])}
        scales = (torch.from_numpy(random(n, k).uniform(3e-4, 3e-3, (n, 1)))).bfloat16()
        return codes.float() * scales.float(), {"weight": codes, "weight_scale": scales}

    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    activations = {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": strategy != "tensor"}
    return compressed("float-quantized", weights, write, activations)


def e2m1(code: int) -> float:
    """The value of a code: a sign, two bits of exponent with bias 1, and one bit of mantissa, by the format's definition."""
    sign, exponent, mantissa = -1 if code & 8 else 1, code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def fp4(kind: str) -> Form:
    """`kind`: "nvfp4", "mxfp4" or "modelopt"."""
    group = 32 if kind == "mxfp4" else 16

    def write(n: int, k: int) -> tuple[Tensor, Tensors]:
        rng = random(n, k, group)
        codes = rng.integers(0, 16, (n, k))
        numbers = torch.tensor([e2m1(code) for code in range(16)])[torch.from_numpy(codes)]
        pairs = torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
        if kind == "mxfp4":
            exponents = rng.integers(118, 124, (n, k // group))
            scales = torch.from_numpy(2.0 ** (exponents - 127)).float()
            stored = {"weight_packed": pairs, "weight_scale": torch.from_numpy(exponents).to(torch.uint8)}
            return numbers * scales.repeat_interleave(group, 1), stored
        scales = torch.from_numpy(rng.uniform(50, 400, (n, k // group))).to(torch.float8_e4m3fn)
        found = numbers * scales.float().repeat_interleave(group, 1)
        if kind == "nvfp4":
            stored = {"weight_packed": pairs, "weight_scale": scales, "weight_global_scale": torch.tensor([8192.0])}
            return found / 8192, stored | {"input_global_scale": torch.tensor([300.0])}
        whole = torch.tensor(1.3e-4)
        return found * whole, {"weight": pairs, "weight_scale": scales, "weight_scale_2": whole, "input_scale": torch.tensor(0.1)}

    if kind == "modelopt":
        return Form(write, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]})
    strategy = "group" if kind == "mxfp4" else "tensor_group"
    weights = {"num_bits": 4, "type": "float", "strategy": strategy, "group_size": group, "symmetric": True, "dynamic": False}
    dynamic = True if kind == "mxfp4" else "local"
    return compressed(f"{kind}-pack-quantized", weights, write, {"num_bits": 4, "type": "float", "dynamic": dynamic})


def modelopt_fp8() -> Form:
    return Form(fp8(None).write, {"quant_method": "modelopt", "quant_algo": "FP8"})


FORMS: dict[str, Form] = {
    "fp8 blocks": fp8((128, 128)),
    "fp8 tensor": fp8(None),
    "ct fp8 blocks": fp8((128, 128), is_compressed=True),
    "ct fp8 channel": compressed_fp8("channel"),
    "ct fp8 tensor": compressed_fp8("tensor"),
    "ct nvfp4": fp4("nvfp4"),
    "ct mxfp4": fp4("mxfp4"),
    "modelopt nvfp4": fp4("modelopt"),
    "modelopt fp8": modelopt_fp8(),
    "ct int8": int8(),
    "ct int8 asymmetric": int8(symmetric=False),
    **{f"ct int4 {group}": packed(group) for group in (32, 64, 128, None)},
    **{f"ct int4 {group} asymmetric": packed(group, symmetric=False) for group in (32, 64, 128, None)},
    "ct int4 actorder group": packed(32, symmetric=False, actorder="group"),
    "ct int4 actorder weight": packed(64, actorder="weight"),
    "ct packed int8": packed(128, bits=8),
    "ct packed int8 asymmetric": packed(64, bits=8, symmetric=False),
    **{f"awq {group}": awq(group) for group in (32, 64, 128)},
    "awq symmetric": awq(64, symmetric=True),
    "gptq v1": gptq(64),
    "gptq v1 symmetric": gptq(128, symmetric=True),
    "gptq v2": gptq(64, version=2),
    "gptq channel": gptq(-1),
    "gptq desc_act": gptq(32, desc_act=True),
    "gptq int8": gptq(128, bits=8),
    "gptq int8 symmetric": gptq(128, bits=8, symmetric=True),
    "gptq int8 desc_act v2": gptq(32, bits=8, version=2, desc_act=True),
}


def quantize(
    plain: Path, form: Form, at: Path, plain_layers: tuple[str, ...] = (), names: str = "*_proj.weight"
) -> tuple[Path, Path]:
    """Two copies of a checkpoint at `at`: one quantised, one with the same values in fp32.

    Args:
        plain_layers: tensors whose names begin with one of these strings stay as they are.
        names: a glob pattern of the matrices.
    """
    tensors = load_file(plain / "model.safetensors")
    quantised, same = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if fnmatch(name, names) and not name.startswith(plain_layers or ("-",)):
            module = name.removesuffix(".weight")
            same[name], stored = form.write(*weight.shape)
            del quantised[name]
            quantised |= {f"{module}.{part}": tensor.contiguous() for part, tensor in stored.items()}
    folders = at / "quantised", at / "plain"
    for folder, content in zip(folders, (quantised, same), strict=True):
        shutil.copytree(plain, folder)
        save_file(content, folder / "model.safetensors", {"format": "pt"})
    change_config(folders[0], {form.key: form.config})
    return folders


def change_config(folder: Path, change: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))


def change_tensors(folder: Path, change: Callable[[Tensors], Any]) -> None:
    """Changes the weight file in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
