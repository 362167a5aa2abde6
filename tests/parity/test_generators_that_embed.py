"""A generation model gives the vectors of the same model loaded only to embed, in fp32, with any other work in its passes."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_generators import folder_without_pooling, preemptions, prompts

from engine import Engine, InvalidInput
from engine.loop import EngineLoop
from engine.options import EmbedOptions, SamplingOptions, TokenIds
from engine.passes import BatchReport, Passes
from engine.run.kv_cache import PAGE_SIZE
from engine.schedule.request import Request

GREEDY = SamplingOptions(max_tokens=40, temperature=0.0)
LENGTHS = (3, 150, 1, 127, 128, 129, 300)
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_lm": {},
    "qwen2_lm": {},
    "llama_lm": {},
    "mistral_lm": {"sliding_window": 20},
    "gemma3_lm": {},
}


@pytest.fixture(scope="module")
def folders(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Two folders of one model: one without a pooling, one with last-token pooling."""

    def make(kind: str) -> tuple[Path, Path]:
        silent = tmp_path_factory.getbasetemp() / f"embeds-{kind}"
        folder_without_pooling(tiny, kind, silent, tie_word_embeddings=False, **KINDS[kind])
        named = silent.with_name(f"{silent.name}-only")
        if not named.exists():
            shutil.copytree(silent, named)
            (named / "1_Pooling").mkdir()
            (named / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
        return silent, named

    return make


def load(folder: Path, **options: Any) -> Engine:
    return Engine.load(folder, dtype="float32", device="cpu", **options)


def sequences(given: Sequence[Sequence[int]]) -> list[TokenIds]:
    return [np.array(each, dtype=np.int32) for each in given]


def run(engine: Engine, *everybody: Any, budget: int = 4096) -> list[BatchReport]:
    """Runs passes until all requests and streams are computed. Returns the reports of the passes."""
    reports: list[BatchReport] = []
    assert engine.pages is not None
    for _ in Passes(engine, budget, on_batch=reports.append).steps(everybody):
        engine.pages.check_integrity()
    assert engine.pages.num_free == engine.pages.num_pages
    return reports


def vectors(request: Request) -> NDArray[np.float32]:
    found: NDArray[np.float32] = request.future.result(0).vectors
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_the_model_that_embeds_only(folders: Callable[[str], tuple[Path, Path]], kind: str) -> None:
    """Texts together, in chunks, beside streams, and with a cached prefix. The streams' tokens stay the same."""
    silent, named = folders(kind)
    given = prompts(LENGTHS)
    only = load(named)
    assert (only.config.generation, only.pages) == (None, None)
    expected = only.embed(given)
    engine = load(silent, pooling="last_token")
    np.testing.assert_allclose(engine.embed(given), expected, atol=1e-5)
    answers = load(silent).generate(given[:2], GREEDY)
    for budget in (4096, 50):
        streams = [engine.new_stream(prompt, GREEDY) for prompt in given[:2]]
        request = Request(sequences(given), EmbedOptions())
        reports = run(engine, streams[0], request, streams[1], budget=budget)
        np.testing.assert_allclose(vectors(request), expected, atol=1e-5)
        assert [stream.future.result(0).tokens for stream in streams] == [answer.tokens for answer in answers]
        assert max(report.num_tokens for report in reports) <= budget
        assert max(report.num_seqs for report in reports) > 2
    for normalize in (False, True):
        cut = Request(sequences(given), EmbedOptions(normalize, dimensions=8))
        run(engine, cut)
        np.testing.assert_allclose(vectors(cut), only.embed(given, normalize=normalize, dimensions=8), atol=1e-5)


def test_a_prefix_is_computed_once_for_all_passes(folders: Callable[[str], tuple[Path, Path]]) -> None:
    silent, named = folders("qwen3_lm")
    instruction, *texts = prompts((200, 30, 40, 128))
    first, second = sequences([instruction + texts[0]]), sequences([instruction + text for text in texts[1:]])
    engine = load(silent, pooling="last_token")
    (report,) = run(engine, Request(first, EmbedOptions()))
    assert report.num_tokens == 230
    again = Request(second, EmbedOptions())
    (report,) = run(engine, again)
    assert report.num_tokens == sum(map(len, second)) - 2 * PAGE_SIZE
    np.testing.assert_allclose(vectors(again), load(named).embed([each.tolist() for each in second]), atol=1e-5)
    prompt = engine.new_stream(instruction, GREEDY)
    run(engine, prompt)
    assert prompt.future.result(0).num_cached_tokens == PAGE_SIZE


def test_little_cache_delays_vectors_and_no_stream(
    folders: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, named = folders("qwen3_lm")
    preempted = preemptions(monkeypatch)
    engine = load(silent, pooling="last_token", cache_tokens=4 * PAGE_SIZE)
    streams = [engine.new_stream(prompt, GREEDY) for prompt in prompts((120, 100))]  # each needs a second page
    given = prompts((10, 128, 130, 20, 129, 5))
    request = Request(sequences(given), EmbedOptions())
    run(engine, *streams, request, budget=30)
    assert not preempted
    np.testing.assert_allclose(vectors(request), load(named).embed(given), atol=1e-5)
    assert all(len(stream.future.result(0).tokens) == 40 for stream in streams)


def test_whoever_leaves_holds_no_page(folders: Callable[[str], tuple[Path, Path]]) -> None:
    engine = load(folders("qwen3_lm")[0], pooling="last_token")
    assert engine.pages is not None
    loop = EngineLoop(engine, 64)
    try:
        requests = [Request(sequences(prompts([300] * 8)), EmbedOptions()) for _ in range(4)]
        loop.submit(requests)
        for request in requests[1:]:
            request.future.cancel()
        assert len(requests[0].future.result(60).vectors) == 8
    finally:
        loop.stop()
    engine.pages.check_integrity()
    assert engine.pages.num_free == engine.pages.num_pages


def test_an_input_longer_than_the_cache_is_cut_or_refused(folders: Callable[[str], tuple[Path, Path]]) -> None:
    engine = load(folders("qwen3_lm")[0], pooling="last_token", cache_tokens=2 * PAGE_SIZE)
    (long,) = prompts([300])
    with pytest.raises(InvalidInput, match="256"):
        engine.embed([long], truncate=False)
    np.testing.assert_allclose(engine.embed([long]), engine.embed([long[:256]]), atol=1e-6)


def test_other_poolings_of_such_a_folder_only_embed(folders: Callable[[str], tuple[Path, Path]]) -> None:
    engine = load(folders("qwen3_lm")[0], pooling="mean")
    assert engine.config.task == "embedding"
    assert engine.embed(prompts([5])).shape == (1, 64)
    with pytest.raises(InvalidInput, match="load it with pooling last_token"):
        load(folders("qwen3_lm")[0]).embed(prompts([5]))


def test_texts_end_as_pooling_wants_and_prompts_do_not(folders: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    """As in gte-Qwen2, tokenizer_config.json asks for an end-of-text token."""
    silent, named = (Path(shutil.copytree(each, tmp_path / each.name)) for each in folders("llama_lm"))
    for folder in (silent, named):
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        tokenizer["post_processor"] = None
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        ends = {"tokenizer_class": "LlamaTokenizer", "add_eos_token": True, "eos_token": "<|endoftext|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(ends))
    engine = load(silent, pooling="last_token")
    np.testing.assert_allclose(engine.embed(["w1 w2"]), load(named).embed(["w1 w2"]), atol=1e-5)
    np.testing.assert_allclose(engine.embed(["w1 w2"]), engine.embed([[6, 7, 4]]), atol=1e-6)
    assert engine.prompts is not None
    assert engine.prompts.encode("w1 w2").tolist() == [6, 7]
