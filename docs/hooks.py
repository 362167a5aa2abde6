"""mkdocs calls these functions: they add pages from outside docs/, draw the benchmarks' charts, and mend links.

Runs in the environment of docs/requirements.txt, so it imports nothing of emberforge.
"""

import ast
import json
import posixpath
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "loadtests" / "results"
# Pages of the site that are files elsewhere in the repository.
PAGES = {"changelog.md": "CHANGELOG.md", "kernels.md": "engine/kernels/README.md"} | {
    f"benchmarks/{path.name}": f"loadtests/results/{path.name}" for path in sorted(RESULTS.glob("*.md"))
}
# The site's page for a link to a folder.
FOLDERS = {"docs/decisions": "decisions/index.md", "loadtests/results": "benchmarks/index.md"}
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


class Chart(NamedTuple):
    """Bars from one table of a result: a bar for each row and column of values."""

    title: str
    result: str  # loadtests/results/<result>.json
    table: str
    only: dict[str, Any]  # the rows with these values
    label: str  # the column that names a row's bars
    values: dict[str, str]  # by column: the bar's name beside the row's


_VLLM = "vLLM 0.26 (cited)"
CHARTS = (
    Chart(
        "Embedding mixed texts, bf16, thousand tokens/s",
        "engine",
        "Tokens/s",
        {"texts": "mixed", "dtype": "bfloat16"},
        "model",
        {
            "k tokens/s": "emberforge",
            "transformers SDPA: k tokens/s": "transformers, padded",
            "transformers packed, FA2: k tokens/s": "transformers, packed",
            _VLLM: "vLLM 0.26, another run",
        },
    ),
    Chart(
        "Generating with 64 streams, bf16, tokens/s",
        "generate",
        "Decode",
        {"prompts of": 128, "temperature": "0", "streams": 64},
        "model",
        {"tokens/s": "emberforge", _VLLM: "vLLM 0.26, another run"},
    ),
    Chart(
        "Reranking, 10 queries of 100 documents at once, documents/s",
        "rerank",
        "One query, 100 documents",
        {},
        "system",
        {"10 at once: documents/s": ""},
    ),
    Chart(
        "Embedding on two cores, all-MiniLM-L6-v2, tokens/s",
        "cpu_engine",
        "all-MiniLM-L6-v2, texts to vectors",
        {},
        "system",
        {"tokens/s": ""},
    ),
    Chart(
        "Serving alone, a stub engine, 16 connections, requests/s",
        "overhead",
        "A stub engine that gives a fixed vector",
        {"connections": 16},
        "server",
        {"req/s": ""},
    ),
    Chart(
        "Routing on four unlike machines at 80 % load, p99 in ms (less is better)",
        "cluster",
        "Routing",
        {"load": "80%"},
        "routing",
        {"p99 ms": ""},
    ),
)


def on_config(config: MkDocsConfig) -> None:
    """Fills the sections whose pages are found by looking."""
    decisions = [f"decisions/{path.name}" for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))]
    found = {"Decisions": ["decisions/index.md", *decisions], "Benchmarks": ["benchmarks/index.md"]}
    for section in config.nav:
        for title in section.keys() & found.keys():
            section[title] = found[title]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the pages from outside docs/ and the pages that are made here."""
    for uri, path in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text(encoding="utf-8")))
    files.append(File.generated(config, "benchmarks/index.md", content="\n".join(_benchmarks())))
    files.append(File.generated(config, "decisions/index.md", content="\n".join(_decisions())))


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turns links to files of the repository into links to their pages. A file without a page loses its link."""
    here = page.file.src_uri
    origin = PAGES.get(here, f"docs/{here}")
    pages = FOLDERS | {path: uri for uri, path in PAGES.items()}

    def mend(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        uri = pages.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if ":" in target or (uri is None and not (ROOT / path).exists()):
            return link[0]
        if uri is None:
            return text if text.strip("`") == path else f"{text} (`{path}`)"
        return f"[{text}]({posixpath.relpath(uri, posixpath.dirname(here) or '.')}{anchor})"

    return _LINK.sub(mend, markdown)


def _decisions() -> Iterator[str]:
    yield from ("# Decisions", "", "Each page says what was chosen, why, what was measured, and what would undo the choice.", "")
    for path in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        yield f"* [{title}]({path.name})"


def _benchmarks() -> Iterator[str]:
    yield from (
        "# Benchmarks",
        "",
        "Each chart and table is made from the files in `loadtests/results`. The pages below have all figures, with the machine,",
        "the command and the floor. A figure marked as cited or as another run was not measured in the same run as ours.",
        "",
    )
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}
    for chart in CHARTS:
        machine = results[chart.result]["machine"]
        place = machine["cpu"] if machine["gpu"] == "none" else machine["gpu"]
        yield from (f"## {chart.title}", "", f"{place}, {machine['date']}. [All figures]({chart.result}.md).", "")
        yield from ("\n".join(_bars(chart, results[chart.result]["tables"][chart.table])), "")
    yield from ("## All results", "", "| result | measures | on | date |", "|---|---|---|---|")
    for name, result in results.items():
        machine = result["machine"]
        place = machine["cpu"] if machine["gpu"] == "none" else machine["gpu"]
        yield f"| [{name}]({name}.md) | {_purpose(result['command'])} | {place} | {machine['date']} |"


def _purpose(command: str) -> str:
    """The first line of the benchmark's docstring."""
    module = command.split()[2]
    source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0].replace("|", "\\|")


def _bars(chart: Chart, rows: list[dict[str, Any]]) -> Iterator[str]:
    """The chart as SVG, and every value as text. Text takes the page's colour."""
    bars: list[tuple[str, float]] = []
    for row in rows:
        if any(row[name] != value for name, value in chart.only.items()):
            continue
        for column, system in chart.values.items():
            if isinstance(row.get(column), int | float):
                bars.append((", ".join(filter(None, (row[chart.label], system))), row[column]))
    if not bars:
        raise ValueError(f"{chart.title}: no rows of {chart.result}.json fit")
    top, height = max(value for _, value in bars), 22
    yield f'<svg viewBox="0 0 800 {height * len(bars)}" width="100%" role="img" aria-label="{escape(chart.title)}">'
    for index, (name, value) in enumerate(bars):
        y, width = height * index, 360 * value / top
        colour = "#c2571a" if name.endswith("emberforge") or name.startswith("emberforge") or name == "ours" else "#8a8f98"
        figure = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        yield f'<text x="355" y="{y + 15}" font-size="12" text-anchor="end" fill="currentColor">{escape(name)}</text>'
        yield f'<rect x="362" y="{y + 3}" width="{width:.1f}" height="16" fill="{colour}"/>'
        yield f'<text x="{366 + width:.1f}" y="{y + 15}" font-size="12" fill="currentColor">{figure}</text>'
    yield "</svg>"
