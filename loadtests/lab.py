"""Several Ray nodes on one machine, each in a network namespace of its own: own address, own ports, and a cable to pull.

Needs root and iproute2. Every process of a node lives in its namespace, so the kernel itself says which they are.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from time import monotonic, sleep
from typing import Any

import psutil

from cluster.local_ray import SERVE_ENV

_NET = "10.77.0"


def possible() -> bool:
    """Whether this process may make network namespaces, found by making one."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"ef{token_hex(2)}-try"
    try:
        _ip("netns", "add", name)
        _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("-n", name, "link", "set", "lo", "up")
    except RuntimeError:
        return False
    finally:
        _ip("link", "del", name, check=False)
        _ip("netns", "del", name, check=False)
    return True


@dataclass
class Member:
    """One node: its namespace, and what `ray start` was told."""

    name: str
    namespace: str  # also the name of its cable's near end
    address: str
    labels: Mapping[str, str]

    def processes(self) -> list[psutil.Process]:
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False).stdout
        found = []
        for pid in listed.split():
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found

    def kill(self) -> None:
        """End every process of the node at once, as a crash of the machine's kernel would."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)

    def unplug(self) -> None:
        """Nothing reaches the node any more, and nobody is told."""
        _ip("link", "set", self.namespace, "down")


class Lab:
    """The nodes, the head first."""

    def __init__(self, folder: Path) -> None:
        self.members: dict[str, Member] = {}
        self._folder, self._bridge = folder, f"ef{token_hex(2)}"
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("link", "set", self._bridge, "up")
        # Short: sockets lie in it, and their names may have 107 characters.
        self.environment = os.environ | SERVE_ENV | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token_hex(16)}
        self.environment |= {"PYTHONPATH": os.getcwd(), "HF_HUB_OFFLINE": "1", "RAY_TMPDIR": str(folder)}
        self.environment.pop("RAY_ADDRESS", None)

    @property
    def head(self) -> Member:
        return next(iter(self.members.values()))

    def add(self, name: str, node_class: str, num_cpus: int, num_gpus: int = 0) -> Member:
        """Make the namespace and start Ray in it; the first one is the head."""
        labels = {"emberforge-class": node_class, "emberforge-node": name}
        member = Member(name, f"{self._bridge}-{name}", f"{_NET}.{len(self.members) + 2}", labels)
        self.members[name] = member
        space = member.namespace
        _ip("netns", "add", space)
        _ip("link", "add", space, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", space, "master", self._bridge, "up")
        _ip("-n", space, "addr", "add", f"{member.address}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", space, "link", "set", "lo", "up")
        first = len(self.members) == 1
        where = ["--head", "--port=6379", "--dashboard-host=127.0.0.1"] if first else [f"--address={self.head.address}:6379"]
        given = ",".join(f"{key}={value}" for key, value in labels.items())
        self.run(
            name, "-m", "ray.scripts.scripts", "start", *where, f"--node-ip-address={member.address}", f"--labels={given}",
            f"--num-cpus={num_cpus}", f"--num-gpus={num_gpus}", "--object-store-memory=100000000", "--disable-usage-stats",
        )  # fmt: skip
        return member

    def run(self, name: str, *arguments: str, **environment: str) -> str:
        """Run Python in a node's namespace until it ends; what it printed. Raises: CalledProcessError."""
        log = self._folder / f"{name}.log"
        with log.open("a", encoding="utf-8") as file:
            done = subprocess.run(
                self._command(name, arguments),
                env=self.environment | environment,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                check=False,
            )
            file.write(done.stdout)
        if done.returncode:
            tail = "\n".join(log.read_text(encoding="utf-8").splitlines()[-25:])
            raise RuntimeError(f"{' '.join(arguments[:4])} on {name} ended with {done.returncode}:\n{tail}")
        return done.stdout

    def start(self, name: str, *arguments: str) -> "subprocess.Popen[str]":
        """Start Python in a node's namespace."""
        return subprocess.Popen(self._command(name, arguments), env=self.environment, stdout=subprocess.PIPE, text=True)

    def close(self) -> None:
        for member in self.members.values():
            for _ in range(3):
                member.kill()
                psutil.wait_procs(member.processes(), timeout=2)
            _ip("link", "del", member.namespace, check=False)  # with the namespace it would go too, but some time later
            _ip("netns", "del", member.namespace, check=False)
        _ip("link", "del", self._bridge, check=False)

    def _command(self, name: str, arguments: tuple[str, ...]) -> list[str]:
        return ["ip", "netns", "exec", self.members[name].namespace, sys.executable, *arguments]


@contextmanager
def lab() -> Iterator[Lab]:
    """An empty laboratory; at the end no process and no interface of it is left."""
    folder = Path(tempfile.mkdtemp(prefix="ef-", dir="/tmp"))  # a short name
    made = Lab(folder)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(what: str, condition: Any, seconds: float = 60) -> float:
    """Seconds until `condition()` held. Raises: TimeoutError naming `what`."""
    start = monotonic()
    while not condition():
        if monotonic() - start > seconds:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        sleep(0.2)
    return monotonic() - start


def _ip(*arguments: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
