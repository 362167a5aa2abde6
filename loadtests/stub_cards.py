"""Replicas whose engine sleeps for a card's computing time, and gateways with other policies. Ray's workers import this file."""

import random
from collections.abc import Callable, Sequence
from itertools import count
from time import perf_counter, sleep
from typing import Any

from ray import serve

from cluster.model_spec import ModelSpec
from cluster.prefixes import PAGE_TOKENS
from cluster.router import Ticket
from cluster.stream_router import StreamLoad, choose_stream
from loadtests.stream_lab import LAST
from loadtests.stub_streams import StreamingEngine
from serve_app.deployment import deployment_options
from serve_app.gateway.app import Gateway
from serve_app.gateway.config import GatewayArgs
from serve_app.gateway.facts import Facts, read_facts
from serve_app.replica import pool

END = 2  # the embedded generator's end of text


class CardEngine(StreamingEngine):
    """A pass takes the time of its decode steps, and of its prompt tokens."""

    def __init__(self, rate: float, step_s: float, stream_s: float, num_pages: int) -> None:
        """
        Args:
            rate: prompt tokens/s.
            step_s: seconds of a decode step without streams; each stream adds `stream_s`.
        """
        super().__init__(0.0)
        from engine.schedule.pages import Pages

        self.pages = Pages(num_pages, PAGE_TOKENS)
        self.longest_input = min(self.longest_input, num_pages * PAGE_TOKENS)
        self._rate, self._step_s, self._stream_s = rate, step_s, stream_s

    def launch(self, sequences: Sequence[Any], options: Any = None, outputs: Any = (), pieces: Sequence[Any] = ()) -> Any:
        import numpy as np

        from engine.run.flight import Finished, Output
        from engine.schedule.stream import Token

        start, lengths = perf_counter(), [len(each.token_ids) for each in pieces]
        prompts = sum(length for length in lengths if length > 1)
        seconds = self._stream_s * lengths.count(1) + max(self._step_s, prompts / self._rate)
        last = [int(each.token_ids[-1]) for each in pieces if each.row is not None]
        assert min(last, default=0) >= 0, "a pass is launched only after the pass before it has ended"
        sleep(max(0.0, start + seconds - perf_counter()))
        tokens = [Token(each - 1 if each > LAST else END) for each in last]
        return Finished(Output(np.zeros((len(sequences), 1), dtype=np.float32), device_s=seconds, tokens=tokens))


class CardPool(pool.PoolServer):
    card: tuple[float, float, float, int]

    def load_engine(self, spec: ModelSpec, num_threads: int) -> Any:
        return CardEngine(*self.card)


def bind_pool(args: pool.PoolArgs, card: tuple[float, float, float, int], **options: Any) -> serve.Application:
    return pool.bind(args, type("CardPool", (CardPool,), {"card": card}), **options)


def _replicas(pools: Sequence[StreamLoad]) -> list[tuple[StreamLoad, str]]:
    return [(each, name) for each in pools for name in each.replicas]


def _less_loaded(pools: Sequence[StreamLoad], rng: random.Random) -> tuple[StreamLoad, str]:
    """The one of two random replicas that has fewer open streams."""
    drawn = rng.sample(_replicas(pools), 2)
    return min(drawn, key=lambda each: sum(sent.replica == each[1] for sent in each[0]._sent.values()))


class RoundRobin:
    def __init__(self) -> None:
        self._turn = count()

    def __call__(self, pools: Sequence[StreamLoad], *_: object) -> tuple[StreamLoad, str]:
        replicas = sorted(_replicas(pools), key=lambda each: each[1])  # their names are random
        return replicas[next(self._turn) % len(replicas)]


class PowerOfTwo:
    def __init__(self) -> None:
        self._rng = random.Random(0)

    def __call__(self, pools: Sequence[StreamLoad], *_: object) -> tuple[StreamLoad, str]:
        return _less_loaded(pools, self._rng)


class PrefixOnly:
    """The same policy as `PrefixOnly` of `loadtests/stream_routing.py`."""

    def __init__(self) -> None:
        self._rng, self._first_holder = random.Random(0), dict[int, tuple[StreamLoad, str]]()

    def __call__(self, pools: Sequence[StreamLoad], ticket: Ticket, *_: object) -> tuple[StreamLoad, str]:
        depth = 0
        while depth < len(ticket.pages) and ticket.pages[depth] in self._first_holder:
            depth += 1
        if 2 * depth * PAGE_TOKENS >= ticket.prompt_tokens:
            chosen = self._first_holder[ticket.pages[depth - 1]]
        else:
            chosen = _less_loaded(pools, self._rng)
        for page in ticket.pages:
            self._first_holder.setdefault(page, chosen)
        return chosen


POLICIES: dict[str, Callable[[], Any]] = {
    "round robin": RoundRobin,
    "power of two": PowerOfTwo,
    "prefix only": PrefixOnly,
    "ours": lambda: choose_stream,
}


class PolicyGateway(Gateway):
    """A gateway that chooses replicas for streams by one of `POLICIES`."""

    def __init__(self, args: GatewayArgs, facts: Facts, policy: str) -> None:
        from serve_app.gateway import models

        models.choose_stream = POLICIES[policy]()
        super().__init__(args, facts)


def bind_gateway(args: GatewayArgs, policy: str, **options: Any) -> serve.Application:
    chosen = deployment_options(args.settings) | options
    deployment = serve.deployment(name="Gateway")(serve.ingress()(PolicyGateway)).options(**chosen)
    application: serve.Application = deployment.bind(args, read_facts(args), policy)
    return application
