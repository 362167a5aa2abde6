"""Writes the parts of the pages that come from the code: settings, commands, TEI's options, routes, predictions for a GB10.

`make docs-pages` runs this. A part stands between `<!-- generated: NAME -->` and `<!-- end -->`. The text around it is written by
hand. It also draws images/road.svg.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import typer
from rich.markup import render

from docs import road
from serve_app.cli import tei
from serve_app.cli.commands import cli
from serve_app.http.openapi import document
from serve_app.settings import Settings

DOCS = Path(__file__).parent
_GB10 = "GB10 (DGX Spark)"  # a card of loadtests/results/predicted.json
_PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_DEFAULT = re.compile(r" ?\[default: (.*)\]")


def filled(page: str) -> str:
    """The text of a page with its generated parts made anew."""
    return _PART.sub(lambda part: part[1] + "\n".join(["", *PARTS[part[2]](), ""]) + "\n" + part[3], page)


def _settings() -> Iterator[str]:
    yield from ("| setting | default | meaning |", "|---|---|---|")
    for name, field in Settings.model_fields.items():
        text = field.description or ""
        said = _DEFAULT.search(text)
        default = said[1] if said else f"`{_plain(field.default)}`"
        yield f"| `{name}` | {_cell(default)} | {_cell(_DEFAULT.sub('', text))} |"


def _commands() -> Iterator[str]:
    yield from _command("emberforge", typer.main.get_command(cli))


def _command(path: str, command: click.Command) -> Iterator[str]:
    commands = getattr(command, "commands", None)  # typer has a group class of its own
    if commands is not None:
        for name, each in commands.items():
            yield from _command(f"{path} {name}", each)
        return
    names = {each.name for each in command.params}
    settings = (
        [each for each in command.params if each.name in Settings.model_fields] if names >= Settings.model_fields.keys() else []
    )
    teis = [each for each in command.params if settings and _is_teis(each)]  # docs/coming-from/tei.md lists them
    options = [each for each in command.params if each not in (*settings, *teis) and each.name != "help"]
    yield from (f"## {path}", "", (command.help or "").replace("\n\n", "\n").strip(), "")
    if settings:
        yield from ("Takes every [setting](settings.md) as an option.", "")
    if options:
        yield from ("| option | meaning | default |", "|---|---|---|")
        for each in options:
            yield f"| {_spelling(each)} | {_cell(_help(each))} | {_cell(_default(each))} |"
        yield ""


def _is_teis(parameter: click.Parameter) -> bool:
    return any(parameter.name == tei.parameter_name(option) for option in tei.OPTIONS)


def _spelling(parameter: click.Parameter) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or (parameter.name or '').upper()}`"
    return ", ".join(f"`{each}`" for each in parameter.opts)


def _help(parameter: click.Parameter) -> str:
    text = render(getattr(parameter, "help", None) or "").plain  # the help escapes brackets for rich
    variable = getattr(parameter, "envvar", None)
    note = f" (env {variable})" if variable and f"env {variable}" not in text else ""
    return _DEFAULT.sub("", text) + note


def _default(parameter: click.Parameter) -> str:
    said = _DEFAULT.search(render(getattr(parameter, "help", None) or "").plain)
    if said:
        return said[1]
    if parameter.required:
        return "required"
    if parameter.default in (None, False, ()) or not isinstance(parameter.default, str | int | float):
        return ""
    return f"`{parameter.default}`"


def _tei_options() -> Iterator[str]:
    yield from ("| TEI's option | in TEI | here |", "|---|---|---|")
    for option in tei.OPTIONS:
        if option.no_effect:
            here = f"no effect: {option.no_effect}"
        elif option.refused:
            here = f"refused: {option.refused}"
        elif option.variable:
            here = "; ".join(filter(None, (f"sets `{option.variable}`", option.differs)))
        else:
            here = "; ".join(filter(None, (f"`{option.key}`", option.differs)))
        yield f"| `--{option.name}` | {_cell(option.tei_default)} | {_cell(here)} |"


def _routes() -> Iterator[str]:
    api = document("")
    yield from ("| route | answers with | body | error statuses |", "|---|---|---|---|")
    bodies: dict[str, list[str]] = {}
    for path, operations in api["paths"].items():
        for method, operation in operations.items():
            names = [each.rsplit("/", 1)[-1] for each in re.findall(r"'\$ref': '([^']+)'", str(operation.get("requestBody", "")))]
            for name in names:
                bodies.setdefault(name, []).append(path)
            links = ", ".join(f"[{name}](#{name.lower()})" for name in names)
            statuses = ", ".join(sorted(operation["responses"].keys() - {"200"}))
            yield f"| `{method.upper()} {path}` | {_cell(operation['summary'])} | {links} | {statuses} |"
    yield from ("", "## Bodies", "")
    schemas = api["components"]["schemas"]
    for name, paths in bodies.items():
        schema = schemas[name]
        yield from (f"### {name}", "", f"Body of {', '.join(f'`{path}`' for path in paths)}.", "")
        yield from ("| field | type | default |", "|---|---|---|")
        required = schema.get("required", ())
        for field, its in schema["properties"].items():
            default = "required" if field in required else f"`{_plain(its['default'])}`" if its.get("default") is not None else ""
            yield f"| `{field}` | {_cell(_type(its, schemas))} | {_cell(default)} |"
        yield ""


def _gb10_predicted() -> Iterator[str]:
    tables = json.loads((DOCS.parent / "loadtests" / "results" / "predicted.json").read_text(encoding="utf-8"))["tables"]
    yield from ("| embeds mixed texts | dtype | tokens/s, predicted | one query, predicted |", "|---|---|---|---|")
    for row in tables["Predicted"]:
        if row["texts"] == "mixed":
            rate, query = row[f"{_GB10}: k tokens/s"], row[f"{_GB10}: ms at least, one query"]
            yield f"| {row['model']} | {row['dtype']} | {_figure(1000 * rate)} | {_figure(query)} ms at least |"
    heads = ("1 stream, tokens/s", "8 streams", "64 streams", "prompt, tokens/s")
    yield from ("", f"| generates, bfloat16, predicted | {' | '.join(heads)} |", "|---|---|---|---|---|")
    columns = [*(f"decode of {streams}, tokens/s" for streams in (1, 8, 64)), "prefill of 2,048, tokens/s"]
    for row in tables["Generation on cards that we have not measured"]:
        if row["card"] == _GB10:
            yield f"| {row['model']} | {' | '.join(_figure(row[column]) for column in columns)} |"
    yield from ("", "[All predictions](../loadtests/results/predicted.md), with their method.")


def _type(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return (
            _type(schemas[name], schemas)
            if "properties" not in schemas[name]
            else f"object ({', '.join(schemas[name]['properties'])})"
        )
    if "enum" in schema:
        return ", ".join(str(each) for each in schema["enum"] if each is not None)
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(_type(each, schemas) for each in schema[several]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}), schemas)}"
    return str(schema.get("type", "any"))


def _plain(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _figure(value: float) -> str:
    """A number with three digits that count."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").strip()


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "settings": _settings,
    "commands": _commands,
    "tei-options": _tei_options,
    "routes": _routes,
    "gb10-predicted": _gb10_predicted,
}

PICTURES: dict[Path, Callable[[], str]] = {DOCS / "images" / "road.svg": road.svg}

if __name__ == "__main__":
    for path, draw in PICTURES.items():
        path.write_text(draw(), encoding="utf-8")
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if (made := filled(text)) != text:
            path.write_text(made, encoding="utf-8")
            print(f"wrote {path.relative_to(DOCS.parent)}")
