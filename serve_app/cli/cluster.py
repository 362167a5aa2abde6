"""`emberforge plan`, `node` and `cluster`: where the models of a cluster go, and the nodes that they run on."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console

from cluster.files import ClusterError
from cluster.node_head import DEFAULT_DASHBOARD_PORT, DEFAULT_PORT
from serve_app.cli.console import console, say


def plan(
    models: Annotated[Path, typer.Option(metavar="FILE", help="YAML: the models, how many replicas, where they may be")],
    inventory: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML: the nodes and their cards")] = None,
    live: Annotated[bool, typer.Option("--live", help="Take the nodes of the running cluster instead")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the Serve config there")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON")] = False,
) -> None:
    """Show which model goes on which card of a cluster and why, and write the Serve config that does it.

    Exit status 1 where something has no place; what has one is shown and written all the same.
    """
    if live == (inventory is not None):
        raise ClusterError("say either --inventory FILE, or --live on a node of a running cluster")
    from cluster import plan_report
    from cluster.models_file import load_models
    from cluster.node_live import live_nodes
    from cluster.nodes import load_nodes
    from cluster.plan import Plan
    from cluster.serve_changes import changes, deployed_before
    from cluster.serve_config import serve_config

    file = load_models(models)  # before the nodes: this check is quicker
    made = Plan(file, load_nodes(inventory) if inventory else live_nodes(say=say))
    if as_json:
        sys.stdout.write(json.dumps(plan_report.as_data(made), indent=1) + "\n")
    else:
        plan_report.show(made, Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 120))
    if output is not None:
        before = deployed_before(output)
        config = serve_config(made)
        text = plan_report.FILE_HEADER + yaml.safe_dump(config, sort_keys=False)
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ClusterError(f"{output} cannot be written: {error.strerror}") from error
        console.print(
            f"written to {output}; on the head, in the environment that node start said: serve deploy {shlex.quote(str(output))}"
        )
        if before is not None:
            lines = [f"  {line}" for line in changes(before, config)] or ["  nothing"]
            console.print("\n".join([f"if {output} as it was is deployed, `serve deploy` now", *lines]))
    if made.unplaced:
        raise ClusterError(f"{plan_report.failure(made)}{'' if output is None else f'; {output} has the rest'}")


def start_node(
    head: Annotated[bool, typer.Option("--head", help="Be the first node, which the others join")] = False,
    address: Annotated[str | None, typer.Option(metavar="HEAD[:PORT]", help="Join the cluster of this head")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where a head listens for its nodes")] = DEFAULT_PORT,
    name: Annotated[str | None, typer.Option(help="What the node is called, if not as its host is")] = None,
    reserve_gib: Annotated[float | None, typer.Option(min=0, help="What models leave of each card, if not the usual")] = None,
    object_store_gib: Annotated[float | None, typer.Option(help="Of Ray's object store, if not 2 or a tenth of memory")] = None,
    dashboard_port: Annotated[int, typer.Option(min=1, max=65535, help="Of Ray's dashboard")] = DEFAULT_DASHBOARD_PORT,
    ip: Annotated[str | None, typer.Option(help="Address at which other nodes reach this machine, if it has several")] = None,
    redis: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Redis that keeps a head's state; key in RAY_REDIS_PASSWORD")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Start a head although that ends nodes of an older cluster")] = False,
    block: Annotated[bool, typer.Option("--block", help="Stay, print the node's logs, and end the node at SIGTERM")] = False,
) -> None:
    """Make this machine the head of a new cluster, or a node of one that is there. It goes on when this command has ended."""
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
    """End the node that was started on this machine, and nothing else."""
    from cluster import node

    num_ended = node.stop()
    console.print(f"ended {num_ended} processes" if num_ended else "no node runs here")


def cluster_status(
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as JSON")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every 2 s, until Ctrl-C")] = False,
    address: Annotated[str | None, typer.Option(metavar="HEAD[:PORT]", help="Of the cluster, if not this node's")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="EMBERFORGE_API_KEY", help="A key of the gateway, which shows that key's models")
    ] = None,
) -> None:
    """Show the cluster's nodes with their cards, and its pools with their load."""
    if as_json and watch:
        raise ClusterError("say either --json or --watch")
    from cluster import status

    output = Console(width=None if sys.stdout.isatty() else 160)
    with status.watching(address, api_key) as watcher:
        if watch:
            status.show_forever(watcher, output)
        elif as_json:
            sys.stdout.write(json.dumps(status.as_data(watcher.look()), indent=1) + "\n")
        else:
            status.show(watcher.look(), output)
