"""The fuzzer's cases, from a seeded `Random`. A case is one request to the HTTP port, or one gRPC call."""

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any, Literal
from urllib.parse import quote, urlencode

from loadtests.fuzz_bodies import Generated, Operations, body
from serve_app.grpc import tei_pb2 as tei

Kind = Literal["body", "raw", "grpc", "grpc bytes"]

# A client waits longer than the server's own timeout. On two slow and busy cores an answer of 23 tokens took 32 s.
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Site:
    """The server under test. `prefix` is the path of its application, `application` the name for gRPC."""

    port: int
    grpc_port: int
    prefix: str = ""
    application: str | None = None
    host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Case:
    """A request. `data` is all bytes of the connection, or a gRPC message."""

    kind: Kind
    route: str  # the name in the counts: the path, the gRPC method, or the fault of the bytes
    data: bytes
    path: str = ""  # the path decides the form of errors; "" if the server cannot know the path
    method: str = "POST"
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    has_deadline: bool = False  # 504 is a right answer then
    ends: bool = False  # the client closes its side of the connection after the request
    leaves: bool = False  # the client does not wait for the whole answer
    waits_s: float = _PATIENCE_S  # the client waits this long for the answer, then leaves

    def to_json(self) -> str:
        metadata = [[name, _text(value)] for name, value in self.metadata]
        return json.dumps(asdict(self) | {"data": base64.b64encode(self.data).decode(), "metadata": metadata})

    @classmethod
    def from_json(cls, line: str) -> "Case":
        given = json.loads(line)
        metadata = tuple(
            (name, value if isinstance(value, str) else base64.b64decode(value[0])) for name, value in given["metadata"]
        )
        return replace(cls(**given), data=base64.b64decode(given["data"]), metadata=metadata)


def _text(value: str | bytes) -> Any:
    return value if isinstance(value, str) else [base64.b64encode(value).decode()]


def operations(document: dict[str, Any]) -> Operations:
    """The POST routes of an OpenAPI document, each with the fields of its bodies."""
    found: Operations = {}
    for path, methods in document["paths"].items():
        if "post" in methods:
            schema = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
            names = [each["$ref"].rpartition("/")[2] for each in schema.get("anyOf", [schema])]
            found[path] = sorted({field for name in names for field in document["components"]["schemas"][name]["properties"]})
    return found


def cases(
    seed: int, site: Site, document: dict[str, Any], models: Sequence[str], generated: Generated | None = None
) -> Iterator[Case]:
    """Cases without end.

    Args:
        generated: bodies by path (`fuzz_schema.py`). They are sent unchanged, or changed like the valid ones.
    """
    random, posts = Random(seed), operations(document)
    gets = [path for path, methods in document["paths"].items() if "get" in methods] + ["/v1/models/x", "/docs", "/openapi.json"]
    makers: list[Callable[[], Case]] = [
        lambda: _post(random, site, posts, models, generated or {}),
        lambda: _get(random, site, gets),
        lambda: _raw(random, site, posts, models),
        lambda: _grpc(random, site, models),
        lambda: _grpc_bytes(random),
    ]
    while True:
        (make,) = random.choices(makers, (60, 5, 18, 15, 2))
        yield make()


# Headers that the server, HAProxy or Ray parses, with values that are hard to parse.
_HEADERS: list[tuple[str, tuple[bytes, ...]]] = [
    ("x-priority", (b"batch", b"interactive", b"", b"BATCH", b"\xff", b"1")),
    ("x-request-deadline-ms", (b"1", b"20", b"5000", b"0", b"-1", b"nan", b"inf", b"1e400", b"9" * 400, b"", b"\xb2")),
    ("cache-control", (b"no-store", b"no-store, no-store=", b"\xff", b",,,")),
    ("authorization", (b"Bearer", b"Bearer \xff", b"Basic Og==", b"")),
    ("accept", (b"text/event-stream", b"*/*;q=x", b"")),
    ("x-request-id", (b"\xff\xfe", b"a" * 500, b"", b"a b")),
    ("x-request-timeout-seconds", (b"0", b"-1", b"x", b"1e9")),
    ("serve_multiplexed_model_id", (b"x", b"\xff", b"")),
    ("traceparent", (b"00-0-0-0", b"00-" + b"f" * 32 + b"-" + b"f" * 16 + b"-01", b"\xff")),
    ("origin", (b"http://x", b"null", b"\xff")),
    ("access-control-request-method", (b"POST", b"\xff")),
    ("expect", (b"100-continue", b"200-ok")),
    ("range", (b"bytes=0-1",)),
    ("content-encoding", (b"gzip", b"identity")),
    ("upgrade", (b"websocket", b"h2c")),
    ("connection", (b"close", b"upgrade", b"keep-alive, x")),
    ("cookie", (b"a=b; " * 100, b"\xff=")),
    ("x-forwarded-for", (b"::1", b"\xff", b"x" * 300)),
    ("host", (b"", b"x" * 300, b"[::1]:x", b"\xff")),
]


