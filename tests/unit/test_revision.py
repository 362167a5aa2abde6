"""The revision of a model's folder: which changes of files change it, and how many bytes it reads."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.model_folder import pinned
from cluster.model_spec import ModelSpec
from engine.errors import ModelError
from engine.model_id import EMBEDDED_MODEL
from engine.revision import commit_of, is_commit, revision_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    return shutil.copytree(tiny("bert"), tmp_path / "model")


def saved(folder: Path, **tensors: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})


def test_a_copy_has_the_revision_of_the_original(folder: Path, tmp_path: Path) -> None:
    first = revision_of(folder)
    assert first is not None
    assert first.startswith("files-")
    assert revision_of(shutil.copytree(folder, tmp_path / "copy")) == first
    os.utime(folder / "model.safetensors", (0, 0))
    for name in (
        "README.md",
        "modeling.py",
        ".gitattributes",
        "onnx/model.onnx",
        ".cache/tokenizer.json",
        "old/model.safetensors",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("what the engine does not read")
    assert revision_of(folder) == first
    assert revision_of(folder, code=True) != first, "the revision depends on code that runs"


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_another_byte_in_a_small_file_is_another_revision(folder: Path, file: str) -> None:
    first = revision_of(folder)
    path = folder / file
    path.write_text(path.read_text() + " ")
    assert revision_of(folder) != first


def test_training_of_any_single_tensor_is_another_revision(folder: Path) -> None:
    tensors, seen = load_file(folder / "model.safetensors"), {revision_of(folder)}
    for name, tensor in tensors.items():
        saved(folder, **{name: tensor * 1.01 + 1e-3})
        found = revision_of(folder)
        assert found not in seen, name
        seen.add(found)
        saved(folder, **{name: tensor})


@pytest.mark.parametrize("place", [0, 4_999, 9_999])
def test_a_row_at_either_end_of_a_large_tensor_or_in_its_middle_counts(folder: Path, place: int) -> None:
    large = torch.zeros(10_000, 64)
    saved(folder, large=large)
    first = revision_of(folder)
    large[place] = 1
    saved(folder, large=large)
    assert revision_of(folder) != first


def test_large_weights_are_sampled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sparse files of 16 GiB: a safetensors file with one tensor, and a PyTorch file."""
    size = 16 << 30
    header = json.dumps({"a": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(file, 8 + len(header) + size)
    first = revision_of(folder)
    with file.open("r+b") as weights:
        weights.seek(-1, os.SEEK_END)
        weights.write(b"x")
    assert revision_of(folder) != first
    file.unlink()
    other = folder / "pytorch_model.bin"
    other.touch()
    os.truncate(other, size)
    first = revision_of(folder)
    os.truncate(other, size + 1)
    assert revision_of(folder) not in (None, first)


def test_a_folder_without_weights_has_no_revision(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert revision_of(folder) is None


def test_a_damaged_header_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"12345678 no header")
    with pytest.raises(ModelError, match="has a file that cannot be read"):
        revision_of(folder)


def test_a_folder_of_the_hubs_cache_has_its_commit() -> None:
    cache = Path("/cache/models--org--x/snapshots")
    assert revision_of(cache / COMMIT) == commit_of(cache / COMMIT) == COMMIT
    for other in (cache / "main", Path("/mine/snapshots") / COMMIT, Path("/")):
        assert commit_of(other) is None
    assert is_commit(COMMIT)
    assert not is_commit("v1")
    assert not is_commit(None)


def test_a_spec_is_pinned_once(folder: Path) -> None:
    spec = pinned(ModelSpec(name="m", model=str(folder)))
    assert (spec.model, spec.revision) == (str(folder), revision_of(folder))
    assert pinned(spec) == spec
    embedded = pinned(ModelSpec(name="m", model=EMBEDDED_MODEL))
    assert embedded.model == EMBEDDED_MODEL
    assert embedded.revision is not None
    commit = pinned(ModelSpec(name="m", model=f"org/x@{COMMIT}"))
    assert (commit.model, commit.revision) == (f"org/x@{COMMIT}", COMMIT)


def test_other_files_than_planned_are_refused(folder: Path) -> None:
    spec = pinned(ModelSpec(name="m", model=str(folder)))
    saved(folder, **{name: tensor + 1 for name, tensor in load_file(folder / "model.safetensors").items()})
    with pytest.raises(ModelError, match=f"{folder} has revision files-.* here, but the plan says {spec.revision}: copy"):
        pinned(spec)
    (folder / "model.safetensors").unlink()
    assert pinned(spec) == spec, "a gateway's folder may have no weights"
    with pytest.raises(ModelError, match="the plan says"):
        pinned(ModelSpec(name="m", model=f"org/x@{COMMIT}", revision="a"))
