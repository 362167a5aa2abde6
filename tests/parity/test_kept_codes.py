"""Matrices that stay in their codes give the results of the dequantised model. `--dtype int4` has small errors."""

import logging
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_generators import prompts
from tiny_quantized import FORMS, change_config, change_tensors, quantize

from engine import Engine, ModelError, devices, load
from engine.hub import EMBEDDED_GENERATOR, EMBEDDED_MODEL
from engine.kernels.packed import Packed
from engine.kernels.quantize import quantize_weight
from engine.model import footprint
from engine.model.folder import load_model_config
from engine.model.layers.linear import Linear, PackedLinear, SideBySide
from engine.model.layers.norm import Residual, RMSNorm
from engine.model.quantized import kept
from engine.model.quantized.kept import FORM, as_codes, joined, kept_form, packed, to_four_bits, why_not
from engine.model.quantized.layout import Codes, EightBits
from engine.model.quantized.scheme import Fp8
from engine.model.weights import Checkpoint, Kept
from engine.options import SamplingOptions

Tiny = Callable[..., Path]
IDS = prompts((3, 40, 17, 90, 200))
SHAPE = {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256, "max_position_embeddings": 512}
SCORED = SamplingOptions(max_tokens=8, temperature=0.0, logprobs=0, prompt_logprobs=0)
STAYS = ("awq 64", "gptq v1", "gptq v2", "gptq desc_act", "gptq channel", "ct int4 64", "ct int4 64 asymmetric",
         "ct int4 32 asymmetric", "ct int4 None", "ct int4 None asymmetric", "ct int4 actorder group", "ct packed int8",
         "gptq int8 symmetric", "ct nvfp4", "ct mxfp4", "modelopt nvfp4", "ct int8", "fp8 blocks", "fp8 tensor", "ct fp8 blocks",
         "ct fp8 channel", "ct fp8 tensor", "modelopt fp8")  # fmt: skip


def generator(tiny: Tiny, name: str, at: Path, kind: str = "qwen3_lm", **shape: int) -> Path:
    folder, _ = quantize(tiny(kind, **SHAPE | shape), FORMS[name], at)
    (folder / "1_Pooling" / "config.json").unlink()
    (folder / "1_Pooling").rmdir()
    change_config(folder, {"eos_token_id": None})
    return Path(folder)


def log_probs(engine: Engine) -> NDArray[np.float64]:
    """Log-probabilities of the tokens of all prompts and answers."""
    answers = engine.generate(IDS, SCORED)
    tokens = [token for answer in answers for token in (*(answer.prompt_tokens or ())[1:], *answer.tokens)]
    return np.array([token.logprob for token in tokens], dtype=np.float64)


def matrices(engine: Engine) -> list[Any]:
    """The linear layers of a decoder."""
    model: Any = engine.network.model
    gated = [getattr(layer, "swiglu", None) or layer.up for layer in model.layers]
    found = [each for layer in model.layers for each in (layer.attend.qkv, layer.attend.out, layer.down)]
    found += [each.gate_up for each in gated]
    return [part for each in found for part in (each.parts if isinstance(each, SideBySide) else [each])]


