"""Finds the files of a folder that hold the model's weights. No torch here."""

import json
from collections.abc import Iterable
from pathlib import Path

from engine.errors import ModelError


def weight_paths(folder: Path) -> Iterable[Path]:
    """The files that hold a folder's weights. Raises: ModelError naming the missing or unreadable file."""
    single = "model.safetensors" if has_safetensors(folder) else "pytorch_model.bin"
    index = folder / f"{single}.index.json"
    if not index.is_file():
        if (gguf := only_gguf(folder)) is not None:
            return [gguf]
        if not (folder / single).is_file():
            raise ModelError(
                f"{folder} has no model.safetensors, no pytorch_model.bin and no GGUF file (other weight formats are never "
                "loaded)"
            )
        return [folder / single]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{index} cannot be read: {error!r}") from error
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if missing:
        raise ModelError(f"{index} names shards that are not in the folder: {', '.join(missing)}")
    return [folder / name for name in names]


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
