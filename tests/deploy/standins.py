"""Fake ingress nodes and clients for these tests."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from cluster.local_ray import free_port


@dataclass
class Node:
    name: str
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("fake_node.py")), str(self.port), self.name]
        self.process = subprocess.Popen(command)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def control(self) -> dict[str, Any]:
        state: dict[str, Any] = httpx.get(f"http://{self.address}/control").json()
        return state

    def set(self, **state: Any) -> None:
        httpx.put(f"http://{self.address}/control", json=state).raise_for_status()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_for(condition: Callable[[], bool], seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


class Load:
    """Clients that send one POST after another. `answers` holds (status, text); an error has status 0 and its name."""

    def __init__(self, url: str, num_clients: int = 8, num_bytes: int = 20_000) -> None:
        self.answers: list[tuple[int, str]] = []
        self._url, self._body = url, b"x" * num_bytes
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(num_clients)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        with httpx.Client(timeout=20) as client:
            while not self._stop.is_set():
                try:
                    answer = client.post(self._url, content=self._body)
                    self.answers.append((answer.status_code, answer.text))
                except httpx.HTTPError as error:
                    self.answers.append((0, repr(error)))

    def errors(self) -> list[tuple[int, str]]:
        return [answer for answer in self.answers if answer[0] != 200]


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
    process.kill()
    process.wait()
