"""`emberforge doctor --measure`: checks the kernels and measures the rates of this machine's first GPU, or its CPU.

It takes two minutes, and needs no network and no files of a model. Beside each rate of a model it shows a plan's prediction for
such a card.
"""

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from statistics import median
from time import monotonic, perf_counter

import psutil
import pynvml  # type: ignore[import-untyped]
import torch

from cluster.catalogue import CATALOGUE
from cluster.generation import decode_tokens_per_s, prefill_tokens_per_s
from cluster.inventory import Facts, capability, circumstances, read_machine, this_node
from cluster.measure_report import size_of, speed_of, verdict
from cluster.measurement import BUSY_PERCENT, DeviceRate, KernelResult, Measurement, ModelRate, own_version
from cluster.nodes import GIB, Node
from cluster.throughput import tokens_per_s
from engine.devices import DTYPES, LEAST_CAPABILITY, DtypeName, choose_device, has_native_bf16
from engine.engine import Engine
from engine.errors import EmberError, OutOfMemory
from engine.measure import timing
from engine.measure.engine_rates import Streaming, embed_tokens_per_s
from engine.measure.kernel_checks import Checked, check_kernels
from engine.measure.random_engine import random_engine
from engine.model.config import ModelConfig
from engine.model.footprint import MemoryKind, footprint
from engine.run import reserve

Say = Callable[[str], None]

# Seconds after which no further model begins. The slowest model takes half a minute.
_LAST_START_S = 85.0
_CONTEXT = 128  # tokens of a prompt whose answer is measured
_WARM_TOKENS, _TRIED_TOKENS = 4, 8
_STEPS_S, _FEWEST_STEPS, _MOST_STEPS = 1.0, 12, 128


@dataclass(frozen=True, slots=True)
class Workload:
    """The models and sizes to measure. The last of `larger` that fits is measured, so the largest comes last."""

    embedders: tuple[str, ...]
    generators: tuple[str, ...]
    larger: tuple[str, ...]
    streams: tuple[int, ...]
    prompt: int  # tokens
    longest_text: int  # tokens
    seconds: float  # for the rounds of one embedding model


_GPU = Workload(
    ("BAAI/bge-base-en-v1.5", "Qwen/Qwen3-Embedding-0.6B"),
    ("Qwen/Qwen3-0.6B",),
    ("Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B"),
    (1, 8, 64), 4096, 2048, 3.0,
)  # fmt: skip
_CPU = Workload(("sentence-transformers/all-MiniLM-L6-v2",), ("HuggingFaceTB/SmolLM2-135M-Instruct",), (), (1, 8), 256, 256, 1.5)


def measure(say: Say, workload: Workload | None = None) -> Measurement:
    """Measures the device that a server would use. `say` gets a line for each finished part.

    Raises: ClusterError if a card's memory is unknown; ModelError without a usable NVRTC.
    """
    facts = read_machine()
    device = choose_device("auto")
    run = _Run(facts, device, say)
    run.say_use_by_others()
    rates = tuple(run.device_rates())
    kernels = tuple(run.kernels())
    models = tuple(run.models(workload or (_GPU if device.type == "cuda" else _CPU)))
    return Measurement(
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        emberforge=own_version(),
        circumstances=circumstances(facts),
        capability=capability(facts),
        memory_gib=round((run.node.cards[0].total_bytes if run.node.cards else facts.ram_bytes) / GIB, 1),
        free_gib=round(run.free_at_start / GIB, 1),
        others_percent=run.others_percent,
        kernels=kernels,
        rates=rates,
        models=models,
        left_out=tuple(run.left_out),
    )


