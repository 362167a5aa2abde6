"""What the command says where others would print a traceback."""

import pytest

from serve_app.cli.commands import _last_words

SERVE = "The deployment failed to start 3 times in a row. See controller logs for details. Error:\n"
TRACE = 'RuntimeError: Traceback (most recent call last):\n  File "engine.py", line 1, in load\n    raise ModelError(text)\n'


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([f"{SERVE}{TRACE}engine.errors.ModelError: config.json: 3 heads\n"], "config.json: 3 heads"),
        ([f"{SERVE}{TRACE}serve_app.settings.SettingsError: a: b"], "a: b"),
        ([f"{SERVE}{TRACE}torch.OutOfMemoryError: CUDA out of memory"], "torch.OutOfMemoryError: CUDA out of memory"),
        (["", f"{SERVE}{TRACE}ValueError: no"], "ValueError: no"),
        (["Running replicas are healthy."], ""),
        ([], ""),
    ],
)
def test_a_failed_start_is_told_in_the_replicas_own_last_words(messages: list[str], words: str) -> None:
    assert _last_words(messages) == words
