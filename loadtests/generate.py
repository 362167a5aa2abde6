"""Measures generation on a GPU through the engine's loop, beside transformers and floors: decode, whole runs, prompts.

python -m loadtests.generate [MODEL ...]

Each model runs in a process of its own. `loadtests.startup` measures the start of such a process.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import transformers

from engine import Engine
from engine.measure.engine_rates import Streaming
from engine.measure.timing import copy_bandwidth, gemm_rate
from engine.model.footprint import footprint
from engine.options import SamplingOptions
from engine.run.kv_cache import bytes_per_token
from loadtests.checkpoints import Published, save
from loadtests.report import write
from loadtests.startup import import_path
from loadtests.traces import percentile
from serve_app.garbage import collect_seldom


def _qwen3(hidden: int, layers: int, heads: int, intermediate: int, tied: bool) -> Published:
    config = transformers.Qwen3Config(
        vocab_size=151936, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8,
        head_dim=128, intermediate_size=intermediate, max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=tied,
    )  # fmt: skip
    return Published(config, transformers.Qwen3ForCausalLM, "last_token")


MODELS = {
    "Qwen3-0.6B": _qwen3(1024, 28, 16, 3072, True),
    "Qwen3-4B": _qwen3(2560, 36, 32, 9728, True),
    "Qwen3-8B": _qwen3(4096, 36, 32, 12288, False),
    "Qwen3-14B": _qwen3(5120, 40, 40, 17408, False),
}
CACHE_TOKENS = 320_000  # for 256 streams of the whole run, and for all prompts of the decode runs
BATCHES = {1: 128, 8: 128, 64: 64, 256: 64}  # streams, and tokens that each of them gets
CASES = [(context, count) for context in (128, 800) for count in BATCHES] + [(4096, 1)]  # tokens of a prompt, and streams
WARM_TOKENS = 40  # enough that all 256 streams begin before the first one ends, with prompts in passes of 8,192 tokens
TEMPERATURES = {
    "0": SamplingOptions(max_tokens=1, temperature=0.0),
    "0.6": SamplingOptions(max_tokens=1, temperature=0.6, top_k=20, top_p=0.95),
}
FIRST_TOKEN, PREFILL = 512, 8192  # tokens of a prompt
REST_S = 0.4  # seconds without work before a prompt that finds the GPU cool
PEER_BATCHES, PEER_TOKENS = (1, 8), 32
# vLLM 0.26 on another H200, with random weights of the same shapes. It was measured earlier, not in this run. Decode is at
# temperature 0: 256 tokens after prompts of 128 tokens.
VLLM: dict[str, dict[str, float]] = {
    "Qwen3-0.6B": {
        "1": 522, "8": 4343, "64": 20600, "256": 39200, "run at 0": 23000, "run at 0.6": 22400, "prefill": 248000,
        "first token": 10.4, "4096": 554,
    },
    "Qwen3-4B": {
        "1": 277, "8": 2150, "64": 13680, "256": 29700, "run at 0": 12390, "run at 0.6": 12400, "prefill": 59900,
        "first token": 13.3, "4096": 264,
    },
    "Qwen3-8B": {
        "1": 194, "8": 1471, "64": 10300, "256": 22400, "run at 0": 9270, "run at 0.6": 9320, "prefill": 37900,
        "first token": 15.9, "4096": 186,
    },
    "Qwen3-14B": {
        "1": 118, "8": 917, "64": 6510, "256": 14700, "run at 0": 6070, "prefill": 21200, "first token": 26.7, "4096": 115,
    },
}  # fmt: skip


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1000, 30000, (count, length), generator=generator).tolist()


def whole_run() -> tuple[list[list[int]], list[int]]:
    """256 prompts of 100 to 1,024 tokens, and the lengths of their answers, which are as long."""
    rng = random.Random(0)
    given = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    return given, [rng.randint(100, 1024) for _ in given]


class Measured(Streaming):
    def whole_run(self, options: SamplingOptions) -> tuple[int, float]:
        """Returns the tokens of all answers of `whole_run`, and its seconds."""
        given, lengths = whole_run()
        wanted = [
            SamplingOptions(length, options.temperature, options.top_k, options.top_p, seed=seed)
            for seed, length in enumerate(lengths)
        ]
        for prompt in given:
            prompt[0] = 20000 + int(10 * options.temperature)  # no prompt is in the cache from an earlier run
        start = perf_counter()
        clock = self.run(given, wanted)
        return clock.num_tokens, perf_counter() - start


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Loads the model in this process and measures everything except the peers."""
    collect_seldom()  # as a replica does
    engine = Engine.load(folder, dtype="bfloat16", cache_tokens=CACHE_TOKENS, num_threads=1, speculate=False)
    measured = Measured(engine)
    found: dict[str, Any] = {"decode": []}
    for temperature, options in TEMPERATURES.items():
        for context, count in CASES:
            steps = measured.decode(count, context, BATCHES[count], options, WARM_TOKENS)
            found["decode"].append([context, temperature, count, median(steps), percentile(steps, 99)])
            print(name, *found["decode"][-1], file=sys.stderr, flush=True)
    found["runs"] = {temperature: measured.whole_run(options) for temperature, options in TEMPERATURES.items()}
    for what, length, repeats in (("first token", FIRST_TOKEN, 20), ("prefill", PREFILL, 5)):
        found[what] = median(measured.first_token(length, repeats))
        found[f"rested {what}"] = median(measured.first_token(length, repeats, REST_S))
    measured.stop()
    cache = CACHE_TOKENS * bytes_per_token(engine.config, engine.dtype)
    found["reserved"] = torch.cuda.memory_reserved() - cache
    found["estimated"] = footprint(engine.config, engine.dtype, "gpu", engine.max_batch_tokens, cache_tokens=0).reserved
    return found


