"""Reads a folder's settings for generation: generation_config.json, and the keys of the head in config.json."""

import sys
from typing import Any

from engine.errors import ModelError
from engine.model.config import GenerationConfig
from engine.model.keys import Keys

# Families whose head is the word embeddings if config.json does not say otherwise.
_TIED = ("Gemma3ForCausalLM",)


def read_generation(keys: Keys, said: Keys) -> GenerationConfig:
    """The config from the head's keys in config.json and from generation_config.json. Raises: ModelError naming a wrong value."""
    keys.refuse("final_logit_softcapping", (None,), "logits are not capped")
    return GenerationConfig(
        tied=bool(keys.get("tie_word_embeddings", keys.architecture in _TIED)),
        eos_ids=_eos_ids(said if said.get("eos_token_id") is not None else keys),
        temperature=_number(said, "temperature", float),
        top_k=_number(said, "top_k", int),
        top_p=_number(said, "top_p", float),
        min_p=_number(said, "min_p", float),
        repetition_penalty=_number(said, "repetition_penalty", float),
        max_new_tokens=_number(said, "max_new_tokens", int),
    )


def _eos_ids(keys: Keys) -> tuple[int, ...]:
    """The ids of `eos_token_id`, which is an id or a list of ids."""
    value = keys.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in ids):
        raise ModelError(f"{keys.path}: eos_token_id is {value!r}, expected the ids of tokens")
    return tuple(ids)


def _number(keys: Keys, key: str, kind: type) -> Any:
    value = keys.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise ModelError(f"{keys.path}: {key} is {value!r:.80}, expected a number of 0 or more")
    return kind(value)
