"""Quantised checkpoints: a key that changes values is supported or refused, and a tensor is used or named in an error."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_quantized import FORMS, Tensors, change_config, change_tensors, packed_columns, quantize

from engine import Engine, ModelError
from engine.model.folder import load_model_config
from engine.model.footprint import footprint
from engine.model.quantized.gptq import read_gptq
from engine.model.quantized.parts import Parts
from engine.model.quantized.scheme import CompressedTensors, Gptq, Group

Tiny = Callable[..., Path]
MODULE = "model.layers.0.self_attn.k_proj"


def folders(tiny: Tiny, name: str, at: Path) -> tuple[Path, Path]:
    shape = {"hidden_size": 128, "num_hidden_layers": 1, "intermediate_size": 256, "max_position_embeddings": 256}
    return quantize(tiny("qwen3_lm", **shape), FORMS[name], at)


def spelled(tiny: Tiny, name: str, at: Path, change: Callable[[dict[str, Any]], Any]) -> tuple[Path, Path]:
    """The same as `folders`, with a change of the form's entry in config.json."""
    folder, plain = folders(tiny, name, at)
    config = deepcopy(FORMS[name].config)
    change(config)
    change_config(folder, {"quantization_config": config})
    return folder, plain


def load(folder: Path) -> Engine:
    return Engine.load(folder, dtype="float32", device="cpu")


