"""`emberforge apply`, `diff`, `rollback` and `destroy` against a stub of Serve, which starts replicas within a few queries."""

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from ray.serve.schema import ServeDeploySchema
from typer.testing import CliRunner

from cluster.applied import History
from cluster.apply import Update, deploy, difference
from cluster.canary import Canary, Tally, figures, is_worse, tell, version_of, versioned
from cluster.files import ClusterError
from cluster.local_ray import free_port
from cluster.serve_client import ServeClient
from cluster.serve_progress import Progress, failure
from cluster.starts import Start, StartReport, starts
from serve_app.cli import apply as cli_apply
from serve_app.cli.commands import cli

REFUSED = 'Traceback (most recent call last):\n  File "load.py", line 1, in load\nengine.errors.ModelError: no such file\n'


def config(dtype: str = "float32", replicas: int = 1, *more: str, gateways: int = 2) -> dict[str, Any]:
    """A Serve config of the model `lite`, of further models, and of gateways, as a plan makes it."""

    def pool(name: str, dtype: str, replicas: int) -> dict[str, Any]:
        numbers = {"min_replicas": replicas, "max_replicas": replicas}
        engine = {"name": "Engine", "num_replicas": "auto", "autoscaling_config": numbers, "ray_actor_options": {"num_cpus": 1}}
        args = {"pool": f"{name}.pc", "spec": {"name": name, "model": name, "dtype": dtype}}
        ours = {"name": f"{name}.pc", "route_prefix": None, "import_path": "serve_app.replica.pool:build"}
        return ours | {"args": args, "deployments": [engine]}

    gateway = {
        "name": "gateway",
        "route_prefix": "/",
        "import_path": "serve_app.gateway.app:build",
        "args": {"models": [["lite", dtype], *([name, dtype] for name in more)]},
        "deployments": [{"name": "Gateway", "num_replicas": gateways}],
    }
    pools = [pool("lite", dtype, replicas), *(pool(name, dtype, 1) for name in more)]
    return {"proxy_location": "EveryNode", "http_options": {"host": "127.0.0.1", "port": 8000}, "applications": [*pools, gateway]}


class StubServe:
    """A stub of `ServeClient` and of Serve. An application in `broken` does not start."""

    def __init__(self) -> None:
        self.applications: dict[str, dict[str, Any]] = {}
        self.broken: set[str] = set()
        self.deploys, self.http, self._next = 0, dict[str, Any](), 0

    def details(self) -> dict[str, Any]:
        for name, each in list(self.applications.items()):
            each["looks"] -= each["looks"] > 0
            if each["status"] == "DELETING" and not each["looks"]:
                del self.applications[name]
            elif each["status"] == "DEPLOYING" and not each["looks"]:
                broken = name in self.broken or each["gave_up"]
                each |= {"status": "DEPLOY_FAILED" if broken else "RUNNING", "gave_up": broken}
                if not broken:
                    for replica in each["replicas"]:
                        replica |= {"state": "RUNNING", "node_id": "1"}
        applications = {name: self._shown(each) for name, each in self.applications.items()}
        proxies = {"1": {"node_ip": "127.0.0.1", "status": "HEALTHY"}}
        return {"applications": applications, "proxies": proxies} | ({"http_options": self.http} if self.http else {})

    def deploy(self, body: Any) -> None:
        self.deploys += 1
        given = ServeDeploySchema.model_validate(body)
        self.http = self.http or given.http_options.model_dump()
        wanted = {each.name: each.model_dump(exclude_unset=True) for each in given.applications}
        for name, application in wanted.items():
            old = self.applications.get(name, {"config": None, "replicas": [], "gave_up": False})
            is_new = _code(old["config"]) != _code(application)
            number = _number(application)
            kept = [] if is_new else old["replicas"][:number]
            started = [self._replica() for _ in range(number - len(kept))]
            gave_up = old["gave_up"] and not is_new
            entry = {"config": application, "status": "DEPLOYING", "looks": 2, "gave_up": gave_up, "replicas": [*kept, *started]}
            self.applications[name] = entry
        for name in self.applications.keys() - wanted.keys():
            self.applications[name] |= {"status": "DELETING", "looks": 4, "config": None}

    def shut_down(self) -> None:
        self.applications, self.http = {}, {}

    def _replica(self) -> dict[str, Any]:
        self._next += 1
        return {"replica_id": f"r{self._next}", "state": "STARTING", "node_id": None, "start_time_s": time.time() - 7}

    def _shown(self, each: dict[str, Any]) -> dict[str, Any]:
        failed = each["status"] == "DEPLOY_FAILED"
        deployment = {
            "status": "DEPLOY_FAILED" if failed else "HEALTHY",
            "message": f"It failed to start 3 times. Error:\n{REFUSED}" if failed else "",
            "replicas": [] if failed else each["replicas"],
        }
        shown = {"status": each["status"], "message": "", "deployed_app_config": each["config"], "route_prefix": "/"}
        is_gateway = each["config"] is not None and each["config"]["name"] == "gateway"
        return json.loads(json.dumps(shown | {"deployments": {"Gateway" if is_gateway else "Engine": deployment}}))


