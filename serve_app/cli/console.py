"""Prints messages for the operator to standard error."""

import logging
import os

from rich.console import Console
from rich.text import Text

log = logging.getLogger(__name__)

console = Console(highlight=False, soft_wrap=True, stderr=True)


def say(line: str) -> None:
    """Prints a line without markup: rich would read an IPv6 address in brackets as a style."""
    console.print(line, markup=False)


def report(line: str, *, markup: bool = False) -> None:
    """Prints a message of the server: as plain text on a terminal, elsewhere as a line of the log."""
    if os.isatty(2):
        console.print(line, markup=markup)
    else:
        log.info("%s", (Text.from_markup(line).plain if markup else line).strip())
