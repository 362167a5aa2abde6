"""The later stages of a replica: an actor for each, in a bundle of the replica's placement group.

The replica owns the actors, so Ray ends them with it. Each of them also ends with the ring of the stages: then the replica is
gone, or another stage is.
"""

import logging
import os
from concurrent.futures import Future
from time import sleep
from typing import Any

import ray
from ray.util import get_current_placement_group, get_node_ip_address
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.model_folder import pinned
from cluster.model_spec import ModelSpec
from engine import cut
from engine.errors import EngineStopped
from engine.run.later_stage import StageOptions, StageProcess
from engine.run.ring import Place
from serve_app.observe.process import observe_process

log = logging.getLogger(__name__)

# Streams hear of the loss of a stage before the replica ends.
_LAST_WORDS_S = 0.5


class _Stage:
    """The actor's class."""

    def __init__(self, spec: ModelSpec, number: int, num_threads: int | None) -> None:
        observe_process(f"stage {number} of {spec.name}")
        self._spec = spec
        self._stage = StageProcess(_address(), num_threads=num_threads)

    def open(self, options: StageOptions, num_stages: int) -> cut.Device:
        pinned(self._spec)  # raises for other files than the plan's
        return self._stage.open(options, num_stages)

    def load(self, layers: range, cache_tokens: int | None) -> None:
        self._stage.load(layers, cache_tokens)

    def run(self, place: Place) -> None:
        """Returns never: the process ends with the ring, and frees its memory."""
        code = 0
        try:
            self._stage.run(place)
        except BaseException:
            log.exception("this stage ends")
            code = 1
        logging.shutdown()
        os._exit(code)


class ActorStage:
    """A `LaterStage` in an actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def open(self, options: StageOptions, num_stages: int) -> "Future[cut.Device]":
        return _future(self._actor.open.remote(options, num_stages))

    def load(self, layers: range, cache_tokens: int | None) -> "Future[None]":
        return _future(self._actor.load.remote(layers, cache_tokens))

    def run(self, place: Place) -> "Future[None]":
        return _future(self._actor.run.remote(place))


def start_stages(spec: ModelSpec, num_threads: int | None) -> tuple[list[ActorStage], str]:
    """Starts an actor in each bundle of this replica's placement group after the first one, which has the replica.

    Returns: the stages, and the address of this machine by which they reach it.
    """
    group = get_current_placement_group()
    assert group is not None, "the config gives a replica with several stages a placement group"
    stages = []
    for index, bundle in enumerate(group.bundle_specs[1:], 1):
        actor = ray.remote(_Stage).options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
            max_restarts=0,
        )
        stages.append(ActorStage(actor.remote(spec, index + 1, num_threads)))
    return stages, _address()


def end_process(error: EngineStopped) -> None:
    """Ends this replica after the loss of a stage. Serve then starts another one, and gateways send its streams elsewhere."""
    log.error("the replica ends: %s", error)
    sleep(_LAST_WORDS_S)
    logging.shutdown()
    os._exit(1)


def _address() -> str:
    """This machine's address, by which Ray's other nodes reach it."""
    address: str = get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def _future(ref: Any) -> "Future[Any]":
    found: Future[Any] = ref.future()
    return found
