"""Shows the state of a running cluster, as tables and as plain data: nodes with their cards, pools with their load.

The first half of this file is pure. The second half asks Ray, the nodes and the gateway.
"""

import json
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.files import ClusterError
from cluster.node_head import connect
from cluster.node_live import ANSWER_TIMEOUT_S, Readings, Seen, connected
from cluster.nodes import GIB, Card

_NODE_COLUMNS = ("node", "class", "arch", "alive", "card", "total", "free", "reserved", "source", "age s", "CPUs free")
_ONLY_WHERE_WIDE = ("arch", "card", "source")
_NUMBERS = ("total", "free", "reserved", "age s", "CPUs free", "replicas", "queued tokens", "tokens/s", "busy")
_WIDE = 125  # columns of a terminal

_WATCH_EVERY_S = 2.0
_SERVE_TIMEOUT_S = 5.0
_GATEWAY_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class PoolState:
    """A pool, or another application with a model. Fields are None if the source lacks them: only the gateway knows the load."""

    name: str
    model: str
    node_class: str | None
    state: str
    replicas: int
    max_replicas: int
    queued_tokens: int | None = None
    tokens_per_s: float | None = None
    busy: float | None = None  # share of the time in which its replicas compute


@dataclass(frozen=True, slots=True)
class Status:
    """The cluster at one moment, `at` in seconds since the epoch. `source` names the source of the pools."""

    address: str
    at: float
    nodes: tuple[Seen, ...]
    pools: tuple[PoolState, ...] = ()
    source: str = "Serve is not running"
    notes: tuple[str, ...] = ()


def gateway_pools(entries: Iterable[Mapping[str, Any]], details: Mapping[str, Any]) -> tuple[PoolState, ...]:
    """The pools in the gateway's answer to GET /v1/models. Serve's `details` have the largest numbers of replicas."""
    most = {pool.name: pool.max_replicas for pool in serve_pools(details)}
    return tuple(
        PoolState(
            name=pool["name"],
            model=entry["id"],
            node_class=pool["node_class"],
            state=pool["state"],
            replicas=pool["replicas"],
            max_replicas=most.get(pool["name"], pool["replicas"]),
            queued_tokens=pool["queued_tokens"],
            tokens_per_s=pool["tokens_per_s"],
            busy=pool["busy"],
        )
        for entry in entries
        for pool in entry["pools"]
    )


def serve_pools(details: Mapping[str, Any]) -> tuple[PoolState, ...]:
    """The applications with a model in Serve's controller. They are the only source without a gateway."""
    return tuple(
        PoolState(
            name=name,
            model=_model_of(application, name),
            node_class=None,
            state=application["status"].lower(),
            replicas=sum(replica["state"] == "RUNNING" for replica in deployment["replicas"]),
            max_replicas=_most_replicas(deployment),
        )
        for name, application in details["applications"].items()
        for title, deployment in application["deployments"].items()
        if title not in ("Gateway", "Unrouted")
    )


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """A replica as Serve's controller sees it. `pool` is the name of its application, `node` Ray's id of its node."""

    id: str
    pool: str
    state: str
    node: str | None


def serve_replicas(details: Mapping[str, Any]) -> tuple[ReplicaState, ...]:
    """All replicas that have a model, in any state, and the gateways."""
    return tuple(
        ReplicaState(replica["replica_id"], name, str(replica["state"]).rpartition(".")[2].lower(), replica["node_id"])
        for name, application in details["applications"].items()
        for title, deployment in application["deployments"].items()
        if title != "Unrouted"
        for replica in deployment["replicas"]
    )


def gateway_urls(details: Mapping[str, Any]) -> tuple[str, ...]:
    """Addresses where a gateway may answer: the proxies of all nodes. Empty if no gateway is deployed."""
    prefixes = [each["route_prefix"] for each in details["applications"].values() if "Gateway" in each["deployments"]]
    if not prefixes or prefixes[0] is None:
        return ()
    host, port = details["http_options"]["host"], details["http_options"]["port"]
    proxies = [proxy["node_ip"] for proxy in details["proxies"].values() if proxy["status"] == "HEALTHY"]
    hosts = proxies if host in ("0.0.0.0", "::", "") else [host]  # noqa: S104
    in_url = [f"[{each}]" if ":" in each else each for each in hosts]
    return tuple(f"http://{each}:{port}{prefixes[0].rstrip('/')}" for each in in_url)