def _post(random: Random, site: Site, posts: Operations, models: Sequence[str], generated: Generated) -> Case:
    """A body that is wrong in some places. The rest of the request is right, except perhaps its headers."""
    path, headers = random.choice(list(posts)), []
    made = body(random, path, posts[path], models, generated.get(path, ()))
    if random.random() < 0.2:
        for name, values in random.sample(_HEADERS, random.randrange(1, 4)):
            headers.append((name, random.choice(values)))
    has_deadline = any(name == "x-request-deadline-ms" for name, _ in headers)
    data = http(site, "POST", path, [*made.headers, *headers], made.content)
    # A text may be as long as the model can write. The client does not wait for its end.
    leaves = "completions" in path
    return Case(
        "body", path, data, site.prefix + path, has_deadline=has_deadline, leaves=leaves, waits_s=1.0 if leaves else _PATIENCE_S
    )


def _get(random: Random, site: Site, gets: Sequence[str]) -> Case:
    path, method = (
        random.choice(gets),
        random.choice(("GET", "GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "QUERY")),
    )
    query = random.choice(
        ("", "", "?model=x", "?" + urlencode({"model": "\U0010ffff"}), "?%ff=%00&&=", "?a" * 200, "?model=%ed%a0%80")
    )
    if path == "/v1/models/x":
        path = "/v1/models/" + quote(random.choice(("x", "/", "..", "\x00", "é", "a" * 2000, "%")))
    headers = [(name, random.choice(values)) for name, values in random.sample(_HEADERS, random.randrange(2))]
    data = http(site, method, path + query, headers, b"")
    return Case("body", path if len(path) < 40 else "/v1/models/...", data, site.prefix + path, method)


def http(site: Site, method: str, target: str, headers: Sequence[tuple[str, bytes]], content: bytes) -> bytes:
    """The bytes of a request."""
    lines = [f"{method} {site.prefix}{target} HTTP/1.1".encode()]
    if not any(name == "host" for name, _ in headers):
        lines.append(b"host: x")
    lines += [name.encode() + b": " + value for name, value in headers]
    if content or method in ("POST", "PUT", "PATCH"):
        lines.append(b"content-length: %d" % len(content))
    return b"\r\n".join(lines) + b"\r\n\r\n" + content


_GOOD = b'{"inputs":"a text"}'


def _raw(random: Random, site: Site, posts: Operations, models: Sequence[str]) -> Case:
    """A connection whose bytes are not valid HTTP."""
    name, make = random.choice(_RAW)
    data = make(random, site.prefix.encode())
    if name == "mutated":
        path = random.choice(list(posts))
        made = body(random, path, posts[path], models)
        data = _mutated(random, http(site, "POST", path, made.headers, made.content))
    return Case("raw", name, data, ends=random.random() < 0.5, waits_s=random.choice((0.02, 0.02, 0.02, 0.1, 0.5)))


def _head(prefix: bytes, *lines: bytes, start: bytes = b"POST %s/embed HTTP/1.1") -> bytes:
    return b"\r\n".join([start.replace(b"%s", prefix), b"host: x", b"content-type: application/json", *lines]) + b"\r\n\r\n"


def _chunked(random: Random, prefix: bytes) -> bytes:
    size = random.choice(
        (b"13", b"ffffffffffffffffff", b"-1", b"zz", b"", b"0x13", b"13;a=b", b"13 ", b"14", b"12", b"7fffffffffffffff")
    )
    end = random.choice(
        (
            b"\r\n0\r\n\r\n",
            b"\r\n0\r\n",
            b"\n0\n\n",
            b"",
            b"\r\n0\r\nx: y\r\n\r\n",
            b"0\r\n\r\n",
            b"\r\n0\r\ntransfer-encoding: x\r\n\r\n",
        )
    )
    coding = random.choice(
        (b"chunked",) * 6 + (b"gzip, chunked", b"chunked, chunked", b"chunked, identity", b"x", b"\x0bchunked", b"CHUNKED")
    )
    return _head(prefix, b"transfer-encoding: " + coding) + size + b"\r\n" + _GOOD + end


def _length(random: Random, prefix: bytes) -> bytes:
    length = random.choice(
        (b"0", b"1", b"18", b"20", b"1000", b"-1", b"+19", b"19, 19", b"1e2", b"9" * 30, b"", b"0x13", b"19 ", b"\xb2")
    )
    return _head(prefix, b"content-length: " + length) + _GOOD


def _two_lengths(random: Random, prefix: bytes) -> bytes:
    other = random.choice((b"content-length: 19", b"content-length: 5", b"transfer-encoding: chunked", b"content-length : 19"))
    lines = [b"content-length: 19", other]
    random.shuffle(lines)
    return _head(prefix, *lines) + _GOOD


def _bomb(random: Random, prefix: bytes) -> bytes:
    number, size = random.choice(((200, 20), (5000, 10), (1, 70_000), (3, 30_000), (90, 600), (1, 8_000)))
    lines = [b"x-%d: " % i + b"a" * size for i in range(number)]
    return _head(prefix, *lines, b"content-length: 19") + _GOOD


def _start_line(random: Random, prefix: bytes) -> bytes:
    target = random.choice(
        (
            b"/embed",
            b"*",
            b"",
            b"embed",
            b"http://x/embed",
            b"http://[/embed",
            b"//embed",
            b"/../embed",
            b"/%00",
            b"/%",
            b"/%ff%fe",
            b"/\xff",
            b"/embed?" + b"a" * 9000,
            b"/embed#x",
            b"x:80",
            b"/embed\x00",
            b"/v1/models/%2e%2e",
            b"/" * 3000,
            b"/embed;x",
            b"/EMBED/",
        )
    )
    method = random.choice(
        (b"POST", b"GET", b"CONNECT", b"OPTIONS", b"PRI", b"post", b"", b"P\x00ST", b"X" * 300, b"M-SEARCH", b"TRACE")
    )
    version = random.choice(
        (b"HTTP/1.1",) * 5 + (b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"", b"HTTP/1.9", b"HTTQ/1.1", b"HTTP/11.1")
    )
    space = random.choice((b" ", b" ", b" ", b"\t", b"  ", b""))
    if target[:1] == b"/":
        target = prefix + target
    return _head(prefix, b"content-length: 19", start=space.join((method, target, version)).replace(b"%s", b"")) + _GOOD


def _header_line(random: Random, prefix: bytes) -> bytes:
    line = random.choice(
        (
            b"no colon",
            b": empty",
            b"a b: c",
            b"a\x00: b",
            b"a: \x00",
            b"a:\x01",
            b" folded: x",
            b"a: b\r\n folded",
            b"a: b\rc: d",
            b"a: b\nc: d",
            b"\xff: \xff",
            b"host: y",
            b"(a): b",
            b"connection: content-length",
            b"connection: host",
            b"te: trailers",
            b"content-type: text/plain",
            b"upgrade: h2c\r\nhttp2-settings: x",
        )
    )
    return _head(prefix, line, b"content-length: 19") + _GOOD


def _pipelined(random: Random, prefix: bytes) -> bytes:
    one = _head(prefix, b"content-length: 19") + _GOOD
    rest = random.choice(
        (
            one,
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x00\x01",
            b"\r\n\r\n" + one,
            one[:30],
            b"PUT %s/x HTTP/1.1\r\nhost: x\r\n\r\n" % prefix,
        )
    )
    return one * random.randrange(1, 20) + rest


def _cut(random: Random, prefix: bytes) -> bytes:
    one = _head(prefix, b"content-length: 19") + _GOOD
    return one[: random.randrange(len(one))]


def _preface(random: Random, _prefix: bytes) -> bytes:
    return random.choice(
        (
            _H2,
            _H2 + _frames(random),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + random.randbytes(200),
            b"PROXY TCP4 x\r\n",
            b"\r\n\r\n\x0d\x0a\x51\x55\x49\x54\x0a",
        )
    )


def _noise(random: Random, _prefix: bytes) -> bytes:
    return random.randbytes(random.randrange(1, 300))


_RAW: list[tuple[str, Callable[[Random, bytes], bytes]]] = [
    ("chunked", _chunked),
    ("content-length", _length),
    ("two lengths", _two_lengths),
    ("header bomb", _bomb),
    ("start line", _start_line),
    ("header line", _header_line),
    ("pipelined", _pipelined),
    ("cut", _cut),
    ("preface", _preface),
    ("noise", _noise),
    ("mutated", _noise),
]


def _mutated(random: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(random.randrange(1, 8)):
        at = random.randrange(len(changed))
        if random.random() < 0.5:
            changed[at] = random.randrange(256)
        elif random.random() < 0.5:
            del changed[at : at + random.randrange(1, 9)]
        else:
            changed[at:at] = random.randbytes(random.randrange(1, 9))
        if not changed:
            return b"\r\n"
    return bytes(changed)


_H2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def _frames(random: Random) -> bytes:
    """HTTP/2 frames of any type, flags, stream and length, both valid and invalid."""
    frames = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # SETTINGS
    for _ in range(random.randrange(1, 8)):
        payload = random.randbytes(random.choice((0, 4, 5, 6, 8, 20, 100)))
        length = len(payload) if random.random() < 0.8 else random.randrange(1 << 24)
        stream = random.choice((0, 1, 2, 3, 0x7FFFFFFF, 0xFFFFFFFF))
        frames += (
            length.to_bytes(3, "big") + bytes((random.randrange(12), random.randrange(256))) + stream.to_bytes(4, "big") + payload
        )
    return frames


def _grpc_bytes(random: Random) -> Case:
    """A connection to the gRPC port whose bytes are not valid HTTP/2."""
    data = random.choice((_H2, b"", _H2)) + (
        _frames(random) if random.random() < 0.8 else random.randbytes(random.randrange(200))
    )
    return Case("grpc bytes", "frames", data or b"x", ends=random.random() < 0.5, waits_s=random.choice((0.02, 0.1)))


_MESSAGES_OF: dict[str, list[Any]] = {
    "/tei.v1.Info/Info": [tei.InfoRequest()],
    "/tei.v1.Embed/Embed": [
        tei.EmbedRequest(inputs="one"),
        tei.EmbedRequest(inputs="two", truncate=True, normalize=False, dimensions=8),
    ],
    "/tei.v1.Embed/EmbedStream": [tei.EmbedRequest(inputs="one", prompt_name="query")],
    "/tei.v1.Embed/EmbedSparse": [tei.EmbedSparseRequest(inputs="one", truncate=True)],
    "/tei.v1.Embed/EmbedSparseStream": [tei.EmbedSparseRequest(inputs="one")],
    "/tei.v1.Embed/EmbedAll": [tei.EmbedAllRequest(inputs="one", truncation_direction=1)],
    "/tei.v1.Embed/EmbedAllStream": [tei.EmbedAllRequest(inputs="one")],
    "/tei.v1.Predict/Predict": [tei.PredictRequest(inputs="one", raw_scores=True)],
    "/tei.v1.Predict/PredictPair": [tei.PredictPairRequest(inputs=["one", "two"])],
    "/tei.v1.Predict/PredictStream": [tei.PredictRequest(inputs="one")],
    "/tei.v1.Predict/PredictPairStream": [tei.PredictPairRequest(inputs=["one", "two"])],
    "/tei.v1.Rerank/Rerank": [tei.RerankRequest(query="one", texts=["two", "three"], return_text=True)],
    "/tei.v1.Rerank/RerankStream": [tei.RerankStreamRequest(query="one", text="two")],
    "/tei.v1.Tokenize/Tokenize": [tei.EncodeRequest(inputs="one", add_special_tokens=True)],
    "/tei.v1.Tokenize/TokenizeStream": [tei.EncodeRequest(inputs="one")],
    "/tei.v1.Tokenize/Decode": [
        tei.DecodeRequest(ids=[101, 2028, 102], skip_special_tokens=True),
        tei.DecodeRequest(ids=[2**32 - 1]),
    ],
    "/tei.v1.Tokenize/DecodeStream": [tei.DecodeRequest(ids=[101])],
    "/grpc.health.v1.Health/Check": [tei.EmbedRequest(inputs="tei.v1.Embed"), tei.EmbedRequest()],
    "/tei.v1.Embed/Nothing": [tei.EmbedRequest()],
}
_METADATA: tuple[tuple[str, tuple[str | bytes, ...]], ...] = (
    ("x-model", ("x", "", "é".encode().decode("latin-1"))),
    ("x-priority", ("batch", "", "x")),
    ("x-request-deadline-ms", ("20", "0", "nan", "-1", "1e400", "")),
    ("x-grpc-timeout", ("1m", "x", "99999999H", "0S", "")),
    ("authorization", ("Bearer", "")),
    ("application", ("nothing", "")),
    ("request_id", ("x" * 300, "")),
    ("multiplexed_model_id", ("x", "")),
    ("x-bin", (b"\xff\x00", b"", b"\xff" * 5000)),
    ("x-large", ("a" * 5000,)),
)


def _grpc(random: Random, site: Site, models: Sequence[str]) -> Case:
    """A call with some bytes of its message changed, or with unusual metadata."""
    method = random.choice(list(_MESSAGES_OF))
    data: bytes = random.choice(_MESSAGES_OF[method]).SerializeToString()
    if data and random.random() < 0.7:
        data = _mutated(random, data)
    elif random.random() < 0.2:
        data = random.randbytes(random.randrange(60))
    metadata: list[tuple[str, str | bytes]] = []
    if random.random() < 0.3:
        metadata = [(name, random.choice(values)) for name, values in random.sample(_METADATA, random.randrange(1, 4))]
    named = {name for name, _ in metadata}
    if "x-model" not in named and random.random() < 0.5:
        metadata.append(("x-model", random.choice(models)))
    if site.application and "application" not in named:
        metadata.append(("application", site.application))
    has_deadline = bool(named & {"x-request-deadline-ms", "x-grpc-timeout"})
    return Case("grpc", method, data, metadata=tuple(metadata), has_deadline=has_deadline)
