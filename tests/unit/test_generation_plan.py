"""Generation models in the plan of a cluster: their caches fit and hold their streams, and their rates are realistic."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_gguf
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_hub import stub_hub

from cluster import plan_report
from cluster.cache_shares import finds_room, more_pages
from cluster.catalogue import CATALOGUE
from cluster.files import ClusterError
from cluster.generation import decode_tokens_per_s, prefill_tokens_per_s
from cluster.models_file import ModelEntry, ModelsFile
from cluster.needs import dtype_on, memory_kind
from cluster.nodes import GIB, Card, Node
from cluster.plan import Plan
from cluster.serve_config import serve_config
from engine.codes import Form
from engine.hub import EMBEDDED_GENERATOR, resolve_model
from engine.model.config import ModelConfig
from engine.model.decoder import DecoderConfig
from engine.model.folder import load_model_config
from engine.model.footprint import MOST_STREAMS, footprint, language_head_bytes, num_quantized, word_bytes
from engine.model.quantized.scheme import Awq, Fp8, Gguf
from engine.run.kv_cache import PAGE_SIZE, bytes_per_token, whole_pages
from loadtests.predict import H200, generated, in_codes, published
from loadtests.report import RESULTS

hub = pytest.fixture(stub_hub)
BF16 = torch.bfloat16
SPARK = Node("spark", "arm64", 119 * GIB, 20, (Card("NVIDIA GB10", 119 * GIB, unified=True),))
PC1, PC2 = (Node(name, "amd64", 64 * GIB, 8, (Card("NVIDIA GeForce RTX 5080", int(15.9 * GIB)),)) for name in ("pc1", "pc2"))
L40S = Node("srv", "amd64", 64 * GIB, 8, (Card("NVIDIA L40S", 48 * GIB),) * 2)
CPU = Node("old", "amd64", 64 * GIB, 16)
MIXED = (SPARK, PC1, PC2, L40S, CPU)
MODELS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-Embedding-0.6B")


def planned(nodes: tuple[Node, ...], *entries: dict[str, object]) -> Plan:
    named = [{"name": f"m{index}"} | each for index, each in enumerate(entries)]
    return Plan(ModelsFile.model_validate({"models": named, "gateways": len(nodes)}), nodes)


def test_rates_on_an_h200_are_near_the_measured_ones() -> None:
    rows = generated(json.loads((RESULTS / "generate.json").read_text()))
    assert len(rows) == 76
    for row in rows:
        assert 1 / 1.15 < row["planner's / measured"] < 1.15, row
    for row in published():
        assert row["theirs"] == "-" or 1 / 1.2 < row["planner's / theirs"] < 1.2, row


def test_rates_of_weights_in_codes_are_near_the_measured_ones() -> None:
    rows = in_codes(json.loads((RESULTS / "packed_models.json").read_text()))
    assert len(rows) == 50
    for row in rows:
        assert 1 / 1.25 < row["planner's / measured"] < 1.25, row


def test_a_head_in_codes_leaves_the_rate_near_that_of_bf16() -> None:
    """Only the head's products take the time of codes. The layers of such a file are dequantised, for example from Q2_K."""
    plain = CATALOGUE["Qwen/Qwen3-8B"]
    kept = replace(plain, quantization=Gguf(("Q2_K",), num_quantized(plain), ((),) * plain.n_layers, head=Form(16, 6)))
    for streams in (1, 16, 64, 256):
        ratio = decode_tokens_per_s(kept, BF16, H200, streams, 160) / decode_tokens_per_s(plain, BF16, H200, streams, 160)
        assert 0.94 < ratio < 1.06, streams


def test_decode_on_a_cpu_is_near_the_measured_rate() -> None:
    config, node = load_model_config(resolve_model(EMBEDDED_GENERATOR)), Node("vm", "amd64", 24 * GIB, 2)
    rows = json.loads((RESULTS / "generate_cpu.json").read_text())["tables"]["SmolLM2-135M-Instruct"]
    measured = {row["system"]: row for row in rows}
    for dtype, name in ((BF16, "bf16"), (torch.float32, "fp32")):
        for streams in (1, 8):
            rate = decode_tokens_per_s(config, dtype, node, streams, 108)
            assert 1 / 1.4 < rate / measured[f"emberforge {name}"][f"decode tokens/s, batch {streams}"] < 1.4


