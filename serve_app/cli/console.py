"""The console that messages for the operator go to: standard error."""

from rich.console import Console

console = Console(highlight=False, soft_wrap=True, stderr=True)


def say(line: str) -> None:
    """Prints a line as it is. With markup, rich would take an IPv6 address in brackets for a style."""
    console.print(line, markup=False)
