"""`emberforge apply`, `diff`, `rollback` and `destroy`: show and change what the running cluster serves."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from cluster.files import ClusterError
from engine.errors import EmberError
from serve_app.cli.console import console, say

if TYPE_CHECKING:
    from cluster.applied import Applied, History
    from cluster.apply import Difference, Update
    from cluster.models_file import ModelsFile
    from cluster.serve_client import ServeClient
    from cluster.starts import Start

Models = Annotated[Path, typer.Argument(metavar="FILE", help="models.yaml: the models, their replicas and their nodes")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation")]


def apply(models: Models, yes: Yes = False) -> None:
    """Plan for the running cluster, show the changes, and deploy them. Ends when every replica is ready, or one has failed."""
    file = _read(models)
    _check_terminal(yes)
    with _cluster() as there:
        there.deploy(_update(file, there.nodes), yes)


def diff(models: Models) -> None:
    """Show what `apply` would change. Exit status 0: no changes; 1: changes; 2: an error."""
    try:
        file = _read(models)
        with _cluster() as there:
            todo = there.difference(_update(file, there.nodes))
    except EmberError as error:
        say(f"error: {error}")
        raise typer.Exit(2) from None
    _print(todo.lines or ["nothing changes"])
    if todo.lines:
        raise typer.Exit(1)


def rollback(
    number: Annotated[int | None, typer.Argument(metavar="[N]", help="Number of the config [default: the previous one]")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Print the applied configs, and change nothing")] = False,
    yes: Yes = False,
) -> None:
    """Deploy an earlier config again: the last one that was ready and is not the present one, or number N.

    The cluster keeps the last ten configs. models.yaml does not change: the next `apply` deploys the file again.
    """
    if not listed:
        _check_terminal(yes)
    from cluster.apply import Update

    with _cluster() as there:
        if listed:
            _print([_row(entry) for entry in there.history.entries()] or ["nothing was applied yet"])
            return
        entry = there.history.previous() if number is None else there.history.entry(number)
        _print([f"returns to {_row(entry)}"])
        there.deploy(Update(entry.config), yes, of=entry.number)


def destroy(yes: Yes = False) -> None:
    """Stop all models and gateways of the running cluster, and Serve. The nodes and the applied configs stay."""
    _check_terminal(yes)
    with _cluster() as there:
        names = list(there.serve.details()["applications"])
        if not names:
            say("nothing runs")
            return
        _print([f"ends {name}" for name in names])
        _ask("End them?", yes)
        with console.status("ending them"):
            there.serve.shut_down()
        say("ended")


@dataclass(frozen=True, slots=True)
class _Cluster:
    """The running cluster: its Serve, the applied configs, and the names of nodes by Ray's ids."""

    serve: "ServeClient"
    history: "History"
    nodes: dict[str, str]

    def difference(self, update: "Update") -> "Difference":
        from cluster.apply import difference

        return difference(self.serve.details(), update, self.history)

    def deploy(self, update: "Update", yes: bool, of: int | None = None) -> None:
        """Shows the difference, asks, and deploys. Raises: ClusterError with the reason if a replica does not start."""
        from cluster.apply import deploy
        from cluster.serve_progress import Progress
        from cluster.starts import starts
        from cluster.status import gateway_urls

        todo = self.difference(update)
        _print(todo.lines or ["nothing changes"])
        if todo.lines:
            _ask("Deploy this?", yes)
        try:
            with _bars() as bars:
                progress = Progress(say, self.nodes, partial(starts, self.history.store), bars)
                deploy(self.serve, self.history, update.config, todo, progress, of=of)
        except KeyboardInterrupt:
            raise ClusterError("interrupted. Serve continues the deployment; type the same command to wait for it") from None
        say(f"ready: {', '.join(gateway_urls(self.serve.details()))}")


@contextmanager
def _bars() -> "Iterator[Callable[[Mapping[str, Start]], None] | None]":
    """On a terminal: a function that shows a progress bar for each starting replica. Elsewhere None: each step prints a line."""
    if not console.is_terminal:
        yield None
        return
    from cluster.starts import WORDS

    shown: dict[str, TaskID] = {}
    with Bars(SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console) as bars:
        waiting = bars.add_task("waiting until every replica is ready", total=None)

        def show(starts: Mapping[str, Start]) -> None:
            for name in shown.keys() - starts.keys():
                bars.remove_task(shown.pop(name))
            for name, start in starts.items():
                if name not in shown:
                    shown[name] = bars.add_task(name)
                total = None if start.share is None else 1.0
                bars.update(shown[name], description=f"{name} {WORDS[start.step]}", total=total, completed=start.share or 0.0)
            bars.update(waiting, visible=not starts)

        yield show
        bars.remove_task(waiting)


@contextmanager
def _cluster() -> Iterator[_Cluster]:
    """Connects to the cluster to which this machine belongs. Raises: ClusterError."""
    from cluster.node_live import connected

    with connected():
        import ray

        from cluster.applied import History, RayStore
        from cluster.node_live import seen_nodes
        from cluster.serve_client import ServeClient, dashboard_address

        nodes = {each.id: each.name for each in seen_nodes(ray.nodes(), {})}  # type: ignore[no-untyped-call]
        yield _Cluster(ServeClient(dashboard_address()), History(RayStore()), nodes)


def _read(models: Path) -> "ModelsFile":
    """Reads models.yaml before the cluster is asked, because this check is faster. Raises: ClusterError."""
    from cluster.models_file import load_models

    return load_models(models)


def _update(file: "ModelsFile", names: Mapping[str, str]) -> "Update":
    """Makes the plan for the running cluster. `names` holds the names of nodes by Ray's ids.

    Raises: ClusterError if a required replica has no place.
    """
    from ray.util import placement_group_table

    from cluster import plan_report
    from cluster.apply import Update
    from cluster.node_live import live_nodes
    from cluster.plan import Plan
    from cluster.room import has_room
    from cluster.serve_config import canaries, serve_config

    plan = Plan(file, live_nodes(say=say))
    _print([part.plain for part in plan_report.in_short(plan)])
    if plan.unplaced:
        raise ClusterError(f"{plan_report.failure(plan)}; nothing was changed")
    return Update(serve_config(plan), canaries(plan), partial(has_room, plan, names, placement_group_table()))


def _row(entry: "Applied") -> str:
    """A line of `rollback --list`: number, time, user, models and state of an applied config."""
    at = datetime.fromtimestamp(entry.at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    models = dict.fromkeys(
        each["args"]["spec"]["name"] for each in entry.config["applications"] if "spec" in each.get("args", {})
    )
    state = "ready" if entry.ready else "failed or interrupted"
    return f"{entry.number}  {at}  {entry.by}  {', '.join(models)}  {state}{'' if entry.of is None else f', from {entry.of}'}"


def _check_terminal(yes: bool) -> None:
    """Raises: ClusterError."""
    if not yes and not sys.stdin.isatty():
        raise ClusterError("there is no terminal to ask for confirmation: read `emberforge diff`, then give --yes")


def _ask(question: str, yes: bool) -> None:
    if not yes and not typer.confirm(question):
        raise typer.Exit(1)


def _print(lines: list[str] | tuple[str, ...]) -> None:
    output = Console(markup=False, highlight=False, soft_wrap=True)
    for line in lines:
        output.print(line)
