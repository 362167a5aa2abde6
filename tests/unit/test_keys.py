"""API keys: what a file must look like, who is let in, and a file that changes while the server runs."""

import logging
import os
import subprocess
import sys
import timeit
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serve_app.admission import keys
from serve_app.admission.keys import Keys, KeysError, add_key, read_keys, remove_key
from serve_app.app import ModelArgs, Share, deploy_config
from serve_app.settings import Settings, SettingsError, load_settings

SECRET = "a key in clear, as TEI takes it"


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", f"Bearer {key}".encode())]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


@pytest.fixture(autouse=True)
def _looked_at_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_LOOK_EVERY_S", -1.0)


def test_each_key_of_a_file_is_admitted_and_nothing_else(file: Path) -> None:
    one, two = add_key(file, "one"), add_key(file, "two")
    known = Keys(None, file)
    assert known.admit(bearer(one))
    assert known.admit(bearer(two))
    assert known.admit([(b"authorization", f"bearer  {two} ".encode())])
    for wrong in (
        b"",
        one.encode(),
        b"Bearer",
        b"Bearer ",
        b"Basic " + one.encode(),
        b"Bearer " + one[:-1].encode(),
        b"Bearer \xff",
    ):
        assert not known.admit([(b"authorization", wrong)])
    assert not known.admit([(b"x-api-key", one.encode())])
    assert not known.admit([])


def test_a_file_holds_no_key_and_is_its_owners_alone(file: Path) -> None:
    key = add_key(file, "one")
    assert key not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o640)
    add_key(file, "two")
    assert file.stat().st_mode & 0o777 == 0o640
    assert list(read_keys(file)) == ["one", "two"]
    assert [path.name for path in file.parent.iterdir()] == ["keys"]


def test_a_key_added_or_removed_counts_without_a_restart(file: Path) -> None:
    one = add_key(file, "one")
    known = Keys(None, file)
    two = add_key(file, "two")
    assert known.admit(bearer(two))
    remove_key(file, "one")
    assert not known.admit(bearer(one))
    remove_key(file, "two")
    assert not known.admit(bearer(two))  # none left: nobody


@pytest.mark.parametrize("damage", ["a key in clear\n", "gone", "one sha256:" + "0" * 64 + "\n" + "one sha256:" + "1" * 64])
def test_a_broken_file_keeps_the_old_keys_and_says_so_once(file: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    one = add_key(file, "one")
    known, whole = Keys(None, file), file.read_text()
    file.unlink()
    if damage != "gone":
        file.write_text(damage)
    with caplog.at_level(logging.ERROR):
        assert known.admit(bearer(one))
        assert known.admit(bearer(one))
    assert len(caplog.records) == 1
    assert str(file) in caplog.text
    assert "in clear" not in caplog.text  # perhaps somebody's key
    file.write_text(whole)
    two = add_key(file, "two")
    assert known.admit(bearer(two))


def test_the_file_is_looked_at_only_now_and_then(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_LOOK_EVERY_S", 3600.0)
    one = add_key(file, "one")
    known = Keys(None, file)
    remove_key(file, "one")
    assert known.admit(bearer(one))
    assert min(timeit.repeat(lambda: known.admit(bearer(one)), number=1000, repeat=5)) < 0.02  # 20 us would be far too much


def test_a_link_to_a_file_stays_one(file: Path, tmp_path: Path) -> None:
    add_key(file, "one")
    link = tmp_path / "link"
    link.symlink_to(file)
    add_key(link, "two")
    assert link.is_symlink()
    assert list(read_keys(file)) == ["one", "two"]


def test_what_cannot_be_done_is_said(file: Path) -> None:
    with pytest.raises(KeysError, match="emberforge keys add"):
        Keys(None, file)
    add_key(file, "one")
    with pytest.raises(KeysError, match="'one' already"):
        add_key(file, "one")
    with pytest.raises(KeysError, match="'a b'"):
        add_key(file, "a b")
    with pytest.raises(KeysError, match="no key 'two'; there is one"):
        remove_key(file, "two")
    with pytest.raises(KeysError, match="cannot be written"):
        add_key(file.parent / "nowhere" / "keys", "one")


def test_a_key_in_clear_goes_no_further_than_the_settings() -> None:
    settings = load_settings({"api_key": SECRET}, {})
    assert SECRET not in repr(settings) + settings.model_dump_json() + str(deploy_config(settings, Share(1, 1, 0, 100)))
    again = ModelArgs.model_validate(deploy_config(settings, Share(1, 1, 0, 100))["applications"][0]["args"]).settings
    known = Keys.of(again)
    assert known is not None
    assert known.admit(bearer(SECRET))
    assert not known.admit(bearer(settings.api_key or ""))  # its hash is no key
    assert load_settings({}, {"EMBERFORGE_API_KEY": SECRET + "\n"}).api_key == settings.api_key
    assert Keys.of(Settings()) is None


def test_a_key_and_a_file_go_together(file: Path) -> None:
    one = add_key(file, "one")
    known = Keys.of(Settings(api_key=SECRET, api_keys_file=str(file)))
    assert known is not None
    assert known.admit(bearer(one))
    assert known.admit(bearer(SECRET))


def test_an_empty_key_stops_the_start() -> None:
    with pytest.raises(SettingsError, match="EMBERFORGE_API_KEY: it is empty"):
        load_settings({}, {"EMBERFORGE_API_KEY": ""})


def test_the_command_makes_lists_and_removes(file: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).parent / "emberforge"), "keys", *arguments]
        env = os.environ | {"EMBERFORGE_API_KEYS_FILE": str(file)}
        return subprocess.run(command, capture_output=True, text=True, env=env, check=False)

    key = run("add", "alice").stdout.strip()
    assert Keys(None, file).admit(bearer(key))
    assert run("list").stdout == "alice\n"
    assert run("remove", "alice").returncode == 0
    assert read_keys(file) == {}
    failed = run("remove", "alice")
    assert (failed.returncode, failed.stderr.strip().splitlines()[-1].endswith("there is none")) == (1, True)


def test_keys_that_are_added_at_once_are_all_there(file: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: add_key(file, f"key{number}"), range(40)))
    assert len(read_keys(file)) == 40
