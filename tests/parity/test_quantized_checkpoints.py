"""Quantised checkpoints against transformers with the same values in fp32. Every mistake in a layout changes the vectors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_generators import prompts
from tiny_quantized import AWQ_ORDER, FORMS, Tensors, change_config, change_tensors, packed_columns, packed_rows, quantize
from typer.testing import CliRunner

from engine import Engine
from engine.kernels import quantize_weight
from engine.kernels.quantize import Quantized
from engine.model.folder import load_model_config
from engine.model.quantized import layout
from engine.model.weights import Checkpoint
from engine.options import SamplingOptions
from serve_app.cli.commands import cli

Tiny = Callable[..., Path]
IDS = prompts((3, 40, 17))
# A matrix of an FP8 checkpoint ends within a block of 128 rows and columns. In the other forms groups fill the matrix.
SHAPE = {"hidden_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 256}
KINDS = ("qwen3_lm", "qwen2_lm", "llama_lm", "mistral_lm", "gemma3_lm")


def folders(tiny: Tiny, name: str, at: Path, kind: str = "qwen3_lm", **options: Any) -> tuple[Path, Path]:
    """Returns: (a checkpoint in this form, a checkpoint with the same values in fp32)."""
    width = 320 if "blocks" in name else 256
    return quantize(tiny(kind, **SHAPE, intermediate_size=width), FORMS[name], at, **options)


def vectors(folder: Path) -> np.ndarray:
    return Engine.load(folder, dtype="float32", device="cpu").embed(IDS)


@torch.inference_mode()
def expected(plain: Path) -> np.ndarray:
    model = transformers.AutoModel.from_pretrained(plain, dtype=torch.float32)
    last = torch.stack([model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in IDS])
    return torch.nn.functional.normalize(last, dim=1).numpy()


def is_close(folder: Path, plain: Path) -> bool:
    return bool(np.abs(vectors(folder) - expected(plain)).max() < 1e-5)


@pytest.mark.parametrize("name", FORMS)
def test_vectors_are_transformers_own(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder, plain = folders(tiny, name, tmp_path)
    assert is_close(folder, plain)
    values = load_file(plain / "model.safetensors")
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(layout, "_SLICE_VALUES", 5000)  # slices of 39 rows, which end within blocks and matrices
        scheme = load_model_config(folder).quantization
        with Checkpoint(folder, torch.device("cpu"), dtype, scheme=scheme) as checkpoint:
            assert checkpoint.num_bytes == sum(each.numel() for each in values.values()) * dtype.itemsize
            for tensor in (each for each in values if each.endswith("_proj.weight")):
                assert torch.equal(checkpoint.take(tensor, *values[tensor].shape), values[tensor].to(dtype)), tensor


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["fp8 blocks", "ct int4 32 asymmetric", "awq 64", "gptq desc_act"])
def test_every_family_of_decoders_loads_them(tiny: Tiny, tmp_path: Path, kind: str, name: str) -> None:
    assert is_close(*folders(tiny, name, tmp_path, kind))


def test_encoders_load_them_too(tiny: Tiny, tmp_path: Path) -> None:
    bert = tiny("bert", hidden_size=128, intermediate_size=256)
    folder, plain = quantize(bert, FORMS["ct int8"], tmp_path, names="encoder.*dense.weight")
    np.testing.assert_array_equal(vectors(folder), vectors(plain))


@torch.inference_mode()
def test_answers_are_transformers_own(tiny: Tiny, tmp_path: Path) -> None:
    folder, plain = folders(tiny, "awq 32", tmp_path)
    for each in (folder, plain):
        (each / "1_Pooling" / "config.json").unlink()
        (each / "1_Pooling").rmdir()
        change_config(each, {"eos_token_id": None})
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    engine = Engine.load(folder, dtype="float32", device="cpu")
    for ids, answer in zip(IDS, engine.generate(IDS, SamplingOptions(max_tokens=20, temperature=0.0)), strict=True):
        theirs = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=20, do_sample=False)
        assert [token.id for token in answer.tokens] == theirs[0, len(ids) :].tolist()
    done = CliRunner().invoke(cli, ["generate", "--check", "-m", str(folder), "-n", "4"], catch_exceptions=False)
    assert done.stderr.count("4 of 4 tokens are those of transformers") == 5


def test_ignored_layers_are_plain_and_groups_have_their_own_form(tiny: Tiny, tmp_path: Path) -> None:
    folder, plain = folders(tiny, "ct int4 32", tmp_path, plain_layers=("model.layers.1.",))
    config = FORMS["ct int4 32"].config
    change_config(folder, {"quantization_config": config | {"ignore": ["lm_head", r"re:.*layers\.1\."]}})
    assert is_close(folder, plain)
    eight = FORMS["ct int8"]

    def as_int8(tensors: Tensors) -> None:
        values = load_file(plain / "model.safetensors")
        for module in [name.removesuffix(".weight") for name in values if name.endswith("layers.0.mlp.down_proj.weight")]:
            for part in ("weight_packed", "weight_scale", "weight_shape"):
                del tensors[f"{module}.{part}"]
            values[f"{module}.weight"], stored = eight.write(*values[f"{module}.weight"].shape)
            tensors |= {f"{module}.{part}": tensor for part, tensor in stored.items()}
        change_tensors(plain, lambda there: there.update(values))

    change_tensors(folder, as_int8)
    groups = {"int4": config["config_groups"]["group_0"] | {"format": "pack-quantized"}}
    groups["int8"] = eight.config["config_groups"]["group_0"] | {"format": "int-quantized", "targets": ["re:.*down_proj"]}
    change_config(folder, {"quantization_config": config | {"format": "mixed-precision", "config_groups": groups}})
    assert is_close(folder, plain)


def test_one_scale_for_the_matrix_may_have_transformers_name(tiny: Tiny, tmp_path: Path) -> None:
    folder, plain = folders(tiny, "fp8 tensor", tmp_path)

    def rename(tensors: Tensors) -> None:
        for old, new in (("weight_scale", "weight_scale_inv"), ("input_scale", "activation_scale")):
            for name in [name for name in tensors if name.endswith(f".{old}")]:
                tensors[name.removesuffix(old) + new] = tensors.pop(name)

    change_tensors(folder, rename)
    assert is_close(folder, plain)


def test_fp8_may_have_scales_of_the_cache(tiny: Tiny, tmp_path: Path) -> None:
    folder, plain = folders(tiny, "fp8 tensor", tmp_path)
    names = [f"model.layers.{layer}.self_attn.{part}_scale" for layer in range(2) for part in "kv"]
    change_tensors(folder, lambda tensors: tensors.update({name: torch.tensor(0.5) for name in names}))
    assert is_close(folder, plain)


def test_layers_in_8_bits_are_made_from_the_values(tiny: Tiny, tmp_path: Path) -> None:
    folder, plain = folders(tiny, "gptq v1", tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    value = load_file(plain / "model.safetensors")[name]
    scheme = load_model_config(folder).quantization
    with Checkpoint(folder, torch.device("cpu"), torch.int8, scheme=scheme) as checkpoint:
        made = checkpoint.to_layer_dtype(checkpoint.take(name, *value.shape))
    wanted = quantize_weight(value.bfloat16(), torch.int8)
    assert isinstance(made, Quantized)
    assert torch.equal(made.values, wanted.values)
    assert torch.equal(made.scale, wanted.scale)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMS)
def test_a_gpu_dequantises_to_the_same_values(tiny: Tiny, tmp_path: Path, name: str) -> None:
    """The matrices have more than 1 MiB, so several threads copy their tensors."""
    shape = {"hidden_size": 1024, "intermediate_size": 2560, "num_hidden_layers": 1, "max_position_embeddings": 256}
    folder, plain = quantize(tiny("qwen3_lm", **shape), FORMS[name], tmp_path)
    scheme, values = load_model_config(folder).quantization, load_file(plain / "model.safetensors")
    with Checkpoint(folder, torch.device("cuda", 0), torch.bfloat16, scheme=scheme) as checkpoint:
        for tensor in (each for each in values if each.endswith("_proj.weight")):
            found = checkpoint.take(tensor, *values[tensor].shape)
            assert found.is_cuda
            assert torch.equal(found.cpu(), values[tensor].bfloat16()), tensor


def every(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    """A function that applies `change` to this tensor of every matrix."""

    def apply(tensors: Tensors) -> None:
        names = [name for name in tensors if name.rpartition(".")[2] == part]
        assert names
        for name in names:
            tensors[name] = change(tensors[name])

    return apply


def nibbles(words: torch.Tensor) -> np.ndarray:
    """int32 [A, B] -> [A, 8 B]. The lowest four bits come first."""
    fields = words.numpy().view(np.uint32)[:, :, None] >> (4 * np.arange(8, dtype=np.uint32)) & 15
    return fields.reshape(len(words), -1).astype(np.int64)


def halves_swapped(words: torch.Tensor) -> torch.Tensor:
    return packed_columns(nibbles(words).reshape(-1, 2)[:, ::-1].reshape(len(words), -1))


def one_more(words: torch.Tensor) -> torch.Tensor:
    """Every field of 4 bits plus 1, modulo 16."""
    return packed_columns((nibbles(words) + 1) & 15)


def rolled(tensor: torch.Tensor) -> torch.Tensor:
    """Moves each scale to the place of its neighbour along the axis of the groups or blocks."""
    return tensor.roll(1, 1 if tensor.shape[1] > 1 else 0)


def _rolled_bytes(scales: torch.Tensor) -> torch.Tensor:
    return rolled(scales.view(torch.uint8)).view(scales.dtype)


def _swap_bytes(tensors: Tensors) -> None:
    """Swaps the two values of each byte."""
    packed = [name for name, tensor in tensors.items() if tensor.dtype == torch.uint8]
    assert packed
    for name in packed:
        tensors[name] = tensors[name] >> 4 | tensors[name] << 4


MUTATIONS: dict[str, tuple[str, Callable[[Tensors], None]]] = {
    "awq: rows in order": ("awq 64", every("qweight", lambda q: packed_columns(nibbles(q)[:, _awq_places(q)]))),
    "awq: halves swapped": ("awq 64", every("qweight", halves_swapped)),
    "awq: zeros + 1": ("awq 64", every("qzeros", one_more)),
    "awq: zeros in order": ("awq 64", every("qzeros", lambda q: packed_columns(nibbles(q)[:, _awq_places(q)]))),
    "awq: scales moved": ("awq 64", every("scales", lambda s: s.roll(1, 0))),
    "gptq: halves swapped": ("gptq v1", every("qweight", lambda q: packed_rows(_swapped(nibbles(q.T.contiguous())).T))),
    "gptq: zeros + 1": ("gptq v1", every("qzeros", one_more)),
    "gptq: scales moved": ("gptq v1", every("scales", lambda s: s.roll(1, 0))),
    "gptq: g_idx moved": ("gptq desc_act", every("g_idx", lambda g: g.roll(1))),
    "ct: halves swapped": ("ct int4 64", every("weight_packed", halves_swapped)),
    "ct: zeros + 1": ("ct int4 64 asymmetric", every("weight_zero_point", one_more)),
    "ct: scales moved": ("ct int4 64", every("weight_scale", rolled)),
    "ct: g_idx moved": ("ct int4 actorder group", every("weight_g_idx", lambda g: g.roll(1))),
    "ct: int8 zeros + 1": ("ct int8 asymmetric", every("weight_zero_point", lambda z: z + 1)),
    "ct: fp8 scales moved": ("ct fp8 channel", every("weight_scale", lambda s: s.roll(1, 0))),
    "nvfp4: halves swapped": ("ct nvfp4", every("weight_packed", lambda q: q >> 4 | q << 4)),
    "nvfp4: scales moved": ("ct nvfp4", every("weight_scale", _rolled_bytes)),
    "mxfp4: scales moved": ("ct mxfp4", every("weight_scale", rolled)),
    "modelopt: halves swapped": ("modelopt nvfp4", _swap_bytes),
    "fp8: scales moved": ("fp8 blocks", every("weight_scale_inv", rolled)),
}


def _awq_places(words: torch.Tensor) -> list[int]:
    return [8 * word + AWQ_ORDER.index(row) for word in range(words.shape[1]) for row in range(8)]


def _swapped(codes: np.ndarray) -> np.ndarray:
    return codes.reshape(-1, 2)[:, ::-1].reshape(codes.shape)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mistake_in_the_layout_changes_the_vectors(tiny: Tiny, tmp_path: Path, mutation: str) -> None:
    name, change = MUTATIONS[mutation]
    folder, plain = folders(tiny, name, tmp_path)
    wanted = expected(plain)
    assert np.abs(vectors(folder) - wanted).max() < 1e-5
    change_tensors(folder, change)
    assert np.abs(vectors(folder) - wanted).max() > 1e-3


@pytest.mark.parametrize(("name", "said"), [("gptq v1", "gptq_v2"), ("gptq v2", "gptq")])
def test_the_versions_of_gptq_are_not_mixed_up(tiny: Tiny, tmp_path: Path, name: str, said: str) -> None:
    folder, plain = folders(tiny, name, tmp_path)
    change_config(folder, {"quantization_config": FORMS[name].config | {"checkpoint_format": said}})
    assert np.abs(vectors(folder) - expected(plain)).max() > 1e-3
