"""Log lines: their destination, their fields, and that no line is lost when its process dies."""

import asyncio
import json
import logging
import os
import pty
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from cluster import logs
from engine.request_tag import RequestTag, request_tags

Lines = Callable[[], list[dict[str, Any]]]
SAY = "import logging; from cluster import logs; logs.set_up('serve'); log = logging.getLogger('serve_app.x'); "


@pytest.fixture(autouse=True)
def without_another_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(logs.VARIABLE, raising=False)  # a test that started Ray in this process has set it


def test_a_line_is_a_json_object_with_these_fields(log_lines: Lines) -> None:
    logging.getLogger("serve_app.replica").info("%d passes\nfailed", 2)
    (line,) = log_lines()
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "message": "2 passes\nfailed",
        "logger": "serve_app.replica",
        "process": "replica of x",
        "pid": os.getpid(),
    }


def test_a_line_may_name_a_file_that_is_not_utf_8(log_lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = [each for each in logging.getLogger().handlers if isinstance(each.formatter, logs._Json)]
    monkeypatch.setattr(logging.getLogger(), "handlers", ours)  # pytest-xdist cannot send what pytest's handlers keep
    name = os.fsdecode(b"caf\xe9")
    try:
        raise FileNotFoundError(name)
    except FileNotFoundError:
        logging.getLogger("engine.load").exception("%s is missing", name)
    (line,) = log_lines()
    assert line["message"] == "caf\udce9 is missing"
    assert "caf\udce9" in line["exception"]


def test_an_error_has_its_traceback(log_lines: Lines) -> None:
    try:
        raise ZeroDivisionError("of ours")
    except ZeroDivisionError:
        logging.getLogger("engine.loop").exception("it broke")
    (line,) = log_lines()
    assert line["message"] == "it broke"
    assert line["exception"].splitlines()[0] == "Traceback (most recent call last):"
    assert line["exception"].splitlines()[-1] == "ZeroDivisionError: of ours"


def test_a_line_names_the_requests_it_is_about(log_lines: Lines) -> None:
    log = logging.getLogger("engine.passes")
    token = request_tags.set((RequestTag("a"),))
    log.warning("of the task's request")
    log.warning("of others", extra={"tags": [RequestTag("b"), RequestTag("c")]})
    request_tags.reset(token)
    log.warning("of none")
    assert [(each.get("request_id"), each.get("request_ids")) for each in log_lines()] == [
        ("a", None),
        (None, ["b", "c"]),
        (None, None),
    ]


def test_libraries_warnings_are_lines_and_their_chatter_is_not(log_lines: Lines) -> None:
    for name in ("asyncio", "ray", "ray.serve"):
        logging.getLogger(name).info("chatter")
        logging.getLogger(name).error("trouble")
    assert [(each["logger"], each["message"]) for each in log_lines()] == [
        (name, "trouble") for name in ("asyncio", "ray", "ray.serve")
    ]


def test_a_stream_that_its_client_leaves_is_no_line(log_lines: Lines) -> None:
    """Runs Ray's own code. Another error of a stream is still logged."""
    from ray.serve._private.grpc_util import get_grpc_response_status

    logs.set_up_ray()

    async def stream(end: BaseException | None) -> AsyncGenerator[int]:
        try:
            if end is not None:
                raise end
            yield 1
        except BaseException as error:
            get_grpc_response_status(error, None, "id")
            raise

    async def leave() -> None:
        leaving = stream(None)
        await anext(leaving)
        await leaving.aclose()

    async def fail() -> None:
        await anext(stream(ZeroDivisionError("of ours")))

    asyncio.run(leave())
    assert log_lines() == []
    with pytest.raises(ZeroDivisionError):
        asyncio.run(fail())
    (line,) = log_lines()
    assert line["exception"].endswith("ZeroDivisionError: of ours")


# A command starts a process with another stderr. That process writes one line and kills itself.
COMMAND = """
import os, subprocess, sys
from cluster import logs
code = "import logging, os, signal; from cluster import logs; logs.set_up('replica'); "
code += "logging.getLogger('serve_app.x').warning('last words'); os.kill(os.getpid(), signal.SIGKILL)"
os.write(2, b"begins\\n")
done = subprocess.run([sys.executable, "-c", code], env=os.environ | logs.share_stderr(), stderr=subprocess.DEVNULL)
assert done.returncode == -9
os.write(2, b"goes on\\n")
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["pipe", "file", "socket", "terminal"])
def test_the_last_line_before_a_kill_reaches_the_commands_stderr(kind: str, tmp_path: Path) -> None:
    file = (tmp_path / "stderr").open("w+b")
    theirs, ours = socket.socketpair()
    made = {
        "pipe": os.pipe()[::-1],
        "file": (file.fileno(), os.open(file.name, os.O_RDONLY)),
        "socket": (theirs.fileno(), ours.fileno()),
        "terminal": pty.openpty()[::-1],
    }
    stderr, source = made[kind]
    with subprocess.Popen([sys.executable, "-c", COMMAND], stdin=subprocess.PIPE, stderr=stderr) as command:
        said, deadline = b"", monotonic() + 60
        while b"last words" not in said or b"goes on" not in said:
            assert monotonic() < deadline, said
            said += os.read(source, 1 << 16)  # a file gives no bytes until more are written
        command.communicate()
    begins, *rest = said.decode().splitlines()
    assert (begins, command.returncode) == ("begins", 0)
    (last,) = [each for each in rest if each != "goes on"]
    assert last.endswith(" WARNING last words") if kind == "terminal" else json.loads(last)["message"] == "last words"
    file.close()
    theirs.close()
    ours.close()
    for each in {*made["pipe"], *made["terminal"], made["file"][1]}:
        os.close(each)


# Another process writes lines at intervals, the command's thread copies them and sleeps, and then the command exits.
LINES = """
import os, signal, sys, time
from cluster import logs
logs._PAUSE_S = 60  # so that only the exit copies all but the first lines
fd = os.open(logs.share_stderr()[logs.VARIABLE], os.O_WRONLY)
signal.signal(signal.SIGTERM, lambda *_: {end})
for line in range(300):
    os.write(fd, b"line %d\\n" % line)
    time.sleep(0.0001 * (line % 7))
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("end", ["sys.exit()", "(logs.copy_rest(), os._exit(0))"])  # `emberforge serve` ends like the second
def test_no_line_is_lost_or_cut_when_the_command_ends(end: str) -> None:
    done = subprocess.run([sys.executable, "-c", LINES.replace("{end}", end)], stderr=subprocess.PIPE, check=True, timeout=60)
    assert done.stderr.decode().splitlines() == [f"line {line}" for line in range(300)]


def test_a_terminal_gets_warnings_as_sentences() -> None:
    master, slave = pty.openpty()
    subprocess.run(
        [sys.executable, "-c", SAY + "log.info('chatter'); log.warning('trouble')"], stderr=slave, check=True, timeout=60
    )
    os.close(slave)
    text = os.read(master, 1 << 16).decode()
    os.close(master)
    assert text.strip().endswith(" WARNING trouble")
    assert "chatter" not in text


@pytest.mark.parametrize(("ids", "end"), [("", ""), ("a", " (a)"), ("abc", " (a, b, c)"), ("abcde", " (a, b, c and 2 more)")])
def test_a_line_on_a_terminal_names_its_requests(ids: str, end: str) -> None:
    record = logging.LogRecord("engine", logging.WARNING, "", 0, "trouble", None, None)
    record.tags = tuple(RequestTag(each) for each in ids)
    assert logs._Plain().format(record).endswith(f" WARNING trouble{end}")


def test_a_reader_that_is_gone_breaks_nothing() -> None:
    read, write = os.pipe()
    os.close(read)
    code = SAY + "log.error('nobody hears this'); print('goes on')"
    done = subprocess.run([sys.executable, "-c", code], stderr=write, stdout=subprocess.PIPE, check=True, timeout=60)
    os.close(write)
    assert done.stdout == b"goes on\n"
