"""Measures generation on a CPU beside transformers, llama.cpp and floors: the same model, prompts and threads, in turns.

python -m loadtests.generate_cpu

llama.cpp takes part if `llama_cpp` can be imported. Its bf16 and Q8_0 files are made from the same GGUF file.
"""

import ctypes
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Protocol

import torch
import transformers

from engine import Engine
from engine.hub import EMBEDDED_GENERATOR, resolve_model
from engine.model.weights import Checkpoint
from engine.options import SamplingOptions
from engine.passes import Passes
from loadtests.report import write

THREADS = os.cpu_count() or 1
ROUNDS, TOKENS, PROMPT, LONG = 3, 16, 100, 512
BATCHES = (1, 8)


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 40000, (count, length), generator=generator).tolist()


class System(Protocol):
    def steps(self, given: list[list[int]], most: int) -> Iterator[None]:
        """Yields after the prompts, and after each pass that gave every answer a token."""
        ...


class Ours:
    def __init__(self, folder: Path, dtype: Any) -> None:
        self._engine = Engine.load(folder, dtype=dtype, device="cpu", num_threads=THREADS, speculate=False)

    def steps(self, given: list[list[int]], most: int) -> Iterator[None]:
        options = SamplingOptions(temperature=0.0, max_tokens=most)
        yield from Passes(self._engine, self._engine.max_batch_tokens).steps(
            [self._engine.new_stream(prompt, options) for prompt in given]
        )


class Theirs:
    """transformers, in bf16."""

    def __init__(self, folder: Path) -> None:
        config = transformers.AutoConfig.from_pretrained(folder)
        self._model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        with Checkpoint(folder, torch.device("cpu"), torch.bfloat16) as checkpoint:
            self._model.load_state_dict(checkpoint.take_all(), strict=False)  # the head is tied
            self._model.tie_weights()

    def steps(self, given: list[list[int]], most: int) -> Iterator[None]:
        ids, cache = torch.tensor(given), transformers.DynamicCache()
        for _ in range(most):
            with torch.inference_mode():
                logits = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1].argmax(1, keepdim=True)
            yield


class LlamaCpp:
    def __init__(self, file: Path) -> None:
        import llama_cpp  # not a dependency

        self._api: Any = llama_cpp
        model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = 8 * 1024, max(BATCHES)
        params.n_batch = params.n_ubatch = 2048
        params.n_threads = params.n_threads_batch = THREADS
        self._context = llama_cpp.llama_init_from_model(model, params)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(2048, 0, 1)

    def steps(self, given: list[list[int]], most: int) -> Iterator[None]:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        start, pieces = 0, given
        for _ in range(most):
            ends, batch = [], self._batch
            batch.n_tokens = 0
            for sequence, piece in enumerate(pieces):
                for place, token in enumerate(piece):
                    at = batch.n_tokens
                    batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, start + place, 1
                    batch.seq_id[at][0], batch.logits[at] = sequence, place == len(piece) - 1
                    batch.n_tokens += 1
                ends.append(batch.n_tokens - 1)
            if self._api.llama_decode(self._context, batch):
                raise RuntimeError("llama.cpp could not compute a batch")
            start += len(pieces[0])
            pieces = [[self._largest(end)] for end in ends]
            yield

    def _largest(self, row: int) -> int:
        logits = self._api.llama_get_logits_ith(self._context, row)
        values = (ctypes.c_float * self._vocab_size).from_address(ctypes.addressof(logits.contents))
        return int(torch.frombuffer(values, dtype=torch.float32).argmax())


def llama_files(gguf: Path, folder: Path) -> dict[str, Path]:
    """The GGUF file itself, and copies of it in bf16 and Q8_0."""
    import llama_cpp

    files = {"llama.cpp Q4_1 (the file as it is)": gguf}
    for name, kind in (("bf16", llama_cpp.LLAMA_FTYPE_MOSTLY_BF16), ("Q8_0", llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0)):
        params, file = llama_cpp.llama_model_quantize_default_params(), folder / f"{name}.gguf"
        params.ftype, params.allow_requantize = kind, True
        if llama_cpp.llama_model_quantize(str(gguf).encode(), str(file).encode(), ctypes.byref(params)):
            raise RuntimeError(f"llama.cpp could not write {file}")
        files[f"llama.cpp {name}"] = file
    return files


def measure(system: System, count: int, length: int, most: int, seed: int) -> list[float]:
    """Seconds of the prompts' pass, and of each pass after it."""
    seconds, start = [], perf_counter()
    for _ in system.steps(prompts(count, length, seed), most):
        seconds.append(perf_counter() - start)
        start = perf_counter()
    return seconds


def read_rate() -> float:
    """The bytes/s at which torch reads memory that is in no cache, with all threads."""
    values = torch.ones(64 << 20, dtype=torch.int64)
    seconds = []
    for _ in range(9):
        start = perf_counter()
        values.sum()
        seconds.append(perf_counter() - start)
    return values.nbytes / min(seconds)


def main() -> None:
    torch.set_num_threads(THREADS)
    folder = resolve_model(EMBEDDED_GENERATOR)
    with TemporaryDirectory() as temporary:
        systems: dict[str, System] = {"transformers bf16": Theirs(folder)}
        if importlib.util.find_spec("llama_cpp"):
            (gguf,) = folder.glob("*.gguf")
            systems |= {name: LlamaCpp(file) for name, file in llama_files(gguf, Path(temporary)).items()}
        systems |= {f"emberforge {name}": Ours(folder, dtype) for name, dtype in (("bf16", "bfloat16"), ("fp32", "float32"))}
        decode: dict[tuple[str, int], list[float]] = {(name, count): [] for name in systems for count in BATCHES}
        first: dict[str, list[float]] = {name: [] for name in systems}
        for seed in range(ROUNDS + 1):
            for name, system in systems.items():
                for count in BATCHES:
                    passes = measure(system, count, PROMPT, TOKENS, seed)[2:]
                    decode[name, count] += passes if seed else []  # the first round warms up
                first[name] += measure(system, 1, LONG, 1, seed) if seed else []
    rows = [
        {
            "system": name,
            **{f"decode tokens/s, batch {count}": count / median(decode[name, count]) for count in BATCHES},
            **{f"best, batch {count}": count / min(decode[name, count]) for count in BATCHES},
            f"ms to the first token of {LONG}": median(first[name]) * 1e3,
            "best ms": min(first[name]) * 1e3,
        }
        for name in systems
    ]
    with Checkpoint(folder, torch.device("cpu"), torch.bfloat16) as checkpoint:
        num_values, rate = checkpoint.num_bytes // 2, read_rate()
    floors = [
        {
            "weights": name,
            "MB a token": num_values * size / 1e6,
            "tokens/s if reading them took all time": rate / num_values / size,
        }
        for name, size in (("fp32", 4.0), ("16 bits", 2.0), ("Q8_0", 34 / 32), ("Q4_1 with Q8_0 words", 5.74 / 8))
    ]
    notes = [
        f"{THREADS} threads; {ROUNDS} rounds in turn; prompts of {PROMPT} tokens, {TOKENS} tokens of each answer, greedy",
        "medians over all passes; the best is the quickest pass",
        f"torch reads memory at {rate / 1e9:.1f} GB/s",
    ]
    tables = {"SmolLM2-135M-Instruct": rows, "Floors": floors}
    write("generate_cpu", "python -m loadtests.generate_cpu", tables, notes)


if __name__ == "__main__":
    main()
