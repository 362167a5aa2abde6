"""The cluster's token: its places, that a head makes it only once, and that no output shows it."""

import stat
from pathlib import Path

import pytest

from cluster.files import ClusterError
from cluster.node_token import Token, find_token, head_token, home_folder, worker_token


def test_a_head_makes_a_token_that_only_its_owner_reads_and_uses_it_again(tmp_path: Path) -> None:
    home = tmp_path / "home"
    token = head_token(home, {})
    assert token.file == home / "token"
    text = token.file.read_text()
    assert len(text) == 64
    assert stat.S_IMODE(token.file.stat().st_mode) == 0o600
    assert head_token(home, {}) == worker_token(home, {}) == token
    assert token.file.read_text() == text
    assert text not in str(token.variables)


def test_the_operators_token_goes_before_ours(tmp_path: Path) -> None:
    head_token(tmp_path, {})
    mine = tmp_path / "mine"
    mine.write_text("secret")
    assert find_token(tmp_path, {"RAY_AUTH_TOKEN_PATH": str(mine)}) == Token(mine)
    assert find_token(tmp_path, {"RAY_AUTH_TOKEN_PATH": str(mine), "RAY_AUTH_TOKEN": "x"}) == Token(None)


def test_a_worker_without_a_token_is_told_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"has no token: copy the head's to .*/token, or set RAY_AUTH_TOKEN"):
        worker_token(tmp_path, {})
    assert list(tmp_path.iterdir()) == []


def test_a_token_file_that_says_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("\n")
    with pytest.raises(ClusterError, match="token holds no token"):
        worker_token(tmp_path, {})
    with pytest.raises(ClusterError, match=r"gone cannot be read .*No such file"):
        head_token(tmp_path, {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "gone")})


def test_the_home_is_the_operators_choice(tmp_path: Path) -> None:
    assert home_folder({"EMBERFORGE_HOME": str(tmp_path)}) == tmp_path
    assert home_folder({}) == Path.home() / ".emberforge"
