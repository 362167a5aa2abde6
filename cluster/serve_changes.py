"""What `serve deploy` of a config will do to a cluster that runs another one: what starts, ends, moves or is replaced.

Ray Serve replaces all replicas of an application if anything in it changes but the number of replicas. It takes the number from
the deployment's options, so `args` must not contain it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

# The options of a deployment that Serve changes without touching a replica.
_NUMBERS = ("num_replicas", "min_replicas", "max_replicas")


def deployed_before(file: Path) -> dict[str, Any] | None:
    """The Serve config in the file. None if there is no file, or no Serve config in it."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return content if isinstance(content, dict) and isinstance(content.get("applications"), list) else None


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """A line for each application that `serve deploy` of `new` changes, and for settings that it cannot change."""
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
        yield f"does not change {', '.join(fixed)}: that takes effect after `serve shutdown` and a new `serve deploy`"


def _applications(config: Mapping[str, Any]) -> dict[str, Any]:
    return {each["name"]: each for each in config["applications"] if isinstance(each, dict) and "name" in each}


def _replaced_for(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The keys whose change makes Serve replace replicas, with the keys inside `args` and of deployments named."""
    old, new = _without_numbers(before), _without_numbers(after)
    return [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]


def _without_numbers(application: Mapping[str, Any]) -> dict[str, Any]:
    flat = {key: value for key, value in application.items() if key not in ("args", "deployments")}
    flat |= {f"args.{key}": value for key, value in (application.get("args") or {}).items()}
    for deployment in application.get("deployments") or ():
        options = {key: value for key, value in deployment.items() if key not in ("name", *_NUMBERS)}
        scaling = options.pop("autoscaling_config", None) or {}
        options |= {key: value for key, value in scaling.items() if key == "policy"}
        flat |= {f"{deployment['name']}.{key}": value for key, value in options.items()}
    return flat


def _numbers(application: Mapping[str, Any]) -> str:
    for deployment in application.get("deployments") or ():
        scaling = deployment.get("autoscaling_config") or {}
        found = [str(each[key]) for each in (deployment, scaling) for key in _NUMBERS if isinstance(each.get(key), int)]
        if found:
            return "-".join(found)
    return "some"
