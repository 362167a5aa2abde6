"""Measures one model on one device and as a pipeline on two: decode and a whole run, with floors.

python -m loadtests.pipeline [MODEL] [--rounds N] [--second-gib N] [--passes FOLDER]

With two GPUs the default model is Qwen3-14B in bf16. Without GPUs a tiny model runs on the CPU: that tests the code, but gives no
speed. Each engine has a process of its own, one after the other, and chooses the size of its cache. With `--second-gib N` another
engine finds only N GiB of the second GPU free, so its stages are uneven. `--passes` keeps the passes of the whole runs.
"""

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from math import nan
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from cluster.catalogue import CATALOGUE
from engine.engine import Engine
from engine.loop import EngineLoop
from engine.measure.engine_rates import sequences
from engine.measure.random_engine import random_engine
from engine.measure.timing import copy_bandwidth
from engine.model.config import ModelConfig
from engine.options import SamplingOptions, TokenIds
from engine.passes import BatchReport
from engine.run.kv_cache import PAGE_SIZE, bytes_per_token
from engine.run.stages import sizes_of
from loadtests.report import write
from serve_app.garbage import collect_seldom

TINY = replace(
    CATALOGUE["Qwen/Qwen3-0.6B"], vocab_size=32_000, hidden_size=128, intermediate_size=512, n_layers=4, n_heads=4, n_kv_heads=2,
    head_dim=32, max_position_embeddings=4096, max_input_length=4096,
)  # fmt: skip
CONTEXT = 128


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of the runs."""

    tokens: dict[int, int]  # of each answer, by the number of streams
    num_prompts: int  # of the whole run
    lengths: tuple[int, int]  # of its prompts and answers

    def whole_run(self, number: int) -> tuple[list[TokenIds], list[int]]:
        """Prompts, and the tokens of each answer. `number` keeps the prompts out of the cache of earlier runs."""
        rng = random.Random(0)
        lengths = [rng.randint(*self.lengths) for _ in range(self.num_prompts)]
        return sequences(lengths, number), [rng.randint(*self.lengths) for _ in range(self.num_prompts)]


# 128 is half of 256 streams: with two stages a pass has that many.
ON_GPUS = Size({1: 128, 128: 64, 256: 64}, 256, (100, 1024))
ON_CPU = Size({1: 16, 8: 16, 16: 16}, 16, (10, 20))


@dataclass
class Measured:
    """The results of one engine, in tokens/s."""

    layers: list[int]  # of each stage
    num_groups: int  # groups of streams that take turns
    cache_tokens: int
    start_s: float  # from the first import until the engine is warm
    copy_bytes_per_s: float  # of the first device, bytes read and written; NaN for a CPU
    stage_bytes: list[int]  # bytes of each stage's weights that a decode step reads
    decode: dict[str, list[float]] = field(default_factory=dict)  # by the number of streams
    whole_run: list[float] = field(default_factory=list)

    def of_decode(self, count: int) -> float:
        return median(self.decode[str(count)])


class Subject:
    """An engine with its loop, as a replica has them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.passes: list[tuple[float, int, int, float]] = []  # end, tokens, sequences, seconds
        threads = 1 if engine.device.type == "cuda" else None
        self.loop = EngineLoop(engine, engine.max_batch_tokens, threads, self._on_batch, max_batch_seqs=engine.max_batch_seqs)

    def _on_batch(self, report: BatchReport) -> None:
        self.passes.append((perf_counter(), report.num_tokens, report.num_seqs, report.seconds))

    def run(self, given: Sequence[TokenIds], wanted: Sequence[int]) -> None:
        """Submits all prompts at once. Returns when the last answer, of the wanted length, has ended."""
        options = [SamplingOptions(max_tokens=most, temperature=0.0) for most in wanted]
        streams = [self.engine.new_stream(prompt, each) for prompt, each in zip(given, options, strict=True)]
        self.loop.submit(streams)
        for stream in streams:
            stream.future.result()

    def decode(self, count: int, most: int) -> float:
        """Tokens/s of the passes that have a token of each stream of their group, and no prompts.

        After the first run the cache has all tokens of each prompt except the last one.
        """
        given = sequences([CONTEXT + 1] * count, CONTEXT, min(30_000, self.engine.config.vocab_size))
        self.passes.clear()
        self.run(given, [most] * count)
        full = -(-count // self.engine.num_groups)
        ended = [at for at, num_tokens, num_seqs, _ in self.passes if num_tokens == num_seqs == full][2:-2]
        return full * (len(ended) - 1) / (ended[-1] - ended[0])

    def whole_run(self, size: Size, number: int) -> float:
        """Tokens/s of a whole run."""
        given, wanted = size.whole_run(number)
        self.passes.clear()
        start = perf_counter()
        self.run(given, wanted)
        return sum(wanted) / (perf_counter() - start)


def measure(config: ModelConfig, size: Size, devices: Sequence[str], second_gib: float | None, rounds: int) -> None:
    """Measures one engine in this process. Prints JSON: `Measured`, and the passes of the last whole run."""
    start = perf_counter()
    collect_seldom()
    bandwidth = nan if devices[0] == "cpu" else copy_bandwidth()
    held = None if second_gib is None else leave(devices[1], second_gib)
    torch.cuda.empty_cache()
    engine = random_engine(config, devices=devices)
    del held
    engine.speculate = False
    assert engine.pages is not None, "the model generates"
    subject = Subject(engine)
    sizes = sizes_of(config, engine.dtype, on_gpu=engine.device.type == "cuda")
    stage_bytes = [
        sum(sizes.layer_bytes[index] for index in stage.config.layers) + sizes.head_bytes * stage.config.has_end
        for stage in engine.stages
    ]
    layers = [len(stage.config.layers) for stage in engine.stages]
    cache_tokens = engine.pages.num_pages * PAGE_SIZE
    found = Measured(layers, engine.num_groups, cache_tokens, perf_counter() - start, bandwidth, stage_bytes)
    say(f"{layers} layers, {engine.num_groups} groups, {cache_tokens:,} tokens of cache, passes of {engine.max_batch_tokens}, "
        f"graphs of up to {engine.max_graph_tokens}; ready after {found.start_s:.0f} s")  # fmt: skip
    for number in range(rounds + 1):  # the first round captures graphs and fills the cache
        for count, most in size.tokens.items():
            rate = subject.decode(count, most)
            if number:
                found.decode.setdefault(str(count), []).append(rate)
                say(f"{count} streams: {rate:,.0f} tokens/s")
    for number in range(rounds + 1 if second_gib is None else 0):  # the first run loads kernels between passes
        rate = subject.whole_run(size, number)
        if number:
            found.whole_run.append(rate)
            say(f"whole run: {rate:,.0f} tokens/s in {len(subject.passes)} passes")
    subject.loop.stop()
    print(json.dumps({"measured": asdict(found), "passes": subject.passes if found.whole_run else []}))


def leave(device: str, gib: float) -> torch.Tensor:
    """Takes memory of a GPU until only `gib` is free."""
    free = torch.cuda.mem_get_info(device)[0]
    return torch.empty(max(0, free - int(gib * 2**30)), dtype=torch.uint8, device=device)


def say(text: str) -> None:
    print(f"  {perf_counter() - _BEGAN:4.0f} s: {text}", file=sys.stderr, flush=True)


_BEGAN = perf_counter()


def measured_alone(given: argparse.Namespace, devices: Sequence[str], second_gib: float | None = None) -> Measured:
    """Runs `measure` in a process of its own."""
    command = [sys.executable, "-m", "loadtests.pipeline", given.model, "--rounds", str(given.rounds), "--devices", *devices]
    if second_gib is not None:
        command += ["--second-gib", str(second_gib)]
    print(f"{perf_counter() - _BEGAN:6.0f} s: {', '.join(devices)}", file=sys.stderr, flush=True)
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    if given.passes is not None and found["passes"]:
        name = f"{'-'.join(map(str, found['measured']['layers']))}.json"
        (given.passes / name).write_text(json.dumps(found["passes"]), encoding="utf-8")
    return Measured(**found["measured"])


def floor(found: Measured, config: ModelConfig, count: int, most: int) -> float:
    """Tokens/s if passes only read weights, keys and values, and the slowest stage never waited for another group.

    Each group's pass reads the weights.
    """
    groups = min(count, found.num_groups)
    of_token = bytes_per_token(replace(config, part=range(1)), torch.bfloat16)
    of_stages = [
        (weights + layers * of_token * (CONTEXT + most / 2) * count / groups) / found.copy_bytes_per_s
        for weights, layers in zip(found.stage_bytes, found.layers, strict=True)
    ]
    return count / max(sum(of_stages), groups * max(of_stages))


def allowed(found: Measured, one: Measured, count: int) -> float:
    """Tokens/s that the cut allows, with the better of one group and two.

    The slowest stage takes its share, by bytes, of one device's time for a group's pass. With one group the stages take turns.
    """
    share = max(found.stage_bytes) / sum(found.stage_bytes)
    return max([one.of_decode(count), *([] if count == 1 else [one.of_decode(count // 2) / share])])


def rows_of(config: ModelConfig, size: Size, one: Measured, several: Sequence[Measured]) -> list[dict[str, Any]]:
    rows = []
    for found in several:
        layers = " + ".join(map(str, found.layers))
        for count, most in size.tokens.items():
            if str(count) not in found.decode or 1 < count < max(size.tokens):
                continue
            rate, alone, lowest = found.of_decode(count), one.of_decode(count), floor(found, config, count, most)
            rows.append(
                {
                    "layers": layers, "what": f"{count} streams", "one, tokens/s": alone, "two, tokens/s": rate,
                    "two / one": rate / alone, "% of what the cut allows": 100 * rate / allowed(found, one, count),
                    "% of the floor": 100 * rate / lowest,
                    "one, % of its floor": 100 * alone / floor(one, config, count, most),
                }
            )  # fmt: skip
        if found.whole_run:
            rate, alone = median(found.whole_run), median(one.whole_run)
            row = {
                "layers": layers,
                "what": "whole run",
                "one, tokens/s": alone,
                "two, tokens/s": rate,
                "two / one": rate / alone,
            }
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "model", nargs="?", choices=[name for name in CATALOGUE if CATALOGUE[name].generation], default="Qwen/Qwen3-14B"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--second-gib", type=float)
    parser.add_argument("--passes", type=Path)
    parser.add_argument("--devices", nargs="+", help=argparse.SUPPRESS)  # of a child
    given = parser.parse_args()
    on_gpus = torch.cuda.device_count() > 1
    config, size = (CATALOGUE[given.model], ON_GPUS) if on_gpus else (TINY, ON_CPU)
    if given.devices:
        return measure(config, size, given.devices, given.second_gib, given.rounds)
    devices = ("cuda:0", "cuda:1") if on_gpus else ("cpu", "cpu")
    one, two = measured_alone(given, devices[:1]), measured_alone(given, devices)
    several = [two]
    if given.second_gib is not None:
        several.append(measured_alone(given, devices, given.second_gib))
    rows = rows_of(config, size, one, several)
    name = given.model if on_gpus else "a tiny model"
    notes = [
        f"{name} on {', '.join(devices)}; random weights; token ids in and out through the engine's own loop; each engine in a "
        f"process of its own; medians of {given.rounds} rounds",
        f"caches, in tokens: {one.cache_tokens:,} on one device, "
        + ", ".join(f"{each.cache_tokens:,} with {' + '.join(map(str, each.layers))} layers" for each in several),
        f"streams: behind prompts of {CONTEXT} tokens, passes without prompts; "
        + ", ".join(f"{most} tokens for each of {n}" for n, most in size.tokens.items()),
        f"whole run: {size.num_prompts} prompts of {size.lengths[0]} to {size.lengths[1]} random tokens, answers of as many, all "
        "submitted at once",
        f"floor: weights, keys and values over {one.copy_bytes_per_s / 1e9:,.0f} GB/s, a copy's rate in this run; the "
        "slowest stage computes one group of streams after the other",
        "what the cut allows: the slowest stage takes its share of the time of one device for a pass of half the streams. Or the "
        "stages take turns, and a pass of all streams takes as long as on one device",
    ]
    uneven = "" if given.second_gib is None else f" --second-gib {given.second_gib:g}"
    command = f"python -m loadtests.pipeline {given.model}{uneven}"
    if on_gpus:
        write("pipeline", command, {"Decode and whole runs": rows}, notes)
    else:  # no result is written: two stages on one CPU share its cores
        print(*rows, *notes, sep="\n")


if __name__ == "__main__":
    main()
