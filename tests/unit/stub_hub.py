"""A Hub without a network. Every model on it has the same commit."""

from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def stub_hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """The requested models and revisions, in order. The Hub has no files of a model."""
    asked: list[tuple[str, str | None]] = []

    def snapshot_download(name: str, *, revision: str | None, **_: Any) -> str:
        asked.append((name, revision))
        return f"/cache/models--{name.replace('/', '--')}/snapshots/{COMMIT}"

    monkeypatch.setattr("engine.download.snapshot_download", snapshot_download)
    return asked
