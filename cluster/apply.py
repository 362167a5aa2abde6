"""Deploys a Serve config: computes the changes, deploys them, and waits until all replicas are ready.

Each step may be interrupted. The same command, typed again, continues from the present state.
"""

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from cluster.applied import History, Store
from cluster.canary import Canary, Trial, figures, forget, is_worse, tallies, trial
from cluster.files import ClusterError
from cluster.serve_changes import changes, interruptions, replaced
from cluster.serve_client import ServeClient, running_config
from cluster.serve_progress import Progress, failed_deployments, failure, is_ready, replicas_seen, running_replicas

_LOOK_EVERY_S = 1.0
_NO_NODE_S = 120.0  # a new gateway may wait for a minute until an old one on its node has finished its streams


class _Failed(ClusterError):
    """A replica does not start, or a new version is worse than the old one."""


class _Serve:
    """Serve, while it runs the config that this command has seen or deployed last.

    Otherwise two commands at the same time would overwrite each other's configs, and the first one would wait for ever.
    """

    def __init__(self, client: ServeClient, running: Mapping[str, Any]) -> None:
        self._client, self._running = client, running

    def details(self) -> dict[str, Any]:
        """Serve's own details. Raises: ClusterError if somebody else has changed the config."""
        details = self._client.details()
        if _by_name(running_config(details, self._running)) != _by_name(self._running):
            raise ClusterError(
                "another command has changed the deployment in the meantime, so this one ends; emberforge rollback --list shows "
                "who applied what, and the same command, typed again, deploys this config"
            )
        return details

    def deploy(self, config: Mapping[str, Any]) -> None:
        """Raises: ClusterError."""
        self._client.deploy(config)
        self._running = config


@dataclass(frozen=True, slots=True)
class Difference:
    """The changes of a deployment, line by line. No lines mean no changes.

    After a failure, Serve does not try a deployment again until its config changes. The applications in `ended` have failed with
    the same config, so they are ended and then started again. The applications in `kept` end only when no gateway
    sends requests to them.
    """

    lines: tuple[str, ...]
    running: Mapping[str, Any]  # the config that Serve ran when the changes were computed
    ended: frozenset[str] = frozenset()
    trial: Trial | None = None
    kept: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Update:
    """A config to apply.

    Args:
        canaries: the models whose new version runs beside the old one for a limited time.
        has_room: whether the nodes can hold the running replicas of these applications together with those of the config.
    """

    config: Mapping[str, Any]
    canaries: Mapping[str, Canary] = field(default_factory=dict)
    has_room: Callable[[Mapping[str, Any], Collection[str]], bool] = lambda *_: False


def difference(details: Mapping[str, Any], update: Update, history: History) -> Difference:
    """The changes that a deployment of `update` makes to the cluster in Serve's `details`."""
    config, start_s = update.config, history.start_s()
    old = running_config(details, config)
    ready = history.ready()
    tried, no_room = trial(old, config, None if ready is None else ready.config, update.canaries), False
    if tried is not None:
        names = {each["name"] for each in config["applications"]}
        kept = {each["name"] for each in tried.beside["applications"]} - names
        no_room = not update.has_room(details, kept)
        if no_room or not all(running_replicas(details).get(name) for name in kept):
            tried = None
    same = {each["name"] for each in old["applications"]} & set(_names(config)) - replaced(old, config)
    failed = {name for name in same if details["applications"][name]["status"] == "DEPLOY_FAILED"}
    ended = frozenset(failed & failed_deployments(details))
    lines = [*changes(old, config), *(f"starts {name} again, because its start has failed" for name in sorted(failed))]
    if tried is not None:
        ended = frozenset()  # because ending them would also end the old version; a failed trial ends them itself
    if no_room:
        lines.append("the nodes cannot hold the new version beside the old one, so the old one ends first")
    lines += () if tried is None else tried.lines()
    target = config if tried is None else tried.beside
    gaps = interruptions(old, target, replicas=running_replicas(details), ended=ended, start_s=start_s)
    last = frozenset[str]() if ended or no_room or tried is not None else _kept(details, old, update)
    return Difference((*lines, *gaps), old, ended, tried, last)


def _kept(details: Mapping[str, Any], old: Mapping[str, Any], update: Update) -> frozenset[str]:
    """The applications that end and may run until the gateways have changed, because nothing needs their place before."""
    before, after = _by_name(old), _by_name(update.config)
    ending = frozenset(before.keys() - after.keys() - {"gateway"})
    is_free = all(before.get(name) == each for name, each in after.items() if name != "gateway")
    return ending if ending and (is_free or update.has_room(details, ending)) else frozenset[str]()


