"""`emberforge keys`: the API keys of a keys file, their limits, and what they have used."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from serve_app.admission import key_file
from serve_app.cli.console import say
from serve_app.observe import usage

KeysFile = Annotated[
    Path, typer.Option("--file", "-f", envvar="EMBERFORGE_API_KEYS_FILE", help="The keys file, as given to --api-keys-file")
]
KeyName = Annotated[str, typer.Argument(metavar="NAME", help="What the key is called: who has it, or for what")]
Models = Annotated[str | None, typer.Option(metavar="A,B", help="Models that the key may use, by name or alias")]
Tokens = Annotated[str | None, typer.Option(metavar="N", help="Tokens per minute: inputs, prompts and answers")]
Requests = Annotated[str | None, typer.Option(metavar="N", help="Requests in flight at a time")]
HighestPriority = Annotated[str | None, typer.Option(metavar="PRIORITY", help="The highest priority: interactive or batch")]
Expires = Annotated[
    str | None, typer.Option(metavar="TIME", help="When the key ends, as 2027-01-31 or 2027-01-31T18:00:00Z (UTC)")
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
    """Make a key and print it, this once: the file has only its hash. Servers take it within three seconds."""
    key = key_file.add_key(file, name, _given(models, tokens_per_minute, requests_in_flight, priority, expires))
    say(f"{file}: {name} added; this is the key, which is kept nowhere:")
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
    """Change limits of a key. `none` takes a limit away; limits that are not given stay. Servers follow within three seconds."""
    limits = key_file.limit_key(file, name, _given(models, tokens_per_minute, requests_in_flight, priority, expires))
    say(f"{file}: {name} has the limits {limits}" if str(limits) else f"{file}: {name} has no limits")


def list_keys(file: KeysFile) -> None:
    """Print the names of the keys, and their limits."""
    for key in key_file.read_keys(file).values():
        sys.stdout.write(f"{key.name} {key.limits}".rstrip() + "\n")


def remove_key(name: KeyName, file: KeysFile) -> None:
    """Take a key back. Servers refuse it within three seconds."""
    key_file.remove_key(file, name)
    say(f"{file}: {name} removed")


def key_usage(
    log: Annotated[list[Path], typer.Option(envvar="EMBERFORGE_USAGE_LOG", help="File given to --usage-log; may be repeated")],
    since: Annotated[str | None, typer.Option(metavar="TIME", help="Count from this time on, as 2027-01-31 (UTC)")] = None,
) -> None:
    """Print the requests, tokens and refusals (429) of each key and model. Servers write them once a minute."""
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
