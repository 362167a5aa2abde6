"""Lists the changes between two Serve configs: which applications start, end, move or are replaced.

Ray Serve replaces all replicas of an application at any change except that of the number of replicas. The number is in the
deployment's options, so `args` must not contain it.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from cluster.files import ClusterError, parse_yaml

# The options of a deployment that Serve changes without touching a replica.
_NUMBERS = ("num_replicas", "min_replicas", "max_replicas")


class _Deployment(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str
    autoscaling_config: dict[str, Any] | None = None


class _Application(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str
    args: dict[str, Any] = {}
    deployments: list[_Deployment] = []


class _Config(BaseModel):
    """The parts of a Serve config that `changes` reads."""

    model_config = ConfigDict(extra="allow")
    applications: list[_Application]


def deployed_before(file: Path) -> dict[str, Any] | None:
    """The Serve config in the file. None if the file does not exist or is empty.

    Raises: ClusterError if the file has something else, which `plan -o` must not replace.
    """
    if not file.is_file():
        return None
    try:
        text = file.read_text(encoding="utf-8")
        return parse_yaml(text, str(file), _Config).model_dump(exclude_unset=True) if text.strip() else None
    except (ClusterError, OSError, ValueError) as error:
        raise ClusterError(f"{error}; --output replaces only a Serve config: name another file, or delete this one") from None


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """A line for each application that the deployment of `new` changes, and for settings that the deployment cannot change."""
    before, after = _applications(old), _applications(new)
    for name in after:
        if name not in before:
            yield f"starts {name}"
        elif parts := _replaced_for(before[name], after[name]):
            yield f"replaces all replicas of {name}, one after another, because of other {', '.join(parts)}"
        elif before[name] != after[name]:
            yield f"moves {name} from {_numbers(before[name])} to {_numbers(after[name])} replicas, and replaces none"
    for name in before:
        if name not in after:
            yield f"ends {name}"
    fixed = [key for key in sorted({*old, *new} - {"applications"}) if old.get(key) != new.get(key)]
    if fixed:
        yield f"does not change {', '.join(fixed)}: that takes effect after `emberforge destroy` and a new deployment"


def replaced(old: Mapping[str, Any], new: Mapping[str, Any]) -> set[str]:
    """The applications whose replicas are all replaced."""
    before, after = _applications(old), _applications(new)
    return {name for name in after if name in before and _replaced_for(before[name], after[name])}


def interruptions(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    replicas: Mapping[str, int],
    ended: Collection[str] = (),
    start_s: Mapping[str, float] | None = None,
) -> Iterator[str]:
    """A line for each model that does not answer for some time while `new` is deployed, and one if no gateway answers.

    Serve replaces one replica of an application after another, and ends the old replica first. So an application with two
    replicas keeps answering.

    Args:
        replicas: the number of running replicas, by application.
        ended: applications that are ended and started again.
        start_s: start time of a replica in seconds, by application.
    """
    before, after = _applications(old), _applications(new)
    gaps = {*ended, *(name for name in replaced(old, new) if replicas.get(name, 0) < 2)}
    kept = before.keys() & after.keys() - gaps
    for model, pools in _by_model(before).items():
        coming = _by_model(after).get(model)
        if coming is None or not any(replicas.get(pool) for pool in pools) or kept.intersection(pools):
            continue
        # The pools of another version have other names. Their replicas start in about the same time.
        known = start_s or {}
        took = min((known[pool] for pool in (*coming, *pools) if pool in known), default=None)
        until = "a new gateway has started" if model is None else "a new replica has started"
        if not set(coming) & set(pools):  # the gateways must learn the new names
            until += " and the gateways, one after another, have changed"
            took = took and max(took, known.get("gateway", 0.0) * replicas.get("gateway", 1))
        how_long = (
            f"about {took:.0f} s at the last start" if took is not None else "the time is unknown before the first measured start"
        )
        yield f"{'no model answers' if model is None else f'{model} does not answer'} until {until}: {how_long}"


def _by_model(applications: Mapping[str, Any]) -> dict[str | None, list[str]]:
    """The names of the applications of each model. The key of gateways is None."""
    found: dict[str | None, list[str]] = {}
    for name, each in applications.items():
        args = each.get("args") or {}
        found.setdefault((args.get("spec") or {}).get("name") or args.get("model"), []).append(name)
    return found


def _applications(config: Mapping[str, Any]) -> dict[str, Any]:
    return {each["name"]: each for each in config["applications"] if isinstance(each, dict) and "name" in each}


def _replaced_for(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The changed keys that make Serve replace replicas, including keys inside `args` and of deployments.

    Keys of a model's spec come with their values. Other keys come without values, because settings may be secret.
    """
    old, new = without_numbers(before), without_numbers(after)
    changed = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    return [
        f"{key} ({_short(old.get(key))} -> {_short(new.get(key))})" if key.startswith("args.spec.") else key for key in changed
    ]


def without_numbers(application: Mapping[str, Any]) -> dict[str, Any]:
    """The values of an application whose change makes Serve replace its replicas, with keys as in `_replaced_for`."""
    flat = {key: value for key, value in application.items() if key not in ("args", "deployments")}
    for key, value in (application.get("args") or {}).items():
        inner = value.items() if key in ("spec", "settings") and isinstance(value, dict) else None
        flat |= {f"args.{key}": value} if inner is None else {f"args.{key}.{name}": its for name, its in inner}
    for deployment in application.get("deployments") or ():
        options = {key: value for key, value in deployment.items() if key not in ("name", *_NUMBERS)}
        scaling = options.pop("autoscaling_config", None) or {}
        options |= {key: value for key, value in scaling.items() if key == "policy"}
        flat |= {f"{deployment['name']}.{key}": value for key, value in options.items()}
    return flat


def _short(value: Any) -> str:
    text = "default" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:12]}...{text[-12:]}"


def _numbers(application: Mapping[str, Any]) -> str:
    for deployment in application.get("deployments") or ():
        scaling = deployment.get("autoscaling_config") or {}
        found = [str(each[key]) for each in (deployment, scaling) for key in _NUMBERS if isinstance(each.get(key), int)]
        if found:
            return "-".join(found)
    return "some"
