"""Checks the files of a model that will be served on this machine."""

from pathlib import Path

from engine.model.config import ModelConfig
from engine.model.weight_files import open_weights
from engine.text.tokenizer import Tokenizer


def check_files(folder: Path, config: ModelConfig) -> None:
    """Opens every file of weights, and loads the tokenizer.

    So a server finds damaged files before it starts Ray, and not a minute later in a replica.
    Raises: ModelError.
    """
    Tokenizer.load(folder, config)
    for file in open_weights(folder):
        file.close()