def in_a_process(*arguments: str, kernel_cache: Path) -> Any:
    """Runs `measure` in a new process. Returns the printed results."""
    environment = os.environ | {"EMBERFORGE_KERNEL_CACHE": str(kernel_cache), "PYTHONPATH": import_path()}
    command = [sys.executable, "-m", "loadtests.generate", "--one", *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@torch.inference_mode()
def of_transformers(folder: Path, device: str = "cuda") -> dict[int, float]:
    """Tokens/s of transformers' `generate` with a static cache, by batch size."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    model = model.eval().to(device)
    rates = {}
    for count in PEER_BATCHES:
        ids = torch.tensor(prompts(count, 128, 128), device=device)
        seconds = {}
        for most in (2, 2, PEER_TOKENS + 2):  # the first run warms up; the difference of the other two is the time of decode
            start = perf_counter()
            answer = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=most,
                do_sample=False,
                cache_implementation="static",
                disable_compile=True,
            )
            assert answer.shape[1] == ids.shape[1] + most
            answer.cpu()
            seconds[most] = perf_counter() - start
        rates[count] = count * PEER_TOKENS / (seconds[PEER_TOKENS + 2] - seconds[2])
    return rates


def matrix_bytes(published: Published) -> int:
    """The bytes of the layers' matrices and of the head, which each pass reads. Each byte takes one FLOP for each row."""
    c = published.config
    return 2 * (published.body_parameters + c.vocab_size * c.hidden_size)


def cache_bytes(published: Published) -> int:
    """The bytes of a token's keys and values, which each later token of its stream reads."""
    c = published.config
    return 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * 2


def step_floor(published: Published, count: int, contexts: int, gemm: float, bandwidth: float) -> float:
    """Seconds of a pass of one token for each of `count` streams, which have `contexts` tokens in all before them."""
    products = matrix_bytes(published) * max(1 / bandwidth, count / gemm)
    return products + contexts * cache_bytes(published) / bandwidth


def decode_rows(
    name: str, found: dict[str, Any], theirs: dict[int, float], gemm: float, bandwidth: float
) -> list[dict[str, Any]]:
    rows = []
    for context, temperature, count, step_s, slow_s in found["decode"]:
        floor_s = step_floor(MODELS[name], count, count * (context + BATCHES[count] // 2), gemm, bandwidth)
        comparable = context == 128 and temperature == "0"
        cited = VLLM[name][str(count)] if comparable else VLLM[name]["4096"] if (context, temperature) == (4096, "0") else None
        rows.append(
            {
                "model": name,
                "prompts of": context,
                "temperature": temperature,
                "streams": count,
                "tokens/s": count / step_s,
                "ms a step": step_s * 1e3,
                "p99 ms": slow_s * 1e3,
                "floor ms": floor_s * 1e3,
                "% of floor": 100 * floor_s / step_s,
                "transformers": theirs.get(count, "-") if comparable else "-",
                "vLLM 0.26 (cited)": cited or "-",
                "ours / vLLM": count / step_s / cited if cited else "-",
            }
        )
    return rows


def run_floors(published: Published, gemm: float, bandwidth: float) -> tuple[float, float]:
    """Seconds of a whole run's prompts by FLOPs, and of its steps: all streams begin at once."""
    given, lengths = whole_run()
    steps_s = 0.0
    for step in range(max(lengths)):
        running = [len(prompt) + step for prompt, length in zip(given, lengths, strict=True) if length > step]
        steps_s += step_floor(published, len(running), sum(running), gemm, bandwidth)
    return published.flops([len(prompt) for prompt in given]) / gemm, steps_s


def run_rows(name: str, found: dict[str, Any], gemm: float, bandwidth: float) -> list[dict[str, Any]]:
    prompts_s, steps_s = run_floors(MODELS[name], gemm, bandwidth)
    rows = []
    for temperature, (tokens, seconds) in found["runs"].items():
        cited = VLLM[name].get(f"run at {temperature}")
        rows.append(
            {
                "model": name,
                "temperature": temperature,
                "tokens": tokens,
                "tokens/s": tokens / seconds,
                "floor of the prompts s": prompts_s,
                "floor of the steps s": steps_s,
                "floor, tokens/s": tokens / (prompts_s + steps_s),
                "% of floor": 100 * (prompts_s + steps_s) / seconds,
                "vLLM 0.26 (cited)": cited or "-",
                "ours / vLLM": tokens / seconds / cited if cited else "-",
            }
        )
    return rows


def prompt_row(name: str, found: dict[str, Any], gemm: float, bandwidth: float) -> dict[str, Any]:
    published, cited = MODELS[name], VLLM[name]
    floors = {
        length: max(published.flops([length]) / gemm, matrix_bytes(published) / bandwidth) for length in (FIRST_TOKEN, PREFILL)
    }
    return {
        "model": name,
        f"ms to the first token of {FIRST_TOKEN}": found["first token"] * 1e3,
        "after a rest, ms": found["rested first token"] * 1e3,
        "floor ms": floors[FIRST_TOKEN] * 1e3,
        "vLLM 0.26 ms (cited)": cited["first token"],
        f"prefill of {PREFILL}, tokens/s": PREFILL / found["prefill"],
        "after a rest, tokens/s": PREFILL / found["rested prefill"],
        "floor, tokens/s": PREFILL / floors[PREFILL],
        "vLLM 0.26 tokens/s (cited)": cited["prefill"],
    }


def memory_row(name: str, found: dict[str, Any]) -> dict[str, Any]:
    mib = 1 << 20
    return {
        "model": name,
        "MiB reserved, without the cache": found["reserved"] / mib,
        "estimated": found["estimated"] / mib,
        "estimate / reserved": found["estimated"] / found["reserved"],
    }


def main(names: Sequence[str]) -> None:
    bandwidth, gemm = copy_bandwidth(), gemm_rate()
    notes = [
        "random weights at the real shapes, bf16; token ids in, tokens out through the engine's own loop; a process for each "
        f"model; a cache of {CACHE_TOKENS:,} tokens; Python's collector set as a replica sets it",
        "decode: the median pass of those that gave a token to every stream, after a run of "
        f"{WARM_TOKENS} tokens each; {', '.join(f'{tokens} tokens for {count}' for count, tokens in BATCHES.items())} streams",
        "temperature 0.6: top-k 20, top-p 0.95, a seed for each stream",
        f"floor of a step: the bytes of the layers' matrices and of the head over {bandwidth / 1e12:.2f} TB/s, a copy's rate in "
        f"this run, or their FLOPs over {gemm / 1e12:,.0f} TFLOP/s, torch.mm in this run; then the bytes of all keys and values",
        "whole run: 256 prompts of 100 to 1,024 random tokens, answers of 100 to 1,024, all submitted at once; its floor: the "
        "prompts' FLOPs, then the floors of the steps, if all streams begin at once",
        f"after a rest: {REST_S} s without work before each prompt; prompts one after the other reach a card's power limit",
        f"floor of a prompt: FLOPs over {gemm / 1e12:,.0f} TFLOP/s, torch.mm in this run, or the weights' bytes",
        f"transformers: generate(), sdpa, static cache, not compiled, {PEER_TOKENS} tokens behind prompts of 128, in this run",
        "vLLM 0.26: on another H200 earlier, not in this run; decode behind 128 or 4,096 tokens, 256 tokens each",
    ]
    tables: dict[str, list[dict[str, Any]]] = {"Decode": [], "Whole run": [], "Prompts": [], "Memory": []}
    with tempfile.TemporaryDirectory() as path:
        kernels = Path(path) / "kernels"
        for name in names:
            folder = Path(path) / name
            save(MODELS[name], folder)
            theirs = of_transformers(folder)
            torch.cuda.empty_cache()
            found = in_a_process(name, str(folder), kernel_cache=kernels)
            tables["Decode"] += decode_rows(name, found, theirs, gemm, bandwidth)
            tables["Whole run"] += run_rows(name, found, gemm, bandwidth)
            tables["Prompts"].append(prompt_row(name, found, gemm, bandwidth))
            tables["Memory"].append(memory_row(name, found))
            for file in folder.iterdir():
                file.unlink()
            write("generate", " ".join(["python -m loadtests.generate", *names]), tables, notes)  # in case another fails


if __name__ == "__main__":
    given = sys.argv[1:]
    if given[:1] == ["--one"]:
        print(json.dumps(measure(given[1], Path(given[2]))))
    else:
        if unknown := [name for name in given if name not in MODELS]:
            sys.exit(f"{unknown[0]} is no model of this benchmark; there are {', '.join(MODELS)}")
        main(given or list(MODELS))
