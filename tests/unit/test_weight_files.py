"""PyTorch files instead of safetensors: vectors and checks of tensors are the same, and code in the files never runs."""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import Engine, ModelError
from engine.model import weights
from engine.model.families.transformers import Transformers
from engine.model.weight_paths import weight_paths
from engine.model.weights import Checkpoint

Tiny = Callable[..., Path]
TEXTS = ["w1 w2 w3", "w9"]


@pytest.fixture
def as_pytorch(tiny: Tiny, tmp_path: Path) -> Callable[..., Path]:
    """A tiny checkpoint whose only weights are PyTorch files, saved as torch saves them with `options`."""

    def make(kind: str, sharded: bool = False, more: dict[str, Any] | None = None, **options: Any) -> Path:
        folder = shutil.copytree(tiny(kind, sharded), tmp_path / "model")
        for path in folder.glob("*.safetensors"):
            name = path.name.replace("model", "pytorch_model", 1).replace(".safetensors", ".bin")
            torch.save(load_file(path) | (more or {}), folder / name, **options)
            path.unlink()
        if sharded:
            index = folder / "model.safetensors.index.json"
            text = index.read_text().replace("model-", "pytorch_model-").replace(".safetensors", ".bin")
            (folder / "pytorch_model.bin.index.json").write_text(text)
            index.unlink()
        return folder

    return make


def vectors(folder: Path) -> np.ndarray:
    return Engine.load(folder, dtype="float32", device="cpu").embed(TEXTS)


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "before torch 1.6"])
def test_vectors_are_those_of_the_safetensors(tiny: Tiny, as_pytorch: Callable[..., Path], kind: str, options: Any) -> None:
    np.testing.assert_array_equal(vectors(as_pytorch(kind, **options)), vectors(tiny(kind)))


def test_shards_are_found_through_their_index(tiny: Tiny, as_pytorch: Callable[..., Path]) -> None:
    folder = as_pytorch("bert", sharded=True)
    np.testing.assert_array_equal(vectors(folder), vectors(tiny("bert")))
    min(folder.glob("*.bin")).unlink()
    with pytest.raises(ModelError, match=r"pytorch_model-00001-of.*bin"):
        Engine.load(folder)


def test_safetensors_are_taken_where_both_are_there(tiny: Tiny, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("bert"), tmp_path / "model")
    (folder / "pytorch_model.bin").write_bytes(b"not looked at")
    np.testing.assert_array_equal(vectors(folder), vectors(tiny("bert")))


@pytest.mark.parametrize("as_shard", [None, "model-00001-of-00001.safetensors"], ids=["no shard", "another shard"])
def test_one_file_is_taken_before_the_index_of_shards(tiny: Tiny, tmp_path: Path, as_shard: str | None) -> None:
    """transformers reads the one file. A folder that was saved in shards before still has their index."""
    folder = shutil.copytree(tiny("bert"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, as_shard or "model-00001-of-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if as_shard is not None:
        save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, folder / as_shard)
    np.testing.assert_array_equal(vectors(folder), vectors(tiny("bert")))


@pytest.mark.parametrize(
    "index",
    [[], {}, {"weight_map": ["model.safetensors"]}, {"weight_map": {"a": 1}}, {"weight_map": {"a": None, "b": "c"}}],
)
def test_an_index_that_names_no_files_is_named(tmp_path: Path, index: Any) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    with pytest.raises(ModelError, match=path.name):
        weight_paths(tmp_path)


def test_integer_buffers_and_tied_tensors_are_accounted_for(as_pytorch: Callable[..., Path]) -> None:
    folder = as_pytorch("bert", more={"embeddings.position_ids": torch.arange(128)[None]})
    tensors = torch.load(folder / "pytorch_model.bin")
    tensors["cls.predictions.decoder.weight"] = tensors["embeddings.word_embeddings.weight"]
    tensors = {name: torch.nn.Parameter(value, value.is_floating_point()) for name, value in tensors.items()}
    torch.save(tensors, folder / "pytorch_model.bin")
    vectors(folder)
    with Checkpoint(folder, torch.device("cpu"), torch.float32) as checkpoint:
        once = sum(value.numel() for name, value in tensors.items() if not name.startswith("cls."))
        assert checkpoint.num_bytes == 4 * once
    torch.save(tensors | {"projection.weight": torch.zeros(4)}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"projection\.weight"):
        Engine.load(folder)


def test_tensors_in_float64_are_rounded(tiny: Tiny, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("bert"), tmp_path / "model")
    path = folder / "model.safetensors"
    save_file({name: tensor.double() for name, tensor in load_file(path).items()}, path)
    np.testing.assert_array_equal(vectors(folder), vectors(tiny("bert")))


@pytest.mark.parametrize("suffix", ["bin", "safetensors"])
def test_norms_may_have_their_tensorflow_names(tiny: Tiny, tmp_path: Path, suffix: str) -> None:
    folder = shutil.copytree(tiny("bert"), tmp_path / "model")
    path = folder / "model.safetensors"
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in load_file(path).items()
    }
    assert sum(name.endswith((".gamma", ".beta")) for name in old) == 14
    path.unlink()
    if suffix == "bin":
        torch.save(old, folder / "pytorch_model.bin")
    else:
        save_file(old, path)
    np.testing.assert_array_equal(vectors(folder), vectors(tiny("bert")))