def keep_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test a CPU keeps matrices in their codes. Plain torch computes with them, in fp32."""
    monkeypatch.setattr(load, "multiplies_codes", lambda device: True)
    monkeypatch.setattr(footprint, "most_bits_kept", lambda config, dtype: 8)


def packed_layers(engine: Engine) -> int:
    return sum(isinstance(each, PackedLinear) for each in matrices(engine))


def check_all_stay(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, atol: float) -> None:
    """All matrices of a tiny decoder stay in their codes. Its log-probabilities are those of the dequantised model."""
    expected = log_probs(Engine.load(folder, dtype="float32", device="cpu"))
    keep_on_a_cpu(monkeypatch)
    with caplog.at_level(logging.INFO):
        engine = Engine.load(folder, dtype="float32", device="cpu")
    assert packed_layers(engine) == 8
    assert f"{folder}: 14 matrices stay in their codes, none is dequantised" in caplog.text
    np.testing.assert_allclose(log_probs(engine), expected, atol=atol)


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "qwen3_lm") for name in STAYS), *((name, "gemma3_lm") for name in ("awq 64", "gptq desc_act", "fp8 blocks"))],
)
def test_the_same_model_as_dequantised(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, kind: str
) -> None:
    check_all_stay(generator(tiny, name, tmp_path, kind), monkeypatch, caplog, atol=4e-3)  # scales are rounded to float16


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("ct int8 asymmetric", "8 bits with zeros, or in blocks of other sizes"),
        ("gptq int8", r"8 bits, groups of 128, zeros, (128 x 128|64 x 128|256 x 128|128 x 256) values"),
    ],
)
def test_what_cannot_stay_is_dequantised_and_said(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, reason: str
) -> None:
    folder = generator(tiny, name, tmp_path)
    assert footprint.bytes_saved(load_model_config(folder), torch.bfloat16, on_gpu=True) == 0
    expected = log_probs(Engine.load(folder, dtype="float32", device="cpu"))
    keep_on_a_cpu(monkeypatch)
    with caplog.at_level(logging.INFO):
        engine = Engine.load(folder, dtype="float32", device="cpu")
    assert packed_layers(engine) == 0
    (said,) = re.findall(r"0 matrices stay in their codes, (.*) are dequantised", caplog.text)
    reasons = [each.split(" with ", 1) for each in re.split(r", (?=\d+ with )", said)]
    assert sum(int(count) for count, _ in reasons) == 14
    assert all(re.fullmatch(reason, why) for _, why in reasons)
    np.testing.assert_allclose(log_probs(engine), expected, atol=1e-5)


def test_an_embedding_model_and_a_cpu_dequantise(tiny: Tiny, tmp_path: Path) -> None:
    folder, _ = quantize(tiny("qwen3_lm", **SHAPE), FORMS["awq 64"], tmp_path)
    config = load_model_config(folder)
    assert footprint.most_bits_kept(config, torch.bfloat16) == 0
    assert footprint.bytes_saved(config, torch.bfloat16, on_gpu=True) == 0
    config = load_model_config(generator(tiny, "awq 64", tmp_path / "generator"))
    assert footprint.most_bits_kept(config, torch.bfloat16) == 8
    assert footprint.most_bits_kept(config, torch.float8_e4m3fn) == 0
    assert footprint.bytes_saved(config, torch.bfloat16, on_gpu=False) == 0


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("awq 64", 4.5),
        ("ct int4 64", 4.25),
        ("ct int4 32 asymmetric", 5),
        ("gptq v1", 4.25),
        ("gptq desc_act", 5),
        ("ct int4 actorder group", 5),
        ("gptq channel", 4.25),
        ("ct int4 None asymmetric", 4.25),
        ("ct packed int8", 8.125),
        ("gptq int8 symmetric", 8.125),
        ("ct nvfp4", 5),
        ("modelopt nvfp4", 5),
        ("ct mxfp4", 4.5),
        ("ct int8", 8.125),
        ("fp8 blocks", 8.125),
        ("ct fp8 channel", 8.125),
        ("modelopt fp8", 8.125),
    ],
)
def test_the_footprint_counts_what_is_there(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, bits: float
) -> None:
    """The real bytes are at most the estimate. The estimate counts zeros, which a checkpoint may not need."""
    folder = generator(tiny, name, tmp_path)
    config = load_model_config(folder)
    values = footprint._shapes(config).num_quantized
    saved = footprint.bytes_saved(config, torch.bfloat16, on_gpu=True)
    counted = 2 * values - saved
    keep_on_a_cpu(monkeypatch)
    weights = [each.weight for each in matrices(Engine.load(folder, dtype="float32", device="cpu"))]
    assert all(isinstance(weight, Packed) for weight in weights)
    there = sum(weight.records.nbytes for weight in weights)
    assert 0.85 * counted <= there <= counted
    assert kept_form(config.quantization) is not None
    assert there * 8 <= bits * values * 1.07


def roll_order(module: str) -> Callable[[dict[str, torch.Tensor]], None]:
    """Gives matrices of a GPTQ checkpoint an order of columns of their own."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {name: found.roll(1) for name, found in tensors.items() if name.endswith(f"{module}.g_idx")}

    return change


def orders(engine: Engine) -> list[bool]:
    """For each matrix, whether passes reorder its inputs."""
    return [each.weight.order is not None for each in matrices(engine)]


