"""Pools whose engines sleep instead of computing. Their speed is that of the card that their node stands for."""

import math
from collections.abc import Sequence
from time import sleep
from typing import Any

import ray
from pydantic import Field
from ray import serve

from cluster.model_spec import ModelSpec
from loadtests.servers import StubEngine
from serve_app.replica import pool


class StubArgs(pool.PoolArgs):
    """`speeds`: tokens/s and seconds a pass, by node class. `ours` False leaves routing to Ray Serve."""

    speeds: dict[str, tuple[float, float]] = Field(min_length=1)
    ours: bool = True


class SleepingEngine(StubEngine):
    """Sleeps for the time of a pass. A vector's first number is the sum of the sequence's ids. The other numbers are fixed."""

    def __init__(self, tokens_per_s: float, pass_s: float) -> None:
        super().__init__()
        import torch

        self.max_batch_tokens, self.device, self.dtype = 8192, torch.device("cpu"), torch.float32
        self.longest_input, self.shares_host_memory = 32768, False
        self._tokens_per_s, self._pass_s = tokens_per_s, pass_s

    def launch(self, sequences: Sequence[Any], options: Any = None, outputs: Any = ()) -> Any:
        finished = super().launch(sequences, options, outputs)
        finished.output.vectors[:, 0] = [sum(ids) for ids in sequences]
        return finished

    def compute(self, sequences: Sequence[Any]) -> None:
        sleep(self._pass_s + sum(map(len, sequences)) / self._tokens_per_s)


class SleepingPool(pool.PoolServer):
    """The label of its node decides which card it stands for."""

    speeds: dict[str, tuple[float, float]] = {}

    def load_engine(self, spec: ModelSpec, num_threads: int) -> Any:
        node = ray.get_runtime_context().get_node_id()
        labels = next(each["Labels"] for each in ray.nodes() if each["NodeID"] == node)  # type: ignore[no-untyped-call]
        return SleepingEngine(*self.speeds[labels["emberforge-class"]])


class FastPool(pool.PoolServer):
    """About as fast as a 0.6B on an H200."""

    planned_tokens_per_s = 6e5

    def load_engine(self, spec: ModelSpec, num_threads: int) -> Any:
        return SleepingEngine(self.planned_tokens_per_s, pass_s=0.002)


class FreePool(pool.PoolServer):
    """A pass takes no time."""

    planned_tokens_per_s = 1e6

    def load_engine(self, spec: ModelSpec, num_threads: int) -> Any:
        return SleepingEngine(math.inf, 0.0)


def build(args: StubArgs) -> serve.Application:
    server = type("SleepingPool", (SleepingPool,), {"speeds": args.speeds})
    return pool.bind(args, server, **({} if args.ours else {"request_router_config": {}}))
