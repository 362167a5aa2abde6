"""How a model is named: a folder, a GGUF file, a Hub id, or a Hub id with a revision. Imports nothing that takes long."""

import re
from pathlib import Path

EMBEDDED_MODEL = "all-MiniLM-L6-v2"
EMBEDDED_GENERATOR = "SmolLM2-135M-Instruct"


def is_path(model: str) -> bool:
    """Whether this names a folder or a GGUF file here."""
    path = Path(model).expanduser()
    return path.is_dir() or (path.suffix == ".gguf" and path.is_file())


# A Hub id cannot hold an @, and cannot begin like a path.
_AT_REVISION = re.compile(r"([\w-][\w.-]*(?:/[\w.-]+)?)@(.+)")


def split_revision(model: str) -> tuple[str, str | None]:
    """Splits `org/name@revision` into (`org/name`, `revision`). The revision is None where the name holds none.

    A revision is a branch, a tag or a commit.
    """
    match = _AT_REVISION.fullmatch(model)
    return (match[1], match[2]) if match and not Path(model).exists() else (model, None)
