"""The process that plans for the console: reads a models.yaml and the nodes from stdin, writes the plan as JSON to stdout.

A plan may need seconds of Python, which would block all requests in a thread of the server. A separate process can also be
limited and killed. Everybody who may view the console may plan. So a plan reads only folders that the server serves, sends no
request to the Hub, and runs no code of a model.
"""

import json
import os
import resource
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from cluster.files import ClusterError
from cluster.models_file import ModelEntry, parse_models
from cluster.nodes import Node
from engine.errors import EmberError

MOST_CPU_S = 20
_MOST_BYTES = 4 << 30  # the limit of memory
_NICE = 10


@dataclass(frozen=True, slots=True)
class Question:
    """The input of a plan. `nodes` None means this machine. `folders`: the folders and files of the served models."""

    text: str
    nodes: tuple[Node, ...] | None
    folders: frozenset[str]


QUESTION = TypeAdapter(Question)


def planned(question: Question) -> dict[str, Any]:
    """The plan as data for the page. Raises: EmberError for a wrong file, or an unusable model or node."""
    file = parse_models(question.text)
    for entry in file.models:
        _check_source(entry, question.folders)
    from cluster import plan_report  # here, because it imports torch for seconds, and errors in the file need no torch
    from cluster.inventory import this_node
    from cluster.plan import Plan

    plan = Plan(file, (this_node(),) if question.nodes is None else question.nodes)
    return plan_report.as_data(plan) | {"summary": list(plan_report.summary(plan))}


def _check_source(entry: ModelEntry, folders: Collection[str]) -> None:
    """Raises: ClusterError for a model that the console does not read."""
    if entry.trust_remote_code:
        raise ClusterError(
            f"model {entry.name} has trust_remote_code, but the console runs no code of a model: use emberforge plan"
        )
    is_file = Path(entry.model).expanduser().exists() or entry.model.startswith(("/", "~", ".")) or entry.model.endswith(".gguf")
    if is_file and entry.model not in folders:
        raise ClusterError(
            f"model {entry.name} is the path {entry.model}, but the console reads only paths that this server serves: "
            "use emberforge plan"
        )


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
    os.nice(_NICE)
    try:
        answer = planned(QUESTION.validate_json(sys.stdin.buffer.read()))
    except EmberError as error:
        answer = {"error": str(error)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