class Evil:
    """A pickle that runs code."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "before torch 1.6"])
def test_what_is_more_than_tensors_is_refused_and_not_run(as_pytorch: Callable[..., Path], tmp_path: Path, options: Any) -> None:
    marker = tmp_path / "ran"
    folder = as_pytorch("bert", more={"x": Evil(marker)}, **options)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin holds more than tensors \(\S+\).*convert it: python -c"):
        Engine.load(folder)
    assert not marker.exists()


@pytest.mark.slow
def test_the_command_in_the_error_converts(tiny: Tiny, as_pytorch: Callable[..., Path]) -> None:
    folder = as_pytorch("bert", more={"step": np.float64(3)})
    with pytest.raises(ModelError, match="holds more than tensors") as caught:
        Engine.load(folder)
    _, code = shlex.split(str(caught.value)[str(caught.value).index("-c") :])
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)
    np.testing.assert_array_equal(vectors(folder), vectors(tiny("bert")))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as a PyTorch file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "it is damaged, or is not a PyTorch file"),
        (b"PK\x03\x04 and no more", "cannot be read as a PyTorch file"),
        ([1, 2], "holds a list, expected tensors by name"),
        ({"a": torch.zeros(2), "epoch": 3}, "epoch is a int, expected a plain tensor"),
        ({"a": torch.eye(3).to_sparse()}, "a is a Tensor, expected a plain tensor"),
    ],
)
def test_a_file_that_is_none_is_named(tiny: Tiny, tmp_path: Path, content: Any, message: str) -> None:
    folder = shutil.copytree(tiny("bert"), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    path = folder / "pytorch_model.bin"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin") as caught:
        Engine.load(folder)
    assert message in str(caught.value)


def test_a_dense_layer_may_have_a_pytorch_file(tiny: Tiny, tmp_path: Path) -> None:
    """The root folder and the layer's folder may have different formats, as in LaBSE and distiluse."""
    folder = shutil.copytree(tiny("bert"), tmp_path / "model")
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "2_Dense").mkdir()
    shape = {"in_features": 64, "out_features": 16, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}
    (folder / "2_Dense" / "config.json").write_text(json.dumps(shape))
    with pytest.raises(ModelError, match=r"2_Dense has no model\.safetensors, no pytorch_model\.bin"):
        Engine.load(folder)
    tensors = {"linear.weight": torch.randn(16, 64), "linear.bias": torch.randn(16)}
    torch.save(tensors, folder / "2_Dense" / "pytorch_model.bin")
    from_pytorch = vectors(folder)
    (folder / "2_Dense" / "pytorch_model.bin").unlink()
    save_file(tensors, folder / "2_Dense" / "model.safetensors")
    np.testing.assert_array_equal(from_pytorch, vectors(folder))


@pytest.mark.parametrize("integrated", [True, False])
@pytest.mark.parametrize("pytorch", [False, True])
def test_weights_go_to_an_integrated_gpu_from_memory_that_is_no_files_mapping(
    integrated: bool, pytorch: bool, tiny: Tiny, as_pytorch: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test runs on the CPU, which keeps the tensor in the memory that it was read into."""
    monkeypatch.setattr(weights, "is_integrated", lambda device: integrated)
    folder = as_pytorch("bert") if pytorch else tiny("bert")
    with Checkpoint(folder, torch.device("cpu"), torch.float32) as checkpoint:
        checkpoint.strip_prefix(("", "bert."), probe="embeddings.word_embeddings.weight")
        tensor = checkpoint.take("embeddings.LayerNorm.weight", 64)
        assert is_mapped_from(folder, tensor) == (not integrated)


@pytest.mark.parametrize("integrated", [True, False])
def test_weights_of_transformers_networks_leave_the_mapping_too(
    integrated: bool, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "is_integrated", lambda device: integrated)
    folder = tiny("bert")
    engine = Engine.load(folder, dtype="float32", device="cpu", backend="transformers")
    assert isinstance(engine.model, Transformers)
    stored = engine.model.network.get_parameter("encoder.layer.0.output.dense.weight")
    assert is_mapped_from(folder, stored) == (not integrated)


def is_mapped_from(folder: Path, tensor: torch.Tensor) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, end = (int(bound, 16) for bound in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < end:
            return str(folder.resolve()) in line
    raise AssertionError("no mapping contains the tensor")


def test_who_waits_for_a_load_hears_how_far_it_is(tiny: Tiny) -> None:
    shares: list[float] = []
    Engine.load(tiny("qwen3", sharded=True), device="cpu", on_progress=shares.append)
    assert len(shares) > 10
    assert shares == sorted(shares)
    assert shares[-1] == 1