def as_data(status: Status) -> dict[str, Any]:
    """The status for JSON. Sizes are in bytes, ages in seconds; unknown values are null."""
    return {
        "address": status.address,
        "at": status.at,
        "nodes": [node_data(each, status.at) for each in status.nodes],
        "pools": [asdict(each) for each in status.pools],
        "pools_source": status.source,
        "notes": list(notes(status)),
    }


def as_text(status: Status, width: int) -> Iterator[RenderableType]:
    """The tables and sentences in reading order, for a terminal of `width` columns."""
    yield _nodes_table(status, width)
    if status.pools:
        yield _pools_table(status.pools)
    for note in notes(status):
        yield Text(f"* {note}")


def notes(status: Status) -> tuple[str, ...]:
    """Notes on the values."""
    silent = [f"node {each.name}: {each.problem}" for each in status.nodes if each.alive and each.problem]
    moved = [
        f"node {each.name} was started as {each.class_label} but is {each.node.class_name} now: end it and start it again"
        for each in status.nodes
        if each.node and each.class_label and each.class_label != each.node.class_name
    ]
    return (*silent, *moved, *status.notes, f"pools: {status.source}")


def node_data(seen: Seen, now: float) -> dict[str, Any]:
    """A node for JSON."""
    node = seen.node
    return {
        "name": seen.name,
        "id": seen.id,
        "ip": seen.ip,
        "class": seen.class_label,
        "arch": seen.arch,
        "alive": seen.alive,
        "problem": seen.problem,
        "cards": [asdict(card) for card in node.cards] if node else None,
        "usable_bytes_per_card": node.usable_bytes if node and node.cards else None,
        "reserved_bytes": seen.reserved_bytes,
        "ram_bytes": node.ram_bytes if node else None,
        "age_s": _age_s(seen, now),
        "gpus": {"total": seen.total.get("GPU", 0.0), "free": seen.available.get("GPU", 0.0)},
        "cpus": {"total": seen.total.get("CPU", 0.0), "free": seen.available.get("CPU", 0.0)},
    }


def _nodes_table(status: Status, width: int) -> Table:
    columns = [name for name in _NODE_COLUMNS if width >= _WIDE or name not in _ONLY_WHERE_WIDE]
    table = _table("Nodes (memory in GiB)", *columns)
    for each in status.nodes:
        cells = _node_cells(each) | {"age s": _rounded(_age_s(each, status.at))}
        style = {"dead": "dim", "silent": "red"}.get(cells["alive"])
        table.add_row(*(cells.get(name, "") for name in columns), style=style)
        cards = each.node.cards if each.node else ()
        for index, card in enumerate(cards if len(cards) > 1 else ()):
            cells = {"node": f"  :{index}"} | _memory_cells((card,))
            table.add_row(*(cells.get(name, "") for name in columns), style="dim")
    return table


def _node_cells(seen: Seen) -> dict[str, str]:
    cells = {"node": seen.name, "class": seen.class_label or "", "arch": seen.arch or "", "reserved": _gib(seen.reserved_bytes)}
    cells["alive"] = "dead" if not seen.alive else "drained" if seen.drained else "silent" if seen.problem else "yes"
    if seen.alive:
        cells["CPUs free"] = f"{seen.available.get('CPU', 0.0):g} of {seen.total.get('CPU', 0.0):g}"
    if seen.node is not None:
        cells |= _memory_cells(seen.node.cards) if seen.node.cards else {"card": "none"}
    return cells


def _memory_cells(cards: Sequence[Card]) -> dict[str, str]:
    """The cells for all cards of a node together."""
    count = Counter(card.name for card in cards)
    free = [card.free_bytes for card in cards if card.free_bytes is not None]
    return {
        "card": ", ".join(f"{number} x {name}" if number > 1 else name for name, number in count.items()),
        "total": _gib(sum(card.total_bytes for card in cards)),
        "free": _gib(sum(free)) if len(free) == len(cards) else "",
        "source": cards[0].source,
    }


def _pools_table(pools: Iterable[PoolState]) -> Table:
    table = _table("Pools", "model", "class", "state", "replicas", "queued tokens", "tokens/s", "busy")
    for each in pools:
        queued = "" if each.queued_tokens is None else f"{each.queued_tokens:,}"
        rate = "" if each.tokens_per_s is None else f"{each.tokens_per_s:,.0f}"
        busy = "" if each.busy is None else f"{each.busy:.0%}"
        table.add_row(
            each.model, each.node_class or each.name, each.state, f"{each.replicas} of {each.max_replicas}", queued, rate, busy,
            style=None if each.replicas else "dim",
        )  # fmt: skip
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        may_wrap = column in ("card", "source", "model")
        table.add_column(column, justify="right" if column in _NUMBERS else "left", no_wrap=not may_wrap, overflow="fold")
    return table


