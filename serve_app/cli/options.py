"""Makes the command line's options from the settings and their descriptions."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from serve_app.cli import tei
from serve_app.cli.console import say
from serve_app.settings import Settings, load_settings


def with_settings(command: Callable[..., None], as_tei: bool = False, **own: Any) -> Callable[..., None]:
    """A command for typer with one option for each setting. It calls `command(settings, ...)`.

    Args:
        as_tei: whether the command also takes TEI's options and environment variables.
        own: further parameters of the command, with their types for typer.
    """

    def run(config: Path | None, **values: Any) -> None:
        arguments = {name: values.pop(name) for name in own}
        given = tei.translate(values, os.environ) if as_tei else tei.Given()
        for note in given.notes:
            say(note)
        os.environ.update(given.environment)
        ours = {name: value for name, value in values.items() if name in Settings.model_fields}
        command(load_settings(ours | given.flags, config=config, tei=given.variables), **arguments)

    def parameter(name: str, annotation: Any) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=None)

    aliases = {option.key: [f"--{option.name}"] for option in tei.OPTIONS if as_tei and option.setting and tei.is_setting(option)}
    if as_tei:
        aliases["port"] = ["-p"]
    parameters = []
    for name, field in Settings.model_fields.items():
        value = ", ".join(field.default) if isinstance(field.default, tuple) else field.default
        default = "" if "[default" in (field.description or "") else f" [default: {value}]"
        # rich would read unescaped brackets as markup.
        text = escape(f"{field.description}{default} (env EMBERFORGE_{name.upper()})")
        if name == "models":
            kind: Any = Annotated[list[str] | None, typer.Argument(metavar="[MODEL]...", help=text, show_default=False)]
        else:
            one_or_more: Any = list[str] if field.annotation == tuple[str, ...] else str
            spellings = [_flag(name), *aliases.get(name, [])]
            kind = Annotated[one_or_more | None, typer.Option(*spellings, help=text, show_default=False)]
        parameters.append(parameter(name, kind))
    parameters += [
        parameter(tei.parameter_name(option), _tei_option(option))
        for option in tei.OPTIONS
        if as_tei and not tei.is_setting(option)
    ]
    help_text = "YAML file of settings (env EMBERFORGE_CONFIG)"
    parameters.append(parameter("config", Annotated[Path | None, typer.Option(envvar="EMBERFORGE_CONFIG", help=help_text)]))
    parameters += [parameter(name, annotation) for name, annotation in own.items()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _tei_option(option: tei.Option) -> Any:
    """The command line's option for an option of TEI that is not one of our settings."""
    text = f"no effect: {option.no_effect}" if option.no_effect else option.differs or option.refused or f"sets {option.variable}"
    help_panel = "Options of text-embeddings-router"
    if not option.takes_value:
        return Annotated[bool | None, typer.Option(f"--{option.name}", help=text, rich_help_panel=help_panel)]
    return Annotated[str | None, typer.Option(f"--{option.name}", help=text, rich_help_panel=help_panel, show_default=False)]
