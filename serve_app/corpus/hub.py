"""Downloads a dataset from the Hub into the Hub's own cache."""

import os
import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from serve_app.corpus.files import CorpusError

_PREFIX = "hf://datasets/"
_NAME = re.compile(rf"{_PREFIX}(?P<name>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?(?:/(?P<path>.+))?")


def download(name: str) -> list[Path]:
    """Downloads `hf://datasets/ORG/NAME[@REVISION][/PATH]` and returns its files and folders. PATH may have wildcards.

    Raises: CorpusError.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise CorpusError(f"{name} is not of the form {_PREFIX}ORG/NAME[@REVISION][/PATH]")
    path = found["path"]
    try:
        folder = snapshot_download(
            found["name"],
            repo_type="dataset",
            revision=found["revision"],
            cache_dir=os.environ.get("HF_HUB_CACHE"),
            allow_patterns=None if path is None else [path, f"{path}/*"],
        )
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        raise CorpusError(f"{name} cannot be downloaded ({type(error).__name__}); private datasets need HF_TOKEN") from error
    paths = [Path(folder)] if path is None else sorted(Path(folder).glob(path))
    if not paths:
        raise CorpusError(f"{name}: the dataset has no such files")
    return paths