@pytest.mark.parametrize("name", ["gptq desc_act", "ct int4 actorder group"])
def test_columns_in_another_order(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Only a gated MLP whose kernel takes G and U in turn gives its products in the order of the next matrix."""
    keep_on_a_cpu(monkeypatch)
    folders = [generator(tiny, name, tmp_path / kind, kind) for kind in ("qwen3_lm", "gemma3_lm")]
    plain, gemma = (Engine.load(folder, dtype="float32", device="cpu") for folder in folders)
    assert orders(plain) == [True, True, False] * 2 + [True] * 2
    assert orders(gemma) == [True] * 8


def test_q_with_an_order_of_its_own(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It stays in its codes beside K and V."""
    folder = generator(tiny, "gptq desc_act", tmp_path)
    change_tensors(folder, roll_order("q_proj"))
    expected = log_probs(Engine.load(folder, dtype="float32", device="cpu"))
    keep_on_a_cpu(monkeypatch)
    with caplog.at_level(logging.INFO):
        engine = Engine.load(folder, dtype="float32", device="cpu")
    assert f"{folder}: 14 matrices stay in their codes, none is dequantised" in caplog.text
    assert packed_layers(engine) == 10
    np.testing.assert_allclose(log_probs(engine), expected, atol=4e-3)


@pytest.mark.parametrize("module", ["up_proj", "down_proj"])
def test_an_mlp_whose_orders_differ(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, module: str
) -> None:
    """G and U of different orders are dequantised. The products have the order of the next matrix in both cases."""
    folder = generator(tiny, "gptq desc_act", tmp_path)
    change_tensors(folder, roll_order(module))
    expected = log_probs(Engine.load(folder, dtype="float32", device="cpu"))
    keep_on_a_cpu(monkeypatch)
    with caplog.at_level(logging.INFO):
        engine = Engine.load(folder, dtype="float32", device="cpu")
    assert ("10 matrices stay in their codes, 4 with a neighbour of another kind" in caplog.text) == (module == "up_proj")
    np.testing.assert_allclose(log_probs(engine), expected, atol=4e-3)


def test_words_keep_the_order_of_their_columns(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A head in another order is dequantised: it may also be the table of words."""
    form = FORMS["gptq desc_act"]
    folder, _ = quantize(tiny("qwen3_lm", **SHAPE, tie_word_embeddings=False), form, tmp_path, names="*[jd].weight")
    shutil.rmtree(folder / "1_Pooling")
    change_config(folder, {"eos_token_id": None, "quantization_config": form.config | {"lm_head": True}})
    expected = log_probs(Engine.load(folder, dtype="float32", device="cpu"))
    keep_on_a_cpu(monkeypatch)
    with caplog.at_level(logging.INFO):
        engine = Engine.load(folder, dtype="float32", device="cpu")
    assert "14 matrices stay in their codes, 1 with words in another order are dequantised" in caplog.text
    np.testing.assert_allclose(log_probs(engine), expected, atol=4e-3)


def without_inputs(config: dict[str, Any]) -> dict[str, Any]:
    """config.json's entry for weights in NVFP4 whose inputs are in 16 bits."""
    weights = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group", "dynamic": False}
    return config | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}}


@pytest.mark.parametrize(("name", "whole"), [("ct nvfp4", 1 / 8192), ("modelopt nvfp4", 1.3e-4)])
def test_inputs_are_in_nvfp4_if_the_checkpoint_says_so(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, whole: float
) -> None:
    """Only on a device that multiplies NVFP4. Here a CPU pretends to be one."""
    folder = generator(tiny, name, tmp_path)
    keep_on_a_cpu(monkeypatch)

    def scales() -> list[torch.Tensor | None]:
        return [each.weight.row_scales for each in matrices(Engine.load(folder, dtype="float32", device="cpu"))]

    assert scales() == [None] * 8
    monkeypatch.setattr(kept, "has_nvfp4", lambda device: True)
    for found in scales():
        assert found is not None
        assert found.tolist() == pytest.approx([whole] * len(found))
    change_config(folder, {"quantization_config": without_inputs(FORMS[name].config)})
    change_tensors(folder, lambda tensors: [tensors.pop(each) for each in list(tensors) if each.endswith("input_global_scale")])
    assert scales() == [None] * 8


