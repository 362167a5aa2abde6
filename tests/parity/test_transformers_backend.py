"""`backend="transformers"`: other architectures in our batches equal plain transformers. A folder's code runs if trusted."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_tokenizer import save_tokenizer

from cluster.model_folder import read_model
from cluster.model_spec import ModelSpec
from engine import Engine, ModelError
from engine.model.families.transformers import like_lengths
from engine.model.folder import load_model_config
from engine.model.footprint import body_parameters, num_parameters
from engine.options import EmbedOptions

_SHAPE = {
    "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96,
    "max_position_embeddings": 128,
}  # fmt: skip
_T5 = {"vocab_size": 300, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
_FNET = {key: value for key, value in _SHAPE.items() if key != "num_attention_heads"}
_GPT2 = {"vocab_size": 300, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
}  # fmt: skip
# (the configuration, the class that is saved, the class that computes, whether padding changes the vectors)
KINDS: dict[str, tuple[Any, str, str, bool]] = {
    "electra with a head": (
        transformers.ElectraConfig(**_SHAPE, embedding_size=32),
        "ElectraForPreTraining",
        "ElectraModel",
        False,
    ),
    "albert": (transformers.AlbertConfig(**_SHAPE, embedding_size=32), "AlbertModel", "AlbertModel", False),
    "albert without pooler": (transformers.AlbertConfig(**_SHAPE, embedding_size=32), "AlbertForMaskedLM", "AlbertModel", False),
    "encoder of t5": (transformers.T5Config(**_T5), "T5EncoderModel", "T5EncoderModel", False),
    "decoder": (transformers.GPT2Config(**_GPT2), "GPT2Model", "GPT2Model", False),
    "fnet": (transformers.FNetConfig(**_FNET), "FNetModel", "FNetModel", True),
    "longrope": (
        transformers.Phi3Config(**_SHAPE, rope_parameters=_LONGROPE, pad_token_id=0, bos_token_id=1, eos_token_id=2),
        "Phi3Model",
        "Phi3Model",
        True,
    ),
    "ours too": (transformers.BertConfig(**_SHAPE), "BertModel", "BertModel", False),
}
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.gpu),
]
LENGTHS = [33, 1, 90, 5, 47, 90, 2]


def save(network: Any, folder: Path, pooling: str = "mean") -> Path:
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    network.eval().save_pretrained(folder)
    save_tokenizer(folder, 300, encoder=True)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 128}')
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pooling}))
    return folder


@pytest.fixture(params=KINDS, scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    torch.manual_seed(0)
    config, saved, _, _ = KINDS[request.param]
    return save(getattr(transformers, saved)(config), tmp_path_factory.mktemp("model")), request.param


def load(folder: Path, device: str = "cpu", **options: Any) -> Engine:
    return Engine.load(folder, dtype="float32", device=device, backend="transformers", **options)


def sequences(lengths: list[int] = LENGTHS) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(5, 300, size=length).astype(np.int32) for length in lengths]


def alone(network: Any, ids: np.ndarray) -> torch.Tensor:
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.inference_mode():
        hidden: torch.Tensor = network(input_ids=tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state
    return hidden[0]


@pytest.mark.parametrize("device", DEVICES)
def test_a_ragged_batch_equals_plain_transformers_alone(checkpoint: tuple[Path, str], device: str) -> None:
    folder, kind = checkpoint
    _, _, name, padding_matters = KINDS[kind]
    theirs = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()
    engine = load(folder, device)
    batch = sequences()
    expected = [alone(theirs, ids) for ids in batch]
    hidden = engine.forward(engine.packer.pack(batch, device=engine.device)).cpu().split(LENGTHS)
    for ours, states in zip(hidden, expected, strict=True):
        torch.testing.assert_close(ours, states, rtol=1e-4, atol=2e-5)
    vectors = engine.launch(batch, [EmbedOptions(normalize=False)] * len(batch)).wait().vectors
    np.testing.assert_allclose(vectors, torch.stack([states.mean(dim=0) for states in expected]), rtol=1e-4, atol=2e-5)
    assert engine.model.stretch == (1 if padding_matters else 2)  # type: ignore[attr-defined]


def test_what_a_plan_counts_is_what_is_there(checkpoint: tuple[Path, str]) -> None:
    folder, kind = checkpoint
    network = getattr(transformers, KINDS[kind][2]).from_pretrained(folder)
    config = load_model_config(folder, backend="transformers")
    assert num_parameters(config) == sum(parameter.numel() for parameter in network.parameters())
    assert 0 < body_parameters(config) < num_parameters(config)


@pytest.mark.parametrize("pooling", ["cls", "lasttoken"])
def test_poolings_that_read_one_token(tmp_path: Path, pooling: str) -> None:
    torch.manual_seed(0)
    config, saved, _, _ = KINDS["electra with a head"]
    engine = load(save(getattr(transformers, saved)(config), tmp_path / "model", pooling))
    batch = sequences()
    hidden = engine.forward(engine.packer.pack(batch)).split(LENGTHS)
    expected = torch.stack([states[0 if pooling == "cls" else -1] for states in hidden])
    ours = engine.launch(batch, [EmbedOptions(normalize=False)] * len(batch)).wait().vectors
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_bf16(checkpoint: tuple[Path, str]) -> None:
    if checkpoint[1] == "fnet":  # Fourier transforms have no bf16
        with pytest.raises(ModelError, match="does not run on token ids alone in bfloat16"):
            Engine.load(checkpoint[0], dtype="bfloat16", device="cpu", backend="transformers")
        return
    low = Engine.load(checkpoint[0], dtype="bfloat16", device="cpu", backend="transformers").embed(["w1 w2 w3", "w9 w8"])
    assert (low * load(checkpoint[0]).embed(["w1 w2 w3", "w9 w8"])).sum(axis=1).min() > 0.998


def test_a_pytorch_file_is_read_by_our_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config, saved, _, _ = KINDS["albert"]
    folder = save(getattr(transformers, saved)(config), tmp_path / "model")
    expected = load(folder).embed(["w1 w2 w3"])
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    np.testing.assert_array_equal(load(folder).embed(["w1 w2 w3"]), expected)


def test_texts_of_like_length_share_a_pass() -> None:
    groups = like_lengths([8, 512, 5, 300, 256, 255, 4], 2)
    assert groups == [[1, 3, 4], [5], [0, 2, 6]]
    assert like_lengths([3, 4, 3], 1) == [[1], [0, 2]]


def test_ours_says_what_else_may_run_it(tmp_path: Path) -> None:
    config, saved, _, _ = KINDS["albert"]
    with pytest.raises(ModelError, match=r"AlbertModel is not supported.*--backend transformers"):
        Engine.load(save(getattr(transformers, saved)(config), tmp_path / "model"))


def test_what_cannot_run_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def edit(folder: Path, **changes: Any) -> Path:
        path = folder / "config.json"
        content = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in content.items() if value != "DELETE"}))
        return folder

    config, saved, _, _ = KINDS["albert"]
    folder = save(getattr(transformers, saved)(config), tmp_path / "model")
    whole = (folder / "config.json").read_text()
    for changes, message in (
        ({"model_type": "no_such"}, "transformers .* cannot read it"),
        ({"model_type": "bart"}, "encoder with a decoder"),
        ({"model_type": "big_bird"}, "attention_type block_sparse is not supported.*set it to original_full"),
        ({"model_type": "vit", "vocab_size": "DELETE"}, "vocab_size is None"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ({"num_hidden_groups": 2}, "tensors are missing"),
        ({"hidden_size": 128}, "cannot load AlbertModel"),
    ):
        edit(folder, **changes)
        with pytest.raises(ModelError, match=message):
            load(folder)
        (folder / "config.json").write_text(whole)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"pip install 'emberforge\[transformers\]'"):
        load(folder)


def test_positions_that_are_the_paddings_do_not_count(tmp_path: Path) -> None:
    folder = save(transformers.RobertaPreLayerNormModel(transformers.RobertaPreLayerNormConfig(**_SHAPE)), tmp_path / "model")
    with pytest.raises(ModelError, match="room for 126 tokens; give --max-input-tokens 126"):
        load(folder)
    load(folder, max_input_tokens=126).embed([list(range(5, 131))])


def test_a_limit_must_be_somewhere(tmp_path: Path) -> None:
    folder = save(transformers.T5EncoderModel(KINDS["encoder of t5"][0]), tmp_path / "model")
    assert load(folder).config.max_input_length == 128
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match=r"sentence_bert_config\.json: max_seq_length is None"):
        load(folder)
    assert load(folder, max_input_tokens=64).config.max_input_length == 64
    spec = ModelSpec(name="t5", model=str(folder), backend="transformers", max_input_tokens=64)
    assert read_model(spec)[1].max_input_length == 64


OWN_CODE = """
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput


class OwnConfig(PreTrainedConfig):
    model_type = "own_{name}"

    def __init__(self, vocab_size=300, hidden_size=64, num_hidden_layers=2, max_position_embeddings=128, **kwargs):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers, self.max_position_embeddings = num_hidden_layers, max_position_embeddings
        super().__init__(**kwargs)


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(nn.Linear(config.hidden_size, config.hidden_size) for _ in range(config.num_hidden_layers))
        steps = torch.arange(config.max_position_embeddings)[:, None] / (1 + torch.arange(config.hidden_size))
        self.register_buffer("steps", steps, persistent=False)  # in no checkpoint
        self.post_init()

    def forward(self, input_ids, attention_mask=None):
        hidden = self.embed(input_ids) + torch.sin(self.steps[: input_ids.shape[1]])
        mask = attention_mask[..., None]
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden + (hidden * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)))
        return BaseModelOutput(last_hidden_state=hidden)
"""


@pytest.fixture
def with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Any]:
    """A folder with a modelling file of its own, and the network that is saved in the folder."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    namespace: dict[str, Any] = {"__name__": "own"}
    exec(OWN_CODE.format(name=tmp_path.name), namespace)
    torch.manual_seed(0)
    network = namespace["OwnModel"](namespace["OwnConfig"]())
    folder = save(network, tmp_path / "snapshots" / "abc")
    (folder / "modeling_own.py").write_text(OWN_CODE.format(name=tmp_path.name))
    content = json.loads((folder / "config.json").read_text())
    content["auto_map"] = {"AutoConfig": "modeling_own.OwnConfig", "AutoModel": "modeling_own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(content))
    return folder, network


def test_code_of_a_model_runs_only_where_it_is_trusted(
    with_code: tuple[Path, Any], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    folder, network = with_code
    (folder / "modeling_own.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\n" + (folder / "modeling_own.py").read_text()
    )
    with pytest.raises(ModelError, match=r"comes with the model.*--trust-remote-code"):
        load(folder)
    assert not (tmp_path / "ran").exists()
    assert not caplog.records
    engine = load(folder, trust_remote_code=True)
    assert (tmp_path / "ran").exists()
    assert "at revision abc: its own code runs" in caplog.text
    batch = sequences()
    for ids, ours in zip(batch, engine.forward(engine.packer.pack(batch)).split(LENGTHS), strict=True):
        torch.testing.assert_close(ours, alone(network, ids), rtol=1e-4, atol=2e-5)
    config = load_model_config(folder, backend="transformers", trust_remote_code=True)
    assert num_parameters(config) == sum(parameter.numel() for parameter in network.parameters())


def test_what_transformers_knows_itself_needs_no_code(tmp_path: Path) -> None:
    config, saved, _, _ = KINDS["albert"]
    folder = save(getattr(transformers, saved)(config), tmp_path / "model")
    content = json.loads((folder / "config.json").read_text())
    content["auto_map"] = {"AutoConfig": "missing.Config", "AutoModel": "missing.Model"}
    (folder / "config.json").write_text(json.dumps(content))
    assert load(folder).embed(["w1"]).shape == (1, 64)


def test_our_engine_and_a_folder_without_weights(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """A plan and a gateway read a model's folder when it has no weights yet."""
    folder = shutil.copytree(tiny("bert"), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    ours, theirs = load_model_config(folder), load_model_config(folder, backend="transformers")
    assert num_parameters(theirs) == num_parameters(ours) + 64 * 65  # the pooler
