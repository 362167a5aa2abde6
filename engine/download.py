"""Downloads a model from the Hub into the Hub's own cache."""

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from engine.errors import ModelError
from engine.model.weight_paths import has_safetensors
from engine.revision import CODE_FILES, MODEL_FILES, OTHER_FILES

# Weights as PyTorch files, for folders that have no safetensors.
_PYTORCH_FILES = ["pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin"]


def download(
    name: str, revision: str | None, weights: bool, code: bool, on_progress: Callable[[float], None] | None = None
) -> Path:
    """The folder of a model on the Hub. Resumes an interrupted download. Downloads weights and code only on request.

    Args: on_progress: gets the share of the bytes of all files that were downloaded.
    Raises: ModelError naming the model and what to do.
    """
    bar = None if on_progress is None else _bar(on_progress)
    given = name if revision is None else f"{name}@{revision}"
    try:
        files = [*MODEL_FILES, *CODE_FILES] if code else MODEL_FILES
        if not weights:
            return _download(name, revision, files, [*OTHER_FILES, "*model*.safetensors"], bar)
        folder = _download(name, revision, files, OTHER_FILES, bar)
        pytorch = _pytorch_files(folder)
        return _download(name, folder.name, pytorch, [], bar) if pytorch else folder  # the folder has the name of its commit
    except RevisionNotFoundError as error:
        raise ModelError(f"{name!r} has no revision {revision!r} on the Hub: name a branch, a tag or a full commit") from error
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise ModelError(f"{given!r} is neither a folder here nor a model on the Hub (private ones need HF_TOKEN)") from error
    except (LocalEntryNotFoundError, OSError) as error:
        reason = (
            "HF_HUB_OFFLINE forbids requests to the Hub"
            if constants.HF_HUB_OFFLINE
            else f"the Hub cannot be reached ({type(error).__name__})"
        )
        raise ModelError(
            f"{given!r} is neither a folder here nor in the Hub's cache, and {reason}; copy the model's folder and name its path"
        ) from error


def _download(name: str, revision: str | None, files: list[str], skip: list[str], bar: type[Any] | None) -> Path:
    cache = os.environ.get("HF_HUB_CACHE")  # huggingface_hub itself reads it only at its import
    return Path(
        snapshot_download(name, revision=revision, cache_dir=cache, allow_patterns=files, ignore_patterns=skip, tqdm_class=bar)
    )


def _bar(on_progress: Callable[[float], None]) -> type[Any]:
    """A progress bar for huggingface_hub that prints nothing."""

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)  # of huggingface_hub's own bar
            super().__init__(*args, **options, file=io.StringIO())

        def update(self, n: float | None = 1) -> bool | None:
            changed: bool | None = super().update(n)
            if self.unit == "B" and self.total:
                on_progress(min(1.0, self.n / self.total))
            return changed

    return Bar


def _pytorch_files(folder: Path) -> list[str]:
    """The PyTorch files to download if the model's folder, or a folder of a Dense layer in it, has no safetensors."""
    bare = [each for each in (folder, *folder.glob("[0-9]_Dense*")) if not has_safetensors(each)]
    return [str((each / file).relative_to(folder)) for each in bare for file in _PYTORCH_FILES]
