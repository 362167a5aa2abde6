"""The whole engine on a GPU in 16 bits, with our kernels: right in any batch, with and without graphs, and after faults."""

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from parity.bge_m3_reference import save_layers

from engine import BackendError, Engine, devices
from engine.devices import DtypeName
from engine.heads import splade
from engine.kernels.embed import _kernel as embed_kernel
from engine.loop import EngineLoop
from engine.model.config import OutputName, Pooling
from engine.model.folder import load_model_config
from engine.options import EmbedOptions, EncodeOptions
from engine.run.batch import PackedBatch
from engine.run.cuda import CudaRunner
from engine.run.pack import GRAPH_TOKENS
from engine.schedule.request import Request
from engine.text.pairs import SECOND_SEGMENT

pytestmark = pytest.mark.gpu

# Our attention takes the head dimensions of these shapes. It does not take those of all tiny defaults.
FAMILIES = {
    "bert": {"hidden_size": 128},
    "bert wide": {"hidden_size": 256, "num_attention_heads": 4},
    "roberta": {"hidden_size": 128},
    "distilbert": {"dim": 128},
    "mpnet": {"hidden_size": 128},
    "qwen3": {},
    "qwen3 wide heads": {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2},
    "nomic_bert": {"hidden_size": 128, "head_dim": 32},
    "nomic_bert_authors": {"n_embd": 256, "mlp_fc1_bias": False},
    "nomic_bert_moe": {"n_embd": 128},
    "gte": {"hidden_size": 128},
    "gte_ntk": {"hidden_size": 256},
    "jina_bert": {"hidden_size": 128},
    "jina_bert six heads": {"hidden_size": 192, "num_attention_heads": 6},
    "jina_bert_code": {"hidden_size": 256},
    "modernbert": {"hidden_size": 128},
    "modernbert biases": {"hidden_size": 256, "norm_bias": True, "attention_bias": True, "mlp_bias": True},
    "qwen2": {"hidden_size": 128},
    "qwen2 bidirectional": {"head_dim": 128, "num_attention_heads": 6, "num_key_value_heads": 1, "is_causal": False},
    "qwen2 local": {"head_dim": 64, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "mistral": {"head_dim": 64, "sliding_window": 9},
    "mistral window, bidirectional": {"sliding_window": 9, "is_causal": False},
    "llama": {},
    "gemma3": {"head_dim": 64},
    "gemma3 as embeddinggemma": {
        "use_bidirectional_attention": True,
        "hidden_size": 192,
        "head_dim": 256,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    },
}
# Together these classifiers have token types, each kind of pooling, one label or several, and widths that our kernels take.
CLASSIFIERS = {
    "bert": {"hidden_size": 128, "id2label": {"0": "a"}, "label2id": {"a": 0}},
    "roberta": {"hidden_size": 128, "num_labels": 3},
    "distilbert": {"dim": 128, "num_labels": 8},
    "modernbert": {"hidden_size": 128, "classifier_pooling": "mean"},
    "nomic_bert": {"hidden_size": 128, "head_dim": 32},
    "gte": {"hidden_size": 128, "num_labels": 5},
    "jina_bert": {"hidden_size": 128},
    "qwen3": {"num_labels": 16},
    "gemma3": {"head_dim": 64},
}
RAGGED = [33, 1, 90, 5, 5, 64, 2, 128, 17]


@pytest.fixture(params=FAMILIES, scope="module")
def folder(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> Path:
    return tiny(request.param.split()[0], **FAMILIES[request.param])


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    engine = Engine.load(folder, dtype="bfloat16", device="cuda")
    assert engine.packer.tiling is not None, "our attention does not run here"
    engine.runner.max_graph_tokens = 512  # type: ignore[union-attr]  # `tune` finds other limits on a busy card
    return engine


def captured(engine: Engine) -> Engine:
    """The engine, after the capture of all graphs that its passes have asked for."""
    assert isinstance(engine.runner, CudaRunner)
    engine.runner.graphs.wait()
    return engine


def sequences(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(5, 300, size=length).astype(np.int32) for length in lengths]


def exact(folder: Path, batch: list[np.ndarray]) -> np.ndarray:
    """Normalised vectors from transformers in fp32, each text alone."""
    return _transformers(folder, batch, torch.float32)


def _transformers(folder: Path, batch: list[np.ndarray], dtype: torch.dtype) -> np.ndarray:
    model = transformers.AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval().cuda()
    row = 0 if load_model_config(folder).pooling == "cls" else -1
    vectors = []
    for ids in batch:
        with torch.inference_mode():
            hidden = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None].cuda()).last_hidden_state[0, row]
        vectors.append(torch.nn.functional.normalize(hidden.float(), dim=-1).cpu().numpy())
    return np.stack(vectors)


