"""The documentation agrees with the code: generated parts, links of README, keys of models.yaml.

`make docs` checks the links of the site.
"""

import re
import subprocess
import sys
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest
import typer

from cluster import plan_report
from cluster.models_file import ModelEntry, ModelsFile
from cluster.nodes import GIB, Card, Node
from cluster.plan import Plan
from docs.generate import DOCS, PARTS, PICTURES, filled
from serve_app.cli.commands import cli

ROOT = DOCS.parent
GENERATED = [path for path in sorted(DOCS.rglob("*.md")) if "<!-- generated: " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", GENERATED, ids=lambda page: page.name)
def test_a_generated_part_is_what_the_code_says(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert filled(text) == text, f"{page.name} is out of date: run `make docs-pages`"


def test_the_pictures_are_what_the_code_says() -> None:
    for path, draw in PICTURES.items():
        assert path.read_text(encoding="utf-8") == draw(), f"{path.name} is out of date: run `make docs-pages`"


def test_each_part_has_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in GENERATED)
    assert set(re.findall(r"<!-- generated: ([\w-]+) -->", text)) == PARTS.keys()


def test_readme_is_short_and_its_links_lead_somewhere() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 90
    links = re.findall(r"\]\(([^)#:]+)\)", readme)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_each_key_of_models_yaml_is_explained() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    keys = {*ModelEntry.model_fields, *ModelsFile.model_fields}
    assert [key for key in sorted(keys) if f"`{key}`" not in text] == []


def test_each_option_of_a_command_is_on_the_page_of_commands() -> None:
    """A command that takes every setting has a line for all of them, and TEI's options have a page of their own."""
    text = (DOCS / "commands.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## emberforge ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))
    commands = {}
    for name, command in typer.main.get_command(cli).commands.items():  # type: ignore[attr-defined]
        below = getattr(command, "commands", None)
        commands |= {name: command} if below is None else {f"{name} {key}": value for key, value in below.items()}
    assert sections.keys() == commands.keys()
    for name, section in sections.items():
        if "Takes every [setting]" not in section:
            options = {option for each in commands[name].params for option in each.opts if option.startswith("--")}
            assert [option for option in sorted(options - {"--help"}) if f"`{option}`" not in section] == [], name


def test_each_decision_begins_with_what_and_why() -> None:
    pages = sorted((DOCS / "decisions").glob("*.md"))
    top = re.compile(r"# .+\n\n> Decision: .+\n(> .+\n)*>\n> Reason: ")
    assert pages
    assert [page.name for page in pages if not top.match(page.read_text(encoding="utf-8"))] == []


# Figures of pages: the page, its words, the number of decimals, and the table, row and column in loadtests/results.
FIGURES = [
    (
        "README.md",
        "[{} times](loadtests/results/engine.md)",
        1,
        "engine",
        "Qwen3-Embedding-0.6B | bfloat16 | mixed | 8192 |",
        "FA2",
    ),
    ("README.md", "[{} times](loadtests/results/generate.md)", 2, "generate", "Qwen3-4B | 128 | 0 | 64 |", "ours / vLLM"),
    (
        "docs/generation.md",
        "at {} times (edited code)",
        1,
        "speculation_gpu",
        "Qwen3-8B's shape, bf16 | code editing |",
        "with / without",
    ),
    (
        "docs/generation.md",
        "{} times (quotes)",
        1,
        "speculation_gpu",
        "Qwen3-8B's shape, bf16 | summarising with quotes",
        "with / without",
    ),
    ("docs/models.md", "{} nats a token in int8", 3, "perplexity", "int8, rows of x and of W |", "loss in nats"),
    ("docs/models.md", "{} in float8", 3, "perplexity", "float8, rows of x and of W |", "loss in nats"),
    ("docs/models.md", "{} in int4", 2, "perplexity", "int4, W in groups of 64 |", "loss in nats"),
    ("docs/models.md", "by {} and 0.8 at most", 1, "perplexity", "float32 | fp8 |", "largest difference"),
    ("docs/models.md", "and {} at most", 1, "perplexity", "float32 | int8 |", "largest difference"),
    ("docs/models.md", "{} times as fast as with", 2, "kv_cache_dtype", "decode of 16 behind 8,192 |", "fp8 / auto"),
    ("docs/embed.md", "a job has {} of", 2, "embed_corpus_gpu", "median |", "rate, job : alone"),
]


@pytest.mark.parametrize(("page", "words", "decimals", "table", "row", "column"), FIGURES, ids=lambda value: str(value)[:20])
def test_a_figure_is_the_measured_one(page: str, words: str, decimals: int, table: str, row: str, column: str) -> None:
    """A new measurement changes the table. The pages have to follow."""
    lines = (ROOT / "loadtests" / "results" / f"{table}.md").read_text(encoding="utf-8").splitlines()
    number = next(number for number, line in enumerate(lines) if line.startswith(f"| {row}"))
    head = max(each for each in range(number) if lines[each].startswith("|---")) - 1
    (place,) = [at for at, name in enumerate(lines[head].split("|")) if name.strip().endswith(column)]
    measured = Decimal(lines[number].split("|")[place].strip())
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert words.format(measured.quantize(Decimal(10) ** -decimals, ROUND_HALF_UP)) in text


def test_the_script_for_mteb_says_how_mteb_is_installed() -> None:
    without = f"import runpy, sys; sys.modules['mteb'] = None; runpy.run_path({str(DOCS / 'mteb_endpoint.py')!r})"
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, check=False)
    (line,) = done.stderr.splitlines()
    assert line.endswith(f"install mteb with: {sys.executable} -m pip install mteb")
    assert done.returncode == 1


def test_the_pages_lines_of_a_pipeline_are_those_of_a_plan() -> None:
    text = (DOCS / "planning-generation.md").read_text(encoding="utf-8")
    card = Card("NVIDIA GeForce RTX 5080", int(15.9 * GIB))
    file = ModelsFile.model_validate({"models": [{"name": "chat", "model": "Qwen/Qwen3-8B"}]})
    one_node = [Node("pc", "amd64", 64 * GIB, 16, (card, card))]
    two_nodes = [Node(name, "amd64", 64 * GIB, 16, (card,)) for name in ("one", "other")]
    notes = [note for nodes in (one_node, two_nodes) for note in plan_report.notes(Plan(file, nodes))]
    lines = [line for line in text.splitlines() if line.startswith("chat.")]
    assert lines
    assert [line for line in lines if line not in notes] == []
