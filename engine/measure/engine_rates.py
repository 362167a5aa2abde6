"""Measures tokens/s of an engine with the loop of a server's replica: texts to embed, prompts, and streams that decode."""

from collections.abc import Sequence, Sized
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter, sleep

import numpy as np

from engine.engine import Engine
from engine.loop import EngineLoop
from engine.options import EmbedOptions, SamplingOptions, TokenIds
from engine.schedule.request import Request
from engine.schedule.stream import Stream

REQUEST = 64  # texts
GREEDY = SamplingOptions(max_tokens=1, temperature=0.0)


def mixed_lengths(total_tokens: int, seed: int, most: int = 2048) -> list[int]:
    """Lengths of the sequences of a packed batch: lognormal, median 150, sigma 0.8, 8 to `most`. The last one is cut to fit."""
    drawn = np.random.default_rng(seed).lognormal(np.log(150), 0.8, total_tokens // 8 + 1)
    ends = np.cumsum(np.clip(drawn, 8, most).astype(int)).clip(max=total_tokens)
    return [int(length) for length in np.diff(ends, prepend=0) if length]


def sequences(lengths: Sequence[int], seed: int | Sequence[int], below: int = 30000) -> list[TokenIds]:
    """Random token ids from 1,000 to `below`."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1000, below, size=length).astype(np.int32) for length in lengths]


def through_the_loop(engine: Engine, texts: Sequence[TokenIds], budget: int | None = None) -> None:
    """Queues requests of 64 texts, all at once. Returns when the last vector is on the host. `budget`: None for the engine's."""
    jobs = [Request(texts[start : start + REQUEST], EmbedOptions()) for start in range(0, len(texts), REQUEST)]
    loop = EngineLoop(engine, budget or engine.max_batch_tokens)
    loop.submit(jobs)
    for job in jobs:
        job.future.result()
    loop.stop()


def embed_tokens_per_s(engine: Engine, most_tokens: int, seconds: float) -> float:
    """Tokens/s of queued texts of mixed lengths: the median of three rounds, which take about `seconds` together.

    Args:
        most_tokens: tokens of the longest text.
    """
    lengths = mixed_lengths(4 * engine.max_batch_tokens, 0, most_tokens)
    start = perf_counter()
    through_the_loop(engine, sequences(lengths, 0))
    rate = sum(lengths) / (perf_counter() - start)  # the first round warms up, and its time sets the size of the others
    rates = []
    for seed in range(1, 4):
        lengths = mixed_lengths(max(engine.max_batch_tokens, int(rate * seconds / 3)), seed, most_tokens)
        texts = sequences(lengths, seed)
        start = perf_counter()
        through_the_loop(engine, texts)
        rates.append(sum(lengths) / (perf_counter() - start))
    return median(rates)


@dataclass
class Clock:
    """Records the end of each pass, and the number of tokens that all streams have by then."""

    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    num_tokens: int = 0

    def token(self, _: object) -> None:
        self.num_tokens += 1

    def tokens(self, keys: Sized, _: object) -> None:
        self.num_tokens += len(keys)

    def ended(self) -> None:
        self.times.append(perf_counter())
        self.counts.append(self.num_tokens)

    def steps(self, count: int) -> list[float]:
        """Seconds of each pass that gave `count` tokens, if the pass before gave `count` tokens too."""
        given = [after - before for before, after in zip([0, *self.counts], self.counts, strict=False)]
        return [
            self.times[index] - self.times[index - 1]
            for index in range(1, len(given))
            if given[index - 1] == given[index] == count
        ]


class Streaming:
    """An engine that generates, with its loop, as in a replica of the server. `stop` ends the loop's threads."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.loop = engine, EngineLoop(engine, engine.max_batch_tokens, 1 if engine.device.type == "cuda" else None)

    def stop(self) -> None:
        self.loop.stop()

    def run(self, given: Sequence[TokenIds], options: Sequence[SamplingOptions]) -> Clock:
        """Submits all streams at once. Returns when the last has ended."""
        clock, streams = Clock(), list[Stream]()
        for prompt, each in zip(given, options, strict=True):
            stream = self.engine.new_stream(prompt, each)
            stream.on_token, stream.on_tokens, stream.on_pass = clock.token, clock.tokens, clock.ended
            streams.append(stream)
        self.loop.submit(streams)
        for stream in streams:
            stream.future.result()
        return clock

    def decode(
        self, count: int, context: int, tokens: int, options: SamplingOptions = GREEDY, warm_tokens: int = 40
    ) -> list[float]:
        """Seconds of a pass of `count` streams, for each such pass. A first run captures graphs and fills the cache.

        Args:
            context, tokens: tokens of each stream's prompt, and of its answer.
        """
        given = self.prompts(count, context)
        for most in (warm_tokens, tokens):
            clock = self.run(given, [replace(options, max_tokens=most, seed=seed) for seed in range(count)])
        return clock.steps(count)

    def first_token(self, length: int, repeats: int, rest_s: float = 0.0) -> list[float]:
        """Seconds from a prompt's submission to its first token on an idle engine. Two runs warm up first.

        Args:
            rest_s: seconds without work before each prompt. Prompts that follow each other reach the power limit of some GPUs.
        """
        seconds = []
        for prompt in self.prompts(repeats + 2, length, others=rest_s > 0):
            sleep(rest_s)
            start = perf_counter()
            self.run([prompt], [GREEDY])
            seconds.append(perf_counter() - start)
        return seconds[2:]

    def prompts(self, count: int, length: int, others: bool = False) -> list[TokenIds]:
        """Random prompts, or others of the same length. Prompts of two lengths do not begin alike."""
        return sequences([length] * count, seed=(length, others), below=min(30000, self.engine.config.vocab_size))
