"""The GPU runner of streams without a GPU: packing, padding, graphs, tokens that stay on the device. CUDA is a stub."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_cuda_runner import CPU, Torch
from tiny_generators import folder_without_pooling, prompts

from engine import Engine
from engine.errors import OutOfMemory
from engine.kernels.tiles import Tiling
from engine.loop import EngineLoop
from engine.options import EmbedOptions, SamplingOptions
from engine.passes import BatchReport, Passes
from engine.run import cuda, cuda_streams, tune
from engine.run.cuda_streams import StreamRunner
from engine.run.streams import Laid, StreamPacker, StreamShape
from engine.schedule.pages import Pages
from engine.schedule.request import Request
from engine.schedule.stream import Answer, Stream

PAGE_SIZE = 128


@dataclass
class Replay:
    compute: Callable[[], None]
    count: int = 0

    def replay(self) -> None:
        self.count += 1
        self.compute()


@dataclass
class Pool:
    """A capture stores the function. A replay calls it: the function reads the graph's buffer and writes its results again."""

    device: Any
    captured: list[Replay] = field(default_factory=list)
    error: Exception | None = None

    def capture(self, compute: Callable[[], None], new_thread: bool) -> Replay:
        if self.error is not None:
            raise self.error
        self.captured.append(Replay(compute))
        return self.captured[-1]


class NoContext:
    def __init__(self, *_: object) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Torch()
    made.cuda.device = made.cuda.stream = NoContext  # type: ignore[attr-defined]
    for module in (cuda, cuda_streams, tune):
        monkeypatch.setattr(module, "torch", made)
    monkeypatch.setattr(cuda_streams, "GraphPool", Pool)


