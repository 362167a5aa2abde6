"""Tiny generation models, and prompts for them."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.schedule.stream import Stream


def preemptions(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """A list that receives each stream that gives up its pages before its end."""
    preempted: list[Stream] = []
    give_back = Stream.give_back

    def spy(stream: Stream) -> None:
        if not stream.future.done():
            preempted.append(stream)
        give_back(stream)

    monkeypatch.setattr(Stream, "give_back", spy)
    return preempted


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Random token ids, the same in each run."""
    return [np.random.default_rng(seed).integers(5, 299, size=length).tolist() for seed, length in enumerate(lengths)]


def folder_without_pooling(tiny: Callable[..., Path], kind: str, copy: Path, **config: Any) -> Path:
    """Copies a folder to `copy` without its pooling. Without a pooling the model generates."""
    more = {"max_position_embeddings": 512, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    folder = tiny(kind, **(more | config))
    if not copy.exists():
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("1_Pooling"))
    return copy
