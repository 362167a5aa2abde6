"""API keys: the form of the file, valid and invalid keys, and a file that changes while the server runs."""

import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import monotonic, sleep

import pytest

from serve_app.admission import keys
from serve_app.admission.key_file import KeysError, Limits, add_key, audit_file, limit_key, read_keys, remove_key
from serve_app.admission.keys import ONE_KEY, Keys
from serve_app.app import ModelArgs, Share, deploy_config
from serve_app.errors import Unauthorized
from serve_app.settings import Settings, SettingsError, load_settings

SECRET = "a key in clear, as TEI takes it"


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", f"Bearer {key}".encode())]


def is_valid(known: Keys, key: str) -> bool:
    try:
        known.account(bearer(key))
    except Unauthorized:
        return False
    return True


def until(condition: Callable[[], bool]) -> None:
    end = monotonic() + 20
    while not condition():
        assert monotonic() < end
        sleep(0.002)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


@pytest.fixture(autouse=True)
def _looked_at_by_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the file's thread asleep. Tests call `look` themselves."""
    monkeypatch.setattr(keys, "_LOOK_EVERY_S", 3600.0)


def test_each_key_of_a_file_is_admitted_and_nothing_else(file: Path) -> None:
    one, two = add_key(file, "one"), add_key(file, "two")
    known = Keys(None, file)
    assert known.account(bearer(one)).name == "one"
    assert known.account(bearer(two)).name == "two"
    assert known.account([(b"authorization", f"bearer  {two} ".encode())]).name == "two"
    for wrong in (
        b"",
        one.encode(),
        b"Bearer",
        b"Bearer ",
        b"Basic " + one.encode(),
        b"Bearer " + one[:-1].encode(),
        b"Bearer \xff",
    ):
        with pytest.raises(Unauthorized, match="no valid API key"):
            known.account([(b"authorization", wrong)])
    for headers in ([(b"x-api-key", one.encode())], []):
        with pytest.raises(Unauthorized):
            known.account(headers)


def test_a_file_holds_no_key_and_is_its_owners_alone(file: Path) -> None:
    key = add_key(file, "one")
    assert key not in file.read_text() + audit_file(file).read_text()
    assert file.stat().st_mode & 0o777 == audit_file(file).stat().st_mode & 0o777 == 0o600
    file.chmod(0o640)
    add_key(file, "two")
    assert file.stat().st_mode & 0o777 == 0o640
    assert list(read_keys(file)) == ["one", "two"]
    assert sorted(path.name for path in file.parent.iterdir()) == ["keys", "keys.audit.jsonl"]


def test_a_file_of_names_and_hashes_alone_is_as_before(file: Path) -> None:
    digest = "A1" * 32
    file.write_text(f"# a comment\n\nalice   sha256:{digest}\n  bob\tsha256:{'0' * 64}  \n")
    read = read_keys(file)
    assert [(key.name, key.hashed, key.limits) for key in read.values()] == [
        ("alice", "sha256:" + digest.lower(), Limits()),
        ("bob", "sha256:" + "0" * 64, Limits()),
    ]
    add_key(file, "carol")
    assert [key.hashed for key in read_keys(file).values()][:2] == [key.hashed for key in read.values()]


LIMITS = {
    "models": "org/a,b",
    "tokens_per_minute": "1000",
    "requests_in_flight": "4",
    "priority": "batch",
    "expires": "2127-01-31T19:00:00+01:00",
}


def test_limits_are_read_as_they_are_written(file: Path) -> None:
    add_key(file, "plain")
    add_key(file, "all", LIMITS)
    limits = Limits(("org/a", "b"), 1000, 4, "batch", datetime(2127, 1, 31, 18, tzinfo=UTC))
    assert [key.limits for key in read_keys(file).values()] == [Limits(), limits]
    assert (
        file.read_text()
        .splitlines()[2]
        .endswith(" models=org/a,b tokens_per_minute=1000 requests_in_flight=4 priority=batch expires=2127-01-31T18:00:00Z")
    )
    changed = limit_key(file, "all", {"tokens_per_minute": "5", "models": "none", "expires": "2028-02-01"})
    assert changed == Limits((), 5, 4, "batch", datetime(2028, 2, 1, tzinfo=UTC))
    assert read_keys(file)["all"].limits == changed
    assert limit_key(file, "all", dict.fromkeys(LIMITS, "none")) == Limits()
    assert file.read_text().splitlines()[2].split()[2:] == []


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tokens_per_minute": "0"}, "tokens_per_minute is not a whole number over 0"),
        ({"requests_in_flight": "-1"}, "requests_in_flight is not a whole number over 0"),
        ({"priority": "urgent"}, "priority is not interactive or batch"),
        ({"expires": "soon"}, "expires is not a date"),
        ({"models": "a,,b"}, "models is not a list"),
        ({"models": "two words"}, "models is not a list"),
    ],
)
def test_a_limit_that_cannot_be_is_named(file: Path, given: dict[str, str], text: str) -> None:
    ((name, value),) = given.items()
    with pytest.raises(KeysError, match=f"{text}.*: {value!r}$"):
        add_key(file, "one", given)
    add_key(file, "one")
    with pytest.raises(KeysError, match=text):
        limit_key(file, "one", given)
    assert read_keys(file)["one"].limits == Limits()
    if " " not in value:
        file.write_text(f"one sha256:{'0' * 64} {name}={value}\n")
        with pytest.raises(KeysError, match=f"line 1: {text}"):
            read_keys(file)
    file.write_text(f"one sha256:{'0' * 64} a-key-in-clear=1\n")
    with pytest.raises(KeysError, match=r"line 1: 1 limits are unknown; limits are models, tokens_per_minute") as told:
        read_keys(file)
    assert "in-clear" not in str(told.value)


