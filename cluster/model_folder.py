"""Finds the folder and the configuration of a `ModelSpec`."""

from dataclasses import replace
from pathlib import Path

from cluster.model_spec import ModelOptions, ModelSpec
from engine.errors import ModelError
from engine.hub import resolve_model
from engine.model.config import ModelConfig, with_kv_cache_dtype
from engine.model_id import is_path, split_revision
from engine.revision import commit_of, is_commit, revision_of


def find_folder(spec: ModelSpec, weights: bool = False) -> Path:
    """The model's folder. Downloads missing files; weights only with `weights`. Raises: ModelError."""
    return resolve_model(spec.model, weights=weights, code=spec.trust_remote_code)


def read_model(spec: ModelSpec, weights: bool = False) -> tuple[Path, ModelConfig]:
    """The model's folder, and its configuration with the spec's options. Downloads missing files; weights only with `weights`.

    Imports torch. Raises: ModelError.
    """
    from engine.model.folder import load_model_config

    folder = find_folder(spec, weights)
    config = load_model_config(
        folder,
        spec.pooling,
        default_prompt_name=spec.default_prompt_name,
        default_prompt=spec.default_prompt,
        max_input_tokens=spec.max_input_tokens,
        backend=spec.backend,
        trust_remote_code=spec.trust_remote_code,
    )
    return folder, with_options(config, spec)


def pinned(spec: ModelSpec) -> ModelSpec:
    """The spec with the revision of the model's files; a model on the Hub also gets `@COMMIT`. Downloads no weights.

    Every process of a server calls this function, so no process computes with files that differ from the plan's.
    Raises: ModelError for files with another revision than `spec.revision`.
    """
    name, asked = split_revision(spec.model)
    if asked is not None and is_commit(asked):
        found: str | None = asked
    else:
        folder = find_folder(spec)
        found = revision_of(folder, spec.trust_remote_code)
        asked = commit_of(folder)
    if spec.revision is not None and found is not None and found != spec.revision:
        raise ModelError(
            f"{spec.model} has revision {found} here, but the plan says {spec.revision}: copy the planned files to this machine, "
            "or plan and deploy again"
        )
    model = spec.model if is_path(spec.model) or asked is None else f"{name}@{asked}"
    return spec.model_copy(update={"model": model, "revision": found or spec.revision})


def with_options(config: ModelConfig, options: ModelOptions) -> ModelConfig:
    """The configuration with the options that change it: an input limit of at most `max_input_tokens`, and `kv_cache_dtype`."""
    shortest = min(config.max_input_length, options.max_input_tokens or config.max_input_length)
    return with_kv_cache_dtype(replace(config, max_input_length=shortest), options.kv_cache_dtype)
