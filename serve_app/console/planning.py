"""Makes the console's plan of a pasted models.yaml, in a process beside the server (`planner.py`), one plan at a time."""

import asyncio
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

import serve_app
from cluster.files import ClusterError
from cluster.node_live import nodes_to_plan_with
from cluster.nodes import Node
from serve_app.compute.service import Service
from serve_app.console.cluster_view import CLUSTER, View
from serve_app.console.planner import MOST_CPU_S, QUESTION, Question
from serve_app.dialects.bodies import parse_body
from serve_app.errors import NoPlan, Overloaded
from serve_app.http.body import read_body
from serve_app.http.encode import json_response

log = logging.getLogger(__name__)

_MOST_CHARACTERS = 1 << 16
# Longer than the limit of CPU time, because on a busy machine the process gets less than a core.
_LONGEST_S = 3 * MOST_CPU_S
_MOST_ANSWER_BYTES = 8 << 20
_RETRY_S = 5.0
_ELSEWHERE = "emberforge plan on a node has no such limit"

_one_at_a_time = asyncio.Lock()


class PlanBody(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    models: Annotated[str, Field(max_length=_MOST_CHARACTERS)]  # the text of a models.yaml


async def plan(service: Service, request: Request) -> Response:
    """Raises: NoPlan; Overloaded while another plan is made."""
    hold = service.admission.hold()
    try:
        body = parse_body(PlanBody, await read_body(request, service, hold))
    finally:
        hold.release()
    if _one_at_a_time.locked():
        raise Overloaded(_RETRY_S, "the server makes another plan; try again in some seconds")
    notes: list[str] = []
    async with _one_at_a_time:
        try:
            nodes = _nodes(CLUSTER.read(), notes)
        except ClusterError as error:
            raise NoPlan(str(error)) from None
        served = frozenset(str(model["model"]) for model in service.backend.overview())
        answer = await _ask(QUESTION.dump_json(Question(body.models, nodes, served)))
    if "error" in answer:
        raise NoPlan(answer["error"])
    answer["summary"] += notes
    return json_response(json.dumps(answer).encode(), {"cache-control": "no-store"})


def _nodes(view: View, notes: list[str]) -> tuple[Node, ...] | None:
    """The nodes to plan for: the cluster's nodes that can have models, or the machine of `emberforge serve`. None: this machine.

    Raises: ClusterError if the cluster was not queried yet, and as `nodes_to_plan_with`.
    """
    if not view.at:
        raise ClusterError("the server has not seen the nodes yet; try again in some seconds")
    here = [each.node for each in view.nodes if each.alive and each.node is not None and each.class_label is None]
    if here and all(each.class_label is None for each in view.nodes):
        return tuple(here)
    if view.problem and not view.nodes:  # a server without Ray
        return None
    return nodes_to_plan_with(view.nodes, notes.append)


async def _ask(question: bytes) -> dict[str, Any]:
    """Runs a process of `planner.py` and returns its answer. The process ends with this call. Raises: NoPlan after a timeout."""
    path = os.pathsep.join(filter(None, (str(Path(serve_app.__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-P", "-m", "serve_app.console.planner")
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environ)
    try:
        async with asyncio.timeout(_LONGEST_S):
            output, errors = await process.communicate(question)
    except TimeoutError:
        raise NoPlan(f"the plan took longer than {_LONGEST_S} s; {_ELSEWHERE}") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()  # closes the pipes
    if process.returncode:
        if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            raise NoPlan(f"the plan took more than {MOST_CPU_S} s of a core; {_ELSEWHERE}")
        log.error("a plan for the console failed: %s", errors.decode(errors="replace"))
        raise NoPlan(f"the plan failed, and the server's log has the details; {_ELSEWHERE}")
    if len(output) > _MOST_ANSWER_BYTES:
        raise NoPlan(f"the plan has too many replicas for this page; {_ELSEWHERE}")
    answer: dict[str, Any] = json.loads(output)
    return answer
