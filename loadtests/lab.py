"""Several Ray nodes on one machine, each in a network namespace of its own: own address, own ports, and a cable to pull.

Needs root and iproute2. Without them `lab()` says so, and the nodes share the machine's loopback, as Ray's own
cluster_utils has them: an address each, but one set of ports, so that only the head serves HTTP.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from time import monotonic, sleep
from typing import Any

import psutil

from cluster import haproxy
from cluster.local_ray import serve_environment
from cluster.node_processes import MARK, Started, find_processes


def possible() -> bool:
    """Whether this process may make network namespaces. Tries to make one."""
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
    """One node on the machine's loopback."""

    name: str
    address: str
    mark: str  # in the environment of all its processes

    def command(self, program: str, arguments: tuple[str, ...]) -> list[str]:
        return [program, *arguments]

    def processes(self) -> list[psutil.Process]:
        return list(find_processes(Started(self.mark, self.name, head=False)))

    def kill(self) -> None:
        """Kills all processes of the node at once, like a crash of the machine's kernel."""
        self._signal(signal.SIGKILL)

    def unplug(self) -> None:
        """Stops everything that comes from the node, without notice."""
        self._signal(signal.SIGSTOP)

    def plug(self) -> None:
        """Undoes `unplug`."""
        self._signal(signal.SIGCONT)

    def join(self) -> None:
        pass

    def leave(self) -> None:
        for _ in range(3):
            self.kill()
            psutil.wait_procs(self.processes(), timeout=2)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


@dataclass
class Namespaced(Member):
    """One node in a namespace. All of its processes live there, so the kernel knows them."""

    bridge: str

    @property
    def _namespace(self) -> str:
        """The name of the namespace, and of the near end of its cable."""
        return f"{self.bridge}-{self.name}"

    def command(self, program: str, arguments: tuple[str, ...]) -> list[str]:
        return ["ip", "netns", "exec", self._namespace, program, *arguments]

    def processes(self) -> list[psutil.Process]:
        listed = subprocess.run(["ip", "netns", "pids", self._namespace], capture_output=True, text=True, check=False).stdout
        found = []
        for pid in listed.split():
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found

    def unplug(self) -> None:
        """Stops everything that is sent to the node, without notice."""
        _ip("link", "set", self._namespace, "down")

    def plug(self) -> None:
        _ip("link", "set", self._namespace, "up")

    def join(self) -> None:
        space = self._namespace
        _ip("netns", "add", space)
        _ip("link", "add", space, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", space, "master", self.bridge, "up")
        _ip("-n", space, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", space, "link", "set", "lo", "up")

    def leave(self) -> None:
        super().leave()
        _ip("link", "del", self._namespace, check=False)  # the end of the namespace would remove it too, but later
        _ip("netns", "del", self._namespace, check=False)


class Lab:
    """The nodes, the head first."""

    def __init__(self, folder: Path, namespaces: bool) -> None:
        self.members: dict[str, Member] = {}
        self._folder, self._name, self._namespaces = folder, f"ef{token_hex(2)}", namespaces
        if namespaces:
            _ip("link", "add", self._name, "type", "bridge")
            _ip("link", "set", self._name, "up")
        # A short name, because the folder has sockets, whose paths may have 107 characters.
        # A Ray of this process has variables that other machines' Rays must not get.
        ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.environment = ours | haproxy.environment() | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token_hex(16)}
        self.environment |= {"PYTHONPATH": os.getcwd(), "HF_HUB_OFFLINE": "1", "RAY_TMPDIR": str(folder)}

    @property
    def head(self) -> Member:
        return next(iter(self.members.values()))

    def machine(self, name: str) -> Member:
        """A machine without processes."""
        number, mark = len(self.members) + 2, f"{self._name}-{name}"
        if self._namespaces:
            self.members[name] = Namespaced(name, f"10.77.0.{number}", mark, self._name)
        else:
            self.members[name] = Member(name, f"127.0.77.{number}", mark)
        self.members[name].join()
        (self._folder / name).mkdir()
        return self.members[name]

    def add(self, name: str, node_class: str, num_cpus: int, num_gpus: int = 0) -> Member:
        """A machine with Ray. The first one is the head."""
        first = not self.members
        member = self.machine(name)
        where = ["--head", "--port=6379", "--dashboard-host=127.0.0.1"] if first else [f"--address={self.head.address}:6379"]
        self.run(
            name, "-m", "ray.scripts.scripts", "start", *where, f"--node-ip-address={member.address}",
            f"--labels=emberforge-class={node_class},emberforge-node={name}", f"--num-cpus={num_cpus}", f"--num-gpus={num_gpus}",
            "--object-store-memory=100000000", "--disable-usage-stats", "--include-log-monitor=false",
        )  # fmt: skip
        return member

    def run(self, name: str, *arguments: str, **environment: str) -> str:
        """Runs Python on a machine until it ends. Returns: its output. Raises: RuntimeError."""
        log = self._folder / f"{name}.log"
        with log.open("a", encoding="utf-8") as file:
            done = subprocess.run(
                self.members[name].command(sys.executable, arguments),
                env=self._environment_of(name) | environment,
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

    def start(self, name: str, *arguments: str, program: str = sys.executable) -> "subprocess.Popen[str]":
        """Starts Python, or another program, on a machine."""
        command = self.members[name].command(program, arguments)
        return subprocess.Popen(command, env=self._environment_of(name), stdout=subprocess.PIPE, text=True)

    def process(self, what: str, *names: str) -> psutil.Process:
        """The first process with `what` in its command line on these machines."""
        everyone = [each for name in names for each in self.members[name].processes()]
        return next(each for each in everyone if what in " ".join(each.cmdline()))

    def close(self) -> None:
        for member in self.members.values():
            member.leave()
        if self._namespaces:
            _ip("link", "del", self._name, check=False)

    def _environment_of(self, name: str) -> Mapping[str, str]:
        return self.environment | serve_environment(self._folder / name) | {MARK: self.members[name].mark}


@contextmanager
def lab() -> Iterator[Lab]:
    """An empty laboratory. At the end it removes its processes and interfaces."""
    namespaces = possible()
    if not namespaces:
        warnings.warn(
            "network namespaces need root and iproute2: the nodes share this machine's loopback, only the head serves HTTP, and "
            "a node falls silent by being stopped",
            stacklevel=3,
        )
    folder = Path(tempfile.mkdtemp(prefix="ef-", dir="/tmp"))  # a short name
    made = Lab(folder, namespaces)
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
