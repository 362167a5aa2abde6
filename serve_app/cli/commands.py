"""Lists all commands, and prints the error that ends one.

`emberforge --help` imports the module of every command. So these modules import only fast modules at the top. A command imports
torch, Ray and other slow modules when it runs.
"""

import errno
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.markup import escape

from engine.errors import EmberError
from serve_app.cli import tei
from serve_app.cli.apply import apply, destroy, diff, rollback
from serve_app.cli.cluster import cluster_status, plan, start_node, stop_node
from serve_app.cli.console import console
from serve_app.cli.embed import embed
from serve_app.cli.generate import chat, check_refused, generate, with_options
from serve_app.cli.keys import add_key, key_usage, limit_key, list_keys, remove_key
from serve_app.cli.machine import doctor, kernels
from serve_app.cli.options import with_settings
from serve_app.cli.serve import config, serve
from serve_app.version import VERSION

cli = typer.Typer(no_args_is_help=True, add_completion=False)


def _print_version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"emberforge {VERSION}\n")
        raise typer.Exit


@cli.callback()
def emberforge(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit")
    ] = False,
) -> None:
    """Serve embedding models, rerankers, classifiers and text generation."""


def run() -> None:
    """Runs the command line. An error meant for the user is one line on stderr, with exit status 1."""
    if isinstance(sys.stdout, TextIOWrapper):
        # In a locale without Unicode, a name or an answer could otherwise end the command with a UnicodeEncodeError.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        check_refused(sys.argv[1:])
        cli(tei.with_values(sys.argv[1:]))
    except EmberError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f" for {error.filename}" if error.filename else ""
        _fail(f"the disk is full{where} ({error.strerror}): free some space; emberforge doctor shows which disk Ray uses")


def _fail(message: str) -> NoReturn:
    console.print(f"[red]error:[/] {escape(message)}", markup=True)
    sys.exit(1)


cli.command()(with_settings(serve, as_tei=True))
cli.command()(
    with_settings(
        config,
        as_tei=True,
        output=Annotated[Path | None, typer.Option("--output", "-o", help=escape("Write the config to FILE [default: stdout]"))],
    )
)
cli.command()(
    with_settings(
        doctor,
        measure=Annotated[bool | None, typer.Option("--measure", help="Check the kernels and measure the speed of this machine")],
        report=Annotated[bool | None, typer.Option("--report", help="Print the result as Markdown, to paste into an issue")],
    )
)
cli.command()(kernels)
short_help = {"help_option_names": ["-h", "--help"]}
cli.command(context_settings=short_help)(with_options(generate))
cli.command(context_settings=short_help)(with_options(chat))
cli.command()(embed)
cli.command()(plan)
cli.command()(apply)
cli.command()(diff)
cli.command()(rollback)
cli.command()(destroy)

node_commands = typer.Typer(help="Start and stop a node of a cluster on this machine.", no_args_is_help=True)
node_commands.command("start")(start_node)
node_commands.command("stop")(stop_node)
cli.add_typer(node_commands, name="node")

cluster_commands = typer.Typer(help="Show the running cluster.", no_args_is_help=True)
cluster_commands.command("status")(cluster_status)
cli.add_typer(cluster_commands, name="cluster")

keys_commands = typer.Typer(help="Make, limit and remove the API keys of a keys file.", no_args_is_help=True)
keys_commands.command("add")(add_key)
keys_commands.command("list")(list_keys)
keys_commands.command("limit")(limit_key)
keys_commands.command("remove")(remove_key)
keys_commands.command("usage")(key_usage)
cli.add_typer(keys_commands, name="keys")