def _code(application: Any) -> Any:
    return None if application is None else (application["args"], application["deployments"][0].get("ray_actor_options"))


def _number(application: Any) -> int:
    (deployment,) = application["deployments"]
    return int(
        deployment["autoscaling_config"]["min_replicas"] if "autoscaling_config" in deployment else deployment["num_replicas"]
    )


class MemoryStore:
    """A store of applied configs. `rival` is called once, before the next config is added."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self.rival: Callable[[], object] | None = None

    def keys(self, prefix: str) -> list[str]:
        return [key for key in self._values if key.startswith(prefix)]

    def get(self, key: str) -> str | None:
        return self._values.get(key)

    def put(self, key: str, value: str, overwrite: bool = True) -> bool:
        if self.rival is not None:
            rival, self.rival = self.rival, None
            rival()
        if key in self._values and not overwrite:
            return False
        self._values[key] = value
        return True

    def delete(self, key: str) -> None:
        del self._values[key]


def tally(failed: int, requests: int = 100, seconds: float = 0.01) -> Tally:
    found = Tally()
    for number in range(requests):
        found.add(seconds, failed=number < failed)
    return found


class Killed(BaseException):
    pass


class Mortal:
    """Passes calls on. The process is killed after `life` steps. There is a step before and a step after each call."""

    def __init__(self, inner: Any, life: list[int]) -> None:
        self._inner, self._life = inner, life

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            self._step()
            result = getattr(self._inner, name)(*args, **named)
            self._step()
            return result

        return call

    def _step(self) -> None:
        self._life[0] -= 1
        if self._life[0] < 0:
            raise Killed


class Operator:
    """A person who types commands. `said` has the lines of progress."""

    def __init__(self) -> None:
        self.serve, self.store, self.said = StubServe(), MemoryStore(), list[str]()
        self.tallies = tally(0), tally(0)  # of the old and the new version, at each gateway
        self.trials: list[tuple[str, ...]] = []  # the applications at each query during a trial

    def apply(
        self,
        wanted: dict[str, Any],
        life: int = 1_000_000,
        of: int | None = None,
        canaries: Mapping[str, Canary] = MappingProxyType({}),
        has_room: bool = True,
    ) -> tuple[str, ...]:
        steps = [life]
        serve: Any = Mortal(self.serve, steps)
        store: Any = Mortal(self.store, steps)
        history, looks = History(store), count()
        todo = difference(serve.details(), Update(wanted, canaries, lambda *_: has_room), history)
        progress = Progress(self.said.append, {"1": "pc1"})
        deploy(serve, history, wanted, todo, progress, of=of, pause=self._let_gateways_tell, clock=lambda: float(next(looks)))
        return todo.lines

    def _let_gateways_tell(self) -> None:
        """Writes the counts that gateways write during a trial, between two queries."""
        if (gateway := self.serve.applications.get("gateway")) is None or gateway["config"] is None:
            return
        for entry in gateway["config"]["args"]["models"]:
            if isinstance(entry, dict) and "trial" in entry:
                self.trials.append(tuple(sorted(self.serve.applications)))
                for replica in gateway["replicas"]:
                    tell(self.store, "lite", replica["replica_id"], version_of(entry["trial"]["pools"]), *self.tallies)

    def rollback(self, life: int = 1_000_000) -> None:
        entry = History(self.store).previous()
        self.apply(entry.config, life, of=entry.number)

    @property
    def history(self) -> list[tuple[int, int | None, bool]]:
        return [(entry.number, entry.of, entry.ready) for entry in History(self.store).entries()]

    @property
    def runs(self) -> dict[str, Any]:
        return {name: (each["status"], each["config"]) for name, each in self.serve.applications.items()}


def test_an_apply_says_what_it_does_and_ends_when_all_is_ready() -> None:
    operator = Operator()
    assert operator.apply(config()) == ("starts lite.pc", "starts gateway")
    assert operator.said == [
        "lite.pc: replica r1 starting",
        "gateway: replica r2 starting",
        "gateway: replica r3 starting",
        "lite.pc: replica r1 ready on pc1 after 7 s",
        "gateway: replica r2 ready on pc1 after 7 s",
        "gateway: replica r3 ready on pc1 after 7 s",
    ]
    assert operator.history == [(1, None, True)]
    operator.said.clear()
    assert operator.apply(config()) == ()
    assert (operator.said, operator.serve.deploys, operator.history) == ([], 1, [(1, None, True)])


def test_a_replica_has_ended_only_when_serve_no_longer_shows_it_in_its_deployment() -> None:
    """Serve shows no deployments of an application that it builds, and none of an application that it deletes."""
    serve, said = StubServe(), list[str]()
    serve.deploy(config("float32", 2, gateways=1))
    serve.details()
    two = serve.details()
    progress = Progress(said.append, {"1": "pc1"})
    building, one, gone = (json.loads(json.dumps(two)) for _ in range(3))
    building["applications"]["lite.pc"] |= {"status": "DEPLOYING", "deployments": {}}
    one["applications"]["lite.pc"]["deployments"]["Engine"]["replicas"].pop()
    del gone["applications"]["lite.pc"]
    told = []
    for details in (two, building, two, one, building, gone):
        progress.update(details)
        told.append(list(said))
        said.clear()
    assert told == [[], [], [], ["lite.pc: replica r2 has ended"], [], ["lite.pc: replica r1 has ended"]]


def test_the_steps_of_a_start_are_lines_or_bars() -> None:
    store, serve, said = MemoryStore(), StubServe(), list[str]()
    serve.deploy(config("float32", 1, gateways=1))
    details = serve.details()
    for replica in details["applications"]["lite.pc"]["deployments"]["Engine"]["replicas"]:
        replica["node_id"] = "1"
    seen: list[Any] = []
    bars: Any = lambda starts: seen.append(dict(starts))  # noqa: E731
    progresses = [Progress(said.append, {"1": "pc1"}, partial(starts, store), each) for each in (None, bars)]
    killed, report = StartReport("r9", store), StartReport("r1", store)
    killed.at("download")
    for change in (lambda: report.at("download"), lambda: report.loaded(0.5), lambda: report.loaded(1.0), report.end):
        change()
        for progress in progresses:
            progress.update(details)
    steps = [f"lite.pc: replica r1 {words}" for words in ("gets its files", "loads its weights", "compiles and measures")]
    assert [line for line in said if line in steps] == steps
    assert seen == [
        {"lite.pc: replica r1": Start("download")},
        {"lite.pc: replica r1": Start("load", 0.5)},
        {"lite.pc: replica r1": Start("compile")},
        {},
    ]
    assert store.keys("starting/") == []


def test_other_numbers_replace_nothing_and_what_stops_is_said() -> None:
    operator = Operator()
    operator.apply(config("float32", 1, "pro"))
    assert operator.apply(config("float32", 2, "pro")) == ("moves lite.pc from 1-1 to 2-2 replicas, and replaces none",)
    assert operator.apply(config("bfloat16", 2, "pro")) == (
        "replaces all replicas of lite.pc, one after another, because of other args.spec.dtype (float32 -> bfloat16)",
        "replaces all replicas of pro.pc, one after another, because of other args.spec.dtype (float32 -> bfloat16)",
        "replaces all replicas of gateway, one after another, because of other args.models",
        "pro does not answer until a new replica has started: about 7 s at the last start",
    )
    assert (
        operator.apply(config("bfloat16", 2))[0]
        == "replaces all replicas of gateway, one after another, because of other args.models"
    )
    assert set(operator.runs) == {"lite.pc", "gateway"}
    operator.apply(config("bfloat16", 2, gateways=1))
    (line,) = [line for line in operator.apply(config("float32", 2, gateways=1)) if "gateway has started" in line]
    assert line == "no model answers until a new gateway has started: about 7 s at the last start"


@pytest.mark.parametrize(
    ("wanted", "has_room", "first"),
    [
        (config(), False, {"lite.pc", "mini.pc", "gateway"}),  # nothing starts, so nothing needs the place of `mini`
        (config("float16"), True, {"lite.pc", "mini.pc", "gateway"}),
        (config("float16"), False, {"lite.pc", "gateway"}),
    ],
)
def test_a_pool_ends_after_the_gateways_have_changed_if_there_is_room(
    wanted: dict[str, Any], has_room: bool, first: set[str]
) -> None:
    """Otherwise the old gateways would send requests to a pool that has ended. They wait for a replaced gateway, too."""
    operator = Operator()
    operator.apply(config("float32", 1, "mini"))
    deploy, deployed, details = operator.serve.deploy, list[set[str]](), operator.serve.details
    stopping = iter(["STOPPING"] * 6)

    def see(body: Any) -> None:
        assert next(stopping, None) is None or not deployed
        deployed.append({each["name"] for each in body["applications"]})
        deploy(body)

    def shown() -> dict[str, Any]:
        seen = details()
        if deployed and seen["applications"]["gateway"]["status"] == "RUNNING" and (state := next(stopping, None)):
            old = seen["applications"]["gateway"]["deployments"]["Gateway"]["replicas"]
            old.append(old[0] | {"replica_id": "old", "state": state})
        return seen

    operator.serve.deploy, operator.serve.details = see, shown  # type: ignore[method-assign]
    assert "ends mini.pc" in operator.apply(wanted, has_room=has_room)
    assert deployed[0] == first
    assert deployed[1:] == [{"lite.pc", "gateway"}] * (len(first) - 2)
    assert operator.runs.keys() == {"lite.pc", "gateway"}


def test_a_replica_on_a_drained_node_answers_until_it_is_replaced() -> None:
    """Serve calls it PENDING_MIGRATION. The model has no other replica, so it does not answer during the replacement."""
    operator = Operator()
    operator.apply(config())
    (replica,) = operator.serve.applications["lite.pc"]["replicas"]
    replica["state"] = "PENDING_MIGRATION"
    assert any(line.startswith("lite does not answer until a new replica") for line in operator.apply(config("float16")))


def test_settings_that_serve_never_changes_are_a_difference() -> None:
    operator = Operator()
    operator.apply(config())
    moved = config() | {"http_options": {"host": "127.0.0.1", "port": 9000}}
    (line,) = operator.apply(moved)
    assert line.startswith("does not change http_options: that takes effect after `emberforge destroy`")


def test_an_apply_that_is_killed_at_any_point_ends_in_the_same_state_when_it_is_typed_again() -> None:
    def begun() -> Operator:
        operator = Operator()
        operator.apply(config("float32", 1, "old"))
        operator.serve.broken = {"lite.pc"}
        with pytest.raises(ClusterError):
            operator.apply(config("bfloat16", 1, "new"))
        operator.serve.broken = set()
        return operator

    done = begun()
    done.apply(config("bfloat16", 1, "new"))
    assert {status for status, _ in done.runs.values()} == {"RUNNING"}
    for life in range(1_000):
        operator = begun()
        try:
            operator.apply(config("bfloat16", 1, "new"), life)
        except Killed:
            operator.apply(config("bfloat16", 1, "new"))
            assert (operator.runs, operator.history) == (done.runs, done.history), life
        else:
            break
    assert life > 30


def test_a_rollback_that_is_killed_at_any_point_goes_on_when_it_is_typed_again() -> None:
    for life in range(1_000):
        operator = Operator()
        for dtype in ("float32", "bfloat16"):
            operator.apply(config(dtype))
        try:
            operator.rollback(life)
        except Killed:
            if operator.history[-1] != (3, 1, True):  # otherwise the process was killed after its work
                operator.rollback()
        else:
            break
        assert operator.runs["lite.pc"][1] == config("float32")["applications"][0]
        assert operator.history == [(1, None, True), (2, None, True), (3, 1, True)]
    assert life > 20


def test_the_sentence_of_a_failure_ends_without_a_full_stop() -> None:
    """More words follow in the error."""
    deployment = {"status": "UNHEALTHY", "message": "A replica's health check failed. It is UNHEALTHY.", "replicas": []}
    details = {"applications": {"lite.pc": {"status": "UNHEALTHY", "message": "", "deployments": {"Engine": deployment}}}}
    assert failure(details, ["lite.pc"]) == "lite.pc is not ready: A replica's health check failed. It is UNHEALTHY"


def test_a_replica_that_does_not_start_is_told_in_its_own_words_and_started_again_by_the_same_command() -> None:
    operator = Operator()
    operator.apply(config())
    operator.serve.broken = {"lite.pc"}
    with pytest.raises(ClusterError, match=r"^lite.pc is not ready: no such file$"):
        operator.apply(config("bfloat16"))
    assert operator.history == [(1, None, True), (2, None, False)]
    operator.serve.broken = set()
    assert operator.apply(config("bfloat16")) == ("starts lite.pc again, because its start has failed",)
    assert {status for status, _ in operator.runs.values()} == {"RUNNING"}
    assert operator.history[-1] == (2, None, True)


def test_a_rollback_returns_to_the_last_config_that_was_ready() -> None:
    operator = Operator()
    with pytest.raises(ClusterError, match="there is no earlier config"):
        operator.rollback()
    operator.apply(config("float32"))
    with pytest.raises(ClusterError, match="there is no earlier config"):
        operator.rollback()
    operator.serve.broken = {"lite.pc"}
    for dtype in ("float16", "bfloat16"):
        with pytest.raises(ClusterError):
            operator.apply(config(dtype))
    operator.serve.broken = set()
    operator.rollback()
    assert operator.runs["lite.pc"][1]["args"]["spec"]["dtype"] == "float32"
    assert operator.history[-1] == (4, 1, True)
    with pytest.raises(ClusterError, match="there is no applied config 9; the applied configs are 1, 2, 3, 4"):
        History(operator.store).entry(9)


def test_ten_configs_are_kept_and_two_operators_never_take_one_number() -> None:
    store = MemoryStore()
    history = History(store)
    for replicas in range(1, 14):
        history.begin(config(replicas=replicas))
    assert [entry.number for entry in history.entries()] == list(range(4, 14))
    store.rival = lambda: history.begin(config(replicas=98))
    assert history.begin(config(replicas=99)) == 15
    assert [entry.config for entry in history.entries()[-2:]] == [config(replicas=98), config(replicas=99)]
    assert len(history.entries()) == 10


CANARY = {"lite": Canary(10, 5.0)}


@pytest.mark.parametrize("look", [1, 2, 3])
@pytest.mark.parametrize("theirs", [config("float16"), config("float32", 1, "mini"), {"applications": []}])
def test_an_apply_ends_when_another_operator_deploys_something_else(look: int, theirs: dict[str, Any]) -> None:
    """The other command deploys while this one asks for confirmation, or while it waits. A destroy leaves no application."""
    operator = Operator()
    operator.apply(config())
    details, looks = operator.serve.details, count()

    def meanwhile() -> dict[str, Any]:
        if next(looks) == look:
            operator.serve.deploy(theirs)
        return details()

    operator.serve.details = meanwhile  # type: ignore[method-assign]
    with pytest.raises(ClusterError, match="another command has changed the deployment"):
        operator.apply(config("bfloat16", 1, "mini"))
    for _ in range(5):
        details()
    assert {each[1]["name"] for each in operator.runs.values()} == {each["name"] for each in theirs["applications"]}
    assert [ready for *_, ready in operator.history] == [True, False][: 1 + (look > 1)]


def canary_config(dtype: str) -> dict[str, Any]:
    """A config like `config`, for a model with a canary."""
    plain = config(dtype)
    pool, gateway = versioned(plain["applications"][0]), plain["applications"][1]
    model = {"spec": {"name": "lite", "dtype": dtype}, "aliases": [], "pools": [{"name": pool["name"]}]}
    return plain | {"applications": [pool, gateway | {"args": {"models": [model]}}]}


def pools(operator: Operator) -> list[str]:
    return [name for name in operator.runs if name != "gateway"]


def updated(seconds: float = 0.01, failed: int = 0) -> Operator:
    """A cluster with the old version. The new version will have `failed` failed requests and take `seconds` per request."""
    operator = Operator()
    operator.apply(canary_config("float32"), canaries=CANARY)
    operator.tallies = tally(0), tally(failed, seconds=seconds)
    return operator


OLD, NEW = (canary_config(dtype)["applications"][0]["name"] for dtype in ("float32", "bfloat16"))


def test_a_new_version_runs_beside_the_old_one_and_then_alone() -> None:
    operator = updated()
    assert operator.trials == []  # the first version has no trial, because nothing ran before
    lines = operator.apply(canary_config("bfloat16"), canaries=CANARY)
    assert lines[0] == f"starts {NEW}"
    assert "tries lite beside the old version first: it gets 10 % of the requests for 5 s" in lines[-1]
    assert not any("does not answer" in line for line in lines)
    assert set(operator.trials) == {("gateway", OLD, NEW)}
    figures = "0 of 200 requests failed, 95 % within 0.0111 s"
    assert f"lite: new version: {figures}; old version: {figures}" in operator.said
    assert pools(operator) == [NEW]
    assert [each[2] for each in operator.history] == [True, True]
    assert operator.apply(canary_config("bfloat16"), canaries=CANARY) == ()
    assert operator.store.keys("trial/") == []


@pytest.mark.parametrize(
    ("embeds", "has_keys", "said"),
    [
        (False, False, "it gets 10 % of the requests for 5 s, then all of them, or none if it fails more often or is slower"),
        (
            True,
            True,
            "it gets the requests of 10 % of the API keys, because its vectors are others, for 5 s, then all requests, or none",
        ),
        (
            True,
            False,
            "it gets no requests, because its vectors are others and there are no API keys, for 5 s, then all of them",
        ),
    ],
)
def test_the_share_of_a_new_version_is_told(embeds: bool, has_keys: bool, said: str) -> None:
    """The new version has another dtype, so it gives other vectors if it embeds."""
    lines = updated().apply(canary_config("bfloat16"), canaries={"lite": Canary(10, 5.0, embeds, has_keys)})
    assert lines[-1].startswith(f"tries lite beside the old version first: {said}")


@pytest.mark.parametrize(
    ("seconds", "failed", "reason"),
    [(0.01, 5, "10 of 200 requests failed"), (0.2, 0, "95 % within 0.205 s; old version: 0 of 200")],
)
def test_a_new_version_that_is_worse_gets_no_requests_and_the_command_fails(seconds: float, failed: int, reason: str) -> None:
    operator = updated(seconds, failed)
    before = operator.runs
    with pytest.raises(ClusterError, match=f"{reason}.*the old version has all requests again"):
        operator.apply(canary_config("bfloat16"), canaries=CANARY)
    assert operator.runs == before
    assert operator.history == [(1, None, True), (2, None, False)]


def test_a_trial_ends_early_only_after_many_slow_requests() -> None:
    """With 100 requests per gateway, the trial ends at the first query. With 30 requests, the trial runs to its end."""
    looks = []
    for requests in (100, 30):
        operator = updated(seconds=0.2)
        operator.tallies = tally(0, requests), tally(0, requests, seconds=0.2)
        with pytest.raises(ClusterError, match="is worse"):
            operator.apply(canary_config("bfloat16"), canaries=CANARY)
        looks.append(len(operator.trials))
    assert looks[0] < looks[1]


def test_a_failed_version_ends_if_a_gateway_finds_no_node_beside_it() -> None:
    """The new version holds the CPUs that the gateway needs, for example after the loss of a node."""
    operator = updated(failed=50)
    details, looks = operator.serve.details, count()

    def full() -> dict[str, Any]:
        assert next(looks) < 100, "the command waits for ever"
        seen = details()
        gateway, trial = seen["applications"]["gateway"], "trial" in str(operator.serve.applications["gateway"]["config"])
        if NEW in seen["applications"] and operator.trials and not trial:
            gateway["status"] = "DEPLOYING"
            waiting = {"state": "STARTING", "node_id": None, "start_time_s": time.time() - 130}
            gateway["deployments"]["Gateway"]["replicas"][0] |= waiting
        return seen

    operator.serve.details = full  # type: ignore[method-assign]
    with pytest.raises(ClusterError, match="the old version has all requests again"):
        operator.apply(canary_config("bfloat16"), canaries=CANARY)
    assert f"a gateway finds no node for 120 s, so {NEW} ends now" in operator.said
    assert pools(operator) == [OLD]


def test_a_new_version_that_does_not_start_leaves_the_old_one() -> None:
    operator = updated()
    before = operator.runs
    operator.serve.broken = {NEW}
    for _ in range(2):
        with pytest.raises(ClusterError, match="is not ready: no such file; the old version has all requests again"):
            operator.apply(canary_config("bfloat16"), canaries=CANARY)
        assert operator.runs == before


def test_a_trial_goes_on_when_the_dashboard_was_away() -> None:
    operator = updated()
    details, looks = operator.serve.details, count()

    def away() -> dict[str, Any]:
        if next(looks) == 8:
            raise ClusterError("Ray's dashboard does not answer")
        return details()

    operator.serve.details = away  # type: ignore[method-assign]
    with pytest.raises(ClusterError, match=r"^Ray's dashboard does not answer$"):
        operator.apply(canary_config("bfloat16"), canaries=CANARY)
    assert {OLD, NEW} <= set(operator.runs)
    operator.apply(canary_config("bfloat16"), canaries=CANARY)
    assert pools(operator) == [NEW]


def test_without_room_the_old_version_ends_first_and_the_time_is_told() -> None:
    operator = updated(failed=100)
    lines = operator.apply(canary_config("bfloat16"), canaries=CANARY, has_room=False)
    assert "the nodes cannot hold the new version beside the old one, so the old one ends first" in lines
    until = "a new replica has started and the gateways, one after another, have changed"
    assert f"lite does not answer until {until}: about 14 s at the last start" in lines  # two gateways
    assert (operator.trials, pools(operator)) == ([], [NEW])


@pytest.mark.slow
@pytest.mark.parametrize("failed", [0, 50])
def test_a_trial_that_is_killed_at_any_point_ends_in_the_same_state_when_it_is_typed_again(failed: int) -> None:
    def end(operator: Operator) -> str:
        try:
            operator.apply(canary_config("bfloat16"), canaries=CANARY)
        except ClusterError as error:
            return str(error)
        return "ready"

    done = updated(failed=failed)
    said = end(done)
    assert (said == "ready") == (failed == 0)
    for life in range(1_000):
        operator = updated(failed=failed)
        try:
            operator.apply(canary_config("bfloat16"), life, canaries=CANARY)
        except Killed:
            assert end(operator) == said, life
            assert (operator.runs, operator.history) == (done.runs, done.history), life
            assert operator.store.keys("trial/") == [], life
        except ClusterError:
            break
        else:
            break
    assert life > 40


def test_few_requests_and_few_failures_say_nothing() -> None:
    assert not is_worse(tally(0), tally(2, 2))
    assert is_worse(tally(0), tally(3, 3))
    assert not is_worse(tally(3), tally(3))
    assert not is_worse(tally(0), tally(0, 19, seconds=9.0))
    assert is_worse(tally(0), tally(0, 20, seconds=9.0))
    assert not is_worse(tally(0), tally(0, 99, seconds=9.0), ended=False)
    assert is_worse(tally(0), tally(0, 100, seconds=9.0), ended=False)
    assert is_worse(tally(0), tally(3, 3), ended=False)
    assert not is_worse(tally(0), tally(0, seconds=0.05))
    assert str(Tally()) == "0 of 0 requests failed"
    assert figures(tally(0), tally(1)).startswith("new version: 1 of ")
    assert figures(tally(0), Tally()).startswith(
        "new version: no requests, so the trial shows only that it starts; old version: 0 of"
    )
    assert Tally().plus(tally(1)).p95_s == tally(1).p95_s


@contextmanager
def rest_api(serve: StubServe) -> Iterator[str]:
    """The address of a dashboard with Serve's REST API."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            version = {"version": "4", "ray_version": "2.60.0", "ray_commit": "", "session_name": ""}
            self._answer(200, json.dumps(version if self.path == "/api/ray/version" else serve.details()))

        def do_PUT(self) -> None:
            try:
                serve.deploy(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            except ValueError:
                self._answer(400, "1 validation\nerror")
            else:
                self._answer(200, "")

        def do_DELETE(self) -> None:
            serve.shut_down()
            self._answer(200, "")

        def _answer(self, status: int, text: str) -> None:
            self.send_response(status if self.path.startswith("/api/") else 404)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_serve_is_asked_through_its_rest_api(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # requests to the cluster use no proxy
    monkeypatch.setenv("no_proxy", "example.org")
    stub = StubServe()
    with rest_api(stub) as address:
        client = ServeClient(address)
        client.deploy(config())
        for _ in range(2):  # then all replicas run, and Serve's answer no longer changes
            client.details()
        assert client.details() == stub.details()
        with pytest.raises(ClusterError, match=r"^Ray's dashboard refuses: .*400: 1 validation error"):
            client.deploy({"applications": 1})
        client.shut_down()
        assert client.details()["applications"] == {}
    with pytest.raises(ClusterError, match=r"does not answer .* on the head"):
        ServeClient(f"http://127.0.0.1:{free_port()}")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[str]]]:
    """Runs a command on a cluster that runs `config()`. The argument `float16` stands for a file with this dtype."""
    operator = Operator()
    operator.apply(config())

    @contextmanager
    def there() -> Iterator[Any]:
        yield cli_apply._Cluster(operator.serve, History(operator.store), {"1": "pc1"})  # type: ignore[arg-type]

    def read(file: Path) -> str:
        if file.name == "wrong":
            raise ClusterError("wrong cannot be read")
        return file.name

    def planned(dtype: str, _: Any) -> Update:
        return Update(config(dtype))

    def type_(*arguments: str) -> tuple[int, list[str]]:
        result = CliRunner().invoke(cli, list(arguments))
        return result.exit_code, [*result.output.splitlines(), *([str(result.exception)] if result.exception else [])]

    monkeypatch.setattr(cli_apply, "_cluster", there)
    monkeypatch.setattr(cli_apply, "_read", read)
    monkeypatch.setattr(cli_apply, "_update", planned)
    monkeypatch.setattr("cluster.apply._LOOK_EVERY_S", 0.0)
    return type_


