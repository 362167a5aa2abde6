"""The stages of a model on several devices: their bytes add up to the model's, and memory and speed decide their layers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_generators import folder_without_pooling

from engine.cut import Device, seconds_by_bytes
from engine.errors import ModelError
from engine.model.config import ModelConfig
from engine.model.folder import load_model_config
from engine.model.footprint import bytes_saved, num_parameters
from engine.model.quantized.scheme import Awq
from engine.run import fits, stages
from engine.run.kv_cache import KERNEL_BYTES, PAGE_SIZE, bytes_per_token, most_default_tokens
from engine.run.layer_times import Call, Times, measure
from engine.run.stages import plan_ring, plan_stages

GPUS = [torch.device("cuda", index) for index in range(3)]


@pytest.fixture(scope="module")
def config_of(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ModelConfig]:
    def make(kind: str, **config: Any) -> ModelConfig:
        config = {"num_hidden_layers": 6} | config
        name = "-".join(["planned", kind, *(f"{key}={value}" for key, value in config.items())])
        return load_model_config(folder_without_pooling(tiny, kind, tmp_path_factory.getbasetemp() / name, **config), None)

    return make


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Stand-in GPUs. Each GPU has a rate, and a number of bytes free beside passes. GPUs with equal rates are of one kind."""

    def make(room: list[int], rates: list[float]) -> None:
        monkeypatch.setattr(stages, "pass_bytes", lambda *_: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card of {rates[device.index]}")
        monkeypatch.setattr(stages, "measure", lambda config, dtype, device, seconds_of: Times(1 / rates[device.index], 0.0))
        monkeypatch.setattr(stages.reserve, "free_bytes", lambda device: room[device.index] + KERNEL_BYTES + (1 << 20))

    return make


@pytest.mark.parametrize("kind", ["qwen3_lm", "qwen2_lm", "gemma3_lm"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_the_parts_are_as_large_as_the_stages_that_the_engine_loads(
    config_of: Callable[..., ModelConfig], kind: str, tied: bool, dtype: torch.dtype
) -> None:
    config = config_of(kind, tie_word_embeddings=tied)
    sizes, itemsize = stages.sizes_of(config, dtype, on_gpu=True), 2 if dtype.itemsize == 1 else dtype.itemsize

    def loaded(layers: range) -> int:
        part = replace(config, part=layers)
        return num_parameters(part) * itemsize - bytes_saved(part, dtype, on_gpu=True)

    for cut in (1, 3, 5):
        assert sum(sizes.layer_bytes[:cut]) + sizes.words_bytes == loaded(range(cut))
        assert sum(sizes.layer_bytes[cut:]) + sizes.head_bytes == loaded(range(cut, 6))
    assert sum(sizes.layer_bytes[2:4]) == loaded(range(2, 4))
    assert sizes.cache_bytes * 6 == bytes_per_token(config, torch.float32 if itemsize == 4 else torch.bfloat16)


@pytest.mark.parametrize("tied", [True, False])
def test_a_ring_has_the_head_in_its_first_stage(config_of: Callable[..., ModelConfig], tied: bool) -> None:
    """In the first stage a tied head and the words are one table."""
    config = config_of("qwen3_lm", tie_word_embeddings=tied)
    table = config.vocab_size * config.hidden_size * 4
    last, first = (stages.sizes_of(config, torch.float32, on_gpu=False, head_is_first=each) for each in (False, True))
    assert first.layer_bytes == last.layer_bytes
    assert first.head_bytes == last.head_bytes
    assert first.words_bytes == (0 if tied else table)
    layer_s, _ = seconds_by_bytes(first, 1.0)
    device = Device("cpu", 1 << 40, 0, layer_s, sum(layer_s))
    parts, tokens, _ = plan_ring(config, torch.float32, [device] * 2, on_gpu=False, cache_tokens=None)
    assert [len(part) for part in parts] == [1, 5]
    assert tokens == most_default_tokens(config)
    small = replace(device, free_bytes=first.words_bytes + first.head_bytes)
    with pytest.raises(ModelError, match=r"of its 6 layers cpu with 0\.0 GiB free holds 0"):
        plan_ring(config, torch.float32, [small, device], on_gpu=False, cache_tokens=128)
    with pytest.raises(ModelError, match="has 6 layers, too few for 7 devices"):
        plan_ring(config, torch.float32, [device] * 7, on_gpu=False, cache_tokens=128)


@pytest.mark.parametrize(("kind", "labels"), [("qwen3", None), ("gemma3", None), ("qwen3_classifier", 3)])
def test_a_model_that_embeds_has_no_cache_and_no_head_of_words(
    tiny: Callable[..., Path], gpus: Callable[..., None], kind: str, labels: int | None
) -> None:
    config = load_model_config(tiny(kind, num_hidden_layers=6, **({"num_labels": labels} if labels else {})))
    sizes = stages.sizes_of(config, torch.bfloat16, on_gpu=True)
    for cut in (1, 3, 5):
        first, last = (num_parameters(replace(config, part=layers)) * 2 for layers in (range(cut), range(cut, 6)))
        assert sum(sizes.layer_bytes[:cut]) + sizes.words_bytes == first
        assert sum(sizes.layer_bytes[cut:]) + sizes.head_bytes == last
    assert sizes.cache_bytes == 0
    gpus([1 << 30] * 3, [1e12] * 3)
    planned, tokens, _ = plan_stages(config, torch.bfloat16, GPUS[:2], 256, None)
    assert tokens is None
    assert [len(stage.config.layers) for stage in planned] == [3, 3]


def test_the_first_parts_of_a_whole_model_add_up(config_of: Callable[..., ModelConfig]) -> None:
    config = config_of("qwen2_lm", tie_word_embeddings=False)
    parts = [replace(config, part=layers) for layers in (range(2), range(2, 3), range(3, 6))]
    assert sum(map(num_parameters, parts)) == num_parameters(config)


def test_equal_gpus_share_equally_and_a_faster_one_gets_more(
    config_of: Callable[..., ModelConfig], gpus: Callable[..., None]
) -> None:
    config = config_of("qwen2_lm", tie_word_embeddings=False)

    def cut(devices: list[torch.device]) -> list[int]:
        planned, tokens, _ = plan_stages(config, torch.bfloat16, devices, 256, 1024)
        assert tokens == 1024
        assert [stage.device for stage in planned] == devices
        assert [layer for stage in planned for layer in stage.config.layers] == list(range(6))
        return [len(stage.config.layers) for stage in planned]

    gpus([1 << 30] * 3, [1e12] * 3)
    assert max(cut(GPUS[:2])) <= 4
    gpus([1 << 30] * 3, [1e12, 4e12, 1e12])
    assert cut(GPUS[:2])[1] > cut(GPUS[1::-1])[1]


def test_the_cache_takes_what_the_fuller_gpu_has_left(config_of: Callable[..., ModelConfig], gpus: Callable[..., None]) -> None:
    config = config_of("qwen2_lm", tie_word_embeddings=False)
    sizes = stages.sizes_of(config, torch.bfloat16, on_gpu=True)
    weights = sum(sizes.layer_bytes) + sizes.words_bytes + sizes.head_bytes
    gpus([weights + 6 * PAGE_SIZE * sizes.cache_bytes, 1 << 30, 0], [1e12] * 3)
    planned, tokens, _ = plan_stages(config, torch.bfloat16, GPUS[:2], 256, None)
    assert tokens is not None
    assert tokens >= PAGE_SIZE
    assert tokens % PAGE_SIZE == 0
    assert len(planned) == 2
    gpus([0, 0, 0], [1e12] * 3)
    with pytest.raises(ModelError, match=r"of its 6 layers cuda:0 with .* free holds \d, cuda:1 with .* free holds \d"):
        plan_stages(replace(config, vocab_size=10_000_000), torch.bfloat16, GPUS[:2], 256, None)


def test_gpus_without_kernels_for_codes_count_16_bits(
    config_of: Callable[..., ModelConfig], gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine dequantises a quantised checkpoint there, so as many layers fit as of the checkpoint in 16 bits."""
    plain = config_of("qwen2_lm", tie_word_embeddings=False, hidden_size=256, intermediate_size=512)
    config = replace(plain, quantization=Awq(128))
    sizes = [stages.sizes_of(each, torch.bfloat16, on_gpu=True) for each in (config, plain)]
    weights = [sum(each.layer_bytes) + each.words_bytes + each.head_bytes for each in sizes]
    assert weights[0] < 0.6 * weights[1]
    gpus([int(0.8 * weights[0])] * 3, [1e12] * 3)
    for newer in (2, 1):  # GPUs that have the kernels
        monkeypatch.setattr(fits, "multiplies_codes", lambda device, newer=newer: device.index < newer)
        if newer == 2:
            assert len(plan_stages(config, torch.bfloat16, GPUS[:2], 256, PAGE_SIZE)[0]) == 2
        else:
            with pytest.raises(ModelError, match="of its 6 layers cuda:0 with"):
                plan_stages(config, torch.bfloat16, GPUS[:2], 256, PAGE_SIZE)


def test_a_gpu_and_a_cpu_do_not_share_a_model(config_of: Callable[..., ModelConfig]) -> None:
    with pytest.raises(ModelError, match="a model runs on GPUs or on CPUs, not on both"):
        plan_stages(config_of("qwen2_lm"), torch.float32, [GPUS[0], torch.device("cpu")], None, None)


@pytest.mark.parametrize("kind", ["qwen3_lm", "gemma3_lm", "mistral_lm"])
def test_a_layer_and_the_head_are_measured_alone(config_of: Callable[..., ModelConfig], kind: str) -> None:
    """Runs on a CPU with a stand-in clock. The measured layer and head take the hidden states of a decode step."""
    config, results = config_of(kind), list[torch.Tensor]()

    def seconds_of(call: Call) -> float:
        results.extend(result for result in (call(), call()) if isinstance(result, torch.Tensor))
        return 0.25 * len(results)

    assert measure(config, torch.float32, torch.device("cpu"), seconds_of) == Times(0.5, 1.0)
    assert [tuple(each.shape) for each in results] == [(64, config.hidden_size)] * 2 + [(64, config.vocab_size)] * 2
    assert torch.equal(results[0], results[1]), "a call changes the input of the next one"


def test_a_model_that_embeds_is_measured_with_texts(tiny: Callable[..., Path]) -> None:
    config, results = load_model_config(tiny("qwen3", num_hidden_layers=3)), list[object]()

    def seconds_of(call: Call) -> float:
        results.append(call())
        return 2.0

    assert measure(config, torch.float32, torch.device("cpu"), seconds_of) == Times(2.0, 0.0)
    (hidden,) = results
    assert isinstance(hidden, torch.Tensor)
    assert hidden.shape == (4 * min(512, config.max_input_length), config.hidden_size)


def test_a_gpu_without_memory_to_measure_is_cut_by_bytes(
    config_of: Callable[..., ModelConfig], gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(call: Call) -> float:
        raise torch.OutOfMemoryError

    config = config_of("qwen2_lm", tie_word_embeddings=False)
    assert measure(config, torch.float32, torch.device("cpu"), full) is None
    gpus([1 << 30] * 3, [1e12, 9e12, 1e12])
    monkeypatch.setattr(stages, "measure", lambda config, dtype, device, seconds_of: None if device.index else Times(1.0, 0.0))
    planned, *_ = plan_stages(config, torch.bfloat16, GPUS[:2], 256, 1024)
    assert len(planned[0].config.layers) >= len(planned[1].config.layers)
