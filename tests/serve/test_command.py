"""`emberforge serve` as a user runs it: in a terminal, until Ctrl-C."""

import fcntl
import os
import pty
import re
import secrets
import shlex
import subprocess
import sys
import termios
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from test_behaviour import metric, wait_for

from cluster.local_ray import free_port
from engine.hub import EMBEDDED_MODEL
from serve_app.grpc import tei_pb2 as tei
from serve_app.grpc import tei_pb2_grpc

EMBERFORGE = str(Path(sys.executable).parent / "emberforge")


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "EMBER_"))} | {
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": "30700"
    }


def _take_terminal() -> None:
    """Makes standard input the controlling terminal. Then Ctrl-C sends a signal to the whole foreground group."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A command in a pseudo-terminal of its own."""

    def __init__(self, *command: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment(), start_new_session=True, preexec_fn=_take_terminal
        )
        os.close(slave)
        self.text = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self.master, 4096)
            except OSError:
                return
            self.text += data.decode(errors="replace")

    def wait_for(self, text: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.text:
            assert time.monotonic() < deadline, self.text
            assert self.process.poll() is None, self.text
            time.sleep(0.05)


def test_serve_prints_a_curl_that_works_and_ctrl_c_leaves_nothing() -> None:
    """The command is typed as for TEI. No other user of the machine can find its API key."""
    port, grpc_port = free_port(), free_port()
    key = "ef-" + secrets.token_hex(16)
    arguments = [
        "--model-id",
        EMBEDDED_MODEL,
        "-p",
        str(port),
        "--api-key",
        key,
        "--auto-truncate",
        "--grpc-port",
        str(grpc_port),
        "--access-log",
    ]
    terminal = Terminal(EMBERFORGE, "serve", *arguments)
    try:
        terminal.wait_for("curl ", 300)
        terminal.wait_for("}'", 5)
        assert f"ready http://127.0.0.1:{port}" in re.sub(r"\x1b\[[0-9;]*m", "", terminal.text)
        started = psutil.Process(terminal.process.pid).children(recursive=True)
        assert any("haproxy" in name_of(process) for process in started)
        curl = next(line for line in terminal.text.splitlines() if line.startswith("curl "))
        assert '"object":"embedding"' not in subprocess.run(shlex.split(curl), capture_output=True, text=True, check=True).stdout
        curl = curl.replace("Bearer KEY", f"Bearer {key}")
        answer = subprocess.run(shlex.split(curl), capture_output=True, text=True, check=True).stdout
        for process in [psutil.Process(terminal.process.pid), *started]:
            with suppress(psutil.NoSuchProcess):
                assert key not in " ".join(process.cmdline())
                assert process.pid == terminal.process.pid or key not in process.environ().values()
        assert key not in terminal.text
        assert '"object":"embedding"' in answer
        terminal.wait_for("INFO POST /v1/embeddings 200 ", 10)  # the command prints a replica's lines
        assert f" 127.0.0.1:{grpc_port}  (gRPC)" in terminal.text
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            embed, metadata = tei_pb2_grpc.EmbedStub(channel).Embed, [("authorization", f"Bearer {key}")]
            assert len(embed(tei.EmbedRequest(inputs="x"), metadata=metadata, wait_for_ready=True).embeddings) == 384
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {key}"}, timeout=60)
        with client, ThreadPoolExecutor(1) as pool:
            last = pool.submit(client.post, "/embed", json={"inputs": ["It takes its time. " * 50] * 1000})
            wait_for(lambda: metric(client, "requests_in_flight") == 1)
            os.write(terminal.master, b"\x03")
            assert len(last.result().json()) == 1000
            answered = time.monotonic()
        assert terminal.process.wait(timeout=20) == 0, terminal.text
        assert time.monotonic() - answered < 10
        assert "stopped" in terminal.text
        assert [process for process in started if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []
    finally:
        if terminal.process.poll() is None:
            process = psutil.Process(terminal.process.pid)
            for each in [*process.children(recursive=True), process]:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            terminal.process.wait()


def name_of(process: psutil.Process) -> str:
    """The process's name, "" if it has ended: the command starts short processes, too."""
    with suppress(psutil.NoSuchProcess):
        return str(process.name())
    return ""


BAD_ARGUMENTS = [
    (("--port", "99999"), "--port = '99999'"),
    (("--dtype", "int3"), "--dtype = 'int3'"),
    (("--max-batch-tokens", "0"), "--max-batch-tokens = '0'"),
    (("/nowhere/model",), "/nowhere/model is not a folder"),
    (("no/such-model",), "neither a folder here nor"),
    (("--config", "/nowhere.yaml"), "--config /nowhere.yaml cannot be read"),
    (("a/x", "b/x"), "have the same name"),
    (("--default-prompt-name", "query"), "`query` but no prompts were found"),
]


@pytest.fixture(scope="module")
def ended() -> dict[tuple[str, ...], "subprocess.CompletedProcess[str]"]:
    """Runs `emberforge serve` with each of the bad arguments until its end. One command per core runs at a time."""

    def serve(arguments: tuple[str, ...]) -> "subprocess.CompletedProcess[str]":
        command = [EMBERFORGE, "serve", "--port", str(free_port()), *arguments]  # another server may use the default port
        return subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)

    each = [arguments for arguments, _ in BAD_ARGUMENTS]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return dict(zip(each, threads.map(serve, each), strict=True))


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS)
def test_bad_arguments_end_in_one_line_that_names_them(
    ended: dict[tuple[str, ...], "subprocess.CompletedProcess[str]"], arguments: tuple[str, ...], message: str
) -> None:
    done = ended[arguments]
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert "Traceback" not in done.stderr