class _Run:
    def __init__(self, facts: Facts, device: torch.device, say: Say) -> None:
        self._facts, self._device, self._say = facts, device, say
        # The prediction is that of a plan without a measurement of this machine.
        self.node = replace(this_node(source=lambda: facts), measurement=None, measurement_problem=None)
        self.left_out: list[str] = []
        self._start = monotonic()
        # Before this process computes.
        self.others_percent = _gpu_percent(self.node) if self.node.cards else round(psutil.cpu_percent(interval=0.5))
        self.free_at_start = reserve.free_bytes(device) if device.type == "cuda" else facts.mem_available_bytes

    def say_use_by_others(self) -> None:
        busy = "" if self.others_percent is None else f", {self.others_percent} % of its time taken by others"
        if (self.others_percent or 0) >= BUSY_PERCENT:
            busy += ": the figures will be too low, and no plan will use them"
        if not self.node.cards:
            self._say(f"this machine has no GPU: its CPU is measured, {self._facts.usable_cpus} cores{busy}")
            return
        card = self.node.cards[0]
        self._say(f"{card.name}: {self.free_at_start / GIB:.1f} of {card.total_bytes / GIB:.1f} GiB free{busy}")
        if len(self.node.cards) > 1:
            self._say(f"the first of {len(self.node.cards)} equal cards is measured; CUDA_VISIBLE_DEVICES chooses another")

    def device_rates(self) -> Iterator[DeviceRate]:
        measured = self._gpu_rates() if self._device.type == "cuda" else _cpu_rates()
        while True:
            try:
                rate = next(measured)
            except StopIteration:
                return
            except Exception as error:  # an error of the driver or of a library; the other parts may work
                self._leave_out("the other rates of the device", error)
                return
            self._say(" ".join((rate.what, *([rate.dtype] if rate.dtype else []), f"{size_of(rate)}: {speed_of(rate)}")))
            yield rate

    def _gpu_rates(self) -> Iterator[DeviceRate]:
        has = torch.cuda.get_device_capability(self._device)
        wide: DtypeName = "bfloat16" if has_native_bf16(self._device) else "float16"
        eight: tuple[DtypeName, ...] = ("float8", "int8")
        narrow = [name for name in eight if has >= LEAST_CAPABILITY[DTYPES[name]]]
        room = self.free_at_start // 4
        sizes = [size for size in (2048, 4096, 8192) if 16 * size * size < room]  # two matrices in fp32, and in 16 bits
        if not sizes:
            raise OutOfMemory(f"the GPU has {self.free_at_start / GIB:.1f} GiB free")
        for size in sizes:
            yield DeviceRate(what="GEMM", dtype=wide, size=size, per_s=timing.gemm_rate(size, DTYPES[wide]))
        for name in narrow:
            yield DeviceRate(what="GEMM", dtype=name, size=sizes[-1], per_s=timing.gemm_rate(sizes[-1], DTYPES[name]))
        num_bytes = min(1 << 31, 1 << int(room // 2).bit_length() - 1)
        yield DeviceRate(what="copy", size=num_bytes, per_s=timing.copy_bandwidth(num_bytes))
        num_bytes = min(1 << 28, num_bytes)
        yield DeviceRate(what="host to device", size=num_bytes, per_s=timing.host_to_device_bandwidth(num_bytes))
        torch.cuda.empty_cache()

    def kernels(self) -> list[KernelResult]:
        """Says one line for each kernel, and one line for each wrong result."""
        if self._device.type != "cuda":
            self._say("kernels: a CPU uses plain torch, so there is nothing to compare")
            return []
        results: list[KernelResult] = []

        def heard(checked: Checked) -> None:
            if results and results[-1].kernel != checked.kernel:
                self._say(f"kernel {results[-1].kernel}: {self._last_kernel(results)}")
            error = checked.error if math.isfinite(checked.error) else None
            results.append(KernelResult(**asdict(checked) | {"error": error, "is_right": checked.is_right}))
            if not checked.is_right:
                self._say(f"WRONG: kernel {checked.kernel}, {checked.shape}: {verdict(results[-1])}")

        check_kernels(self._device, heard)
        if results:
            self._say(f"kernel {results[-1].kernel}: {self._last_kernel(results)}")
        return results

    @staticmethod
    def _last_kernel(results: Sequence[KernelResult]) -> str:
        of_kernel = [each for each in results if each.kernel == results[-1].kernel]
        wrong = sum(not each.is_right for each in of_kernel)
        return f"{wrong} of {len(of_kernel)} checks WRONG" if wrong else f"{len(of_kernel)} of {len(of_kernel)} checks right"

    def models(self, workload: Workload) -> Iterator[ModelRate]:
        for name in workload.embedders:
            yield from self._model(name, workload, self._embedder)
        fitting = [name for name in workload.larger if self._fits(name, workload)]
        for name in (*workload.generators, *fitting[-1:]):
            yield from self._model(name, workload, self._generator)
        if workload.larger and fitting[-1:] != list(workload.larger[-1:]):
            left = workload.larger[len(fitting) :]
            self.left_out.append(
                f"{', '.join(left)}: too large for {reserve.free_bytes(self._device) / GIB:.1f} GiB of free memory"
            )
            self._say(self.left_out[-1])

    def _model(
        self, name: str, workload: Workload, rates: Callable[[str, Engine, Workload], Iterator[ModelRate]]
    ) -> Iterator[ModelRate]:
        if monotonic() - self._start > _LAST_START_S:
            self._leave_out(name, "the time is up")
            return
        if not self._fits(name, workload):
            self._leave_out(name, f"too large for {reserve.free_bytes(self._device) / GIB:.1f} GiB of free memory")
            return
        self._say(f"{name}: making random weights, warming up")
        try:
            yield from self._rates_of(name, workload, rates)
        except (EmberError, RuntimeError) as error:  # RuntimeError: torch's errors of memory or of a kernel
            self._leave_out(name, error)
        gc.collect()  # frees the engine, because the frame that held it has ended
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _rates_of(
        self, name: str, workload: Workload, rates: Callable[[str, Engine, Workload], Iterator[ModelRate]]
    ) -> Iterator[ModelRate]:
        config = _shape(name, workload)
        engine = random_engine(config, self._device.type, _cache_tokens(config, workload))
        for rate in rates(name, engine, workload):
            self._say(rate_line(rate))
            yield rate

    def _fits(self, name: str, workload: Workload) -> bool:
        if self._device.type == "cpu":
            return True
        config = _shape(name, workload)
        kind: MemoryKind = "unified" if self.node.cards[0].unified else "gpu"
        dtype = torch.bfloat16 if has_native_bf16(self._device) else torch.float32
        needs = footprint(config, dtype, kind, cache_tokens=_cache_tokens(config, workload)).total
        return needs <= reserve.free_bytes(self._device)

    def _embedder(self, name: str, engine: Engine, workload: Workload) -> Iterator[ModelRate]:
        rate = embed_tokens_per_s(engine, engine.config.max_input_length, workload.seconds)
        predicted = tokens_per_s(engine.config, engine.dtype, self.node).tokens_per_s
        yield ModelRate(model=name, dtype=engine.dtype_name, what="embed", tokens_per_s=rate, predicted=predicted)

    def _generator(self, name: str, engine: Engine, workload: Workload) -> Iterator[ModelRate]:
        streaming = Streaming(engine)
        try:
            yield from self._decode(name, streaming, workload)
            length = workload.prompt
            rate = length / median(streaming.first_token(length, 3))
            predicted = prefill_tokens_per_s(engine.config, engine.dtype, self.node, length)
            yield ModelRate(
                model=name, dtype=engine.dtype_name, what="prefill", length=length, tokens_per_s=rate, predicted=predicted
            )
        finally:
            streaming.stop()

    def _decode(self, name: str, streaming: Streaming, workload: Workload) -> Iterator[ModelRate]:
        engine = streaming.engine
        for count in workload.streams:
            start = perf_counter()
            first = streaming.decode(count, _CONTEXT, _TRIED_TOKENS, warm_tokens=_WARM_TOKENS)
            step_s = median(first) if first else perf_counter() - start
            steps = max(_FEWEST_STEPS, min(_MOST_STEPS, int(_STEPS_S / step_s)))
            seconds = streaming.decode(count, _CONTEXT, steps, warm_tokens=1)
            if not seconds:
                self._leave_out(f"{name}, {count} streams", "no pass had a token of every stream")
                continue
            length = _CONTEXT + steps // 2
            predicted = decode_tokens_per_s(engine.config, engine.dtype, self.node, count, length)
            yield ModelRate(
                model=name,
                dtype=engine.dtype_name,
                what="decode",
                streams=count,
                length=length,
                tokens_per_s=count / median(seconds),
                predicted=predicted,
            )

    def _leave_out(self, what: str, why: object) -> None:
        lines = str(why).strip().splitlines() or [type(why).__name__]
        self.left_out.append(f"{what}: {lines[0]}")
        self._say(f"not measured: {self.left_out[-1]}")


def _shape(name: str, workload: Workload) -> ModelConfig:
    """The published shape, with inputs as long as those of the measurement."""
    config = CATALOGUE[name]
    longest = workload.longest_text if config.generation is None else workload.prompt + _CONTEXT + 2 * _MOST_STEPS
    return replace(config, max_input_length=min(config.max_input_length, longest))


def _cache_tokens(config: ModelConfig, workload: Workload) -> int | None:
    """Tokens of a cache for all streams with whole pages, and for a prompt."""
    if config.generation is None:
        return None
    return max(workload.streams) * (_CONTEXT + 2 * _MOST_STEPS) + 2 * workload.prompt


def _cpu_rates() -> Iterator[DeviceRate]:
    """The dtype that the engine chooses on this CPU."""
    name: DtypeName = "bfloat16" if has_native_bf16(torch.device("cpu")) else "float32"
    for size in (512, 1024, 2048):
        a, b = (torch.randn(size, size, dtype=DTYPES[name]) for _ in range(2))
        seconds = _host_seconds(partial(torch.mm, a, b, out=torch.empty_like(a)))
        yield DeviceRate(what="GEMM", dtype=name, size=size, per_s=2 * size**3 / seconds)
    source = torch.zeros(1 << 28, dtype=torch.uint8)
    target = torch.ones_like(source)
    yield DeviceRate(what="copy", size=1 << 28, per_s=2 * source.nbytes / _host_seconds(lambda: target.copy_(source)))


def _host_seconds(call: Callable[[], object]) -> float:
    """The median seconds of five calls on a CPU, after a call to warm up."""
    call()
    seconds = []
    for _ in range(5):
        start = perf_counter()
        call()
        seconds.append(perf_counter() - start)
    return median(seconds)


def _gpu_percent(node: Node) -> int | None:
    """The percentage of the first card's time that was used recently. None if NVML does not report it."""
    if node.cards[0].uuid is None:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(node.cards[0].uuid)
        return int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except pynvml.NVMLError:
        return None


def rate_line(rate: ModelRate) -> str:
    """A line with a rate and its prediction."""
    what = {"embed": "embeds", "decode": f"decodes {rate.streams} at once", "prefill": f"computes prompts of {rate.length:,}"}
    ratio = rate.tokens_per_s / rate.predicted
    return (
        f"{rate.model} in {rate.dtype} {what[rate.what]}: {rate.tokens_per_s:,.0f} tokens/s, {rate.predicted:,.0f} predicted "
        f"({ratio:.2f} of it)"
    )
