"""Measures faults of a cluster in the laboratory, one after the other. A results file has a row for each fault."""

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from time import sleep
from typing import Any

from loadtests.cluster_load import Site
from loadtests.lab import possible
from loadtests.report import RESULTS

Fault = Callable[[Site, Path], None]


def kill(what: str, *names: str) -> Fault:
    """Kills the first process with `what` in its command line on these nodes."""
    return lambda site, _: site.laboratory.process(what, *names).kill()


def drain(name: str, deadline_s: int) -> Fault:
    """Drains a node, as docs/operate/drain.md says. At the deadline the node is switched off."""

    def fault(site: Site, _: Path) -> None:
        reason = "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "maintenance"
        deadline = "--deadline-remaining-seconds", str(deadline_s)
        # Without an id Ray takes a raylet of the machine, the head first. All nodes of a laboratory are on one machine.
        raylet = site.laboratory.process("raylet/raylet", name).cmdline()
        node = next(each.partition("=")[2] for each in raylet if each.startswith("--node_id="))
        site.laboratory.run(name, "-m", "ray.scripts.scripts", "drain-node", "--node-id", node, *reason, *deadline)
        sleep(deadline_s)
        site.laboratory.members[name].kill()

    return fault


def measure_faults(
    results: str,
    title: str,
    names: tuple[Sequence[str], Sequence[str]],
    wanted: Sequence[str],
    running: Callable[[Path], AbstractContextManager[Site]],
    measured: Callable[[Site, Path, str], dict[str, Any]],
    report: Callable[[Sequence[dict[str, Any]]], None],
) -> None:
    """Measures the wanted faults, or all. The rows of the others stay in the table.

    Args:
        results: the name of the results file, which has the table `title`.
        names: the faults after which a cluster serves for the next fault, and the faults that end a cluster.
        running: starts a cluster.
        measured: gives the row of one fault.
        report: writes the table.
    """
    if not possible():
        raise SystemExit("this needs network namespaces: run it as root where iproute2 is installed")
    file = RESULTS / f"{results}.json"
    known = json.loads(file.read_text(encoding="utf-8"))["tables"][title] if wanted and file.exists() else []
    rows = {each["fault"]: each for each in known}
    everything, (_, lasting) = [*names[0], *names[1]], names
    left = [name for name in everything if not wanted or name in wanted]
    while left:
        with tempfile.TemporaryDirectory(prefix="ef-", dir="/tmp") as folder, running(Path(folder)) as site:
            name = ""
            while left and name not in lasting:
                name = left.pop(0)
                rows[name] = {"fault": name} | measured(site, Path(folder), name)
                report([rows[each] for each in everything if each in rows])
