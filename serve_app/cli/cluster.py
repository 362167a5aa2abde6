"""`emberforge plan`, `node` and `cluster`: plan the models of a cluster, start its nodes, show its state."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.markup import escape

from cluster.files import ClusterError
from cluster.node_head import DEFAULT_DASHBOARD_PORT, DEFAULT_PORT
from cluster.numbers import MOST_GIB
from serve_app.cli.console import console, say


def plan(
    models: Annotated[Path, typer.Option(metavar="FILE", help="models.yaml: the models, their replicas and their nodes")],
    inventory: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML file of the nodes and their cards")] = None,
    live: Annotated[bool, typer.Option("--live", help="Plan for the nodes of the running cluster")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the Serve config to FILE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON")] = False,
) -> None:
    """Show which model goes on which card of a cluster and why, and write the Serve config of this plan.

    If a replica does not fit, the exit status is 1, and the plan shows and writes all other replicas.
    """
    if live == (inventory is not None):
        raise ClusterError("give either --inventory FILE, or --live on a node of a running cluster")
    from cluster import plan_report
    from cluster.models_file import load_models
    from cluster.node_live import live_nodes
    from cluster.nodes import load_nodes
    from cluster.plan import Plan
    from cluster.serve_changes import changes, deployed_before
    from cluster.serve_config import serve_config

    before = None if output is None else deployed_before(output)
    file = load_models(models)  # before the nodes, because this check is faster
    made = Plan(file, load_nodes(inventory) if inventory else live_nodes(say=say))
    if as_json:
        sys.stdout.write(json.dumps(plan_report.as_data(made), indent=1) + "\n")
    else:
        plan_report.show(made, Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 120))
    if output is not None:
        config = serve_config(made)
        text = plan_report.FILE_HEADER + yaml.safe_dump(config, sort_keys=False)
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ClusterError(f"{output} cannot be written: {error.strerror}") from error
        console.print(
            f"written to {output}; deploy it on the head, in the environment that `node start` printed: "
            f"serve deploy {shlex.quote(str(output))}"
        )
        if before is not None:
            lines = [f"  {line}" for line in changes(before, config)] or ["  nothing"]
            console.print("\n".join([f"if the previous {output} is deployed, `serve deploy` now", *lines]))
    if made.unplaced:
        raise ClusterError(f"{plan_report.failure(made)}{'' if output is None else f'; {output} has all other replicas'}")


def start_node(
    head: Annotated[bool, typer.Option("--head", help="Start the head, the first node of a new cluster")] = False,
    address: Annotated[str | None, typer.Option(metavar="HEAD[:PORT]", help="Join the cluster of this head")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on which the head listens for nodes")] = DEFAULT_PORT,
    name: Annotated[str | None, typer.Option(help=escape("Name of the node [default: the host's name]"))] = None,
    reserve_gib: Annotated[
        float | None,
        typer.Option(min=0, max=MOST_GIB, help=escape("GiB that models leave free on each card [default: by the kind of node]")),
    ] = None,
    object_store_gib: Annotated[
        float | None, typer.Option(max=MOST_GIB, help=escape("GiB of Ray's object store [default: 2, at most a tenth of memory]"))
    ] = None,
    dashboard_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of Ray's dashboard, on the head")
    ] = DEFAULT_DASHBOARD_PORT,
    ip: Annotated[
        str | None, typer.Option(help="Address at which other nodes reach this machine, if the machine has several")
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Redis that keeps the head's state; its password is in RAY_REDIS_PASSWORD"),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Start a new head even if this stops the nodes of an older cluster")
    ] = False,
    block: Annotated[
        bool, typer.Option("--block", help="Keep running, print the node's logs, and stop the node at SIGTERM")
    ] = False,
) -> None:
    """Make this machine the head of a new cluster, or a node of an existing one. The node keeps running after this command."""
    from cluster import node

    started = node.start(
        head,
        address,
        port=port,
        name=name,
        reserve_gib=reserve_gib,
        object_store_gib=object_store_gib,
        dashboard_port=dashboard_port,
        ip=ip,
        redis=redis,
        replace_cluster=replace,
        shares_stderr=block,
        say=say,
    )
    if block:
        node.hold(started)


def stop_node() -> None:
    """Stop the node that `node start` started on this machine. Other processes of Ray keep running."""
    from cluster import node

    num_ended = node.stop()
    console.print(f"ended {num_ended} processes" if num_ended else "no node runs here")


def cluster_status(
    as_json: Annotated[bool, typer.Option("--json", help="Print the status as JSON")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every 2 s, until Ctrl-C")] = False,
    address: Annotated[
        str | None, typer.Option(metavar="HEAD[:PORT]", help=escape("Address of the cluster [default: this node's cluster]"))
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="EMBERFORGE_API_KEY", help="An API key of the gateway; the status shows the key's models")
    ] = None,
) -> None:
    """Show the cluster's nodes with their cards, and its pools with their load."""
    if as_json and watch:
        raise ClusterError("give either --json or --watch")
    from cluster import status

    output = Console(width=None if sys.stdout.isatty() else 160)
    with status.watching(address, api_key) as watcher:
        if watch:
            status.show_forever(watcher, output)
        elif as_json:
            sys.stdout.write(json.dumps(status.as_data(watcher.look()), indent=1) + "\n")
        else:
            status.show(watcher.look(), output)
