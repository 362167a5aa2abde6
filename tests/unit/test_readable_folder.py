"""A model folder with damaged or missing files is refused before Ray starts."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.model_files import check_files
from cluster.model_folder import read_model
from cluster.model_spec import ModelSpec
from engine.errors import ModelError


@pytest.fixture
def folder(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    copy = shutil.copytree(tiny("bert"), tmp_path / "model")
    found, config = read_model(spec(copy), weights=True)
    assert found == copy
    check_files(found, config)
    return copy


def spec(folder: Path) -> ModelSpec:
    return ModelSpec(name="m", model=str(folder))


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def broken_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (truncated, r"model\.safetensors cannot be read as safetensors"),
        (broken_header, r"model\.safetensors cannot be read as safetensors"),
        (without("model.safetensors"), r"has no model\.safetensors"),
        (without("tokenizer.json"), r"has no tokenizer\.json"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), r"tokenizer\.json cannot be loaded"),
    ],
    ids=["truncated", "header", "no weights", "no tokenizer", "broken tokenizer"],
)
def test_a_damaged_folder_is_refused_by_name(folder: Path, damage: Callable[[Path], None], sentence: str) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=sentence):
        check_files(*read_model(spec(folder), weights=True))


def test_a_gateway_needs_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert read_model(spec(folder))[1].hidden_size > 0