@dataclass(frozen=True)
class Packer(StreamPacker):
    """Also lists the slots of the keys that a pass reads as settled."""

    settled: list[NDArray[np.int32]] = field(default_factory=list, compare=False)

    def fill(self, buffer: NDArray[np.int32], shape: StreamShape, laid: Laid) -> None:
        super().fill(buffer, shape, laid)
        self.settled.clear()
        pages = buffer[shape.size :]
        for index in range(len(shape.windows)):
            where, _ = shape.places[f"items{index}"]
            for _, place, first, end, part, num_parts, _, is_settled in buffer[where].reshape(-1, 8):
                if is_settled:
                    keys = np.arange(first, end - (part == num_parts - 1))
                    self.settled.append(pages[place + keys // PAGE_SIZE] * PAGE_SIZE + keys % PAGE_SIZE)


class Runner(StreamRunner):
    """Checks that a pass writes none of the keys and values that it reads as settled."""

    num_settled = 0

    def launch(self, *arguments: Any, **named: Any) -> Any:
        layers: Any = self._cache.layers
        before = [layer.clone() for layer in layers]
        flight = super().launch(*arguments, **named)
        assert isinstance(self.packer, Packer)
        for slots in self.packer.settled:
            self.num_settled += len(slots)
            for layer, was in zip(layers, before, strict=True):
                assert torch.equal(layer[:, slots].nan_to_num(), was[:, slots].nan_to_num())
        return flight


class Streaming:
    """An engine whose streams run on the GPU's runner."""

    def __init__(self, engine: Engine, num_pages: int, budget: int) -> None:
        config, self._engine, self.budget = engine.config, engine, budget
        group = config.n_heads // config.n_kv_heads
        tiling = Tiling(config.head_dim, group, config.n_kv_heads, (8, 0), 4, causal=True)
        packer = Packer(tiling, engine.model.windows, 8)
        cache = type(engine.runner._cache)(config, num_pages * PAGE_SIZE, torch.float32, CPU)  # type: ignore[union-attr]
        self.pages = Pages(num_pages, PAGE_SIZE)
        self.runner: StreamRunner = Runner(engine.network, packer, cache, CPU)
        self.passes_in_flight, self.num_stages, self.num_groups, self.max_graph_tokens = self.runner.passes_in_flight, 1, 1, 0
        self.speculation_rows, self.cohort_size = self.runner.speculation_rows, 8
        self.reports: list[BatchReport] = []

    def with_graphs(self, most_tokens: int) -> "Streaming":
        packer = self.runner.packer
        shapes = [*packer.decode_shapes(), *packer.chunk_shapes(most_tokens)]
        self.runner.prepare_graphs(shapes, self._engine.config.hidden_size, torch.float32)
        self.runner.max_graph_tokens = most_tokens
        return self

    def launch(self, *arguments: Any) -> Any:
        return self.runner.launch(*arguments)

    def generate(self, streams: list[Stream], requests: Sequence[Request] = ()) -> list[Answer]:
        passes = Passes(self, self.budget, on_batch=self.reports.append)  # type: ignore[arg-type]
        for _ in passes.steps([*streams, *requests]):
            self.pages.check_integrity()
        assert self.pages.num_free == self.pages.num_pages
        self.runner.graphs.wait()
        return [each.future.result(0) for each in streams]


KINDS: dict[str, dict[str, Any]] = {
    "qwen3_lm": {},
    "mistral_lm": {"sliding_window": 20},
    "gemma3_lm": {},
    "qwen2_lm": {"num_attention_heads": 2, "num_key_value_heads": 1},
}


@pytest.fixture(scope="module")
def engines(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Engine]:
    made: dict[str, Engine] = {}

    def make(kind: str) -> Engine:
        if kind not in made:
            copy = tmp_path_factory.getbasetemp() / f"streams-{kind}"
            folder = folder_without_pooling(tiny, kind, copy, tie_word_embeddings=False, **KINDS[kind])
            made[kind] = Engine.load(folder, dtype="float32", device="cpu", cache_tokens=64 * PAGE_SIZE)
        return made[kind]

    return make


LENGTHS = (3, 150, 127, 200, 1, 128)
MIXED = [
    SamplingOptions(max_tokens=12, temperature=0.0),
    SamplingOptions(max_tokens=12, temperature=0.9, seed=1),
    SamplingOptions(max_tokens=12, temperature=0.7, top_k=7, top_p=0.8, seed=2, logprobs=0),
    SamplingOptions(max_tokens=12, temperature=0.0, presence_penalty=1.5, repetition_penalty=1.2),
    SamplingOptions(max_tokens=12, temperature=0.0, logit_bias=((5, 3.0),), logprobs=3, logprobs_of=(1, 2)),
    SamplingOptions(max_tokens=3, temperature=0.0, prompt_logprobs=2),
]


def streams_of(engine: Engine, options: list[SamplingOptions]) -> list[Stream]:
    return [engine.new_stream(prompt, each) for prompt, each in zip(prompts(LENGTHS), options, strict=True)]


def same(mine: Answer, theirs: Answer) -> None:
    assert [token.id for token in mine.tokens] == [token.id for token in theirs.tokens]
    assert mine.finish_reason == theirs.finish_reason
    for one, other in zip(
        (*mine.tokens, *(mine.prompt_tokens or ())), (*theirs.tokens, *(theirs.prompt_tokens or ())), strict=True
    ):
        assert (one.logprob is None) == (other.logprob is None)
        if one.logprob is not None:
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [each for each, _ in one.top or ()] == [each for each, _ in other.top or ()]
        assert one.logprobs_of == pytest.approx(other.logprobs_of, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_streams_get_the_tokens_that_the_cpu_gives(engines: Callable[[str], Engine], kind: str) -> None:
    """Whole prompts and chunks, with and without graphs, with many and with few pages."""
    engine = engines(kind)
    expected = [stream.future.result(0) for stream in _run(engine, streams_of(engine, MIXED))]
    for num_pages, budget, graph_tokens in ((40, 4096, 0), (40, 50, 0), (7, 60, 0), (40, 4096, 4096), (7, 70, 512)):
        ours = Streaming(engine, num_pages, budget)
        if graph_tokens:
            ours.with_graphs(graph_tokens)
        for _ in range(3 if graph_tokens else 1):  # eager, then from graphs
            for mine, theirs in zip(ours.generate(streams_of(engine, MIXED)), expected, strict=True):
                same(mine, theirs)
        replays = [graph.count for graph in ours.runner.graphs._graphs.values()]  # type: ignore[attr-defined]
        assert bool(sum(replays)) == bool(graph_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_beside_streams_get_the_vectors_that_the_cpu_gives(engines: Callable[[str], Engine], kind: str) -> None:
    """With and without graphs, in chunks, with few pages, and in passes that score a prompt. Streams get the same tokens."""
    engine = engines(kind)
    expected = [stream.future.result(0) for stream in _run(engine, streams_of(engine, MIXED))]
    sequences = [np.array(ids, dtype=np.int32) for ids in prompts((1, 300, 128, 7, 129))]
    options = [EmbedOptions(), EmbedOptions(normalize=False, dimensions=8)]
    requests = [Request(sequences, each) for each in options]
    Passes(engine, engine.max_batch_tokens).run(requests)
    exact = [each.future.result(0).vectors for each in requests]
    for num_pages, budget, graph_tokens in ((40, 4096, 0), (7, 60, 0), (40, 4096, 4096), (7, 70, 512)):
        ours = Streaming(engine, num_pages, budget)
        if graph_tokens:
            ours.with_graphs(graph_tokens)
        for _ in range(3 if graph_tokens else 1):
            requests = [Request(sequences, each) for each in options]
            for mine, theirs in zip(ours.generate(streams_of(engine, MIXED), requests), expected, strict=True):
                same(mine, theirs)
            for request, vectors in zip(requests, exact, strict=True):
                np.testing.assert_allclose(request.future.result(0).vectors, vectors, atol=1e-5)
        replays = [graph.count for graph in ours.runner.graphs._graphs.values()]  # type: ignore[attr-defined]
        assert bool(sum(replays)) == bool(graph_tokens)


@pytest.mark.slow
def test_streams_that_speculate_get_the_tokens_that_the_cpu_gives(
    tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A model with tied random word embeddings repeats a few words. Greedy streams speculate beside sampled streams."""
    folder = folder_without_pooling(tiny, "qwen3_lm", tmp_path_factory.getbasetemp() / "streams-tied", tie_word_embeddings=True)
    engine = Engine.load(folder, dtype="float32", device="cpu", cache_tokens=64 * PAGE_SIZE)
    options = [SamplingOptions(max_tokens=60, temperature=0.0, logprobs=0), SamplingOptions(max_tokens=50, seed=1)] * 3
    engine.speculate = False
    expected = [stream.future.result(0) for stream in _run(engine, streams_of(engine, options))]
    engine.speculate = True
    for num_pages, budget, graph_tokens in ((40, 4096, 0), (40, 4096, 4096), (7, 70, 512)):
        ours = Streaming(engine, num_pages, budget)
        if graph_tokens:
            ours.with_graphs(graph_tokens)
        for _ in range(2 if graph_tokens else 1):
            for mine, theirs in zip(ours.generate(streams_of(engine, options)), expected, strict=True):
                same(mine, theirs)
        assert sum(each.num_accepted for each in ours.reports) > 30
        assert isinstance(ours.runner, Runner)
        assert ours.runner.num_settled


def _run(engine: Engine, streams: list[Stream]) -> list[Stream]:
    Passes(engine, engine.max_batch_tokens).run(streams)
    return streams


def test_a_pass_without_room_on_the_device_is_split(engines: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines("qwen3_lm")
    ours, plain = Streaming(engine, 40, 4096), type(engine.model).forward

    def forward(self: Any, batch: Any, pooled_only: bool = False) -> Any:
        if batch.num_tokens > 260:
            raise torch.OutOfMemoryError("no room")
        return plain(self, batch, pooled_only)

    expected = [stream.future.result(0) for stream in _run(engine, streams_of(engine, MIXED))]
    monkeypatch.setattr(type(engine.model), "forward", forward)
    for mine, theirs in zip(ours.generate(streams_of(engine, MIXED)), expected, strict=True):
        same(mine, theirs)


def test_a_capture_that_fails_costs_nothing_else(engines: Callable[[str], Engine]) -> None:
    engine = engines("qwen3_lm")
    ours = Streaming(engine, 40, 4096).with_graphs(512)
    pool: Any = ours.runner._pool
    pool.error = RuntimeError("operation not permitted")
    expected = [stream.future.result(0) for stream in _run(engine, streams_of(engine, MIXED))]
    for _ in range(2):
        for mine, theirs in zip(ours.generate(streams_of(engine, MIXED)), expected, strict=True):
            same(mine, theirs)
    assert not len(ours.runner.graphs)


def test_logits_that_are_not_finite_end_their_stream_alone(engines: Callable[[str], Engine]) -> None:
    engine = engines("qwen3_lm")
    ours = Streaming(engine, 40, 4096)
    good, bad = streams_of(engine, MIXED)[:2]
    plain = ours.runner._head.narrow
    ours.runner._head = type("Head", (), {"narrow": staticmethod(lambda hidden: _broken(plain(hidden)))})()
    passes = Passes(ours, 4096)  # type: ignore[arg-type]
    passes.run([good, bad])
    assert good.future.exception(0) is None
    with pytest.raises(Exception, match="not finite"):
        bad.future.result(0)


def _broken(logits: torch.Tensor) -> torch.Tensor:
    """Makes the second row NaN, if there is one."""
    if len(logits) > 1:
        logits[1] = float("nan")
    return logits


@pytest.mark.parametrize("room", [1 << 30, 3000])
def test_tuning_finds_a_budget_and_captures_graphs(
    engines: Callable[[str], Engine], room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines("qwen3_lm")
    ours = Streaming(engine, 40, 4096)

    def forward(_: Any, batch: Any, pooled_only: bool = False) -> Any:
        if batch.num_tokens > room:
            raise torch.OutOfMemoryError("no room")
        return torch.zeros(len(batch.pooled_rows) if pooled_only else batch.num_tokens, engine.config.hidden_size)

    monkeypatch.setattr(type(engine.model), "forward", forward)
    budget = tune.tune_streams(ours.runner, engine.config, torch.float32, 40 * PAGE_SIZE, None)
    assert budget == (8192 if room > 8192 else 2048)
    assert ours.runner.max_graph_tokens <= budget
    assert len(ours.runner.graphs) > 10
    if room < 4096:
        with pytest.raises(OutOfMemory, match="a pass of 4096 tokens does not fit"):
            tune.tune_streams(Streaming(engine, 40, 4096).runner, engine.config, torch.float32, 40 * PAGE_SIZE, 4096)


@pytest.mark.slow
def test_many_streams_through_the_loop(engines: Callable[[str], Engine]) -> None:
    """Captures run at the same time as the passes."""
    engine = engines("qwen3_lm")
    ours = Streaming(engine, 400, 8192).with_graphs(8192)
    for count in (1, 8, 64):
        for most in (10, 20):
            loop = EngineLoop(ours, 8192)  # type: ignore[arg-type]
            options = SamplingOptions(max_tokens=most, temperature=0.0)
            streams = [engine.new_stream(prompts([128])[0], options) for _ in range(count)]
            loop.submit(streams)
            for each in streams:
                assert len(each.future.result(60).tokens) == most
            loop.stop()
    ours.pages.check_integrity()
    ours.runner.graphs.wait()