# (the form, the tensor, its change or None for its removal, the error)
TENSORS: dict[str, tuple[str, str, Callable[[Any], Any], str]] = {
    "no codes": ("ct int4 64", "weight_packed", lambda _: None, rf"tensor {MODULE}.weight_packed is missing"),
    "no scales of int4": ("ct int4 64", "weight_scale", lambda _: None, rf"tensor {MODULE}.weight_scale is missing"),
    "no scales of awq": ("awq 64", "scales", lambda _: None, rf"tensor {MODULE}.scales is missing"),
    "no scales of fp8": ("fp8 blocks", "weight_scale_inv", lambda _: None, r"k_proj.weight is stored as torch.float8_e4m3fn"),
    "no weight of fp8": ("fp8 blocks", "weight", lambda _: None, rf"tensor {MODULE}.weight is missing"),
    "no zeros": ("gptq v1", "qzeros", lambda _: None, rf"tensor {MODULE}.qzeros is missing"),
    "no packed zeros": ("ct int4 64 asymmetric", "weight_zero_point", lambda _: None, r"weight_zero_point is missing"),
    "no g_idx": ("gptq desc_act", "g_idx", lambda _: None, rf"tensor {MODULE}.g_idx is missing"),
    "no shape": ("ct int4 64", "weight_shape", lambda _: None, rf"tensor {MODULE}.weight_shape is missing"),
    "no scale of the matrix": ("ct nvfp4", "weight_global_scale", lambda _: None, r"k_proj.weight_global_scale is missing"),
    "no scale of modelopt's matrix": ("modelopt nvfp4", "weight_scale_2", lambda _: None, r"k_proj.weight_scale_2 is missing"),
    "a scale too many": ("ct mxfp4", "weight_global_scale", lambda _: torch.ones(1), rf"no tensor {MODULE}.weight_global_scale"),
    "scales of another kind": ("ct mxfp4", "weight_scale", lambda s: s.half(), r"weight_scale is stored as torch.float16"),
    "zeros too many": (
        "ct int4 64", "weight_zero_point", lambda _: torch.zeros(8, 2, dtype=torch.int32),
        rf"no tensor {MODULE}.weight_zero_point",
    ),
    "an unknown g_idx": ("awq 64", "g_idx", lambda _: torch.zeros(128, dtype=torch.int32), rf"no tensor {MODULE}.g_idx"),
    "scales of a wrong shape": ("awq 64", "scales", lambda s: s.repeat(2, 1), r"has shape \[4, 64\], .* asks for \[2, 64\]"),
    "scales of a wrong dtype": ("awq 64", "scales", lambda s: s.int(), r"scales is stored as torch.int32, expected"),
    "codes of a wrong dtype": ("gptq v1", "qweight", lambda q: q.long(), r"qweight is stored as torch.int64, expected"),
    "a matrix of a wrong shape": (
        "ct int8", "weight", lambda w: w[:, :64], r"k_proj.weight has shape \[64, 64\], config.json asks for \[64, 128\]",
    ),
    "no columns": ("ct int8", "weight", lambda w: w[:, :0], r"k_proj.weight has shape \[64, 0\], it holds no values"),
    "groups of unequal sizes": ("gptq desc_act", "g_idx", torch.zeros_like, r"g_idx does not divide the columns into 4 groups"),
    "groups beyond the last": ("gptq desc_act", "g_idx", lambda g: g + 1, r"g_idx does not divide the columns into 4 groups"),
    "two weights": ("awq 64", "weight", lambda _: torch.zeros(64, 128), r"k_proj has both a weight and a quantised one"),
    "many scales for one matrix": ("fp8 tensor", "weight_scale", lambda _: torch.ones(2), r"weight_scale has shape \[2\]"),
    "an input scale of dynamic activations": (
        "ct fp8 channel", "input_scale", lambda _: torch.ones(1), rf"no tensor {MODULE}.input_scale",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_a_wrong_tensor_is_named(tiny: Tiny, tmp_path: Path, case: str) -> None:
    name, part, change, error = TENSORS[case]
    folder, _ = folders(tiny, name, tmp_path)

    def apply(tensors: Tensors) -> None:
        changed = change(tensors.pop(f"{MODULE}.{part}", None))
        if changed is not None:
            tensors[f"{MODULE}.{part}"] = changed

    change_tensors(folder, apply)
    with pytest.raises(ModelError, match=error):
        load(folder)


def test_a_tensor_beside_no_matrix_is_named(tiny: Tiny, tmp_path: Path) -> None:
    folder, _ = folders(tiny, "gptq v1", tmp_path)
    change_tensors(folder, lambda tensors: tensors.update({"model.layers.0.mlp.qzeros": torch.zeros(1)}))
    with pytest.raises(ModelError, match=r"not part of this architecture.*model.layers.0.mlp.qzeros"):
        load(folder)


def test_a_bias_beside_a_matrix_that_has_none_must_be_zero(tiny: Tiny, tmp_path: Path) -> None:
    """AutoGPTQ writes biases of zeros for layers without one."""
    folder, _ = folders(tiny, "gptq v1", tmp_path)
    change_tensors(folder, lambda tensors: tensors.update({f"{MODULE}.bias": torch.zeros(64)}))
    load(folder)
    change_tensors(folder, lambda tensors: tensors.update({f"{MODULE}.bias": torch.full((64,), 0.01)}))
    with pytest.raises(ModelError, match=rf"not part of this architecture.*{MODULE}.bias"):
        load(folder)


def test_a_matrix_may_lie_in_several_shards(tiny: Tiny, tmp_path: Path) -> None:
    folder, plain = folders(tiny, "awq 64", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shard_of = {name: f"{'a' if name.endswith('scales') else 'b'}.safetensors" for name in tensors}
    for shard in ("a.safetensors", "b.safetensors"):
        save_file({name: tensors[name] for name in tensors if shard_of[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))
    np.testing.assert_array_equal(load(folder).embed(["w1 w2"]), load(plain).embed(["w1 w2"]))


def test_scales_of_keys_and_values_are_expected_where_the_config_names_them(tiny: Tiny, tmp_path: Path) -> None:
    folder, _ = folders(tiny, "ct int8", tmp_path)
    change_tensors(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.k_scale": torch.ones(1)}))
    with pytest.raises(ModelError, match=r"self_attn.k_scale"):
        load(folder)
    cache = {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}
    change_config(folder, {"quantization_config": FORMS["ct int8"].config | cache})
    load(folder)


def test_a_checkpoint_whose_config_does_not_say_so_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    for name, error in (("fp8 blocks", "nothing says how it is quantised"), ("awq 64", "_proj.weight is missing")):
        folder, _ = folders(tiny, name, tmp_path / name)
        change_config(folder, {"quantization_config": None})
        with pytest.raises(ModelError, match=error):
            load(folder)


def test_an_ignored_layer_must_not_be_quantised(tiny: Tiny, tmp_path: Path) -> None:
    folder, _ = folders(tiny, "ct int4 64", tmp_path)
    change_config(folder, {"quantization_config": FORMS["ct int4 64"].config | {"ignore": [MODULE]}})
    with pytest.raises(ModelError, match=rf"{MODULE} is quantised, but config.json's quantisation ignores it"):
        load(folder)


def test_groups_that_do_not_fill_a_row_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    folder, _ = folders(tiny, "gptq v1", tmp_path)
    change_config(folder, {"quantization_config": FORMS["gptq v1"].config | {"group_size": 96}})
    with pytest.raises(ModelError, match=r"128 columns are not a multiple of the group size 96"):
        load(folder)


def weights(**change: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config["config_groups"]["group_0"]["weights"].update(change)


# The keys of AutoRound for the tensors of "gptq v1".
AUTO_ROUND = {"quant_method": "auto-round", "sym": False, "data_type": "int", "packing_format": "auto_round:auto_gptq"}
KEYS: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "method": ("awq 64", lambda config: config.update(quant_method="bitsandbytes"), r"quant_method = 'bitsandbytes'.*only fp8"),
    "no method": ("awq 64", lambda config: config.pop("quant_method"), r"quant_method = None"),
    "a method that is no name": ("awq 64", lambda config: config.update(quant_method=[]), r"quant_method = \[\]"),
    "awq's bits": ("awq 64", lambda config: config.update(bits=3), r"quantization_config.bits = 3"),
    "awq's version": ("awq 64", lambda config: config.update(version="gemv"), r"version = 'gemv' .*only gemm"),
    "awq's backend": ("awq 64", lambda config: config.update(backend="llm-awq"), r"backend = 'llm-awq'"),
    "awq's group": ("awq 64", lambda config: config.update(group_size=0), r"group_size = 0"),
    "awq's zeros": ("awq 64", lambda config: config.update(zero_point="no"), r"zero_point = 'no'"),
    "auto-round's packing": (
        "gptq v1", lambda config: config.update(AUTO_ROUND | {"packing_format": "auto_round:gptq"}), r"'auto_round:gptq'",
    ),
    "auto-round's numbers": ("gptq v1", lambda config: config.update(AUTO_ROUND | {"data_type": "mx_fp"}), r"= 'mx_fp'"),
    "gptq's bits": ("gptq v1", lambda config: config.update(bits=2), r"bits = 2"),
    "bits that are a truth": ("gptq v1", lambda config: config.update(bits=True), r"bits = True"),
    "gptq's layout": ("gptq v1", lambda config: config.update(checkpoint_format="marlin"), r"checkpoint_format = 'marlin'"),
    "gptq's layout by its newer name": ("gptq v1", lambda config: config.update(format="bitblas"), r"format = 'bitblas'"),
    "layers of their own": ("gptq v1", lambda config: config.update(dynamic={"-:x": {}, "+:y": {}}), r"dynamic = .*only mod"),
    "layers of their own in awq": ("awq 64", lambda config: config.update(dynamic={"y": {"bits": 8}}), r"dynamic = .*only mod"),
    "layers of 8 bits": ("gptq v1", lambda config: config.update(extra_config={"y": {"bits": 8}}), r"extra_config = .*only mod"),
    "a block": ("ct fp8 blocks", weights(block_structure="128 x 128"), r"block_structure = '128 x 128'"),
    "fp8's numbers": ("fp8 blocks", lambda config: config.update(fmt="e5m2"), r"fmt = 'e5m2'"),
    "fp8's block": ("fp8 blocks", lambda config: config.update(weight_block_size=[128]), r"weight_block_size = \[128\]"),
    "modelopt's algorithm": ("modelopt nvfp4", lambda config: config.update(quant_algo="NVFP4_AWQ"), r"quant_algo = 'NVFP4_AWQ'"),
    "fp4's group": ("ct mxfp4", weights(group_size=16), r"weights.group_size = 16"),
    "a layout": ("ct int4 64", lambda config: config.update(format="marlin-24"), r"format = 'marlin-24'"),
    "bits": ("ct int4 64", weights(num_bits=3), r"config_groups.group_0.weights.num_bits = 3"),
    "a type": ("ct int4 64", weights(type="float"), r"weights.type = 'float'"),
    "a strategy": ("ct int4 64", weights(strategy="token"), r"weights.strategy = 'token'"),
    "an order": ("ct int4 64", weights(actorder="other"), r"weights.actorder = 'other'"),
    "dynamic weights": ("ct int4 64", weights(dynamic=True), r"weights.dynamic = True"),
    "no groups": ("ct int4 64", lambda config: config.update(config_groups={}), r"config_groups = {}"),
    "no weights": ("ct int4 64", lambda config: config["config_groups"]["group_0"].pop("weights"), r"group_0.weights is None"),
    "rotations": ("ct int4 64", lambda config: config.update(transform_config={"groups": 1}), r"transform_config ="),
    "sparsity": (
        "ct int4 64", lambda config: config.update(sparsity_config={"format": "sparse-bitmask"}), r"sparsity_config.format =",
    ),
    "a state": ("ct int4 64", lambda config: config.update(quantization_status="calibration"), r"quantization_status ="),
    "a bad pattern": ("ct int4 64", lambda config: config.update(ignore=["re:("]), r"ignore = 're:\('"),
}  # fmt: skip


@pytest.mark.parametrize("case", KEYS)
def test_a_key_that_cannot_be_honoured_is_named(tiny: Tiny, tmp_path: Path, case: str) -> None:
    name, change, error = KEYS[case]
    folder, _ = spelled(tiny, name, tmp_path, change)
    with pytest.raises(ModelError, match=rf"config.json: .*{error}.*not quantised"):
        load_model_config(folder)


def without(key: str, at: str = "") -> Callable[[dict[str, Any]], Any]:
    """Removes a key, also from the objects below `at`."""

    def change(config: dict[str, Any]) -> None:
        its = config["config_groups"]["group_0"][at] if at else config
        its.pop(key, None)

    return change


def replaced(config: dict[str, Any], new: dict[str, Any]) -> None:
    config.clear()
    config |= new


def as_it_is(_unchanged: Any) -> None:
    """No change."""


def with_scales(*names: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({f"model.layers.0.self_attn.{name}": torch.ones(1) for name in names})


def without_order(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith("g_idx")]:
        del tensors[name]


def zeros_of_version_2(tensors: Tensors) -> None:
    tensors |= {name: tensor + 0x11111111 for name, tensor in tensors.items() if name.endswith("qzeros")}


# Other ways in which publishers write the same: (the form, the change of config.json's entry, the change of the tensors).
SPELLINGS: dict[str, tuple[str, Callable[[dict[str, Any]], Any], Callable[[Tensors], Any]]] = {
    "gptq's zeros of version 2": ("gptq v1 symmetric", as_it_is, zeros_of_version_2),
    "gptq's head": ("gptq v1", lambda config: config.update(dynamic={"-:lm_head": {}}), as_it_is),
    "awq without zeros": ("awq symmetric", as_it_is, as_it_is),
    "awq's kernels": ("awq 64", lambda config: config.update(backend="marlin"), as_it_is),
    "auto-round": ("gptq v1", lambda config: config.update(AUTO_ROUND), without_order),
    "auto-round, symmetric": (
        "gptq v1 symmetric", lambda config: config.update(AUTO_ROUND | {"sym": True, "packing_format": "auto_round"}),
        zeros_of_version_2,
    ),
    "auto-round's head": (
        "gptq v1", lambda config: config.update(AUTO_ROUND | {"extra_config": {"lm_head": {"bits": 16}}}), without_order,
    ),
    "auto-round as awq": (
        "awq 64", lambda config: config.update(AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}), as_it_is,
    ),
    "modelopt without its name": ("modelopt fp8", without("quant_method"), as_it_is),
    "modelopt's nested keys": (
        "modelopt nvfp4", lambda config: replaced(config, {"quant_method": "modelopt", "quantization": dict(config)}),
        as_it_is,
    ),
    "modelopt's weights": ("modelopt nvfp4", lambda config: config.update(quant_algo="W4A16_NVFP4"), as_it_is),
    "modelopt's cache": (
        "modelopt fp8", as_it_is, with_scales("k_proj.k_scale", "v_proj.v_scale"),
    ),
    "fp8's cache": ("fp8 tensor", as_it_is, with_scales("kv_scale", "q_scale")),
    "a block as a text": ("ct fp8 blocks", weights(block_structure="128x128"), as_it_is),
    "no strategy of groups": ("ct int4 64", without("strategy", "weights"), as_it_is),
    "no strategy of rows": (
        "ct int4 None", lambda config: (weights(group_size=-1)(config), without("strategy", "weights")(config)),
        as_it_is,
    ),
    "no strategy of a matrix": ("ct fp8 tensor", without("strategy", "weights"), as_it_is),
    "an entry within an entry": (
        "ct int8", lambda config: replaced(config, {"quantization_config": dict(config)}), as_it_is,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPELLINGS)
def test_other_spellings_mean_the_same(tiny: Tiny, tmp_path: Path, case: str) -> None:
    name, change, change_of_tensors = SPELLINGS[case]
    folder, plain = spelled(tiny, name, tmp_path, change)
    change_tensors(folder, change_of_tensors)
    np.testing.assert_array_equal(load(folder).embed(["w1 w2"]), load(plain).embed(["w1 w2"]))


def test_modelopts_own_file_is_read(tiny: Tiny, tmp_path: Path) -> None:
    folder, plain = folders(tiny, "modelopt fp8", tmp_path)
    change_config(folder, {"quantization_config": None})
    own = folder / "hf_quant_config.json"
    said = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    own.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": said}))
    np.testing.assert_array_equal(load(folder).embed(["w1 w2"]), load(plain).embed(["w1 w2"]))
    own.write_text(json.dumps({"quantization": said | {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(ModelError, match=r"hf_quant_config.json: quantization.quant_algo = 'W4A8_AWQ' is not supported"):
        load_model_config(folder)
    own.write_text(json.dumps({"quantization": said | {"quant_algo": None}}))
    assert load_model_config(folder).quantization is None


def test_zeros_that_config_json_excludes_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    for name, change, error in (
        ("gptq v1", {"sym": True}, r"q_proj.qzeros has other zeros than 8, but config.json says sym = true"),
        ("awq 64", {"zero_point": False}, r"q_proj.qzeros has other zeros than 8, but config.json says zero_point = false"),
    ):
        folder, _ = folders(tiny, name, tmp_path / name)
        change_config(folder, {"quantization_config": FORMS[name].config | change})
        with pytest.raises(ModelError, match=error):
            load(folder)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_zero_of_0_borrows_in_version_1(bits: int) -> None:
    """Writers subtract 1 from all fields of a word at once."""
    zeros = np.random.default_rng(0).integers(0, 1 << bits, (3, 16))
    zeros[0] = 0
    words = packed_columns(zeros, bits) - {4: 0x11111111, 8: 0x01010101}[bits]
    tensors = {
        "qweight": torch.zeros(6 * bits, 16, dtype=torch.int32),
        "qzeros": words,
        "scales": torch.ones(3, 16).half(),
    }
    parts = Parts("x", Path(), {name: name for name in tensors}, tensors.__getitem__)
    found = read_gptq(parts, Gptq(4 if bits == 4 else 8, 64, symmetric=False, reorders=False, adds_one=True))
    assert found.zeros is not None
    assert found.zeros.T.tolist() == zeros.tolist()


def test_the_older_name_of_the_key_is_read(tiny: Tiny, tmp_path: Path) -> None:
    folder, _ = folders(tiny, "ct int4 64", tmp_path)
    scheme = load_model_config(folder).quantization
    config = {key: value for key, value in FORMS["ct int4 64"].config.items() if key != "quant_method"}
    change_config(folder, {"quantization_config": None, "compression_config": config})
    assert scheme is not None
    assert load_model_config(folder).quantization == scheme
    load(folder)


def test_layers_find_their_group() -> None:
    make = {"is_float": False, "strategy": "channel", "symmetric": True, "packed": True}
    groups = Group(("Linear",), 4, **make), Group((r"re:.*\.down_proj", "lm_head"), 8, **make)
    scheme = CompressedTensors(groups, ("a.gate", r"re:vision\."))
    found = {name: scheme.group_of(name) for name in ("a.q_proj", "a.down_proj", "lm_head", "a.gate", "vision.q", "b.vision.q")}
    assert list(found.values()) == [groups[0], groups[1], groups[1], None, None, groups[0]]


def test_a_quantised_checkpoint_needs_what_its_values_need(tiny: Tiny, tmp_path: Path) -> None:
    """The engine dequantises at load, so the memory is that of the plain checkpoint."""
    configs = [load_model_config(folder) for folder in folders(tiny, "awq 64", tmp_path)]
    quantised, plain = (footprint(config, torch.bfloat16, "gpu") for config in configs)
    assert configs[0].quantization is not None
    assert quantised == plain
