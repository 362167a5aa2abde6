"""Serves the files of the console's page. The files need no API key, because they hold no data. Requests for data need one."""

import hashlib
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from serve_app.compute.service import Service
from serve_app.errors import UnknownRoute

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
# The page loads files only from this server, runs only its own scripts, and no other page may show it in a frame.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # a browser asks each time whether its copy is current, so all files are of one version
}


class _File(NamedTuple):
    content: bytes
    media_type: str
    tag: str


async def page(_service: Service, request: Request) -> Response:
    return _answer("index.html", request)


async def file(_service: Service, request: Request) -> Response:
    """Raises: UnknownRoute."""
    return _answer(request.path_params["name"], request)


def _answer(name: str, request: Request) -> Response:
    found = _files().get(name)
    if found is None:
        raise UnknownRoute(f"the console has no file {name}", 404)
    headers = _HEADERS | {"etag": found.tag}
    known = {each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")}
    if found.tag in known:
        return Response(None, 304, headers)
    return Response(found.content, 200, headers, found.media_type)


@cache
def _files() -> dict[str, _File]:
    """Every file of the page by name. A name in a request is never used as a path."""
    found = {}
    for path in (files("serve_app.console") / "static").iterdir():
        media_type, content = _TYPES.get(path.name.rpartition(".")[2]), path.read_bytes()
        if media_type is not None:
            found[path.name] = _File(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found