def _most_replicas(deployment: Mapping[str, Any]) -> int:
    config = deployment["deployment_config"]
    scaling = config.get("autoscaling_config")
    return int(scaling["max_replicas"] if scaling else config.get("num_replicas") or deployment["target_num_replicas"])


def _model_of(application: Mapping[str, Any], name: str) -> str:
    """The model named in the `args` of a pool or of a plain application. Only a deployed config file leaves `args` behind."""
    args = (application.get("deployed_app_config") or {}).get("args") or {}
    return str(args.get("spec", {}).get("name") or args.get("model") or name)


def _age_s(seen: Seen, now: float) -> float | None:
    return None if seen.heard_at is None else round(max(0.0, now - seen.heard_at), 1)


def _gib(size: int | None) -> str:
    return "" if size is None else f"{size / GIB:.1f}"


def _rounded(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.0f}"


class Watcher:
    """Reads the status of the cluster that this process is connected to."""

    def __init__(self, address: str, api_key: str | None = None) -> None:
        """`api_key`: an API key of the gateway."""
        self._address, self._api_key = address, api_key
        self._readings = Readings()

    def look(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Status:
        """The present status. Waits for the nodes for at most `timeout_s`. Raises: ClusterError if the head is lost."""
        connect(self._address)
        nodes = self._readings.read(timeout_s)
        try:
            details = serve_details()
        except ClusterError as error:
            return Status(self._address, time.time(), nodes, source=str(error))
        if details is None:
            return Status(self._address, time.time(), nodes)
        pools, source, problems = _pools(details, self._api_key)
        return Status(self._address, time.time(), nodes, pools, source, problems)


def show(status: Status, console: Console) -> None:
    for part in as_text(status, console.width):
        console.print(part, soft_wrap=isinstance(part, Text))


def show_forever(watcher: Watcher, console: Console) -> None:
    """Shows the status every 2 s until Ctrl-C.

    Raises: ClusterError if the head is lost. A minute later Ray itself would end this process.
    """
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        timeout_s = ANSWER_TIMEOUT_S
        while True:
            live.update(Group(*as_text(watcher.look(timeout_s), console.width)), refresh=True)
            timeout_s = _WATCH_EVERY_S  # a node that has not answered yet may answer before the next query
            time.sleep(_WATCH_EVERY_S)


@contextmanager
def watching(address: str | None = None, api_key: str | None = None) -> Iterator[Watcher]:
    """Raises: ClusterError if there is no cluster, or if this machine is not a node of it."""
    with connected(address) as found:
        yield Watcher(found, api_key)


def _pools(details: Mapping[str, Any], api_key: str | None = None) -> tuple[tuple[PoolState, ...], str, tuple[str, ...]]:
    """Returns: (the pools, the source, the problems of gateways that did not answer)."""
    problems = []
    for url in gateway_urls(details):
        try:
            return gateway_pools(_ask_gateway(url, api_key), details), f"as the gateway at {url} says", ()
        except urllib.error.HTTPError as error:
            wants_key = "; give a valid key with --api-key or EMBERFORGE_API_KEY" if error.code == HTTPStatus.UNAUTHORIZED else ""
            problems.append(f"the gateway at {url} does not answer: {error}{wants_key}")
        except (OSError, ValueError, KeyError) as error:
            problems.append(f"the gateway at {url} does not answer: {error}")
    return serve_pools(details), "as Serve's controller says, which does not know the load", tuple(problems)


def _ask_gateway(url: str, api_key: str | None) -> list[dict[str, Any]]:
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({})
    )  # without HTTP_PROXY, because a company's proxy cannot reach the cluster
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {api_key}"} if api_key else {})  # noqa: S310
    with opener.open(request, timeout=_GATEWAY_TIMEOUT_S) as response:
        entries: list[dict[str, Any]] = json.loads(response.read())["data"]
        return entries


def serve_details() -> dict[str, Any] | None:
    """All details of Serve's controller. None if Serve is not running. Raises: ClusterError if the controller does not answer."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    try:
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return None
    try:
        reference: Any = controller.get_serve_instance_details.remote()
        details: Any = ray.get(reference, timeout=_SERVE_TIMEOUT_S)
        return dict(details)
    except ray.exceptions.RayError as error:
        raise ClusterError(f"Serve's controller does not answer ({type(error).__name__})") from error
