"""The documentation agrees with the code: generated parts, links of README, keys of models.yaml.

`make docs` checks the links of the site.
"""

import re
from pathlib import Path

import pytest
import typer

from cluster.models_file import ModelEntry, ModelsFile
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
