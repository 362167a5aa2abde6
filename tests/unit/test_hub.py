"""The revision of a model that is requested from the Hub, and the error if it does not exist."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import RevisionNotFoundError
from huggingface_hub.utils import filter_repo_objects

from engine.errors import ModelError
from engine.hub import EMBEDDED_MODEL, resolve_model, split_revision
from serve_app.settings import load_settings


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("org/x", ("org/x", None)),
        ("org/x@v1.0", ("org/x", "v1.0")),
        ("org/x@refs/pr/2", ("org/x", "refs/pr/2")),
        ("bert@main", ("bert", "main")),
        ("/models/x@1", ("/models/x@1", None)),
        ("./x@1", ("./x@1", None)),
        ("~/x@1", ("~/x@1", None)),
    ],
)
def test_a_revision_follows_an_at(model: str, parts: tuple[str, str | None]) -> None:
    assert split_revision(model) == parts


def test_a_folder_may_have_an_at_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my@folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert split_revision("my@folder") == ("my@folder", None)
    assert resolve_model("my@folder") == tmp_path / "my@folder"
    assert load_settings({"models": ["my@folder"]}, {}).names == ("my@folder",)


def test_the_hub_is_asked_for_that_revision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def download(name: str, **arguments: Any) -> str:
        asked.update(arguments, name=name)
        return str(tmp_path)

    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr("engine.download.snapshot_download", download)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    assert resolve_model("org/x@v1") == tmp_path
    assert (asked["name"], asked["revision"], asked["cache_dir"]) == ("org/x", "v1", None)
    monkeypatch.setenv("HF_HUB_CACHE", "/cache")
    resolve_model("org/x")
    assert (asked["name"], asked["revision"], asked["cache_dir"]) == ("org/x", None, "/cache")


def test_a_revision_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **arguments: Any) -> str:
        raise RevisionNotFoundError("404", response=httpx.Response(404, request=httpx.Request("GET", "https://hub")))

    monkeypatch.setattr("engine.download.snapshot_download", download)
    with pytest.raises(ModelError, match="'org/x' has no revision 'v9'"):
        resolve_model("org/x@v9")


def test_a_folder_has_no_revisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "x").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("org/x", EMBEDDED_MODEL):
        with pytest.raises(ModelError, match="leave out 'v1'"):
            resolve_model(f"{name}@v1")


SAFETENSORS = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "2_Dense/config.json"]
PYTORCH = ["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"]
OTHERS = [
    "other.pt",
    "onnx/model.onnx",
    "openvino/openvino_model.bin",
    "training_args.bin",
    "modeling_x.py",
    "optimizer.bin",
]


@pytest.mark.parametrize(
    ("repository", "fetched"),
    [
        ([*SAFETENSORS, *PYTORCH, "2_Dense/model.safetensors"], [*SAFETENSORS, "2_Dense/model.safetensors"]),
        (
            [*SAFETENSORS, *PYTORCH, "2_Dense/pytorch_model.bin", "3_Other/pytorch_model.bin"],
            [*SAFETENSORS, "2_Dense/pytorch_model.bin"],
        ),
        (
            ["config.json", *PYTORCH, "2_Dense/config.json", "2_Dense/model.safetensors", "2_Dense/pytorch_model.bin"],
            ["config.json", *PYTORCH, "2_Dense/config.json", "2_Dense/model.safetensors"],
        ),
        (["config.json", "pytorch_model.bin"], ["config.json", "pytorch_model.bin"]),
        (
            ["config.json", "sparse_linear.pt", "colbert_linear.safetensors", "pytorch_model.bin"],
            ["config.json", "sparse_linear.pt", "colbert_linear.safetensors", "pytorch_model.bin"],
        ),
    ],
)
def test_pytorch_files_are_fetched_where_there_are_no_safetensors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, repository: list[str], fetched: list[str]
) -> None:
    """Uses the real patterns, on a stub of the Hub."""
    snapshot = tmp_path / "snapshots" / "abc"
    revisions = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str], **_: Any) -> str:
        revisions.append(revision)
        for file in filter_repo_objects([*repository, *OTHERS], allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
            (snapshot / file).touch()
        return str(snapshot)

    def files() -> set[str]:
        return {str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()}

    monkeypatch.setattr("engine.download.snapshot_download", download)
    resolve_model("org/x", weights=False)
    assert files() == {
        file for file in fetched if file.endswith("config.json") or "safetensors.index" in file or "linear" in file
    }
    assert resolve_model("org/x@v1") == snapshot
    assert files() == set(fetched)
    assert revisions[:2] == [None, "v1"]
    assert set(revisions[2:]) <= {"abc"}  # all further downloads use the commit that was found


def test_a_download_tells_its_share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub.utils.tqdm import _create_progress_bar

    def download(name: str, *, tqdm_class: Any, **_: Any) -> str:
        files = _create_progress_bar(cls=tqdm_class, log_level=30, name="files", desc="Fetching 2 files", total=2)
        with _create_progress_bar(cls=tqdm_class, log_level=30, name="bytes", desc="Bytes", total=0, unit="B") as bar:
            bar.total = 400
            bar.update(100)
            files.update(1)
            bar.update(300)
        files.close()
        return str(tmp_path)

    monkeypatch.setattr("engine.download.snapshot_download", download)
    (tmp_path / "model.safetensors").touch()
    shares: list[float] = []
    resolve_model("org/x", on_progress=shares.append)
    assert shares == [0.25, 1.0]


def test_code_is_fetched_where_it_is_trusted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fetched: list[str] = []

    def download(name: str, *, allow_patterns: list[str], ignore_patterns: list[str], **_: Any) -> str:
        repository = ["config.json", "modeling_x.py", "model.safetensors"]
        fetched.extend(filter_repo_objects(repository, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        return str(tmp_path)

    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr("engine.download.snapshot_download", download)
    resolve_model("org/x")
    assert fetched == ["config.json", "model.safetensors"]
    fetched.clear()
    resolve_model("org/x", weights=False, code=True)
    assert fetched == ["config.json", "modeling_x.py"]
