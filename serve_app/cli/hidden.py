"""Moves keys and tokens from the command line to environment variables."""

from collections.abc import Sequence

_SECRETS = {"--api-key": "EMBERFORGE_API_KEY", "--hf-token": "HF_TOKEN", "--hf-api-token": "HF_TOKEN"}


def without_secrets(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Returns: (the command line without keys and tokens, the environment variables with them)."""
    kept: list[str] = []
    secrets: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        flag, equals, value = argument.partition("=")
        following = next(rest, None) if flag in _SECRETS and not equals else value
        if flag in _SECRETS and following is not None:
            secrets[_SECRETS[flag]] = following
        else:
            kept.append(argument)
    return kept, secrets
