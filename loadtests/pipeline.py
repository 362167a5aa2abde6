"""One model on one device and the same model cut over two, turn by turn in one process: decode and a whole run, with floors.

python -m loadtests.pipeline [MODEL] [--rounds N] [--cache-tokens N] [--second-gib N]

With two GPUs the model is Qwen3-14B unless another is named, in bf16. Otherwise a tiny model runs on the CPU, which shows that
everything works, and no speed. `--second-gib` takes memory of the second GPU until so much is left: the cut becomes uneven.
"""

import argparse
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import transformers

from engine import Engine
from engine.loop import EngineLoop
from engine.options import SamplingOptions
from loadtests.checkpoints import Published, save
from loadtests.generate import MODELS, _qwen3, prompts
from loadtests.report import write
from serve_app.garbage import collect_seldom

BIG = MODELS | {"Qwen3-14B": _qwen3(5120, 40, 40, 17408, False)}
TINY = Published(
    transformers.Qwen3Config(
        vocab_size=32_000, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=512, max_position_embeddings=4096, tie_word_embeddings=False,
    ),
    transformers.Qwen3ForCausalLM,
    "last_token",
)  # fmt: skip
# Pages for both engines beside their weights on the first of two cards of 80 GB.
CACHE_TOKENS = 90_000
BATCHES = (1, 256)
CONTEXT = 128


@dataclass(frozen=True, slots=True)
class Size:
    """How much is generated."""

    tokens: dict[int, int]  # of each answer, by the number of streams
    num_prompts: int  # of the whole run
    lengths: tuple[int, int]  # of its prompts and answers


ON_GPUS = Size({1: 128, 256: 64}, 256, (100, 1024))
ON_CPU = Size({1: 16, 256: 4}, 16, (10, 20))


@dataclass
class Counter:
    """When the tokens came, of all streams together."""

    times: list[float] = field(default_factory=list)

    def token(self, _: object) -> None:
        self.times.append(perf_counter())

    def rate(self, count: int) -> float:
        """Tokens/s from the moment at which all of `count` streams have begun, as a rule, until the first may have ended."""
        first, last = count - 1, len(self.times) - count
        return (last - first) / (self.times[last] - self.times[first])


class Subject:
    """An engine with its loop, as a replica has them."""

    def __init__(self, folder: Path, dtype: Any, devices: Sequence[str], cache_tokens: int) -> None:
        self.engine = Engine.load(folder, dtype=dtype, devices=devices, cache_tokens=cache_tokens, num_threads=1)
        self.loop = EngineLoop(self.engine, self.engine.max_batch_tokens, 1, max_batch_seqs=self.engine.max_batch_seqs)

    @property
    def layers(self) -> str:
        return " + ".join(str(len(stage.config.layers)) for stage in self.engine.stages)

    def run(self, given: Sequence[list[int]], wanted: Sequence[int]) -> Counter:
        """Submits all prompts at once. Returns when the last answer, of the wanted number of tokens, has ended."""
        counter = Counter()
        streams = []
        for prompt, most in zip(given, wanted, strict=True):
            stream = self.engine.new_stream(prompt, SamplingOptions(max_tokens=most, temperature=0.0))
            stream.on_token = counter.token
            streams.append(stream)
        self.loop.submit(streams)
        for stream in streams:
            stream.future.result()
        return counter

    def decode(self, count: int, most: int) -> float:
        """Tokens/s of `count` streams. The prompts are in the cache after the first run."""
        return self.run(prompts(count, CONTEXT, CONTEXT), [most] * count).rate(count)

    def whole_run(self, size: Size, number: int) -> float:
        """Tokens/s of a whole run. `number` keeps its prompts out of the cache of earlier runs."""
        rng = random.Random(0)
        given = [
            [20_000 + number, *(rng.randint(0, 10_000) for _ in range(rng.randint(*size.lengths)))]
            for _ in range(size.num_prompts)
        ]
        wanted = [rng.randint(*size.lengths) for _ in range(size.num_prompts)]
        start = perf_counter()
        self.run(given, wanted)
        return sum(wanted) / (perf_counter() - start)


def floor(subject: Subject, published: Published, count: int, most: int, bandwidth: float) -> float:
    """Tokens/s if reading weights, keys and values took all the time, and the slowest stage never waited.

    `count` streams form as many groups as there are stages, and each group's pass reads the weights.
    """
    c, itemsize = published.config, subject.engine.dtype.itemsize
    stages = subject.engine.stages
    groups = min(count, len(stages))
    of_stages = []
    for stage in stages:
        share = len(stage.config.layers) / c.num_hidden_layers
        weights = published.body_parameters * share + c.vocab_size * c.hidden_size * stage.config.has_end
        cache = 2 * len(stage.config.layers) * c.num_key_value_heads * c.head_dim * (CONTEXT + most / 2) * count / groups
        of_stages.append((weights + cache) * itemsize / bandwidth)
    return count / (sum(of_stages) if count == 1 else groups * max(of_stages))