def test_decode_is_no_faster_than_memory_and_prefill_no_faster_than_products() -> None:
    config = CATALOGUE["Qwen/Qwen3-8B"]
    weights = 2 * (8_190_735_360 - config.vocab_size * config.hidden_size)  # a step reads only some rows of the word embeddings
    for node, peak_bytes, peak_flops in ((SPARK, 273e9, 92e12), (PC1, 960e9, 113e12)):
        assert 0.7 < decode_tokens_per_s(config, BF16, node, 1, 1) * weights / peak_bytes < 1
        assert 0.4 < prefill_tokens_per_s(config, BF16, node, 4096) * weights / peak_flops < 1
    alone, long = (decode_tokens_per_s(config, BF16, SPARK, 1, length) for length in (1, 40_000))
    assert 1 / long - 1 / alone == pytest.approx(39_999 * bytes_per_token(config, BF16) / 218e9)
    float8 = decode_tokens_per_s(config, torch.float8_e4m3fn, SPARK, 1, 1)
    assert 1.6 < float8 / alone < 2  # the head stays in bf16


def test_a_window_bounds_what_decode_reads() -> None:
    config = CATALOGUE["Qwen/Qwen3-8B"]
    assert isinstance(config, DecoderConfig)
    local = replace(config, window=1023, local_layers=tuple(range(config.n_layers)))
    rates = [decode_tokens_per_s(each, BF16, SPARK, 4, length) for each, length in ((local, 30_000), (config, 1024))]
    assert rates[0] == pytest.approx(rates[1])


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(1, 50), min_size=5, max_size=5),
    st.lists(st.integers(0, 40), min_size=5, max_size=5),
    st.lists(st.integers(-5, 1000), min_size=4, max_size=4),
)
def test_all_memory_is_handed_out_and_no_more(cards: list[list[int]], sizes: list[int], most: list[int], left: list[int]) -> None:
    replicas = {card: Counter(pools) for card, pools in enumerate(cards)}
    pools = {pool for each in replicas.values() for pool in each}
    free = dict(enumerate(left))
    given_pages = more_pages(free, replicas, {pool: sizes[pool] for pool in pools}, dict(enumerate(most)))
    taken = {
        card: sum(given_pages[pool] * sizes[pool] * count for pool, count in each.items()) for card, each in replicas.items()
    }
    assert all(size <= max(0, free[card]) for card, size in taken.items())
    for pool in pools:
        tight = [card for card, each in replicas.items() if pool in each]
        wanted = {card: sum(sizes[other] * count for other, count in replicas[card].items()) for card in tight}
        assert 0 <= given_pages[pool] <= most[pool]
        assert given_pages[pool] == most[pool] or any(taken[card] + wanted[card] > max(0, free[card]) for card in tight)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(MODELS), st.integers(1, 40_960), st.integers(1, 40), st.integers(0, 2), st.integers(1, 3)),
        min_size=1,
        max_size=4,
    )
)
def test_every_cache_fits_and_holds_its_streams(chosen: list[tuple[str, int, int, int, int]]) -> None:
    entries = []
    for model, context, streams, least, most in chosen:
        generates = {"context": context, "streams": streams} if CATALOGUE[model].generation else {}
        entries.append({"model": model, "min_replicas": least, "max_replicas": max(least, most)} | generates)
    plan = planned(MIXED, *entries)
    taken: Counter[tuple[str, int | None]] = Counter()
    pools = {(pool.model, pool.node_class): pool for pool in plan.pools}
    for each in plan.assigned:
        pool, entry = pools[each.model, plan.class_of[each.node]], plan.entries[each.model]
        node, config = plan.classes[pool.node_class], plan.shapes[each.model]
        dtype = dtype_on(entry, node, config)
        config = replace(config, max_input_length=entry.max_input_tokens or config.max_input_length)
        taken[each.node, each.card] += footprint(config, dtype, memory_kind(node), cache_tokens=pool.cache_tokens).total
        assert (pool.cache_tokens is None) == (config.generation is None)
        if entry.context and entry.streams:
            assert pool.cache_tokens
            assert entry.streams * -(-entry.context // PAGE_SIZE) <= pool.cache_tokens // PAGE_SIZE
            assert pool.streams == pool.cache_tokens // whole_pages(entry.context) >= entry.streams
            assert pool.streams <= max(MOST_STREAMS, entry.streams)
    for use in plan_report.card_uses(plan):
        assert use.members or taken[use.node, use.card] == use.used_bytes  # stages on several nodes need more
        assert use.used_bytes <= use.capacity


SMALL = Node("small", "amd64", 32 * GIB, 8, (Card("NVIDIA GeForce RTX 5070", int(11.9 * GIB)),))
TWO = Node("two", "amd64", 64 * GIB, 8, (Card("NVIDIA GeForce RTX 5080", int(15.9 * GIB)),) * 2)


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize(
    ("model", "node", "context", "streams", "cards"),
    [
        ("Qwen/Qwen3-8B", SMALL, 16_384, 1, 1),
        ("Qwen/Qwen3-14B", PC1, 8192, 1, 1),
        ("Qwen/Qwen3-32B", SPARK, 32_768, 4, 1),
        ("Qwen/Qwen3-32B", TWO, 8192, 1, 2),
    ],
)
def test_large_models_in_four_bits_on_small_cards(
    monkeypatch: pytest.MonkeyPatch, model: str, node: Node, context: int, streams: int, cards: int, published: bool
) -> None:
    """The weights are rounded at load, or published in four bits. In bf16 the models fit only on the GB10."""
    asked: dict[str, object] = {"model": model, "context": context, "streams": streams}
    monkeypatch.setitem(CATALOGUE, "published/AWQ", replace(CATALOGUE[model], quantization=Awq(128)))
    plan = planned((node,), asked | ({"model": "published/AWQ"} if published else {"dtype": "int4"}))
    assert plan.unplaced == ()
    (pool,) = plan.pools
    assert pool.num_stages == cards
    assert pool.cache_tokens is not None
    assert pool.cache_tokens >= streams * context
    assert all(use.used_bytes <= use.capacity for use in plan_report.card_uses(plan))
    assert bool(planned((node,), asked).unplaced) == (node is not SPARK)


def test_an_fp8_checkpoint_takes_its_own_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An 8B with 24k of context fits a card of 16 GB, exactly as published. In bf16 it does not."""
    monkeypatch.setitem(CATALOGUE, "published/FP8", replace(CATALOGUE["Qwen/Qwen3-8B"], quantization=Fp8((128, 128), False)))
    asked: dict[str, object] = {"model": "published/FP8", "context": 24_576, "streams": 1}
    plan = planned((PC1,), asked)
    assert plan.unplaced == ()
    assert "GPUs of compute capability 8.0 or later keep it in its bits" in " ".join(plan_report.notes(plan))
    assert planned((PC1,), asked | {"model": "Qwen/Qwen3-8B"}).unplaced
    in_float8 = planned((L40S,), asked | {"dtype": "float8"})
    assert "GPUs of compute capability 9.0 keep its values in e4m3" in " ".join(plan_report.notes(in_float8))


def test_an_8b_with_32k_of_context_needs_more_than_12_gb() -> None:
    """The KV cache takes 4.5 GiB in bf16. The ways out name the context that fits."""
    plan = planned((SMALL,), {"model": "Qwen/Qwen3-8B", "dtype": "int4", "context": 32_768, "streams": 1})
    (unplaced,) = plan.unplaced
    assert "a replica needs 13.4 GiB, but small:0 has only 11.6 GiB for models" in unplaced.why
    assert "context: 20352" in unplaced.ways_out
    assert "kv_cache_dtype: fp8" in unplaced.ways_out


def test_an_8b_with_32k_of_context_fits_12_gb_with_keys_and_values_in_8_bits(hub: None) -> None:
    """The KV cache takes 2.3 GiB. The remaining memory holds 8,000 further tokens."""
    asked = {"model": "Qwen/Qwen3-8B", "dtype": "int4", "context": 32_768, "streams": 1, "kv_cache_dtype": "fp8"}
    plan = planned((SMALL,), asked)
    assert plan.unplaced == ()
    (pool,) = plan.pools
    assert pool.cache_tokens == 40_448
    assert plan.cache_bytes(pool) == 40_448 * 2 * 36 * 8 * 129
    (use,) = plan_report.card_uses(plan)
    assert use.used_bytes <= use.capacity
    pool_app, _ = serve_config(plan)["applications"]
    assert pool_app["args"]["spec"]["kv_cache_dtype"] == "fp8"


def test_keys_and_values_in_8_bits_decode_faster_behind_long_contexts() -> None:
    one = {"model": "Qwen/Qwen3-8B", "context": 32_768, "streams": 4}
    rates = [planned((L40S,), one | {"kv_cache_dtype": name}).generation_rates("m0") for name in ("auto", "fp8")]
    ((wide,), (narrow,)) = (each.values() for each in rates)
    assert 1.1 < narrow.decode / wide.decode < 2
    assert narrow.prefill == wide.prefill


def test_a_model_that_does_not_generate_has_no_kv_cache_dtype() -> None:
    with pytest.raises(ClusterError, match="model m0 has kv_cache_dtype: fp8, but does not generate text; leave it out"):
        planned((L40S,), {"model": "all-MiniLM-L6-v2", "kv_cache_dtype": "fp8"})


def qwen3_8b_q4_k_m(path: Path) -> Path:
    """A GGUF file of a Qwen3-8B with the types of llama.cpp's Q4_K_M (src/llama-quant.cpp).

    V and down have more bits in the first and last eighth of the layers, and in each third layer between.
    """
    shape = CATALOGUE["Qwen/Qwen3-8B"]
    c, heads, keys = shape.hidden_size, shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    tensors: dict[str, tuple[tuple[int, ...], Kind]] = {
        "token_embd.weight": ((shape.vocab_size, c), Kind.Q4_K),
        "output_norm.weight": ((c,), Kind.F32),
        "output.weight": ((shape.vocab_size, c), Kind.Q6_K),
    }
    eighth = shape.n_layers // 8
    for layer in range(shape.n_layers):
        more_bits = layer < eighth or layer >= 7 * shape.n_layers // 8 or (layer - eighth) % 3 == 2
        high = Kind.Q6_K if more_bits else Kind.Q4_K
        matrices = {
            "attn_q": ((heads, c), Kind.Q4_K),
            "attn_k": ((keys, c), Kind.Q4_K),
            "attn_v": ((keys, c), high),
            "attn_output": ((c, heads), Kind.Q4_K),
            "ffn_gate": ((shape.intermediate_size, c), Kind.Q4_K),
            "ffn_up": ((shape.intermediate_size, c), Kind.Q4_K),
            "ffn_down": ((c, shape.intermediate_size), high),
        }
        widths = {"attn_norm": c, "ffn_norm": c, "attn_q_norm": shape.head_dim, "attn_k_norm": shape.head_dim}
        matrices |= {name: ((width,), Kind.F32) for name, width in widths.items()}
        tensors |= {f"blk.{layer}.{name}.weight": each for name, each in matrices.items()}
    metadata = tiny_gguf.tokenizer_metadata(shape.vocab_size) | {
        "qwen3.context_length": 40_960,
        "qwen3.embedding_length": c,
        "qwen3.block_count": shape.n_layers,
        "qwen3.feed_forward_length": shape.intermediate_size,
        "qwen3.attention.head_count": shape.n_heads,
        "qwen3.attention.head_count_kv": shape.n_kv_heads,
        "qwen3.attention.key_length": shape.head_dim,
        "qwen3.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen3.rope.freq_base": 1e6,
    }
    return tiny_gguf.write_zeros(path, "qwen3", metadata, tensors)


@pytest.mark.slow
def test_an_8b_of_a_gguf_file_on_12_gb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Q4_K_M file has some matrices in 6 bits. They have 4 bits with dtype int4."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = qwen3_8b_q4_k_m(tmp_path / "Qwen3-8B-Q4_K_M.gguf")
    assert 4.6 < path.stat().st_size / GIB < 4.8  # the published file has 5.03 GB
    wide, short, small = (
        planned((SMALL,), {"model": str(path), "context": context, "streams": 1, "dtype": dtype})
        for dtype, context in (("bfloat16", 26_624), ("bfloat16", 6144), ("int4", 26_624))
    )
    assert "a replica needs 11.9 GiB, but small:0 has only 11.6 GiB for models" in wide.unplaced[0].why
    assert {"dtype: int4", "context: 24832"} < set(wide.unplaced[0].ways_out)
    assert short.unplaced == small.unplaced == ()
    assert [round(plan.footprint("m0", plan.pools[0].node_class).weights / GIB, 1) for plan in (short, small)] == [5.2, 4.8]
    config = load_model_config(resolve_model(str(path)))
    values = config.vocab_size * config.hidden_size
    assert [language_head_bytes(config, BF16, on_gpu) for on_gpu in (False, True)] == [2 * values, values * 7 // 8]
    assert [word_bytes(config, BF16, on_gpu) for on_gpu in (False, True)] == [2 * values, values * 5 // 8]
    in_16_bits = replace(config, quantization=replace(config.quantization, head=None))  # type: ignore[arg-type,type-var]
    rates = [decode_tokens_per_s(each, BF16, SMALL, 1, 256) for each in (in_16_bits, config)]
    assert 1.05 < rates[1] / rates[0] < 1.1, "a step of one stream reads 0.7 GB less"
    quantised = "m0: the checkpoint is quantised (GGUF with Q4_K and Q6_K); GPUs of compute capability 8.0 or later keep"
    assert any(note.startswith(f"{quantised} it in its bits, elsewhere") for note in plan_report.notes(short))
    rounded = f"{quantised} 85 % of the layers' values in their bits and round the others to 4 bits"
    assert rounded in plan_report.notes(small)


def test_what_is_left_of_a_card_is_cache() -> None:
    plan = planned((PC1,), {"model": "Qwen/Qwen3-4B"}, {"model": "all-MiniLM-L6-v2"})
    (use,) = plan_report.card_uses(plan)
    assert use.capacity - use.used_bytes < PAGE_SIZE * bytes_per_token(CATALOGUE["Qwen/Qwen3-4B"], BF16)
    (pool,) = (pool for pool in plan.pools if pool.streams)
    assert pool.num_gpus > 0.9
    assert pool.streams == 4 < planned((L40S,), {"model": "Qwen/Qwen3-4B"}).pools[0].streams  # type: ignore[operator]
    exact = planned((PC1,), {"model": "Qwen/Qwen3-4B", "cache_tokens": 20_000})
    assert (exact.pools[0].cache_tokens, exact.pools[0].streams) == (20_000, 2)
    one = planned((PC1,), {"model": "Qwen/Qwen3-4B", "cache_tokens": 1000, "context": 1000})
    assert (one.entries["m0"].streams, one.pools[0].streams) == (1, 1), "a page is always whole"
    for node in (SPARK, CPU):  # the engine leaves the reserve free, besides the memory that the system uses
        (use,) = plan_report.card_uses(planned((node,), {"model": "Qwen/Qwen3-0.6B", "context": 40_960}))
        assert 0 <= use.capacity - node.reserved - use.used_bytes < PAGE_SIZE * 2 * 114_688


def test_caches_grow_only_as_far_as_ray_finds_the_cards() -> None:
    """Replicas of 5, 3, 2 and 4, 4, 2 could fill two cards. If they are placed one by one, the last does not fit."""
    halves = [(5000, 1, 1), (4000, 2, 2), (3000, 1, 1), (2000, 2, 2)]
    assert not finds_room(halves, [2])
    assert not finds_room(halves, [1, 1])
    assert finds_room([(5000, 3, 3)], [2])
    assert not finds_room([(5000, 3, 2)], [2])  # no more than two on a node
    assert finds_room([(share - 1000, *rest) for share, *rest in halves], [2])
    assert not finds_room([(5000, 2, 1), (4000, 1, 1)], [1])
    assert finds_room([(4894, 1, 1)], [0, 1])  # whole-card replicas have taken all cards of the first node
    assert finds_room([(5000, 2, 1), (5000, 2, 1)], [1, 1])
    assert finds_room([(10_000, 1, 1)], [1])
    two_hosts = (CPU, replace(CPU, name="older"))  # Ray does not count host memory, so one node may get both models
    models = ({"model": "Qwen/Qwen3-0.6B"}, {"model": "Qwen/Qwen3-1.7B"})
    assert [pool.streams for pool in planned(two_hosts, *models).pools] == [4, 4]
    assert all(pool.streams > 4 for pool in planned((CPU,), *models).pools)  # type: ignore[operator]


def test_the_replica_gets_the_cache_and_the_gateway_the_context(tmp_path: Path) -> None:
    plan = planned((CPU,), {"model": EMBEDDED_GENERATOR, "context": 1000}, {"model": "all-MiniLM-L6-v2"})
    *pools, gateway = serve_config(plan)["applications"]
    (spec,) = (pool["args"]["spec"] for pool in pools if pool["args"]["spec"]["name"] == "m0")
    (pool,) = (pool for pool in plan.pools if pool.model == "m0")
    assert (spec["max_input_tokens"], spec["cache_tokens"]) == (1000, pool.cache_tokens)
    assert gateway["args"]["models"][0]["spec"] == {key: value for key, value in spec.items() if key != "cache_tokens"}
    assert "max_input_tokens" not in gateway["args"]["models"][1]["spec"]


def test_a_pooling_may_end_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(spec: ModelEntry) -> tuple[Path, ModelConfig]:
        return Path(), replace(CATALOGUE["Qwen/Qwen3-4B"], generation=None, pooling=spec.pooling)

    monkeypatch.setattr("cluster.needs.read_model", read)
    plan = planned((SPARK,), {"model": "Qwen/Qwen3-4B", "pooling": "mean"}, {"model": "Qwen/Qwen3-4B"})
    assert [pool.streams is None for pool in sorted(plan.pools, key=lambda pool: pool.model)] == [True, False]


@pytest.mark.parametrize(("key", "step"), [("context", PAGE_SIZE), ("streams", 1)])
def test_ways_out_name_the_most_that_fits(key: str, step: int) -> None:
    model: dict[str, object] = {"model": "Qwen/Qwen3-4B", "context": 8192, "streams": 16}
    (unplaced,) = planned((PC1,), model).unplaced
    (way,) = (way for way in unplaced.ways_out if way.startswith(key))
    most = int(way.split(": ")[1])
    assert planned((PC1,), model | {key: most}).unplaced == ()
    assert planned((PC1,), model | {key: most + step}).unplaced


def test_the_report_has_streams_and_rates_by_card() -> None:
    l40s, rtx_3090 = (
        Node(name, "amd64", 64 * GIB, 8, (Card(card, gib * GIB),))
        for name, card, gib in (("a", "NVIDIA L40S", 48), ("b", "NVIDIA GeForce RTX 3090", 24))
    )
    plan = planned((l40s, rtx_3090), {"model": "Qwen/Qwen3-4B"}, {"model": "Qwen/Qwen3-Embedding-0.6B", "nodes": ["a"]})
    (chosen,) = (each for each in plan.assigned if each.model == "m0")
    assert chosen.node == "b", "it decodes faster"
    rates = plan_report.as_data(plan)["generation"]
    assert rates.keys() == {"m0"}
    assert rates["m0"][l40s.class_name]["prefill"] > rates["m0"][rtx_3090.class_name]["prefill"]
    notes = plan_report.notes(plan)
    assert any(f"{rtx_3090.class_name} decodes faster and {l40s.class_name} computes prompts faster" in note for note in notes)
    assert any("as additional cache" in line for line in plan_report.summary(plan))
    pinned = planned((l40s, rtx_3090), {"model": "Qwen/Qwen3-4B", "nodes": ["a"]})
    assert plan_report.as_data(pinned)["generation"]["m0"].keys() == {l40s.class_name}
    both = planned((SPARK, PC1), {"model": "Qwen/Qwen3-4B"})
    assert not any("decodes faster" in note for note in plan_report.notes(both)), "one card is faster at both"
    assert plan_report.as_data(planned((PC1,), {"model": "all-MiniLM-L6-v2"}))["generation"] == {}


@pytest.mark.usefixtures("hub")
def test_a_rate_below_one_reaches_the_router_as_one() -> None:
    plan = planned((replace(CPU, ram_bytes=256 * GIB),), {"model": "Qwen/Qwen3-32B", "streams": 1, "dtype": "fp32"})
    assert 0 < plan.pools[0].tokens_per_s < 0.5
    pool, gateway = serve_config(plan)["applications"]
    assert pool["args"]["tokens_per_s"] == gateway["args"]["models"][0]["pools"][0]["tokens_per_s"] == 1
