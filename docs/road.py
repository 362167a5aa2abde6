"""Draws the road of a request as SVG: its modules from top to bottom, and the imports between them as arcs."""

from collections.abc import Iterator
from html import escape

from docs.imports import imported, purpose

# The modules that a request for embeddings comes through, in this order.
ROAD = (
    "serve_app.http.app",
    "serve_app.http.routes",
    "serve_app.dialects.openai",
    "serve_app.compute.embedding",
    "serve_app.compute.service",
    "serve_app.admission.admission",
    "engine.text.tokenizer",
    "serve_app.gateway.pool",
    "cluster.router",
    "serve_app.replica.pool",
    "serve_app.replica.local",
    "engine.engine",
    "engine.loop",
    "engine.passes",
    "engine.schedule.scheduler",
    "engine.schedule.queue",
    "engine.run.runner",
    "engine.run.pack",
    "engine.model.encoder",
    "engine.heads.pool",
    "engine.kernels",
)
_LEFT, _WIDTH, _STEP, _HEIGHT = 60, 700, 46, 36
_COLOURS = {"serve_app": "#c2571a", "cluster": "#4a7fb5", "engine": "#3f8f5f"}


def svg() -> str:
    """The picture. Its colours are readable on a light and on a dark page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    height = _STEP * len(ROAD) + 10
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {height}" font-family="sans-serif" role="img">'
    yield "<title>The road of a request for embeddings</title>"
    yield f'<rect width="960" height="{height}" rx="8" fill="#ffffff"/>'
    for number, module in enumerate(ROAD):
        y, colour = _STEP * number + 8, _COLOURS[module.partition(".")[0]]
        yield f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="4" fill="#f7f7f7" stroke="{colour}"/>'
        yield f'<text x="{_LEFT + 10}" y="{y + 15}" font-size="12" font-weight="bold" fill="{colour}">{_file(module)}</text>'
        yield f'<text x="{_LEFT + 10}" y="{y + 29}" font-size="11" fill="#333333">{_what(module)}</text>'
    for start, module in enumerate(ROAD):
        targets = set(imported(module))
        for end, other in enumerate(ROAD):
            if other in targets and other != module:
                yield _arc(start, end, _COLOURS[module.partition(".")[0]])
    yield "</svg>"


def _file(module: str) -> str:
    return module.replace(".", "/") + ("/" if module == "engine.kernels" else ".py")


def _what(module: str) -> str:
    """The first sentence of the module's docstring."""
    return escape(purpose(module).partition(". ")[0].rstrip(".").replace("`", ""))


def _arc(start: int, end: int, colour: str) -> str:
    """Downwards on the right of the boxes, upwards on their left. The dot is at the module that is imported."""
    down = end > start
    x = _LEFT + _WIDTH if down else _LEFT
    wide = (30 + 11 * abs(end - start)) * (1 if down else -1)
    wide = min(wide, 240) if down else max(wide, -80)
    y0, y1 = (_STEP * row + 8 + _HEIGHT / 2 + (4 if row == start else -4) for row in (start, end))
    path = f'<path d="M{x},{y0:g} C{x + wide},{y0:g} {x + wide},{y1:g} {x},{y1:g}" fill="none" stroke="{colour}" opacity="0.6"/>'
    return f'{path}<circle cx="{x}" cy="{y1:g}" r="3" fill="{colour}"/>'
