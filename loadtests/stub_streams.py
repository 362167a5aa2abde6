"""Replicas whose engine gives a token to every stream at a fixed pace and computes nothing. Ray's workers import this file."""

import os
from collections.abc import Sequence
from time import perf_counter, sleep
from typing import Any

from pydantic import Field
from ray import serve

from cluster.model_spec import ModelSpec
from serve_app.replica import pool
from serve_app.replica.model_server import ModelServer

PASS_S = "BENCH_PASS_S"


def token_at(position: Any) -> Any:
    """The token of every stream at this position: a word, or a part of a word, of the embedded generator."""
    return 12126 + position % 200


class StreamingEngine:
    """A pass takes `pass_s`, or BENCH_PASS_S, and gives each stream its next token."""

    def __init__(self, pass_s: float | None = None) -> None:
        import torch

        from engine.hub import resolve_model
        from engine.model.folder import load_model_config
        from engine.model_id import EMBEDDED_GENERATOR
        from engine.run.kv_cache import PAGE_SIZE
        from engine.schedule.pages import Pages
        from engine.schedule.queue import MOST_SEQS
        from engine.text.prompts import Prompts
        from engine.text.tokenizer import Tokenizer

        folder = resolve_model(EMBEDDED_GENERATOR)
        self.config = load_model_config(folder)
        self.tokenizer = Tokenizer.load(folder, self.config)
        self.prompts = Prompts.of(folder, self.tokenizer.shared)
        self.pages = Pages(8192, PAGE_SIZE)
        self.max_batch_tokens, self.dtype_name, self.device, self.dtype = 8192, "float32", torch.device("cpu"), torch.float32
        self.passes_in_flight = self.num_stages = self.num_groups = 1
        self.max_graph_tokens, self.max_batch_seqs = 0, MOST_SEQS
        self.speculation_rows, self.cohort_size = 0, 320
        self.longest_input, self.shares_host_memory, self.used_bytes = self.config.max_input_length, False, 0
        self._pass_s, self._due = float(os.environ.get(PASS_S, "0")) if pass_s is None else pass_s, 0.0

    def close(self) -> None:
        """Does nothing, because there are no stages in other processes."""

    def planned_bytes(self, max_batch_tokens: int | None) -> int:
        return 0

    def new_stream(self, prompt: Any, options: Any) -> Any:
        from engine.schedule.stream import Stream

        return Stream.begin(prompt, options, self.config.vocab_size, self.config.max_input_length)

    def launch(
        self, sequences: Sequence[Any], options: Any = None, outputs: Any = (), pieces: Sequence[Any] = (), together: Any = None
    ) -> Any:
        import numpy as np

        from engine.run.flight import Finished, Output
        from engine.schedule.stream import Token

        now = perf_counter()
        self._due = max(self._due + self._pass_s, now)  # the pace includes the time of everything else in a pass
        sleep(self._due - now)
        tokens = [Token(token_at(each.start + len(each.token_ids))) for each in pieces if each.row is not None]
        chosen = np.ones((0 if together is None else len(together), 4), np.int32)
        if together is not None:
            chosen[:, 0] = token_at(together.starts + 1)
        vectors = np.zeros((len(sequences), 1), dtype=np.float32)
        return Finished(Output(vectors, device_s=self._pass_s, tokens=tokens, together=chosen))


class StreamingServer(ModelServer):
    def load_engine(self, spec: ModelSpec, num_threads: int) -> Any:
        return StreamingEngine()


class StreamingPool(pool.PoolServer):
    planned_tokens_per_s = 1e4
    pass_s: float | None = None

    def load_engine(self, spec: ModelSpec, num_threads: int) -> Any:
        return StreamingEngine(self.pass_s)


class StreamingArgs(pool.PoolArgs):
    """`pass_s`: seconds a pass."""

    pass_s: float = Field(ge=0)


def build(args: StreamingArgs) -> serve.Application:
    return pool.bind(args, type("StreamingPool", (StreamingPool,), {"pass_s": args.pass_s}))
