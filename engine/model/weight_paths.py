"""Finds the files of a folder that hold the model's weights. No torch here."""

from collections.abc import Iterable
from pathlib import Path

from engine.errors import ModelError
from engine.model.keys import read_object


def weight_paths(folder: Path) -> Iterable[Path]:
    """The files that hold a folder's weights. Raises: ModelError naming the missing or unreadable file."""
    kind = "model.safetensors" if has_safetensors(folder) else "pytorch_model.bin"
    single, index = folder / kind, folder / f"{kind}.index.json"
    if single.is_file():  # the index may be of earlier shards; transformers does not read it either
        return [single]
    if index.is_file():
        return _shards(index)
    if (gguf := only_gguf(folder)) is not None:
        return [gguf]
    raise ModelError(
        f"{folder} has no model.safetensors, no pytorch_model.bin and no GGUF file (other weight formats are never loaded)"
    )


def _shards(index: Path) -> list[Path]:
    """The files that an index names. Raises: ModelError if it names none, or a file that is not beside it."""
    shards = read_object(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise ModelError(f"{index} has no weight_map with the file of each tensor; download it again")
    names = sorted(set(shards.values()))
    missing = [name for name in names if Path(name).name != name or not (index.parent / name).is_file()]
    if missing:
        raise ModelError(f"{index} names shards that are not in the folder: {', '.join(missing)}")
    return [index.parent / name for name in names]


def only_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder without other weights. None if there are other weights, or no GGUF file.

    Raises: ModelError if there are several.
    """
    others = ("pytorch_model.bin", "pytorch_model.bin.index.json")
    if has_safetensors(folder) or any((folder / name).is_file() for name in others):
        return None
    found = sorted(folder.glob("*.gguf"))
    if len(found) > 1:
        raise ModelError(f"{folder} has {len(found)} GGUF files; name one of them: {', '.join(path.name for path in found)}")
    return found[0] if found else None


def has_safetensors(folder: Path) -> bool:
    """Whether the folder's weights are safetensors. Then other files of weights are not read."""
    return any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))