def test_each_change_is_recorded(file: Path) -> None:
    add_key(file, "one", {"priority": "batch"})
    limit_key(file, "one", {"tokens_per_minute": "7"})
    remove_key(file, "one")
    with pytest.raises(KeysError):
        remove_key(file, "one")
    entries = [json.loads(line) for line in audit_file(file).read_text().splitlines()]
    assert [(each["action"], each["key"], each["limits"], each.get("before")) for each in entries] == [
        ("add", "one", "priority=batch", None),
        ("limit", "one", "tokens_per_minute=7 priority=batch", "priority=batch"),
        ("remove", "one", "tokens_per_minute=7 priority=batch", None),
    ]
    assert all(each["user"] and each["host"] for each in entries)
    at = datetime.fromisoformat(entries[0]["at"])
    assert abs(datetime.now(UTC) - at) < timedelta(minutes=5)


def test_a_change_that_cannot_be_recorded_is_not_made(file: Path) -> None:
    audit_file(file).mkdir()
    with pytest.raises(KeysError, match="nothing was changed"):
        add_key(file, "one")
    assert not file.exists()


def test_a_key_added_changed_or_removed_counts_without_a_restart(file: Path) -> None:
    one = add_key(file, "one")
    known = Keys(None, file)
    account = known.account(bearer(one))
    two = add_key(file, "two")
    known.look()
    assert is_valid(known, two)
    limit_key(file, "one", {"tokens_per_minute": "7"})
    known.look()
    assert known.account(bearer(one)) is account  # the account keeps its count of tokens
    assert account.limits.tokens_per_minute == 7
    remove_key(file, "one")
    known.look()
    assert not is_valid(known, one)
    remove_key(file, "two")
    known.look()
    assert not is_valid(known, two)  # a file without keys admits nobody


def test_a_key_ends_when_it_expires(file: Path) -> None:
    past, future = ((datetime.now(UTC) + timedelta(hours=hours)).isoformat() for hours in (-1, 1))
    old, new = add_key(file, "old"), add_key(file, "new", {"expires": future})
    limit_key(file, "old", {"expires": past})
    known = Keys(None, file)
    assert is_valid(known, new)
    with pytest.raises(Unauthorized, match="`old` has expired"):
        known.account(bearer(old))


@pytest.mark.parametrize("at", ["2020-02-01", "2020-02-01T18:00:00+01:00"])
def test_a_new_key_has_not_expired(file: Path, at: str) -> None:
    with pytest.raises(KeysError, match=rf"^expires '{re.escape(at)}' has passed: it is 2.*Z; give a later time$"):
        add_key(file, "one", {"expires": at})
    assert not file.exists()


def test_a_thread_looks_at_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_LOOK_EVERY_S", 0.005)
    one = add_key(file, "one")
    known = Keys(None, file)
    remove_key(file, "one")
    until(lambda: not is_valid(known, one))