def copy_rate(device: str) -> float:
    """Bytes/s of a copy on the device, read and written."""
    source = torch.empty(1 << (30 if device != "cpu" else 27), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(10):
        if device != "cpu":
            torch.cuda.synchronize(device)
        start = perf_counter()
        target.copy_(source)
        if device != "cpu":
            torch.cuda.synchronize(device)
        seconds.append(perf_counter() - start)
    return float(2 * source.nbytes / median(seconds))


def leave(device: str, gib: float) -> torch.Tensor:
    """Takes memory of a GPU until `gib` is left."""
    free = torch.cuda.mem_get_info(device)[0]
    return torch.empty(max(0, free - int(gib * 2**30)), dtype=torch.uint8, device=device)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", choices=BIG, default="Qwen3-14B")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cache-tokens", type=int, default=CACHE_TOKENS)
    parser.add_argument("--second-gib", type=float)
    given = parser.parse_args()
    on_gpus = torch.cuda.device_count() > 1
    published, size, dtype = (BIG[given.model], ON_GPUS, "bfloat16") if on_gpus else (TINY, ON_CPU, "float32")
    devices = ("cuda:0", "cuda:1") if on_gpus else ("cpu", "cpu")
    collect_seldom()
    bandwidth = copy_rate(devices[0])
    rates: dict[tuple[int, str], list[float]] = {}  # by (index of the subject, what was measured)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path) / "model"
        save(published, folder, devices[0])
        held = leave(devices[1], given.second_gib) if on_gpus and given.second_gib else None
        torch.cuda.empty_cache()
        # The one on two devices first: it is refused where the other has left too little.
        two, one = (Subject(folder, dtype, each, given.cache_tokens) for each in (devices, devices[:1]))
    del held
    for number in range(given.rounds + 1):
        for index, subject in enumerate((one, two)):
            for count, most in size.tokens.items():
                rate = subject.decode(count, most)
                if number:  # the first round captures graphs and fills the cache
                    rates.setdefault((index, f"{count} streams"), []).append(rate)
            if number:
                rates.setdefault((index, "whole run"), []).append(subject.whole_run(size, number))
            print(number, subject.layers, {what: values[-1] for (its, what), values in rates.items() if its == index}, flush=True)
    rows = []
    for what in dict.fromkeys(what for _, what in rates):
        of_one, of_two = (median(rates[index, what]) for index in (0, 1))
        row = {"what": what, "one, tokens/s": of_one, "two, tokens/s": of_two, "two / one": of_two / of_one}
        if what != "whole run":
            count = int(what.split()[0])
            floors = [floor(each, published, count, size.tokens[count], bandwidth) for each in (one, two)]
            row |= {"floor of one": floors[0], "floor of two": floors[1], "% of the floor of two": 100 * of_two / floors[1]}
        rows.append(row)
    for subject in (one, two):
        subject.loop.stop()
    name = given.model if on_gpus else "a tiny model"
    notes = [
        f"{name}, {dtype}, layers {two.layers} on {', '.join(devices)}; random weights; token ids in and out through the "
        f"engine's own loop; both engines in one process, turn by turn; medians of {given.rounds} rounds",
        f"streams: behind prompts of {CONTEXT} tokens; "
        + ", ".join(f"{most} tokens for each of {n}" for n, most in size.tokens.items()),
        f"whole run: {size.num_prompts} prompts of {size.lengths[0]} to {size.lengths[1]} random tokens, answers of as many, all "
        f"submitted at once; a cache of {given.cache_tokens:,} tokens in both",
        f"floor: weights, keys and values over {bandwidth / 1e9:,.0f} GB/s, a copy's rate in this run; on two devices the "
        "slowest stage computes one group of streams after the other",
    ]
    uneven = "" if given.second_gib is None else f" --second-gib {given.second_gib:g}"
    command = f"python -m loadtests.pipeline {given.model}{uneven}"
    if on_gpus:
        write("pipeline", command, {"Decode and whole runs": rows}, notes)
    else:  # no result: two stages on one CPU take each other's cores
        print(*rows, *notes, sep="\n")


if __name__ == "__main__":
    main()
