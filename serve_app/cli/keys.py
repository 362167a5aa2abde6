"""`emberforge keys`: the API keys of a keys file."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from serve_app.admission import keys
from serve_app.cli.console import console

KeysFile = Annotated[
    Path, typer.Option("--file", "-f", envvar="EMBERFORGE_API_KEYS_FILE", help="The keys file, as given to --api-keys-file")
]
KeyName = Annotated[str, typer.Argument(metavar="NAME", help="What the key is called: who has it, or for what")]


def add_key(name: KeyName, file: KeysFile) -> None:
    """Make a key and print it, this once: the file has only its hash. Servers take it within a second or two."""
    key = keys.add_key(file, name)
    console.print(f"{file}: {name} added; this is the key, which is kept nowhere:", markup=False)
    sys.stdout.write(key + "\n")


def list_keys(file: KeysFile) -> None:
    """Print the names of the keys."""
    for name in keys.read_keys(file):
        sys.stdout.write(name + "\n")


def remove_key(name: KeyName, file: KeysFile) -> None:
    """Take a key back. Servers refuse it within a second or two."""
    keys.remove_key(file, name)
    console.print(f"{file}: {name} removed", markup=False)