def assert_as_exact_as_transformers(ours: np.ndarray, folder: Path, batch: list[np.ndarray]) -> None:
    """Over the batch, our error against fp32 is at most 1.5 times the error of transformers in bf16."""
    torch.cuda.set_per_process_memory_fraction(1.0)  # an engine that was loaded here limits this process's share of the card
    expected = exact(folder, batch)
    theirs = _transformers(folder, batch, torch.bfloat16)
    assert np.linalg.norm(ours - expected) <= 1.5 * np.linalg.norm(theirs - expected)


WANTS: dict[str, tuple[bool, tuple[OutputName, ...]]] = {
    "graph": (True, ()),
    "graph with tokens": (True, ("tokens",)),
    "eager": (False, ()),
    "eager with tokens": (False, ("tokens",)),
}


@pytest.mark.parametrize(("graphed", "want"), WANTS.values(), ids=WANTS.keys())
@pytest.mark.parametrize("lengths", [[33], [33] * 7, [3] * 6, RAGGED], ids=["alone", "equal", "a place a token", "ragged"])
def test_vectors_are_right_in_every_company(
    folder: Path,
    engine: Engine,
    lengths: list[int],
    graphed: bool,
    want: tuple[OutputName, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal lengths are the case in which TEI loses the causal mask (TEI#882)."""
    if not graphed:
        monkeypatch.setattr(engine.runner, "max_graph_tokens", 0)
    row = 0 if engine.config.pooling == "cls" else -1
    batches, vectors = [], []
    for seed in range(3):  # a graph is captured, then replayed on other texts
        batch = sequences(lengths, seed)
        output = captured(engine).launch(batch, outputs=want).wait()
        batches += batch
        vectors.append(output.vectors)
        for name in want:
            tokens = [output.ragged[name][index] for index in range(len(batch))]
            assert [len(each) for each in tokens] == lengths
            pooled = torch.nn.functional.normalize(torch.from_numpy(np.stack([each[row] for each in tokens])), dim=-1)
            np.testing.assert_allclose(pooled.numpy(), output.vectors, atol=1e-6)
    assert_as_exact_as_transformers(np.concatenate(vectors), folder, batches)


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_logits_of_pairs_are_right_graphed_and_not(tiny: Callable[..., Path], kind: str) -> None:
    """Our error against fp32 is at most 1.5 times transformers' error in bf16. The second text has other token types."""
    folder = tiny(f"{kind}_classifier", **CLASSIFIERS[kind])
    engine = Engine.load(folder, dtype="bfloat16", device="cuda")
    engine.runner.max_graph_tokens = 4096  # type: ignore[union-attr]
    assert engine.packer.tiling is not None
    models = [
        transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype, attn_implementation="eager").cuda()
        for dtype in (torch.float32, torch.bfloat16)
    ]
    rng = np.random.default_rng(0)
    for graphed in (True, True, False):  # a graph is captured, then replayed on other pairs
        lengths = [1, 30, 7, 90, *rng.integers(1, 60, 36)]  # with many sequences, rounding errors average out
        pairs = [tuple(" ".join(f"w{i}" for i in rng.integers(0, 290, count)) for count in (9, most)) for most in lengths]
        sequences = engine.tokenizer.encode_pairs(pairs, EncodeOptions())  # type: ignore[arg-type]
        want: tuple[OutputName, ...] = () if graphed else ("tokens",)
        output = engine.launch(sequences, [EmbedOptions(normalize=False)] * len(pairs), outputs=want).wait()
        expected, low = (np.stack([_logits(model.eval(), ids) for ids in sequences]) for model in models)
        assert np.linalg.norm(output.vectors - expected) <= 1.5 * np.linalg.norm(low - expected)


def _logits(model: Any, sequence: np.ndarray) -> np.ndarray:
    ids, types = (torch.tensor([part.tolist()]).cuda() for part in (sequence & ~SECOND_SEGMENT, sequence // SECOND_SEGMENT))
    given = {"token_type_ids": types} if getattr(model.config, "type_vocab_size", 0) > 1 else {}
    with torch.inference_mode():
        return np.asarray(model(input_ids=ids, **given).logits[0].float().cpu())


SHARING = {
    "qwen3": {},
    "qwen3 wide heads": {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2},
    "qwen2": {"hidden_size": 256},
    "llama": {"hidden_size": 224, "head_dim": 128, "num_attention_heads": 7, "num_key_value_heads": 1},
    "mistral": {"head_dim": 64},
}


@pytest.mark.parametrize("kind", SHARING)
def test_sequences_that_share_a_prefix_get_the_vectors_they_get_alone(tiny: Callable[..., Path], kind: str) -> None:
    """A graph is captured, then replayed with other lengths and prefixes of the same shape. Then passes run without graphs."""
    folder = tiny(kind.split()[0], **SHARING[kind])
    engine = Engine.load(folder, dtype="bfloat16", device="cuda")
    for max_graph_tokens in (512, 0):
        engine.runner.max_graph_tokens = max_graph_tokens  # type: ignore[union-attr]
        for lengths, prefix in ((RAGGED, 65), ([1] * 40, 100), ([90, 90, 3], 150), ([20, 1, 100, 128], 17), ([60] * 5, 64)):
            own, (shared, other) = sequences(lengths, prefix), sequences([prefix, 40], prefix + 1)
            batch = [np.concatenate((shared, ids)) for ids in own] + [shared, other, other[:3], own[-1]]
            assert engine.packer.layout(batch, whole=False).prefixes
            assert_as_exact_as_transformers(engine.launch(batch).wait().vectors, folder, batch)


def test_bidirectional_qwen3_is_that_of_the_cpu(tiny: Callable[..., Path]) -> None:
    """transformers' Qwen3 is always causal, so this test compares with our fp32 engine. Another test checks the fp32 engine."""
    folder = tiny("qwen3", use_bidirectional_attention=True)
    texts = [ids.tolist() for ids in sequences(RAGGED)]
    ours = Engine.load(folder, dtype="bfloat16", device="cuda").embed(texts)
    assert (ours * Engine.load(folder, dtype="float32", device="cpu").embed(texts)).sum(axis=1).min() > 0.999


@pytest.mark.parametrize("lengths", [[33], [33] * 7, RAGGED], ids=["alone", "equal lengths", "ragged"])
def test_a_family_that_walks_the_lengths_is_right_without_graphs(tiny: Callable[..., Path], lengths: list[int]) -> None:
    folder, batch = tiny("deberta", hidden_size=128), sequences(lengths)
    engine = Engine.load(folder, dtype="bfloat16", device="cuda")
    assert engine.packer.tiling is None
    assert engine.max_graph_tokens == 0
    assert_as_exact_as_transformers(engine.launch(batch).wait().vectors, folder, batch)


def test_a_graph_made_for_one_batch_serves_others_of_its_bucket(folder: Path, engine: Engine) -> None:
    for lengths in ([40, 80], [1] * 60 + [60], [100, 1, 1, 1], [128], [7] * 18):
        batch = sequences(lengths, len(lengths))
        assert_as_exact_as_transformers(engine.launch(batch).wait().vectors, folder, batch)


def assert_near(ours: np.ndarray, exact: np.ndarray, least: float = 0.999) -> None:
    """Asserts for each row that the cosine is at least `least`, and that the lengths are equal within 2 %."""
    assert ours.shape == exact.shape
    lengths = np.linalg.norm(ours, axis=-1) * np.linalg.norm(exact, axis=-1)
    assert ((ours * exact).sum(axis=-1) >= least * lengths).all()
    np.testing.assert_allclose(np.linalg.norm(ours, axis=-1), np.linalg.norm(exact, axis=-1), rtol=0.02)


@pytest.mark.parametrize("graphed", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("kind", ["bert_lm", "roberta_lm", "distilbert_lm", "mpnet_lm", "modernbert_lm"])
def test_splade_is_that_of_the_cpu(tiny: Callable[..., Path], kind: str, graphed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny(kind, **({"dim": 128} if kind == "distilbert_lm" else {"hidden_size": 128}))
    engine = Engine.load(folder, dtype="bfloat16", device="cuda", pooling="splade")
    exact = Engine.load(folder, dtype="float32", device="cpu", pooling="splade")
    assert isinstance(engine.runner, CudaRunner)
    monkeypatch.setattr(engine.runner, "max_graph_tokens", 512 * graphed)
    options = [EmbedOptions(normalize=False, outputs=("sparse",)), EmbedOptions(normalize=True, dimensions=104)]
    for lengths in ([33], [33] * 7, RAGGED, [1] * 60, [512, 700, 3]):
        for seed in range(2):
            batch = sequences([min(length, 120) for length in lengths], seed)
            each = [options[index % 2] for index in range(len(batch))]
            ours, theirs = (one.launch(batch, each, ("sparse",)).wait() for one in (captured(engine), exact))
            assert_near(ours.vectors, theirs.vectors)
            for row, vector in enumerate(ours.vectors):
                assert ours.ragged["sparse"][row]["index"].tolist() == np.flatnonzero(vector).tolist()


@pytest.mark.parametrize("graphed", [True, False], ids=["graph", "eager"])
def test_splades_logits_of_a_few_tokens_at_a_time_give_the_same(
    tiny: Callable[..., Path], graphed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some sequences begin in one part and end in another. Vectors are cut in several steps."""
    engine = Engine.load(tiny("bert_lm", hidden_size=128), dtype="bfloat16", device="cuda", pooling="splade")
    exact = Engine.load(tiny("bert_lm", hidden_size=128), dtype="float32", device="cpu", pooling="splade")
    assert isinstance(engine.runner, CudaRunner)
    monkeypatch.setattr(engine.runner, "max_graph_tokens", 512 * graphed)
    monkeypatch.setattr(splade, "CHUNK_BYTES", 50 * 304 * 2)
    for lengths in ([90, 100, 120, 7, 3], [2] * 150):
        batch = sequences(lengths)
        options = [EmbedOptions(normalize=False)] * len(batch)
        ours, theirs = (one.launch(batch, options).wait().vectors for one in (captured(engine), exact))
        assert_near(ours, theirs)


@pytest.mark.parametrize("graphed", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("lengths", [[33], [33] * 7, RAGGED], ids=["alone", "equal lengths", "ragged"])
def test_bge_m3s_outputs_are_those_of_the_cpu(
    tiny: Callable[..., Path], tmp_path: Path, lengths: list[int], graphed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tiny("xlm_roberta", hidden_size=128), tmp_path / "model")
    save_layers(folder, 128, 64)
    engine, exact = (
        Engine.load(folder, dtype=dtype, device=device)  # type: ignore[arg-type]
        for dtype, device in (("bfloat16", "cuda"), ("float32", "cpu"))
    )
    assert isinstance(engine.runner, CudaRunner)
    monkeypatch.setattr(engine.runner, "max_graph_tokens", 512 * graphed)
    wants: list[tuple[OutputName, ...]] = [("colbert", "sparse", "tokens"), ("sparse",), ("colbert",), ()]
    for seed, want in enumerate(wants * 2):  # a graph is captured, then replayed on other texts
        batch = sequences(lengths, seed)
        ours, theirs = (one.launch(batch, None, want).wait() for one in (captured(engine), exact))
        assert_near(ours.vectors, theirs.vectors)
        assert set(ours.ragged) == set(want)
        for row in range(len(batch)):
            for name in set(want) - {"sparse"}:
                assert_near(ours.ragged[name][row], theirs.ragged[name][row], 0.995)
            if "sparse" in want:
                weights, expected = (dict(each.ragged["sparse"][row].tolist()) for each in (ours, theirs))
                for index in set(weights) | set(expected):
                    assert weights.get(index, 0) == pytest.approx(expected.get(index, 0), abs=0.05)


@pytest.mark.parametrize("pooling", ["mean", "max", "mean_sqrt_len", "weighted_mean"])
def test_chunks_are_those_of_the_cpu(tiny: Callable[..., Path], pooling: Pooling) -> None:
    engine, exact = (
        Engine.load(tiny("bert", hidden_size=128), dtype=dtype, device=device, pooling=pooling)  # type: ignore[arg-type]
        for dtype, device in (("bfloat16", "cuda"), ("float32", "cpu"))
    )
    batch = sequences(RAGGED)
    spans = [tuple((start, len(ids)) for start in range(0, len(ids), 7)) for ids in batch]
    options = [EmbedOptions(outputs=("chunks",), spans=each) for each in spans]
    for _ in range(2):
        ours, theirs = (one.launch(batch, options, ("chunks",)).wait() for one in (engine, exact))
        assert_near(ours.vectors, theirs.vectors)
        for row in range(len(batch)):
            assert_near(ours.ragged["chunks"][row], theirs.ragged["chunks"][row])


def test_options_are_each_sequences_own(engine: Engine) -> None:
    batch = sequences([9, 9, 9])
    whole = engine.launch([batch[0]] * 3, [EmbedOptions(False), EmbedOptions(True, 8), EmbedOptions(False, 8)]).wait().vectors
    plain = engine.launch([batch[0]], [EmbedOptions(normalize=False)]).wait().vectors[0]
    assert_near(whole[0], plain)  # not equal: another number of rows goes through another kernel
    assert_near(whole[2, :8], plain[:8])
    np.testing.assert_allclose(np.linalg.norm(whole[1]), 1, rtol=1e-5)
    assert not whole[1:, 8:].any()


def test_a_text_gone_to_nan_fails_alone(tiny: Callable[..., Path]) -> None:
    engine = Engine.load(tiny("qwen3"), dtype="bfloat16", device="cuda")
    with torch.inference_mode():
        engine.model.words[7] = torch.nan
    texts = [np.full(3, 5 + i % 90 + 5 * (i % 90 >= 2), dtype=np.int32) for i in range(60)]
    texts = [ids for ids in texts if 7 not in ids]
    bad = np.array([9, 7, 9], dtype=np.int32)
    loop = EngineLoop(engine, engine.max_batch_tokens)
    good_jobs, bad_job = [Request([ids], EmbedOptions()) for ids in texts], Request([bad], EmbedOptions())
    loop.submit([*good_jobs[:20], bad_job, *good_jobs[20:]])
    with pytest.raises(BackendError, match="not finite"):
        bad_job.future.result(20)
    vectors = np.concatenate([job.future.result(20).vectors for job in good_jobs])
    loop.stop()  # before this call only the loop's thread may use the engine
    assert (vectors * engine.embed([ids.tolist() for ids in texts])).sum(axis=1).min() > 0.999


def test_what_does_not_fit_is_split_until_it_does(tiny: Callable[..., Path]) -> None:
    engine = Engine.load(tiny("bert", hidden_size=128, intermediate_size=16384), device="cuda", max_batch_tokens=1024)
    batch = sequences([128] * 128)
    alone = engine.embed([ids.tolist() for ids in batch])
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    splits: list[int] = []
    loop = EngineLoop(engine, 32768, on_split=lambda: splits.append(1))
    job = Request(batch, EmbedOptions())
    try:  # the memory is enough for the wide activation of 8,192 tokens, not of 16,384
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (400 << 20)) / total)
        loop.submit([job])
        vectors = job.future.result(60).vectors
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        loop.stop()
    assert splits
    assert (vectors * alone).sum(axis=1).min() > 0.999


ODD = [100, 100, 100]  # at its load an engine captures no graph of this shape with the output "tokens"


def test_a_capture_that_fails_costs_its_shape_the_graph_and_nothing_else(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.load(tiny("qwen3"), device="cuda")
    assert isinstance(engine.runner, CudaRunner)
    batch, graphs = sequences(ODD), len(engine.runner.graphs)
    assert graphs
    expected = engine.launch(batch).wait().vectors
    forward = engine.model.forward

    def greedy(*arguments: Any) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
        return forward(*arguments)

    monkeypatch.setattr(engine.model, "forward", greedy)
    for _ in range(2):
        assert (captured(engine).launch(batch, outputs=("tokens",)).wait().vectors * expected).sum(axis=1).min() > 0.999
    assert len(engine.runner.graphs) == graphs
    monkeypatch.undo()
    assert (captured(engine).launch(batch).wait().vectors * expected).sum(axis=1).min() > 0.999


def test_graphs_are_captured_beside_passes(tiny: Callable[..., Path]) -> None:
    """Another thread captures graphs while this thread launches passes. The vectors stay the same, except for rounding."""
    engine = Engine.load(tiny("qwen3"), device="cuda")
    assert isinstance(engine.runner, CudaRunner)
    engine.runner.max_graph_tokens = 4096
    batches = [sequences([length] * 3, length) for length in range(20, 400, 20)]
    expected = [engine.launch(batch).wait().vectors for batch in batches]
    for _ in range(20):
        for batch, each in zip(batches, expected, strict=True):
            output = engine.launch(batch, outputs=("tokens",)).wait()
            assert (output.vectors * each).sum(axis=1).min() > 0.999
    graphs = len(captured(engine).runner.graphs)  # type: ignore[union-attr]
    assert all(
        (engine.launch(batch, outputs=("tokens",)).wait().vectors * each).sum() > 2.99
        for batch, each in zip(batches, expected, strict=True)
    )
    assert len(captured(engine).runner.graphs) == graphs  # type: ignore[union-attr]  # no graph is new


def test_an_engine_that_is_gone_does_not_break_the_capture_of_a_graph(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, engine = (Engine.load(tiny("qwen3"), device="cuda") for _ in range(2))
    assert isinstance(engine.runner, CudaRunner)
    gone.itself = gone  # type: ignore[attr-defined]  # a cycle: only garbage collection frees the engine and its graphs
    del gone
    forward = engine.model.forward

    def collecting(*arguments: Any) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing() and gc.isenabled():  # Python may collect whenever it makes a list
            gc.collect()
        return forward(*arguments)

    monkeypatch.setattr(engine.model, "forward", collecting)
    graphs = len(engine.runner.graphs)
    assert engine.launch(sequences(ODD), outputs=("tokens",)).wait().finite.all()
    assert len(captured(engine).runner.graphs) == graphs + 1  # type: ignore[union-attr]


def test_results_that_are_let_go_while_a_graph_is_captured_fail_no_pass(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.load(tiny("qwen3"), device="cuda")
    held = [engine.launch(sequences([9])).wait() for _ in range(3)]
    forward = engine.model.forward

    def forgetting(*arguments: Any) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():  # as another thread may do
            held.clear()
        return forward(*arguments)

    monkeypatch.setattr(engine.model, "forward", forgetting)
    batch = sequences(ODD)
    expected = engine.launch(batch, outputs=("tokens",)).wait().vectors
    captured(engine)
    assert not held
    for _ in range(5):
        np.testing.assert_array_equal(engine.launch(batch, outputs=("tokens",)).wait().vectors, expected)


def test_results_are_their_holders_own(tiny: Callable[..., Path]) -> None:
    """Results stay valid during and after other passes, although all passes use the same memory."""
    engine = Engine.load(tiny("qwen3"), device="cuda")
    batches = [sequences([9]), sequences([40, 7, 90]), sequences([200] * 30), sequences([5] * 2)]
    expected = [engine.launch(batch, outputs=("tokens",)).wait() for batch in batches]
    copies = [each.vectors.copy() for each in expected]
    flights = [engine.launch(batch, outputs=("tokens",)) for batch in batches * 3]
    for _ in range(3):
        engine.launch(sequences([64] * 8)).wait()
    for index, flight in enumerate(flights):
        output, whole = flight.wait(), expected[index % len(batches)]
        np.testing.assert_array_equal(output.vectors, whole.vectors)
        for row in range(len(batches[index % len(batches)])):
            np.testing.assert_array_equal(output.ragged["tokens"][row], whole.ragged["tokens"][row])
    for each, copy in zip(expected, copies, strict=True):
        np.testing.assert_array_equal(each.vectors, copy)


def test_replayed_graphs_leave_all_other_memory_alone(tiny: Callable[..., Path]) -> None:
    engine = Engine.load(tiny("qwen3", hidden_size=512, intermediate_size=8192), device="cuda")
    runner = engine.runner
    assert isinstance(runner, CudaRunner)
    batches = [sequences([length] * 3) for length in (40, 80, 120, 160)]
    runner.max_graph_tokens = 0
    expected = [engine.launch(batch).wait().vectors for batch in batches]
    runner.max_graph_tokens = 512
    others = []
    for index in [0, 1, 2, 3, 1, 2, 3, 0, 2, 3, 0, 1]:
        output = captured(engine).launch(batches[index], outputs=("tokens",)).wait()
        assert (output.vectors * expected[index]).sum(axis=1).min() > 0.999
        with runner._stream:  # 32 MiB in the memory where cuBLAS would write its partial sums
            others.append(torch.ones(8 << 20, device="cuda"))
    assert all((each == 1).all() for each in others)


def test_graphs_keep_their_results_in_one_place(tiny: Callable[..., Path]) -> None:
    """The vector of a text of four tokens takes 4 KiB here. All else that a graph keeps for the text is smaller."""
    engine = Engine.load(tiny("qwen3", hidden_size=1024), device="cuda", max_batch_tokens=4096)
    assert isinstance(engine.runner, CudaRunner)
    engine.runner.max_graph_tokens = 4096
    engine.launch(sequences([4] * 1024)).wait()
    before = torch.cuda.memory_allocated()
    batches = [sequences([4] * (tokens // 4)) for tokens in GRAPH_TOKENS if 1024 < tokens < 4096]
    vectors = [engine.launch(batch).wait().vectors for batch in batches]
    captured(engine)
    assert len(batches) == 7
    assert torch.cuda.memory_allocated() - before < 0.1 * sum(each.nbytes for each in vectors)
    for batch, each in zip(reversed(batches), reversed(vectors), strict=True):  # a replay still gives its own result
        np.testing.assert_array_equal(engine.launch(batch).wait().vectors, each)


def test_what_the_driver_refuses_is_an_error_of_its_pass(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.load(tiny("qwen3"), device="cuda")
    batch = sequences([7, 20])
    expected = engine.launch(batch).wait().vectors
    forward = engine.model.forward

    def too_large(batch: PackedBatch, *arguments: Any) -> torch.Tensor:
        hidden = forward(batch, *arguments)
        ids, positions, words = batch.token_ids, batch.positions, engine.model.words
        kernel = embed_kernel(64, False, torch.bfloat16, hidden.device)
        kernel((1, 1 << 20), ids, positions, words, None, None, hidden, len(ids), len(words), 0)  # blocks in y: 65,535 at most
        return hidden

    monkeypatch.setattr(engine.model, "forward", too_large)
    with pytest.raises(BackendError, match="launching embed"):
        engine.launch(batch, outputs=("tokens",))
    monkeypatch.undo()
    np.testing.assert_array_equal(engine.launch(batch).wait().vectors, expected)


def test_fp16_is_as_exact_as_bf16_or_better(tiny: Callable[..., Path]) -> None:
    folder, batch = tiny("bert", hidden_size=128), sequences(RAGGED)
    expected = exact(folder, batch)
    errors = {
        dtype: np.linalg.norm(Engine.load(folder, dtype=dtype, device="cuda").launch(batch).wait().vectors - expected)  # type: ignore[arg-type]
        for dtype in ("bfloat16", "float16")
    }
    assert errors["float16"] < errors["bfloat16"]


@pytest.mark.parametrize("kind", ["bert", "qwen3", "gte", "modernbert", "gemma3"])
@pytest.mark.parametrize("dtype", ["float8", "int8"])
def test_layers_in_8_bits_are_as_exact_as_in_plain_torch(
    tiny: Callable[..., Path], kind: str, dtype: DtypeName, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability() < devices.LEAST_CAPABILITY[devices.DTYPES[dtype]]:
        pytest.skip(f"this GPU has no {dtype}")
    folder = tiny(kind, **FAMILIES[kind])
    monkeypatch.delitem(devices.LEAST_CAPABILITY, devices.DTYPES[dtype])  # allows the dtype on a CPU
    plain, ours = (Engine.load(folder, dtype=dtype, device=device) for device in ("cpu", "cuda"))
    for lengths in ([5], RAGGED, [40] * 60):  # five rows, hundreds, thousands
        batch = sequences(lengths)
        expected = exact(folder, batch)
        error, theirs = (np.linalg.norm(each.launch(batch).wait().vectors - expected) for each in (ours, plain))
        assert error <= 1.5 * theirs
        assert theirs <= 0.2 * len(batch) ** 0.5  # a mean cosine of about 0.98


def test_eight_billion_shapes_stay_finite_with_large_activations(tiny: Callable[..., Path]) -> None:
    folder = tiny(
        "qwen3", hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128, intermediate_size=12288,
        num_hidden_layers=2, max_position_embeddings=4096, initializer_range=1.0,
    )  # fmt: skip
    batch = sequences([4, 700, 128, 33])
    output = Engine.load(folder, dtype="bfloat16", device="cuda").launch(batch).wait()
    assert output.finite.all()
    assert_as_exact_as_transformers(output.vectors, folder, batch)


def test_a_loaded_engine_leaves_the_rest_of_the_card_alone(tiny: Callable[..., Path]) -> None:
    free = torch.cuda.mem_get_info()[0]
    Engine.load(tiny("qwen3"), dtype="bfloat16", device="cuda")
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(free // 2, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_lost_device_ends_the_engine(tiny: Callable[..., Path]) -> None:
    """Runs in a process of its own, because after the loss no operation on this GPU works in that process."""
    command = [sys.executable, "-u", "-W", "ignore", "-c", _LOSE_THE_DEVICE, str(tiny("qwen3"))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout.split(), done.returncode) == (["1.0", "DeviceLost", "stopped", "alive"], 0), done.stderr[-2000:]


_LOSE_THE_DEVICE = """
import os, sys, time
import numpy as np, torch
from engine import Engine
from engine.loop import EngineLoop
from engine.schedule.request import Request
from engine.options import EmbedOptions

engine = Engine.load(sys.argv[1], dtype="bfloat16", device="cuda")
loop = EngineLoop(engine, engine.max_batch_tokens)

def job():
    made = Request([np.arange(5, 25, dtype=np.int32)], EmbedOptions())
    loop.submit([made])
    return made.future

results = [job().result(20) for _ in range(3)]
print(round(float(np.linalg.norm(results[0].vectors)), 3))
try:
    torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]  # an assertion on the device
    torch.cuda.synchronize()
except RuntimeError:
    pass
try:
    job().result(20)
except Exception as error:
    print(type(error).__name__)
for _ in range(100):
    if not loop.alive:
        print("stopped")
        break
    time.sleep(0.05)
results.clear()  # torch ends the process that frees pinned memory on a lost device
time.sleep(0.2)
print("alive")
os._exit(0)  # the interpreter's own end frees everything
"""
