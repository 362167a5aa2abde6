"""Answers with all metrics of a node at one address (docs/decisions/038).

Each of our processes has a socket in a folder of the node, at which it gives its metrics (`publish`). The process beside HAProxy
(`cluster/haproxy.py`) answers `GET /metrics` of the node: at each scrape it asks all processes and HAProxy, and merges their
answers.
"""

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from time import monotonic

from cluster.node_sockets import listen

log = logging.getLogger(__name__)

# The timeout of a process's metrics in seconds. Prometheus waits 10 s for the node.
TIMEOUT_S = 3.0
# Scrapes within this time share one answer. Anybody may ask for metrics, and each answer takes time of every event loop.
_FRESH_S = 0.1
# The names of the sockets are short, because the path of a socket has at most 107 bytes.
_PROCESSES, _NODE = "p", "n"
# The end of a complete answer. It is missing if a process is killed while it answers.
_END = b"# EOF\n"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# HAProxy's exporter has over a hundred series. Dashboards and alert rules need these.
HAPROXY_SERIES = (
    "haproxy_process_current_connections",
    "haproxy_process_max_connections",
    "haproxy_process_start_time_seconds",
    "haproxy_frontend_current_sessions",
    "haproxy_frontend_denied_connections_total",
    "haproxy_frontend_http_requests_total",
    "haproxy_frontend_http_responses_total",
    "haproxy_backend_active_servers",
    "haproxy_backend_connection_errors_total",
    "haproxy_backend_current_sessions",
    "haproxy_backend_http_responses_total",
    "haproxy_backend_redispatch_warnings_total",
    "haproxy_backend_requests_denied_total",
    "haproxy_backend_response_errors_total",
    "haproxy_backend_retry_warnings_total",
)
_HAPROXY_PATH = "/metrics?scope=global&scope=frontend&scope=backend"


def node_socket(folder: Path) -> Path:
    """The socket that answers for the node. `folder` is the folder of this node's HAProxy."""
    return folder / _NODE


def publish(folder: Path, exposition: Callable[[], bytes]) -> None:
    """Answers with this process's metrics on a socket, from a thread.

    Args:
        folder: the folder of this node's HAProxy.
        exposition: gives the metrics in Prometheus' text format. The thread calls it.
    """
    server = listen(folder / _PROCESSES / str(os.getpid()))
    threading.Thread(target=_answer_all, args=(server, exposition), name="metrics", daemon=True).start()


def _answer_all(server: socket.socket, exposition: Callable[[], bytes]) -> None:
    while True:
        connection, _ = server.accept()
        with connection:
            try:
                connection.settimeout(TIMEOUT_S)
                connection.sendall(exposition() + _END)
            except OSError:  # the client has left; TimeoutError is an OSError
                pass
            except Exception:
                log.exception("the metrics of this process failed")


class NodeServer(ThreadingMixIn, UnixStreamServer):
    """Answers `GET /metrics` with the metrics of the node. HAProxy is the only client."""

    daemon_threads = True

    def __init__(self, folder: Path, haproxy_port: int | None) -> None:
        """`haproxy_port`: the port of HAProxy's exporter on this machine."""
        super().__init__(str(node_socket(folder)), _Scrape, bind_and_activate=False)
        self.socket.close()
        self.socket = listen(node_socket(folder))
        self._folder, self._haproxy_port = folder, haproxy_port
        self._lock, self._metrics, self._collected_at = threading.Lock(), b"", -_FRESH_S

    def metrics(self) -> bytes:
        with self._lock:
            if monotonic() - self._collected_at > _FRESH_S:
                self._metrics = collect(self._folder, self._haproxy_port)
                self._collected_at = monotonic()
            return self._metrics

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores a client that leaves during its answer."""
        if not isinstance(sys.exception(), OSError):
            log.exception("the metrics of the node failed")


class _Scrape(BaseHTTPRequestHandler):
    timeout = TIMEOUT_S
    server: NodeServer

    def do_GET(self) -> None:
        self.wfile.write(self._head())

    def do_HEAD(self) -> None:
        """Answers HEAD, because HAProxy's `METH_GET` is also true for HEAD."""
        self._head()

    def _head(self) -> bytes:
        """Sends the head of the answer. Returns: the body."""
        body = self.server.metrics()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return body

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing, because HAProxy logs the requests."""


def collect(folder: Path, haproxy_port: int | None = None) -> bytes:
    """The metrics of all processes of the node, and of HAProxy. Asks all at once. Sockets of ended processes are removed."""
    sockets = sorted(each for each in (folder / _PROCESSES).glob("*") if each.name.isdecimal())
    with ThreadPoolExecutor(len(sockets) + 1) as pool:
        haproxy = pool.submit(_ask_haproxy, haproxy_port)
        answers = [each for each in pool.map(_ask, sockets) if each is not None]
        whole = [each for each in answers if each]
        return merged([*whole, haproxy.result(), _own(len(whole), len(answers) - len(whole))])


def _ask(path: Path) -> str | None:
    """The metrics of a process. None if the process has ended. "" if it does not answer in time."""
    answer = bytearray()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT_S)
        try:
            connection.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return None
        except OSError:
            return ""
        with suppress(OSError):
            while part := connection.recv(1 << 16):
                answer += part
    return answer.removesuffix(_END).decode() if answer.endswith(_END) else ""


def _ask_haproxy(port: int | None) -> str:
    """The series of `HAPROXY_SERIES`. "" if HAProxy does not answer."""
    if port is None:
        return ""
    connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", _HAPROXY_PATH)
        text = connection.getresponse().read().decode()
    except (OSError, HTTPException):
        return ""
    finally:
        connection.close()
    return "\n".join(line for line in text.splitlines() if _family(line) in HAPROXY_SERIES)


def _family(line: str) -> str:
    """The name of the series that a line is about."""
    return line.split(" ", 3)[2] if line.startswith("# ") else line.split("{", 1)[0].split(" ", 1)[0]


def _own(num_answers: int, num_silent: int) -> str:
    return (
        "# HELP emberforge_node_processes Processes of the node that answered this scrape\n"
        "# TYPE emberforge_node_processes gauge\n"
        f"emberforge_node_processes {num_answers}\n"
        f"# HELP emberforge_node_silent_processes Processes of the node that did not answer within {TIMEOUT_S:g} s\n"
        "# TYPE emberforge_node_silent_processes gauge\n"
        f"emberforge_node_silent_processes {num_silent}\n"
    )


def merged(expositions: Iterable[str]) -> bytes:
    """Merges several expositions into one. Each series name has its type once, followed by the samples of all expositions."""
    families: dict[str, dict[str, str]] = {}  # by name of the series: one HELP, one TYPE, and the samples
    for text in expositions:
        lines: dict[str, str] = {}
        for line in filter(None, text.split("\n")):  # not `splitlines`, because a label may have other line breaks
            key = line
            if line.startswith("# "):
                _, key, name, *_ = line.split(" ", 3)
                lines = families.setdefault(name, {})
            lines.setdefault(key, line)
    return "\n".join([line for lines in families.values() for line in lines.values()] + [""]).encode()


def labelled(exposition: str, labels: str) -> str:
    """Adds labels to each sample of an exposition. `labels` has the form of a sample: `a="1",b="2"`."""
    lines = filter(None, exposition.split("\n"))  # as in `merged`
    return "\n".join([line if line.startswith("#") else _labelled(line, labels) for line in lines] + [""])


def _labelled(sample: str, labels: str) -> str:
    name, brace, rest = sample.partition("{")
    if brace:
        return f"{name}{{{labels},{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{labels}}} {value}"
