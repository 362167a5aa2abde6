"""`emberforge keys`: makes and limits the API keys of a keys file, and prints their usage."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from serve_app.admission import key_file
from serve_app.cli.console import say
from serve_app.observe import usage

KeysFile = Annotated[
    Path, typer.Option("--file", "-f", envvar="EMBERFORGE_API_KEYS_FILE", help="The keys file of --api-keys-file")
]
KeyName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the key, for example the user or the program that uses it")]
Models = Annotated[str | None, typer.Option(metavar="A,B", help="Models that the key may use, by name or alias")]
Tokens = Annotated[str | None, typer.Option(metavar="N", help="The most tokens per minute: inputs, prompts and answers")]
Requests = Annotated[str | None, typer.Option(metavar="N", help="The most requests in flight")]
HighestPriority = Annotated[str | None, typer.Option(metavar="PRIORITY", help="The highest priority: interactive or batch")]
Expires = Annotated[
    str | None, typer.Option(metavar="TIME", help="Time at which the key ends: 2027-01-31 or 2027-01-31T18:00:00Z (UTC)")
]


def add_key(
    name: KeyName,
    file: KeysFile,
    models: Models = None,
    tokens_per_minute: Tokens = None,
    requests_in_flight: Requests = None,
    priority: HighestPriority = None,
    expires: Expires = None,
) -> None:
    """Make a key and print it. Save it now: the file holds only the key's hash. Servers accept the key within three seconds."""
    key = key_file.add_key(file, name, _given(models, tokens_per_minute, requests_in_flight, priority, expires))
    say(f"{file}: {name} added; save this key, because it is not stored anywhere:")
    sys.stdout.write(key + "\n")


def limit_key(
    name: KeyName,
    file: KeysFile,
    models: Models = None,
    tokens_per_minute: Tokens = None,
    requests_in_flight: Requests = None,
    priority: HighestPriority = None,
    expires: Expires = None,
) -> None:
    """Change limits of a key. `none` removes a limit; all other limits stay. Servers follow within three seconds."""
    limits = key_file.limit_key(file, name, _given(models, tokens_per_minute, requests_in_flight, priority, expires))
    say(f"{file}: {name} has the limits {limits}" if str(limits) else f"{file}: {name} has no limits")


def list_keys(file: KeysFile) -> None:
    """Print the names of the keys, and their limits."""
    for key in key_file.read_keys(file).values():
        sys.stdout.write(f"{key.name} {key.limits}".rstrip() + "\n")


def remove_key(name: KeyName, file: KeysFile) -> None:
    """Remove a key. Servers refuse it within three seconds."""
    key_file.remove_key(file, name)
    say(f"{file}: {name} removed")


def key_usage(
    log: Annotated[list[Path], typer.Option(envvar="EMBERFORGE_USAGE_LOG", help="The file of --usage-log; may be repeated")],
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Count from this time on, for example 2027-01-31 (UTC)")
    ] = None,
) -> None:
    """Print the requests, tokens and refusals (429) of each key and model. Servers write the counts once a minute."""
    sums = usage.total(log, None if since is None else key_file.read_time(since))
    rows = [(*place, f"{each.requests}", f"{each.tokens}", f"{each.refusals}") for place, each in sorted(sums.items())]
    table = [("key", "model", "requests", "tokens", "refusals"), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [
            cell.ljust(width) if at < 2 else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


def _given(
    models: str | None, tokens_per_minute: str | None, requests_in_flight: str | None, priority: str | None, expires: str | None
) -> dict[str, str]:
    given = {
        "models": models,
        "tokens_per_minute": tokens_per_minute,
        "requests_in_flight": requests_in_flight,
        "priority": priority,
        "expires": expires,
    }
    return {name: value for name, value in given.items() if value is not None}
