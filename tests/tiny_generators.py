"""Tiny generation models, and prompts for them."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import Engine
from engine.options import SamplingOptions
from engine.schedule.stream import Stream

# The keys of all kinds of scaled RoPE, for texts of more than 16 tokens. Each kind takes some of them.
SCALED_ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0}  # fmt: skip


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


def assert_likely(engine: Engine, given: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], num_tokens: int) -> None:
    """Each token of a greedy answer is nearly the likeliest one by the scores that `engine` gives for the same text.

    No CUDA graph computes these scores. The tokens of two runs or of two engines may differ: bf16 rounds differently in passes of
    other shapes, and the sum between two stages is rounded once more.
    """
    scored = SamplingOptions(max_tokens=0, prompt_logprobs=1)
    texts = [[*prompt, *answer] for prompt, answer in zip(given, answers, strict=True)]
    for prompt, answer, score in zip(given, answers, engine.generate(texts, scored), strict=True):
        assert len(answer) == num_tokens
        assert score.prompt_tokens is not None
        for token in score.prompt_tokens[len(prompt) :]:
            assert token.logprob is not None
            assert token.top is not None
            assert token.logprob > token.top[0][1] - 0.3, f"{token} after a prompt of {len(prompt)} tokens"
