"""Runs a new version of a model beside the old one: the Serve config of both, and the comparison of their requests.

The name of a canary model's pool ends in a digest of everything whose change makes Serve replace replicas. So a new version is
another application, and both run at the same time (docs/decisions/047).
"""

import hashlib
import json
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.applied import Store
from cluster.serve_changes import without_numbers

# The new version is worse if its share of failed requests is higher by this value, or if its 95th percentile of request times is
# longer by a factor and a constant. With fewer failures, or fewer requests, there is no judgement. Times need more requests until
# the end of a trial, because the first requests to a new replica are slow: two of 31 would decide the 95th percentile.
MORE_FAILED, LEAST_FAILED = 0.01, 3
SLOWER, SLOWER_S, LEAST_REQUESTS, LEAST_REQUESTS_EARLY = 1.5, 0.05, 20, 100
# Upper bounds in seconds of the intervals in which the times of requests are counted.
_BOUNDS_S = tuple(0.0005 * 1.2**step for step in range(70))
_PREFIX = "trial/"
# Fields of a spec whose change gives other vectors. An index must not mix them with vectors of the old version.
VECTORS = ("model", "revision", "dtype", "pooling", "default_prompt", "default_prompt_name")


@dataclass(frozen=True, slots=True)
class Canary:
    """The trial that models.yaml asks for: the new version's share of the model's requests, and the duration.

    If the model embeds and its vectors change, `has_keys` tells whether there are API keys whose requests it may get.
    """

    percent: int
    seconds: float
    embeds: bool = False
    has_keys: bool = False

    def describe(self, model: str, other_vectors: bool) -> str:
        """What the trial does, for the operator."""
        then = "then all of them, or none if it fails more often or is slower"
        if not (self.embeds and other_vectors):
            share = f"{self.percent} % of the requests"
        elif self.has_keys:
            share = f"the requests of {self.percent} % of the API keys, because its vectors are others,"
            then = "then all requests, or none if it fails more often or is slower"
        else:
            share, then = (
                "no requests, because its vectors are others and there are no API keys,",
                "then all of them, if it has started",
            )
        return f"tries {model} beside the old version first: it gets {share} for {self.seconds:g} s, {then}"


@dataclass(frozen=True, slots=True)
class Trial:
    """An update that runs both versions for a limited time. `old` has only the old versions, `beside` has both."""

    canaries: Mapping[str, Canary]  # by model
    versions: Mapping[str, str]  # of the new pools, by model
    old: Mapping[str, Any]
    beside: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        return max(each.seconds for each in self.canaries.values())

    def lines(self) -> Iterator[str]:
        """A line for each model, for the operator."""
        models = _gateway_models(self.beside)
        for name, canary in self.canaries.items():
            old, new = models[name]["spec"], models[name]["trial"]["spec"]
            yield canary.describe(name, any(old.get(key) != new.get(key) for key in VECTORS))


def versioned(application: dict[str, Any]) -> dict[str, Any]:
    """The application of a pool, with a name that contains its version."""
    args = {key: value for key, value in application["args"].items() if key != "pool"}
    facts = without_numbers(application | {"args": args, "name": ""})
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]
    name = f"{application['name']}@{digest}"
    return application | {"name": name, "args": application["args"] | {"pool": name}}


def trial(
    running: Mapping[str, Any], config: Mapping[str, Any], old: Mapping[str, Any] | None, canaries: Mapping[str, Canary]
) -> Trial | None:
    """The trial of the canary models that change from the running config to `config`. None if no canary model changes.

    Both versions may already run, because an earlier command was interrupted.

    Args:
        old: the last config whose replicas were all ready.
    """
    if old is None or not canaries:
        return None
    runs = {each["name"]: each for each in running["applications"]}
    wanted = {each["name"] for each in config["applications"]}
    ready = {each["name"] for each in old["applications"]}
    before, after = _gateway_models(running), _gateway_models(config)
    kept, versions = dict[str, Any](), dict[str, str]()
    for model in canaries:
        if model not in before or model not in after:
            continue
        pools = {each["name"] for each in before[model]["pools"]}
        if not pools & wanted and pools <= runs.keys() & ready:
            kept |= {name: runs[name] for name in pools}
            versions[model] = version_of(after[model]["pools"])
    if not kept:
        return None
    tried = {model: canaries[model] for model in versions}
    pools_of = [each for each in config["applications"] if each["name"] != "gateway"]
    (gateway,) = (each for each in config["applications"] if each["name"] == "gateway")
    models = [
        _with_trial(before[name], entry, tried[name].percent) if (name := entry["spec"]["name"]) in tried else entry
        for entry in gateway["args"]["models"]
    ]
    both = gateway | {"args": gateway["args"] | {"models": models}}
    return Trial(tried, versions, old, {**config, "applications": [*pools_of, *kept.values(), both]})


