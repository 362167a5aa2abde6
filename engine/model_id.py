"""Parses the name of a model: a folder, a GGUF file, or a Hub id with or without a revision. Imports no slow module."""

import re
from pathlib import Path

EMBEDDED_MODEL = "all-MiniLM-L6-v2"
EMBEDDED_GENERATOR = "SmolLM2-135M-Instruct"


def is_path(model: str) -> bool:
    """Whether this is the name of a local folder or GGUF file."""
    path = Path(model).expanduser()
    return path.is_dir() or (path.suffix == ".gguf" and path.is_file())


# A Hub id contains no @, and does not begin like a path.
_AT_REVISION = re.compile(r"([\w-][\w.-]*(?:/[\w.-]+)?)@(.+)")


def split_revision(model: str) -> tuple[str, str | None]:
    """Splits `org/name@revision` into (`org/name`, `revision`). The revision is None if the name has none.

    A revision is a branch, a tag or a commit.
    """
    match = _AT_REVISION.fullmatch(model)
    return (match[1], match[2]) if match and not Path(model).exists() else (model, None)
