"""The language model in a model that also reads images, against transformers in fp32, and the other parts of its files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_checkpoints import save_tokenizer
from tiny_generators import prompts

from engine import Engine
from engine.errors import ModelError
from engine.model.folder import load_model_config
from engine.model.weights import Checkpoint
from engine.options import SamplingOptions

_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
           "patch_size": 14}  # fmt: skip
_TEXT = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 10, "max_position_embeddings": 512}  # fmt: skip
_PREFIX = "language_model.model."


def _gemma3() -> Any:
    config = transformers.Gemma3Config(text_config=_TEXT, vision_config=_VISION, mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration(config)


def _mistral3() -> Any:
    text, vision = _TEXT | {"model_type": "mistral"}, _VISION | {"model_type": "pixtral"}
    config = transformers.Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    return transformers.Mistral3ForConditionalGeneration(config)


MAKERS: dict[str, Callable[[], Any]] = {"gemma3": _gemma3, "mistral3": _mistral3}


def _saved(kind: str, folder: Path) -> Any:
    """Saves a tiny model. Returns: the model."""
    torch.manual_seed(0)
    model = MAKERS[kind]().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases, too: their initial values would hide mistakes
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    save_tokenizer(folder, _TEXT["vocab_size"], False)
    return model


def _rename(folder: Path, named: Callable[[str], str]) -> None:
    file = folder / "model.safetensors"
    save_file({named(name): tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})


def _as_modules(name: str) -> str:
    """The name of a tensor as transformers' modules have it."""
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    return f"model.{name.replace(_PREFIX, 'language_model.', 1)}"


@pytest.mark.parametrize("named", [str, _as_modules], ids=["published names", "modules' names"])
@pytest.mark.parametrize("kind", MAKERS)
def test_its_language_model_scores_texts_as_transformers_does(kind: str, named: Callable[[str], str], tmp_path: Path) -> None:
    model = _saved(kind, tmp_path)
    _rename(tmp_path, named)
    engine = Engine.load(tmp_path, dtype="float32", device="cpu")
    for ids in prompts((3, 60)):
        with torch.inference_mode():
            expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        (answer,) = engine.generate([ids], SamplingOptions(max_tokens=0, prompt_logprobs=1))
        assert answer.prompt_tokens is not None
        found = [token.logprob for token in answer.prompt_tokens[1:]]
        assert found == pytest.approx([row[each].item() for row, each in zip(expected[:-1], ids[1:], strict=True)], abs=1e-4)


def test_keys_that_published_files_of_gemma3_leave_out_have_transformers_values(tmp_path: Path) -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}  # fmt: skip
    said = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106]}
    (tmp_path / "config.json").write_text(json.dumps(said | {"text_config": text, "vision_config": {}}))
    config: Any = load_model_config(tmp_path)
    expected = transformers.Gemma3TextConfig(**text)
    assert config.generation.eos_ids == (1, 106)
    assert config.generation.tied
    assert (config.vocab_size, config.max_input_length) == (expected.vocab_size, expected.max_position_embeddings)
    assert (config.n_heads, config.n_kv_heads) == (expected.num_attention_heads, expected.num_key_value_heads)
    assert (config.head_dim, config.norm_eps) == (expected.head_dim, expected.rms_norm_eps)
    assert config.query_pre_attn_scalar == expected.query_pre_attn_scalar
    kinds = ["sliding_attention" if index in config.local_layers else "full_attention" for index in range(config.n_layers)]
    assert kinds == expected.layer_types
    (tmp_path / "config.json").write_text(json.dumps(said | {"text_config": 5}))
    with pytest.raises(ModelError, match="text_config is 5, expected an object"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("named", [str, _as_modules], ids=["published names", "modules' names"])
def test_the_part_that_reads_images_takes_no_memory(named: Callable[[str], str], tmp_path: Path) -> None:
    """The check of the device's memory counts the bytes of the language model alone."""
    model = _saved("mistral3", tmp_path)
    _rename(tmp_path, named)
    with Checkpoint(tmp_path, torch.device("cpu"), torch.float32) as checkpoint:
        checkpoint.leave_out_images()
        parts = (model.model.language_model, model.lm_head)
        assert checkpoint.num_bytes == sum(each.numel() for part in parts for each in part.parameters()) * 4


def test_a_tensor_of_neither_part_stops_the_load(tmp_path: Path) -> None:
    _saved("mistral3", tmp_path)
    _rename(tmp_path, lambda name: name.replace("vision_tower.ln_pre", "audio_tower.ln_pre"))
    with pytest.raises(ModelError, match=r"1 tensors are not part of this architecture.*: audio_tower\.ln_pre\.weight"):
        Engine.load(tmp_path, dtype="float32", device="cpu")