def test_the_thread_ends_with_the_keys(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_LOOK_EVERY_S", 0.005)
    add_key(file, "one")
    before = set(threading.enumerate())
    known = Keys(None, file)
    (thread,) = set(threading.enumerate()) - before
    del known
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize("damage", ["a key in clear\n", "one sha256:" + "0" * 64 + "\n" + "one sha256:" + "1" * 64])
def test_a_broken_file_keeps_the_old_keys_and_says_so_once(file: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    one = add_key(file, "one")
    known, whole = Keys(None, file), file.read_text()
    file.write_text(damage)
    with caplog.at_level(logging.ERROR):
        known.look()
        known.look()
        assert is_valid(known, one)
    assert len(caplog.records) == 1
    assert str(file) in caplog.text
    assert "in clear" not in caplog.text  # the line may hold a real key, so the log does not show it
    file.write_text(whole)
    two = add_key(file, "two")
    known.look()
    assert is_valid(known, two)


def test_the_keys_of_a_file_that_is_gone_are_no_longer_valid(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = add_key(file, "one")
    known, whole = Keys(Settings(api_key=SECRET).api_key, file), file.read_text()
    file.unlink()
    with caplog.at_level(logging.ERROR):
        known.look()
        assert is_valid(known, one)  # a file that is absent for a moment may be about to be replaced
        known.look()
        assert not is_valid(known, one)
        known.look()
    assert is_valid(known, SECRET)
    assert [record.message for record in caplog.records] == [f"{file} was deleted: its keys are no longer valid"]
    file.write_text(whole)
    known.look()
    assert is_valid(known, one)


def test_storage_that_fails_keeps_the_keys(file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    one = add_key(file, "one")
    known = Keys(None, file)

    def fail(_: object) -> None:
        raise OSError(116, "Stale file handle")

    with caplog.at_level(logging.ERROR):
        with monkeypatch.context() as patch:
            patch.setattr(keys, "_signature", fail)
            known.look()
            known.look()
            assert is_valid(known, one)
        assert [record.message for record in caplog.records] == [
            f"{file} cannot be checked (Stale file handle); the previous keys stay valid"
        ]
        add_key(file, "two")
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_text", lambda *_, **__: fail(None))
            known.look()  # the file has changed but cannot be read
        known.look()
    assert {key.name for key in known._keys.values()} == {"one", "two"}


def test_storage_that_does_not_answer_holds_up_no_request(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = add_key(file, "one")
    asked, answer = threading.Event(), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(keys, "_LOOK_EVERY_S", 0.0)
        known = Keys(None, file)

        def stat(_: Path) -> tuple[int, int, int]:
            asked.set()
            answer.wait(20)
            return (0, 0, 0)

        patch.setattr(keys, "_signature", stat)
        assert asked.wait(20)
        with caplog.at_level(logging.ERROR):
            assert is_valid(known, one)
            assert not caplog.records
            patch.setattr(keys, "_SILENT_S", -1.0)
            assert is_valid(known, one)
            assert is_valid(known, one)
        assert [record.message for record in caplog.records] == [
            f"{file} cannot be checked: its storage does not answer; the previous keys stay valid"
        ]
        answer.set()


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
    with pytest.raises(KeysError, match="already has a key 'one'"):
        add_key(file, "one")
    with pytest.raises(KeysError, match="'a b'"):
        add_key(file, "a b")
    with pytest.raises(KeysError, match="no key 'two'; its keys are one"):
        remove_key(file, "two")
    with pytest.raises(KeysError, match="no key 'two'; its keys are one"):
        limit_key(file, "two", {})
    with pytest.raises(KeysError, match="cannot be written"):
        add_key(file.parent / "nowhere" / "keys", "one")


def test_a_key_in_clear_goes_no_further_than_the_settings() -> None:
    settings = load_settings({"api_key": SECRET}, {})
    assert SECRET not in repr(settings) + settings.model_dump_json() + str(deploy_config(settings, Share(1, 1, 0, 100)))
    again = ModelArgs.model_validate(deploy_config(settings, Share(1, 1, 0, 100))["applications"][0]["args"]).settings
    known = Keys.of(again)
    assert known is not None
    assert known.account(bearer(SECRET)).name == ONE_KEY
    assert not is_valid(known, settings.api_key or "")  # the hash of a key is not a key
    assert load_settings({}, {"EMBERFORGE_API_KEY": SECRET + "\n"}).api_key == settings.api_key
    assert Keys.of(Settings()) is None


def test_a_key_and_a_file_go_together(file: Path) -> None:
    one = add_key(file, "one")
    known = Keys.of(Settings(api_key=SECRET, api_keys_file=str(file)))
    assert known is not None
    assert is_valid(known, one)
    assert is_valid(known, SECRET)


def test_an_empty_key_stops_the_start() -> None:
    with pytest.raises(SettingsError, match="EMBERFORGE_API_KEY: the key is empty"):
        load_settings({}, {"EMBERFORGE_API_KEY": ""})


@pytest.mark.slow
def test_the_command_makes_lists_limits_and_removes(file: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).parent / "emberforge"), "keys", *arguments]
        env = os.environ | {"EMBERFORGE_API_KEYS_FILE": str(file)}
        return subprocess.run(command, capture_output=True, text=True, env=env, check=False)

    key = run("add", "alice", "--tokens-per-minute", "1000", "--models", "a,b").stdout.strip()
    assert is_valid(Keys(None, file), key)
    assert run("list").stdout == "alice models=a,b tokens_per_minute=1000\n"
    limited = run("limit", "alice", "--models", "none", "--tokens-per-minute", "none")
    assert (limited.returncode, run("list").stdout) == (0, "alice\n")
    assert run("remove", "alice").returncode == 0
    assert read_keys(file) == {}
    failed = run("remove", "alice")
    assert (failed.returncode, failed.stderr.strip().splitlines()[-1].endswith("it has no keys")) == (1, True)


def test_keys_that_are_added_at_once_are_all_there(file: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: add_key(file, f"key{number}"), range(40)))
    assert len(read_keys(file)) == 40
    assert len(audit_file(file).read_text().splitlines()) == 40
