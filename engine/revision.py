"""The revision of a model's folder: a name for the files that change the model's results.

A folder of the Hub's cache has the name of its commit. Any other folder gets a fingerprint: a hash of its small files, and of
samples of its weights. Reading all weights of an 8B model takes many seconds, reading the samples takes a fraction of a second.

The samples are both ends and the middle of every tensor of a safetensors file, and `_BLOCKS` places of any other file. Training
changes nearly all values of a tensor, so it also changes the samples. Damage to some other bytes, for example by a faulty disk,
does not change the fingerprint. If a file of weights is saved again with other metadata, its fingerprint changes, although its
values are the same.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO

from engine.errors import ModelError
from engine.model.weight_paths import weight_paths

# The files of a model that the engine reads. Weights are in safetensors. The engine never reads ONNX files or code. The only
# pickles are the two small layers of BGE-M3, of which torch reads only the tensors.
MODEL_FILES = ["*.safetensors", "*.safetensors.index.json", "config*.json", "sentence_*_config.json", "modules.json",
               "tokenizer*.json", "special_tokens_map.json", "vocab.*", "merges.txt", "[0-9]_*/config.json",
               "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja", "generation_config.json",
               "hf_quant_config.json", "int8_ranges.json",
               *(f"{name}_linear.{kind}" for name in ("sparse", "colbert") for kind in ("pt", "safetensors"))]  # fmt: skip
OTHER_FILES = ["onnx/*", "openvino/*", "[!0-9]*/*.safetensors"]
CODE_FILES = ["*.py"]  # only if the operator trusts them

_COMMIT = re.compile(r"[0-9a-f]{40}")
_BLOCK, _BLOCKS = 4096, 1024
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")


def is_commit(revision: str | None) -> bool:
    """Whether this is the full hash of a commit, which always means the same commit."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def commit_of(folder: Path) -> str | None:
    """The commit of a folder in the Hub's cache. None for any other folder."""
    in_cache = folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--")
    return folder.name if in_cache and is_commit(folder.name) else None


def revision_of(folder: Path, code: bool = False) -> str | None:
    """The revision of a model's folder. None for a folder without weights, because its other files do not identify the model.

    Args:
        code: whether the code in the folder runs. It is then part of the revision.
    Raises: ModelError for a file that cannot be read.
    """
    if (commit := commit_of(folder)) is not None:
        return commit
    try:
        weights = set(weight_paths(folder))
    except ModelError:
        return None
    digest = hashlib.sha256()
    try:
        for path in sorted(weights | set(_files(folder, code))):
            digest.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                for part in _samples(file, path) if path.suffix in _WEIGHTS else (file.read(),):
                    digest.update(part)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder} has a file that cannot be read: {error!r}") from error
    return f"files-{digest.hexdigest()[:32]}"


def _files(folder: Path, code: bool) -> Iterator[Path]:
    patterns = [*MODEL_FILES, "[0-9]_*/pytorch_model.bin", *(CODE_FILES if code else ())]
    for path in folder.glob("**/*"):
        name = str(path.relative_to(folder))
        wanted = any(fnmatch(name, each) for each in patterns) and not any(fnmatch(name, each) for each in OTHER_FILES)
        if wanted and not name.startswith(".") and path.is_file():
            yield path


def _samples(file: BinaryIO, path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    if path.suffix == ".safetensors":
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, size))
        yield header
        tensors = sorted(entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__")
        places = [each for start, stop in tensors for each in _ends_and_middle(8 + length + start, 8 + length + stop)]
    elif size <= _BLOCKS * _BLOCK:
        places = [(0, size)]
    else:
        places = [((size - _BLOCK) * index // (_BLOCKS - 1), _BLOCK) for index in range(_BLOCKS)]
    for start, length in places:
        file.seek(start)
        yield file.read(length)


def _ends_and_middle(start: int, stop: int) -> list[tuple[int, int]]:
    """(start, length) of the samples of a tensor. A small tensor is one sample."""
    if stop - start <= 3 * _BLOCK:
        return [(start, stop - start)]
    return [(start, _BLOCK), ((start + stop - _BLOCK) // 2, _BLOCK), (stop - _BLOCK, _BLOCK)]