def deploy(
    client: ServeClient,
    history: History,
    config: Mapping[str, Any],
    todo: Difference,
    progress: Progress,
    *,
    of: int | None = None,
    pause: Callable[[], None] = lambda: time.sleep(_LOOK_EVERY_S),
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Applies a config, records it in the history, and returns when all replicas are ready.

    Args:
        of: the number of the applied config to which a rollback returns.
        pause: waits before the next query of Serve.
    Raises: ClusterError with the reason if a replica does not start, or with the figures of a new version that is worse than
        the old one. The old version then has all requests again. ClusterError also if another command changes the deployment.
    """
    serve = _Serve(client, todo.running)
    progress.update(serve.details())
    number = history.begin(config, of)
    if todo.ended:
        others = [each for each in config["applications"] if each["name"] not in todo.ended]
        serve.deploy({**config, "applications": others})
        while todo.ended.intersection((details := serve.details())["applications"]):
            progress.update(details)
            pause()
    if todo.trial is not None:
        _try(serve, history.store, todo.trial, progress, pause, clock)
        _let_gateways_change(serve, config, todo.trial.beside, progress, pause)
    elif todo.kept:
        kept = [each for each in todo.running["applications"] if each["name"] in todo.kept]
        _let_gateways_change(serve, config, {"applications": kept}, progress, pause)
    if todo.lines:
        serve.deploy(config)
    _wait(serve, _names(config), progress, pause)
    forget(history.store)
    history.finish(number, progress.start_s)


def _wait(serve: _Serve, names: Collection[str], progress: Progress, pause: Callable[[], None]) -> None:
    """Returns when all replicas of these applications are ready. Raises: _Failed if one does not start."""
    while True:
        details = serve.details()
        progress.update(details)
        if reason := failure(details, names):
            raise _Failed(reason)
        if is_ready(details, names):
            return
        pause()


def _try(
    serve: _Serve,
    store: Store,
    tried: Trial,
    progress: Progress,
    pause: Callable[[], None],
    clock: Callable[[], float],
) -> None:
    """Runs both versions for the time of the trial. Returns if the new version passes the trial.

    Raises: ClusterError if the new version fails, after the old config runs again.
    """
    serve.deploy(tried.beside)
    try:
        _wait(serve, _names(tried.beside), progress, pause)
        progress.tell(f"both versions run, for {tried.seconds:g} s")
        end = clock() + tried.seconds
        while clock() < end:
            pause()
            _compare(serve, store, tried, progress, ended=False)
        for line in _compare(serve, store, tried, progress, ended=True):
            progress.tell(line)
    except _Failed as error:
        progress.tell(f"{error}; returning to the old version")
        with suppress(_Failed):  # the new version must end in any case
            _let_gateways_change(serve, tried.old, tried.beside, progress, pause)
        serve.deploy(tried.old)
        _wait(serve, _names(tried.old), progress, pause)
        forget(store)
        raise ClusterError(f"{error}; the old version has all requests again") from None


def _let_gateways_change(
    serve: _Serve, config: Mapping[str, Any], beside: Mapping[str, Any], progress: Progress, pause: Callable[[], None]
) -> None:
    """Changes the gateways while the applications of `beside` still run. Returns when no gateway sends requests to them.

    It also returns if a gateway finds no node, because the applications of `beside` may hold the CPUs that it needs.

    Raises: _Failed if a gateway does not start.
    """
    names = _names(config)
    others = [each for each in beside["applications"] if each["name"] not in names]
    serve.deploy({**config, "applications": [*config["applications"], *others]})
    while True:
        details = serve.details()
        progress.update(details)
        if reason := failure(details, ["gateway"]):
            raise _Failed(reason)
        gateways = [each for each in replicas_seen(details, {}).values() if each.application == "gateway"]
        is_stopping = any(each.state == "STOPPING" for each in gateways)
        if not is_stopping and is_ready(details, ["gateway"]):
            return
        if not is_stopping and any(each.waits_s > _NO_NODE_S for each in gateways):
            progress.tell(
                f"a gateway finds no node for {_NO_NODE_S:g} s, so {', '.join(each['name'] for each in others)} ends now"
            )
            return
        pause()


def _compare(serve: _Serve, store: Store, tried: Trial, progress: Progress, ended: bool) -> list[str]:
    """The figures of both versions, one line per model. Raises: _Failed if a new version is worse, or has failed."""
    details = serve.details()
    progress.update(details)
    if reason := failure(details, [name for version in tried.versions.values() for name in version.split()]):
        raise _Failed(reason)
    gateways = [each.id for each in replicas_seen(details, {}).values() if each.application == "gateway"]
    lines = []
    for model, version in tried.versions.items():
        old, new = tallies(store, model, version, gateways)
        lines.append(f"{model}: {figures(old, new)}")
        if is_worse(old, new, ended):
            raise _Failed(f"the new version is worse: {lines[-1]}")
    return lines


def _names(config: Mapping[str, Any]) -> list[str]:
    return [each["name"] for each in config["applications"]]


def _by_name(config: Mapping[str, Any]) -> dict[str, Any]:
    return {each["name"]: each for each in config["applications"]}