def _gateway_models(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The models in the gateway's args, by name."""
    args: dict[str, Any] = next((each["args"] for each in config["applications"] if each["name"] == "gateway"), {})
    return {entry["spec"]["name"]: entry for entry in args.get("models", ())}


def _with_trial(old: Mapping[str, Any], new: Mapping[str, Any], percent: int) -> dict[str, Any]:
    beside = {"spec": new["spec"], "pools": new["pools"], "percent": percent}
    return {**new, "spec": old["spec"], "pools": old["pools"], "trial": beside}


def version_of(pools: Collection[Mapping[str, Any]]) -> str:
    """The name of a version: the names of its pools."""
    return " ".join(sorted(each["name"] for each in pools))


@dataclass(slots=True)
class Tally:
    """The requests to one version, without requests whose failure is the client's fault."""

    requests: int = 0
    failed: int = 0
    times: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS_S) + 1))

    def add(self, seconds: float, failed: bool) -> None:
        self.requests += 1
        self.failed += failed
        if not failed:
            self.times[bisect_left(_BOUNDS_S, seconds)] += 1

    def plus(self, other: "Tally") -> "Tally":
        times = [ours + theirs for ours, theirs in zip(self.times, other.times, strict=True)]
        return Tally(self.requests + other.requests, self.failed + other.failed, times)

    @property
    def share_failed(self) -> float:
        return self.failed / max(1, self.requests)

    @property
    def p95_s(self) -> float:
        """The 95th percentile of the seconds of successful requests. 0 without requests."""
        left = 0.95 * sum(self.times)
        for bound, count in zip((*_BOUNDS_S, _BOUNDS_S[-1]), self.times, strict=True):
            left -= count
            if left <= 0:
                return bound if sum(self.times) else 0.0
        return _BOUNDS_S[-1]

    def __str__(self) -> str:
        ended = f", 95 % within {self.p95_s:.3g} s" if sum(self.times) else ""
        return f"{self.failed} of {self.requests} requests failed{ended}"


def figures(old: Tally, new: Tally) -> str:
    if not new.requests:  # without keys, if the vectors differ
        return f"new version: no requests, so the trial shows only that it starts; old version: {old}"
    return f"new version: {new}; old version: {old}"


def is_worse(old: Tally, new: Tally, ended: bool = True) -> bool:
    """Whether the new version fails more often, or takes longer. `ended`: whether this is the end of the trial."""
    if new.failed >= LEAST_FAILED and new.share_failed > old.share_failed + MORE_FAILED:
        return True
    counts = sum(old.times), sum(new.times)
    enough = LEAST_REQUESTS if ended else LEAST_REQUESTS_EARLY
    return min(counts) >= enough and new.p95_s > SLOWER * old.p95_s + SLOWER_S


def tell(store: Store, model: str, gateway: str, version: str, old: Tally, new: Tally) -> None:
    """Writes the counts of requests that a gateway has sent to both versions of a model."""
    store.put(f"{_PREFIX}{model}/{gateway}", json.dumps({"version": version, "old": asdict(old), "new": asdict(new)}))


def tallies(store: Store, model: str, version: str, gateways: Collection[str]) -> tuple[Tally, Tally]:
    """The counts of requests that these gateways have sent to the old version of a model and to this new version."""
    old, new = Tally(), Tally()
    for gateway in gateways:
        value = store.get(f"{_PREFIX}{model}/{gateway}")
        told = None if value is None else json.loads(value)
        if told is not None and told["version"] == version:
            old, new = old.plus(Tally(**told["old"])), new.plus(Tally(**told["new"]))
    return old, new


def forget(store: Store) -> None:
    """Removes the gateways' counts of finished trials."""
    for key in store.keys(_PREFIX):
        store.delete(key)