def test_the_footprint_of_blocks_that_end_within_a_group(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of 192 columns have groups of 64. The estimate counts such groups in the others, too."""
    folder = generator(tiny, "fp8 blocks", tmp_path, hidden_size=192)
    config = load_model_config(folder)
    values, counted = footprint.kept_in_codes(config, torch.bfloat16)
    assert values == footprint.num_quantized(config)
    assert counted == values * 33 // 32
    expected = log_probs(Engine.load(folder, dtype="float32", device="cpu"))
    keep_on_a_cpu(monkeypatch)
    kept = Engine.load(folder, dtype="float32", device="cpu")
    there = sum(layer.weight.records.nbytes for layer in matrices(kept))
    assert 0.98 * counted <= there <= counted
    np.testing.assert_allclose(log_probs(kept), expected, atol=4e-3)


def test_rounding_takes_the_best_scale_of_a_few() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 256, generator=generator)
    weight[0, :64] = 0
    weight[1, 0] = -9
    found = to_four_bits(weight)
    assert why_not(found, 4) is None
    values = found.dequantized(torch.float32)
    assert not values[0, :64].any()
    error = (values - weight).square().view(32, -1, FORM.group).mean(2)
    plain_scale = weight.view(32, -1, FORM.group).abs().amax(2, keepdim=True) / 7
    plain = (weight.view(32, -1, FORM.group) / plain_scale.clamp(min=1e-9)).round() * plain_scale
    theirs = (plain - weight.view(32, -1, FORM.group)).square().mean(2)
    assert error.mean() < 0.9 * theirs.mean()
    assert (error <= theirs * 1.3 + 1e-6).all()
    with pytest.raises(ModelError, match=r"a matrix of 24 x 96 cannot be in 4 bits"):
        to_four_bits(torch.randn(24, 96))


def test_parts_with_and_without_zeros_are_joined() -> None:
    generator = torch.Generator().manual_seed(1)
    parts = [to_four_bits(torch.randn(16, 128, generator=generator)) for _ in range(2)]
    parts[1] = replace(parts[1], zeros=torch.full_like(parts[1].scales, 7, dtype=torch.uint8))
    whole = joined(parts)
    assert whole is not None
    assert torch.equal(whole.dequantized(torch.float32), torch.cat([each.dequantized(torch.float32) for each in parts]))
    assert packed(whole).form.beside == "zeros"
    assert packed(parts[0]).form.beside is None
    assert joined([parts[0], replace(parts[0], scales=parts[0].scales[:, :1])]) is None
    assert joined([parts[0], replace(parts[0], bits=5)]) is None


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(("block", "group"), [((128, 128), 64), ((48, 64), 64), ((1, 96), 32), ((1, 192), 64), ((80, 576), 64)])
def test_blocks_of_8_bits_become_groups(block: tuple[int, int], group: int, dtype: torch.dtype) -> None:
    """The last blocks of rows and of columns are cut off."""
    torch.manual_seed(0)
    codes = (60 * torch.randn(80, 192)).to(dtype)
    matrix = EightBits(codes, torch.rand(-(-80 // block[0]), -(-192 // block[1])) * 1e-3, block)
    found = as_codes(matrix)
    assert isinstance(found, Codes)
    assert found.form.group == group
    assert torch.equal(found.dequantized(torch.float32), matrix.dequantized(torch.float32))


@pytest.mark.parametrize(("size", "group"), [(576, 64), (192, 64), (96, 32), (64, 64), (36, 36)])
def test_long_groups_are_divided(size: int, group: int) -> None:
    """If no group of the kernels divides them, they stay as they are."""
    torch.manual_seed(0)
    codes, of_groups = torch.randint(0, 16, (32, 576), dtype=torch.uint8), (32, 576 // size)
    scales, zeros = torch.rand(of_groups), torch.randint(0, 16, of_groups, dtype=torch.uint8)
    for beside in ({}, {"zeros": zeros}, {"mins": torch.rand(of_groups)}):
        matrix = Codes(codes, scales, order=torch.randperm(576), **beside)
        found = as_codes(matrix)
        assert isinstance(found, Codes)
        assert found.form.group == group
        assert found.form.beside == next(iter(beside), None)
        assert torch.equal(found.dequantized(torch.float32), matrix.dequantized(torch.float32))


def test_matrices_in_8_bits_that_do_not_become_codes() -> None:
    codes = torch.ones(16, 192).to(torch.float8_e4m3fn)
    assert isinstance(as_codes(EightBits(codes, torch.ones(1, 24), (128, 8))), EightBits)
    assert isinstance(as_codes(EightBits(codes, torch.ones(1, 2), (128, 100))), EightBits)
    codes[3, 5] = torch.nan
    no_number = as_codes(EightBits(codes, torch.ones(1, 2), (128, 128)))
    assert why_not(no_number, 8) == "values that are no numbers"
    too_large = as_codes(EightBits(codes, torch.full((1, 2), 300.0), (128, 128)))
    assert why_not(too_large, 8) == "scales that float16 does not hold"
    whole_numbers = torch.ones(16, 192, dtype=torch.int8)
    assert why_not(as_codes(EightBits(whole_numbers, torch.linspace(1, 2, 16)[:, None] * 1e-7, (1, 192))), 8) is not None
    with_a_small_row = torch.full((16, 1), 1e-3)
    with_a_small_row[3] = 1e-8
    assert why_not(as_codes(EightBits(whole_numbers, with_a_small_row, (1, 192))), 8) is None


@pytest.mark.parametrize(
    ("names", "in_16_bits"),
    [
        (["lm_head", "model.layers.0.input_layernorm", "model.layers.0.self_attn.q_norm"], False),
        (["lm_head", "model.layers.0.mlp.down_proj"], True),
        (["vision_tower.encoder.layers.0.self_attn.q_proj", "multi_modal_projector"], False),
        (None, False),
    ],
)
def test_fp8_with_layers_in_16_bits_is_planned_in_16_bits(
    tiny: Tiny, tmp_path: Path, names: list[str] | None, in_16_bits: bool
) -> None:
    """The files decide which matrices stay in e4m3. Without them a plan cannot count those that do not."""
    folder = generator(tiny, "fp8 blocks", tmp_path)
    change_config(folder, {"quantization_config": FORMS["fp8 blocks"].config | {"modules_to_not_convert": names}})
    scheme = load_model_config(folder).quantization
    assert isinstance(scheme, Fp8)
    assert scheme.ignores_layers == in_16_bits
    assert (kept_form(scheme) is None) == in_16_bits


@pytest.mark.parametrize(
    ("name", "change", "in_16_bits"),
    [
        ("fp8 blocks", {"ignored_layers": ["model.layers.0.self_attn.k_proj"]}, True),
        ("awq 64", {"modules_to_not_convert": ["lm_head"]}, False),
        ("awq 64", {"modules_to_not_convert": ["self_attn"]}, True),
        ("gptq v1", {"dynamic": {"-:lm_head": {}}}, False),
        ("gptq v1", {"dynamic": {r"-:.*k_proj": {}}}, True),
        ("gptq v1", {"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 16}}}, True),
        ("gptq v1", {"modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.down_proj"]]}, True),
        (
            "gptq v1",
            {
                "modules_in_block_to_quantize": [
                    *([f"self_attn.{each}_proj"] for each in "qkvo"),
                    ["mlp.gate_proj", "mlp.up_proj"],
                    ["mlp.down_proj"],
                ]
            },
            False,
        ),
        ("ct int4 64", {"ignore": ["re:.*lm_head", "model.embed_tokens"]}, False),
        ("ct int4 64", {"ignore": ["lm_head", "model.layers.1.mlp.down_proj"]}, True),
    ],
)
def test_layers_in_16_bits_are_planned_in_16_bits(
    tiny: Tiny, tmp_path: Path, name: str, change: dict[str, Any], in_16_bits: bool
) -> None:
    folder = generator(tiny, name, tmp_path)
    change_config(folder, {"quantization_config": FORMS[name].config | change})
    assert (kept_form(load_model_config(folder).quantization) is None) == in_16_bits


@pytest.mark.parametrize("name", ["modelopt fp8", "modelopt nvfp4"])
@pytest.mark.parametrize("key", ["ignore", "exclude_modules"])
def test_modelopt_with_layers_in_16_bits_is_planned_in_16_bits(tiny: Tiny, tmp_path: Path, name: str, key: str) -> None:
    folder = generator(tiny, name, tmp_path)
    for names, in_16_bits in ((["lm_head", "*embed_tokens*"], False), (["lm_head", "model.layers.1*"], True)):
        change_config(folder, {"quantization_config": FORMS[name].config | {key: names}})
        assert (kept_form(load_model_config(folder).quantization) is None) == in_16_bits


FP8_BLOCKS = ("fp8 blocks", "fp8 tensor", "ct fp8 blocks", "ct fp8 tensor", "modelopt fp8")


@pytest.mark.parametrize("name", ["fp8 blocks", "ct fp8 tensor"])
def test_float8_keeps_a_checkpoints_values_on_hopper(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The matrices have the values and the scales of the checkpoint. Only activations are rounded."""
    folder = generator(tiny, name, tmp_path)
    exact = log_probs(Engine.load(folder, dtype="float32", device="cpu"))
    monkeypatch.setattr(devices, "LEAST_CAPABILITY", {})  # allows the dtype on a CPU
    rounded = Engine.load(folder, dtype="float8", device="cpu")
    assert not any(each.weight.block_scale is not None for each in matrices(rounded))
    monkeypatch.setattr(load, "is_hopper", lambda device: True)
    kept = Engine.load(folder, dtype="float8", device="cpu")
    for layer in matrices(kept):
        assert layer.weight.block_scale is not None
        assert (layer.weight.scale == 1).all()
    errors = [np.abs(log_probs(each) - exact).mean() for each in (kept, rounded)]
    assert errors[0] < 1.05 * errors[1]
    config = load_model_config(folder)
    values, there = (
        footprint._shapes(config).num_quantized,
        sum(
            each.nbytes
            for layer in matrices(kept)
            for each in (layer.weight.values, layer.weight.scale, layer.weight.block_scale)
        ),
    )
    assert there == 2 * values - footprint.bytes_saved(config, torch.float8_e4m3fn, on_gpu=True)


def test_float8_keeps_the_values_of_most_matrices(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer has one matrix in 16 bits. The engine rounds it. K and V keep their values beside it."""
    layer = "model.layers.0.self_attn.q_proj"
    folder, _ = quantize(tiny("qwen3_lm", **SHAPE), FORMS["fp8 blocks"], tmp_path, plain_layers=(layer,))
    shutil.rmtree(folder / "1_Pooling")
    change_config(folder, {"eos_token_id": None})
    change_config(folder, {"quantization_config": FORMS["fp8 blocks"].config | {"modules_to_not_convert": [layer]}})
    exact = log_probs(Engine.load(folder, dtype="float32", device="cpu"))
    monkeypatch.setattr(devices, "LEAST_CAPABILITY", {})
    rounded = Engine.load(folder, dtype="float8", device="cpu")
    monkeypatch.setattr(load, "is_hopper", lambda device: True)
    kept = Engine.load(folder, dtype="float8", device="cpu")
    in_blocks = [layer.weight.block_scale is not None for layer in matrices(kept)]
    assert in_blocks.count(False) == 1
    errors = [np.abs(log_probs(each) - exact).mean() for each in (kept, rounded)]
    assert errors[0] < 1.1 * errors[1]


def test_what_is_pending_is_added_once() -> None:
    """Q, K and V of different kinds are separate layers in 8 bits. Each of them would add it."""
    torch.manual_seed(0)
    parts = [Linear.of(quantize_weight(torch.randn(16, 32), torch.float8_e4m3fn)) for _ in range(3)]
    value, pending, norm = torch.randn(4, 32).bfloat16(), torch.randn(4, 32).bfloat16(), RMSNorm(torch.ones(32).bfloat16(), 1e-6)
    stream = Residual(value.clone(), pending)
    found = SideBySide(parts).normed(stream, norm)
    assert torch.equal(stream.value, value + pending)
    expected = torch.cat([part.normed(Residual(value + pending), norm) for part in parts], dim=1)
    assert (found - expected).abs().max() <= 0.05 * expected.abs().max()


def test_each_device_of_a_pipeline_decides_for_itself(tiny: Tiny, tmp_path: Path) -> None:
    """Cards of a pipeline may be of different kinds."""
    folder = generator(tiny, "fp8 blocks", tmp_path)
    with Checkpoint(folder, torch.device("cpu"), torch.float8_e4m3fn) as checkpoint:
        checkpoint.kept_on = lambda device: Kept(e4m3=device.type == "meta")
        assert not checkpoint._kept
        with checkpoint.on(torch.device("meta")) as other:
            assert other._kept.e4m3
        assert not checkpoint._kept


def test_float8_rounds_what_is_not_e4m3_in_blocks(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "LEAST_CAPABILITY", {})
    monkeypatch.setattr(load, "is_hopper", lambda device: True)
    for name in ("ct int8", "ct fp8 channel", "awq 64"):
        engine = Engine.load(generator(tiny, name, tmp_path / name), dtype="float8", device="cpu")
        assert all(layer.weight.block_scale is None for layer in matrices(engine))


TEXT = """The giant panda lives on bamboo, twenty kilograms of it a day. Bears sleep in winter; pandas do not, because bamboo
has too little fat for it. In spring they climb to higher valleys, where the new shoots are, and in autumn they come down
again. A cub weighs a hundred grams when it is born, and is blind for six weeks. Its mother carries it in her paws, and does
not eat for days."""


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Beside other tests, two threads of a long computation wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_a_real_models_text_costs_little_more_in_4_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """int4 rounds the values of SmolLM2-135M, which have 5 bits in its file. The loss is in nats for each token of a text."""
    monkeypatch.setattr(devices, "LEAST_CAPABILITY", {})  # allows the dtype on a CPU

    def nats(dtype: Any) -> float:
        engine = Engine.load(EMBEDDED_GENERATOR, dtype=dtype, device="cpu", num_threads=1)
        assert engine.prompts is not None
        scored = SamplingOptions(max_tokens=0, prompt_logprobs=0)
        (answer,) = engine.generate([engine.prompts.encode(TEXT)], scored)
        return -float(np.mean([token.logprob or 0.0 for token in (answer.prompt_tokens or ())[1:]]))

    exact, rounded = nats("float32"), nats("int4")
    assert exact < rounded < exact + 0.25


def test_a_real_models_vectors_in_4_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "LEAST_CAPABILITY", {})
    texts = TEXT.split(". ")
    exact, found = (Engine.load(EMBEDDED_MODEL, dtype=dtype, device="cpu").embed(texts) for dtype in ("float32", "int4"))
    assert 0.97 < (exact * found).sum(axis=1).mean() < 0.9999


def test_a_cpu_refuses_int4() -> None:
    with pytest.raises(ModelError, match=r"int4 needs a GPU of compute capability 8\.0 or more, this is a CPU"):
        Engine.load(EMBEDDED_MODEL, dtype="int4", device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*STAYS, "int4"])
def test_on_a_gpu(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Steps of a few streams and prompts of many rows are as close to fp32 as the dequantised model in bf16."""
    folder = generator(tiny, "awq 64" if name == "int4" else name, tmp_path)
    dtype: Any = "int4" if name == "int4" else "bfloat16"
    exact = log_probs(Engine.load(folder, dtype="float32", device="cpu"))
    kept = Engine.load(folder, dtype=dtype, device="cuda")
    assert packed_layers(kept) == 8
    monkeypatch.setattr(load, "multiplies_codes", lambda device: False)
    plain = Engine.load(folder, dtype="bfloat16", device="cuda")
    assert packed_layers(plain) == 0
    error, theirs = (np.median(np.abs(log_probs(each) - exact)) for each in (kept, plain))
    assert error <= 1.5 * theirs + 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("name", FP8_BLOCKS)
def test_float8_on_a_gpu(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """On Hopper the checkpoint's own values are closer than, or as close as, those that the engine rounds."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only Hopper has products with scales of blocks")
    folder = generator(tiny, name, tmp_path)
    exact = log_probs(Engine.load(folder, dtype="float32", device="cpu"))
    kept = Engine.load(folder, dtype="float8", device="cuda")
    assert all(layer.weight.block_scale is not None for layer in matrices(kept))
    monkeypatch.setattr(load, "is_hopper", lambda device: False)
    rounded = Engine.load(folder, dtype="float8", device="cuda")
    assert all(layer.weight.block_scale is None for layer in matrices(rounded))
    errors = [np.abs(log_probs(each) - exact).mean() for each in (kept, rounded)]
    assert errors[0] <= 1.1 * errors[1] + 1e-3