def test_the_commands(command: Callable[..., tuple[int, list[str]]]) -> None:
    assert command("diff", "float32") == (0, ["nothing changes"])
    status, lines = command("diff", "float16")
    assert (status, lines[0].partition(",")[0]) == (1, "replaces all replicas of lite.pc")
    assert command("diff", "wrong") == (2, ["error: wrong cannot be read", "2"])
    assert "wrong cannot be read" in command("apply", "wrong")[1]  # also without a terminal
    for refused in (["apply", "float16"], ["rollback"], ["destroy"]):
        status, lines = command(*refused)
        assert (status, lines[-1].partition(":")[0]) == (1, "there is no terminal to ask for confirmation")
    status, lines = command("apply", "float16", "--yes")
    assert (status, lines[-1]) == (0, "ready: http://127.0.0.1:8000")
    status, lines = command("rollback", "--yes")
    assert (status, lines[0].partition("  ")[0], lines[-1]) == (0, "returns to 1", "ready: http://127.0.0.1:8000")
    status, lines = command("rollback", "--list")
    assert [line.split("  ")[0] for line in lines] == ["1", "2", "3"]
    assert lines[-1].endswith("lite  ready, from 1")
    assert command("destroy", "--yes") == (0, ["ends lite.pc", "ends gateway", "ended"])
    assert command("destroy", "--yes") == (0, ["nothing runs"])
    assert command("rollback", "1", "--yes")[0] == 0
