"""The plan of a cluster: its Serve config, its ways out, its report, and the files that it refuses."""

import io
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from huggingface_hub.errors import LocalEntryNotFoundError
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.serve.schema import ServeDeploySchema
from rich.console import Console
from stub_hub import COMMIT, stub_hub
from tiny_quantized import FORMS, quantize
from typer.testing import CliRunner

from cluster import plan_report
from cluster.catalogue import CATALOGUE
from cluster.files import ClusterError
from cluster.models_file import ModelEntry, ModelsFile, load_models, parse_models
from cluster.nodes import CARD_RESERVE, GIB, Card, Node, load_nodes
from cluster.plan import Plan
from cluster.serve_config import serve_config
from engine.errors import EmberError, ModelError
from engine.model.quantized.scheme import Awq
from engine.revision import revision_of
from serve_app.cli.commands import cli
from serve_app.gateway.config import GatewayArgs

NODES = """\
nodes:
  - {name: spark, arch: aarch64, ram_gib: 119, gpus: [{name: NVIDIA GB10, vram_gib: 119, unified: true}]}
  - {name: pc1, arch: x86_64, ram_gib: 64, gpus: [{name: NVIDIA GeForce RTX 5080, vram_gib: 15.9}]}
"""
MODELS = """\
models:
  - {name: lite, model: Qwen/Qwen3-Embedding-0.6B, dtype: bf16, min_replicas: 1, max_replicas: 4, aliases: [default]}
  - {name: pro, model: Qwen/Qwen3-Embedding-8B}
"""
PC_CLASS = "rtx-5080-16g-amd64"


def rtx_5080(name: str = "pc1", gib: float = 15.9) -> Node:
    return Node(name, "amd64", 64 * GIB, 8, (Card("NVIDIA GeForce RTX 5080", int(gib * GIB)),))


SPARK = Node("spark", "arm64", 119 * GIB, 20, (Card("NVIDIA GB10", 119 * GIB, unified=True),))
H200 = Node("big", "amd64", 999 * GIB, 64, (Card("NVIDIA H200", 140 * GIB),) * 8)
A100 = Node("a", "amd64", 64 * GIB, 8, (Card("NVIDIA A100-SXM4-80GB", 80 * GIB),))
CPU = Node("old", "amd64", 64 * GIB, 16)
T4 = Node("t", "amd64", 64 * GIB, 8, (Card("Tesla T4", 15 * GIB),))
UNKNOWN = Node("rx", "amd64", 64 * GIB, 8, (Card("Some [GPU]", 24 * GIB),))
MIXED = (SPARK, rtx_5080(), rtx_5080("pc2"), H200, CPU, UNKNOWN)


def entry(name: str = "m", model: str = "Qwen/Qwen3-Embedding-0.6B", **more: object) -> ModelEntry:
    return ModelEntry.model_validate({"name": name, "model": model} | more)


def planned(nodes: Sequence[Node], *entries: ModelEntry, **more: object) -> Plan:
    return Plan(ModelsFile.model_validate({"models": entries} | more), nodes)


hub = pytest.fixture(stub_hub)
pytestmark = pytest.mark.usefixtures("hub")


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    models, nodes = tmp_path / "models.yaml", tmp_path / "nodes.yaml"
    models.write_text(MODELS)
    nodes.write_text(NODES)
    return models, nodes


@pytest.fixture
def example(files: tuple[Path, Path]) -> Plan:
    models, nodes = files
    return Plan(load_models(models), load_nodes(nodes))


def lost(ours: Any, known: Any, place: str = "") -> list[str]:
    """The paths where `known` differs from `ours`. Ray silently drops a key that it does not know."""
    if isinstance(ours, dict):
        if not isinstance(known, dict):
            return [place]
        return [each for key, value in ours.items() for each in lost(value, known.get(key, "nothing"), f"{place}.{key}")]
    if isinstance(ours, list):
        if not isinstance(known, list) or len(ours) != len(known):
            return [place]
        return [each for index, value in enumerate(ours) for each in lost(value, known[index], f"{place}.{index}")]
    return [] if ours == known else [place]


def read_by_ray(config: dict[str, Any]) -> dict[str, Any]:
    text = yaml.safe_load(yaml.safe_dump(config))
    content: dict[str, Any] = ServeDeploySchema.model_validate(text).model_dump(mode="json", exclude_unset=True)
    return content


def test_the_example_is_a_config_that_ray_reads_whole(example: Plan) -> None:
    config = serve_config(example)
    assert lost(config, read_by_ray(config)) == []
    names = [application["name"] for application in config["applications"]]
    assert names == [*(pool.name for pool in example.pools), "gateway"]
    assert {pool.model for pool in example.pools if pool.min_replicas} == {"lite", "pro"}
    gateway = config["applications"][-1]
    assert gateway["args"]["default"] == "lite"
    assert [model["spec"]["name"] for model in gateway["args"]["models"]] == ["lite", "pro"]
    assert gateway["args"]["models"][0]["aliases"] == ["default"]


def test_a_key_that_ray_does_not_know_would_be_noticed(example: Plan) -> None:
    config = serve_config(example)
    config["applications"][0]["deployments"][0]["max_replicas_pernode"] = 1
    config["http_options"]["prt"] = 1
    assert lost(config, read_by_ray(config)) == [".http_options.prt", ".applications.0.deployments.0.max_replicas_pernode"]


def test_every_option_reaches_the_config() -> None:
    limits = {"max_batch_tokens": 2048, "max_input_tokens": 1024, "pooling": "mean", "dtype": "fp32"}
    plan = planned(
        MIXED, entry("a/x", "qwen3-embedding-0.6b", nodes=["pc1", "pc2"], default_prompt_name="query", **limits),
        entry("b", not_nodes=["pc1", "big"], default_prompt=""),
        default="b", gateways=3, asleep="refuse", settings={"port": 9000, "grpc_port": 9001, "max_client_batch_size": 7},
    )  # fmt: skip
    config = serve_config(plan)
    assert lost(config, read_by_ray(config)) == []
    by_name = {application["name"]: application for application in config["applications"]}
    pinned = next(pool for name, pool in by_name.items() if name.startswith("x."))
    model = f"Qwen/Qwen3-Embedding-0.6B@{COMMIT}"  # the Hub's own spelling
    wanted = limits | {"dtype": "float32", "name": "a/x", "default_prompt_name": "query", "model": model, "revision": COMMIT}
    assert pinned["args"]["spec"] == wanted
    assert pinned["args"]["settings"]["max_client_batch_size"] == 7
    assert pinned["deployments"][0]["ray_actor_options"]["label_selector"]["emberforge-node"] == "in(pc1,pc2)"
    kept_off = next(pool for name, pool in by_name.items() if name.startswith("b."))
    assert kept_off["deployments"][0]["ray_actor_options"]["label_selector"]["emberforge-node"] == "!in(pc1,big)"
    gateway = by_name["gateway"]
    assert (gateway["args"]["default"], gateway["args"]["asleep"], config["http_options"]["port"]) == ("b", "refuse", 9000)
    assert config["grpc_options"]["port"] == 9001
    assert gateway["deployments"][0]["num_replicas"] == 3
    first, second = (model.spec for model in GatewayArgs.model_validate(gateway["args"]).models)
    assert gateway["args"]["models"][0]["spec"] == pinned["args"]["spec"], "gateway and replica are told the same"
    assert (first.default_prompt_name, first.default_prompt, first.max_input_tokens) == ("query", None, 1024)
    assert (second.default_prompt_name, second.default_prompt) == (None, "")


def test_a_folder_is_named_by_its_whole_path(minilm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(minilm.parent)
    plan = planned([rtx_5080()], entry(model=f"./{minilm.name}"))
    application, gateway = serve_config(plan)["applications"]
    assert application["args"]["spec"]["model"] == gateway["args"]["models"][0]["spec"]["model"] == str(minilm)
    embedded = serve_config(planned([CPU], entry(model="all-MiniLM-L6-v2")))["applications"][0]
    assert embedded["args"]["spec"]["model"] == "all-MiniLM-L6-v2"


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(sorted(CATALOGUE)), st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=6))
def test_ray_finds_room_for_every_pool_on_every_card(chosen: list[tuple[str, int, int]]) -> None:
    models = [
        entry(f"m{index}", model, min_replicas=least, max_replicas=max(1, least + more))
        for index, (model, least, more) in enumerate(chosen)
    ]
    plan = planned(MIXED, *models)
    share = {(pool.model, pool.node_class): pool for pool in plan.pools}
    gpus: Counter[tuple[str, int | None]] = Counter()
    cpus: Counter[str] = Counter()
    for each in plan.assigned:
        pool = share[each.model, plan.class_of[each.node]]
        gpus[each.node, each.card] += pool.num_gpus  # type: ignore[assignment]
        cpus[each.node] += pool.num_cpus  # type: ignore[assignment]
        assert (each.card is None) == (pool.num_gpus == 0)
    assert all(total <= 1 for total in gpus.values())
    assert cpus["old"] <= CPU.num_cpus / 2, "half the cores that replicas compute with"
    for pool in plan.pools:
        on_node = Counter(
            each.node for each in plan.assigned if (each.model, plan.class_of[each.node]) == (pool.model, pool.node_class)
        )
        assert pool.max_replicas == on_node.total()
        assert pool.max_per_node >= max(on_node.values())
        assert pool.node_class != PC_CLASS or pool.max_per_node == max(on_node.values()), "there are two such nodes"


def apply(plan: Plan, name: str, way: str) -> Plan:
    """The plan after an operator has followed `way` literally. The published 4-bit checkpoint is the catalogue's AWQ model."""
    if " a card of " in way:
        gib = float(way.split(" a card of ")[1].split(" GiB")[0])
        count = int(way.split()[0]) if way[0].isdigit() else 1
        new = [Node(f"new{index}", "amd64", 64 * GIB, 8, (Card("New", int(gib * GIB)),)) for index in range(count)]
        nodes = (*plan.nodes, *new)
        more = {"nodes": [*(plan.written[name].nodes or ()), *(node.name for node in new)]} if "named in its nodes" in way else {}
    elif way.startswith("a published 4-bit checkpoint"):
        nodes, more = plan.nodes, {"model": f"{plan.written[name].model}-AWQ"}
    else:
        nodes = plan.nodes
        more = {"nodes": None, "not_nodes": []} if way == "no nodes and not_nodes" else yaml.safe_load(way.replace(" and ", "\n"))
    changed = {
        key: ModelEntry.model_validate(each.model_dump() | (more if key == name else {})) for key, each in plan.written.items()
    }
    return Plan(plan.file.model_copy(update={"models": tuple(changed.values())}), nodes)


UNPLACED = {
    "dtype": (planned([rtx_5080()], entry(model="Qwen/Qwen3-Embedding-4B", dtype="fp32")), "dtype: bfloat16"),
    "length": (planned([rtx_5080(gib=11.5)], entry(model="Qwen/Qwen3-Embedding-4B")), "max_input_tokens: 16384"),
    "budget": (
        planned([rtx_5080(gib=2.05)], entry(model="BAAI/bge-large-en-v1.5")),
        "max_batch_tokens: 2048",
    ),
    "both": (
        planned([rtx_5080(gib=10)], entry(model="Qwen/Qwen3-Embedding-4B")),
        "max_input_tokens: 8192 and max_batch_tokens: 8192",
    ),
    "replicas": (planned([rtx_5080()], entry(model="Qwen/Qwen3-Embedding-4B", min_replicas=3)), "min_replicas: 1"),
    "too large": (planned([rtx_5080()], entry(model="Qwen/Qwen3-Embedding-8B", min_replicas=2)), "2 more nodes"),
    "pinned": (
        planned([rtx_5080(), SPARK], entry(model="Qwen/Qwen3-Embedding-8B", nodes=["pc1"])),
        "named in its nodes",
    ),
    "excluded": (planned([rtx_5080(), SPARK], entry(model="Qwen/Qwen3-Embedding-8B", not_nodes=["spark"])), "no nodes and"),
    "asleep": (planned([rtx_5080()], entry(model="Qwen/Qwen3-Embedding-8B", min_replicas=0), entry("other")), "another node"),
    "crowded": (
        planned([rtx_5080()], *(entry(f"m{index}", "Qwen/Qwen3-Embedding-4B") for index in range(2))),
        "another node with a card",
    ),
    "squeezed": (
        planned([rtx_5080()], entry("lite"), entry("pro", "Qwen/Qwen3-Embedding-8B")),
        "another node",  # with shorter inputs pro would have a place, but lite would not
    ),
    "cores": (planned([CPU], entry(min_replicas=5, dtype="bf16")), "min_replicas: 4"),
    "two cores": (
        planned([Node("tiny", "amd64", 16 * GIB, 2)], entry(min_replicas=2, dtype="bf16")),
        "or of class cpu-2c-16g-amd64",
    ),
    "another CPU": (planned([CPU], entry(min_replicas=5, dtype="bf16")), f"or of class {CPU.class_name}"),
    "8 bits": (planned([rtx_5080()], entry(model="Qwen/Qwen3-Embedding-8B")), "dtype: float8"),
    "8 bits before float8": (
        planned(
            [replace(A100, cards=(Card("NVIDIA GeForce RTX 3090", int(15.9 * GIB)),))], entry(model="Qwen/Qwen3-Embedding-8B")
        ),
        "dtype: int8",
    ),
    "float8": (planned([A100, CPU], entry(dtype="float8")), "dtype: bfloat16"),
    "float8 elsewhere": (planned([A100, CPU], entry(model="intfloat/e5-mistral-7b-instruct", dtype="float8")), "8.9 or later"),
    "int8": (planned([CPU], entry(dtype="int8", nodes=["old"])), "named in its nodes"),
    "float16": (planned([CPU], entry(model="BAAI/bge-base-en-v1.5", dtype="fp16")), "dtype: bfloat16"),
    "context": (planned([rtx_5080()], entry(model="Qwen/Qwen3-4B", streams=16)), "context: 2"),
    "streams": (planned([rtx_5080()], entry(model="Qwen/Qwen3-4B", context=32768)), "streams: 1"),
    "weights and streams": (planned([rtx_5080()], entry(model="Qwen/Qwen3-8B", context=4096)), "dtype: float8"),
    "published": (planned([rtx_5080(gib=11.9)], entry(model="Qwen/Qwen3-8B", streams=1)), "a published 4-bit checkpoint"),
    "4 bits": (planned([rtx_5080()], entry(model="Qwen/Qwen3-14B", streams=1)), "dtype: int4"),
    "cache": (planned([rtx_5080()], entry(model="Qwen/Qwen3-4B", cache_tokens=100_000)), "cache_tokens: "),
    "card for streams": (planned([rtx_5080()], entry(model="Qwen/Qwen3-14B", streams=64)), "another node with a card"),
}


@pytest.mark.parametrize("case", UNPLACED)
def test_ways_out_are_true(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    plan, expected = UNPLACED[case]
    for entry in plan.written.values():
        shape = replace(plan.shapes[entry.name], quantization=Awq(128))
        monkeypatch.setitem(CATALOGUE, f"{entry.model}-AWQ", shape)
    (unplaced, *rest) = plan.unplaced
    assert rest == []
    assert any(expected in way for way in unplaced.ways_out), unplaced.ways_out
    for way in unplaced.ways_out:
        after = apply(plan, unplaced.model, way)
        assert after.unplaced == (), way


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("too large", ["needs 19.1 GiB", "pc1:0 has only 15.6 GiB for models"]),
        ("crowded", ["needs 11.7 GiB", "pc1:0 has only 4.0 GiB of 15.6 GiB left"]),
        ("cores", ["needs 4 cores", "no cores are free on old", "4 replicas each compute with 4 cores on old"]),
        ("two cores", ["needs 2 cores", "no cores are free on tiny", "1 replica computes with 2 cores on tiny"]),
        ("float16", ["float16 does not run on a CPU"]),
        ("float8", ["float8", "capability 8.9 or later; a100-sxm4-80gb-80g-amd64 and cpu-16c-64g-amd64 have no such card"]),
        ("int8", ["int8 needs an NVIDIA card of compute capability 8.0 or later; cpu-16c-64g-amd64 has no such card"]),
    ],
)
def test_why_it_does_not_fit_is_said_with_figures(case: str, parts: list[str]) -> None:
    (unplaced,) = UNPLACED[case][0].unplaced
    for part in parts:
        assert part in unplaced.why


def test_the_cores_of_a_replica_are_told_from_the_cpus_that_ray_reserves() -> None:
    plan = UNPLACED["two cores"][0]
    assert "CPUs reserved for replicas: 0.95 of 2" in plan_report.summary(plan)[2]
    assert "Ray reserves 0.95 CPUs for each of these replicas" in plan.unplaced[0].why


@pytest.mark.parametrize(
    "name",
    [
        "Tesla P40",
        "NVIDIA GeForce GTX 1080 Ti",
        "Tesla V100-SXM2-16GB",
        "NVIDIA TITAN V",
        "AMD Radeon RX 7900 XTX",
        "Intel Arc A770",
    ],
)
@pytest.mark.parametrize("dtype", ["auto", "fp32", "int8"])
def test_cards_without_kernels_get_no_replica(name: str, dtype: str) -> None:
    node = Node("old", "amd64", 64 * GIB, 8, (Card(name, 24 * GIB),))
    (unplaced,) = planned([node], entry(dtype=dtype)).unplaced
    assert (
        f"the engine needs an NVIDIA card of compute capability 7.5 or later; {node.class_name} has no such card" in unplaced.why
    )
    assert {pool.node_class for pool in planned([node, CPU], entry(max_replicas=9)).pools} == {CPU.class_name}


def test_8_bits_go_where_they_run() -> None:
    nodes = [A100, CPU, Node("t", "amd64", 64 * GIB, 8, (Card("Tesla T4", 15 * GIB),)), rtx_5080()]
    places = {"float8": {PC_CLASS}, "int8": {A100.class_name, PC_CLASS}}
    for dtype, classes in places.items():
        plan = planned(nodes, entry(dtype=dtype, max_replicas=9))
        assert {pool.node_class for pool in plan.pools} == classes
        assert set(plan.demands["m"].bytes_on) == classes


def test_8_bits_are_a_way_out_for_our_engine_alone(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("bert"), tmp_path / "large")
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 48, "num_attention_heads": 16}
    (folder / "config.json").write_text(json.dumps(config))
    for backend, is_offered in (("emberforge", True), ("transformers", False)):
        model = entry(model=str(folder), backend=backend, pooling="mean")
        needs = planned([H200], model).footprint("m", H200.class_name).total
        plan = planned([rtx_5080(gib=(needs + CARD_RESERVE - 1) / GIB)], model)
        assert ("dtype: float8" in plan.unplaced[0].ways_out) == is_offered


def test_pins_and_exclusions_that_leave_no_node_are_said() -> None:
    plan = planned([rtx_5080(), SPARK], entry(nodes=["pc1"], not_nodes=["pc1"]))
    assert plan.unplaced[0].why == "nodes and not_nodes leave no node for it"


def test_what_was_measured_changes_the_choice() -> None:
    nodes = (SPARK, rtx_5080())
    assert planned(nodes, entry()).assigned[0].node == "pc1"
    measured = planned(nodes, entry(tokens_per_s={SPARK.class_name: 1e6}))
    assert (measured.assigned[0].node, measured.assigned[0].tokens_per_s) == ("spark", 1e6)
    assert serve_config(measured)["applications"][-1]["args"]["models"][0]["pools"][0]["tokens_per_s"] == 1_000_000


def test_old_cards_hold_what_the_engine_will_load_there() -> None:
    for model, factor in (("Qwen/Qwen3-Embedding-0.6B", 2), ("BAAI/bge-base-en-v1.5", 1)):
        weights = [planned([node], entry(model=model)).footprint("m", node.class_name).weights for node in (T4, rtx_5080())]
        assert weights[0] / weights[1] == pytest.approx(factor, rel=0.02)


@pytest.mark.parametrize(("size", "saved"), [("4B", 4 * GIB), ("8B", 9 * GIB)])
def test_a_card_without_kernels_for_codes_holds_dequantised_layers(
    monkeypatch: pytest.MonkeyPatch, size: str, saved: int
) -> None:
    """The 8B needs several T4."""
    plain, quantised = f"Qwen/Qwen3-{size}", f"an/{size}-AWQ"
    monkeypatch.setitem(CATALOGUE, quantised, replace(CATALOGUE[plain], quantization=Awq(128)))
    nodes = [replace(T4, cards=T4.cards * 8), replace(A100, cards=A100.cards * 8)]
    needs = {
        (node.name, model): planned([node], entry(model=model, dtype="bf16", streams=1)).assigned[0].needs_bytes
        for node in nodes
        for model in (plain, quantised)
    }
    assert needs["t", quantised] == needs["t", plain]
    assert needs["a", quantised] < needs["a", plain] - saved


CPU_BF16 = replace(CPU, name="new", cpu_bf16=True, num_cpus=64)
MINILM = "sentence-transformers/all-MiniLM-L6-v2"


@pytest.mark.parametrize(
    ("nodes", "more", "dtype", "left_out"),
    [
        ([rtx_5080(), SPARK], {}, "bfloat16", []),
        ([rtx_5080(), T4], {}, "bfloat16", [T4]),  # the model overflows float16
        ([rtx_5080(), T4], {"model": "BAAI/bge-base-en-v1.5", "max_replicas": 2}, "float16", []),
        ([T4], {}, "float32", []),
        ([T4, CPU], {"model": "BAAI/bge-base-en-v1.5"}, "float16", [CPU]),
        ([rtx_5080(), CPU], {"max_replicas": 9}, "bfloat16", [CPU]),
        ([rtx_5080(), CPU], {"nodes": ["old"]}, "float32", []),
        ([rtx_5080(), CPU], {"not_nodes": ["old"]}, "bfloat16", []),
        ([rtx_5080(), CPU_BF16], {}, "bfloat16", []),
        ([CPU_BF16, CPU], {"model": MINILM}, "bfloat16", [CPU]),
        ([CPU_BF16, replace(CPU_BF16, name="like it", cpu_bf16=False)], {}, "float32", []),
        ([rtx_5080(gib=2), CPU], {}, "float32", []),  # the model does not fit on the card
        ([rtx_5080(), CPU], {"min_replicas": 2, "model": "Qwen/Qwen3-Embedding-4B"}, "float32", []),
        ([rtx_5080(), T4, CPU], {"dtype": "fp32"}, "float32", []),
    ],
)
def test_a_model_has_one_dtype_on_all_nodes(nodes: list[Node], more: dict[str, Any], dtype: str, left_out: list[Node]) -> None:
    plan = planned(nodes, entry(**more), gateways=2)
    assert {pool.dtype for pool in plan.pools} == {dtype}
    assert plan.unplaced == ()
    assert plan.left_out("m") == tuple(node.class_name for node in left_out)
    assert not {pool.node_class for pool in plan.pools} & set(plan.left_out("m"))
    gateway = serve_config(plan)["applications"][-1]["args"]["models"][0]["spec"]
    assert gateway["dtype"] == dtype, "a replica chooses nothing"
    warnings = [each for each in warned(plan) if "one dtype" in each]
    assert len(warnings) == bool(left_out)
    assert all(each.class_name in warning for warning in warnings for each in left_out)


def test_another_dtype_is_a_way_out_where_the_chosen_one_leaves_nodes_out() -> None:
    plan = planned([rtx_5080(gib=4), CPU], entry("a", min_replicas=1), entry("b", min_replicas=1), gateways=2)
    (unplaced,) = plan.unplaced
    assert "dtype: float32" in unplaced.ways_out
    assert apply(plan, unplaced.model, "dtype: float32").unplaced == ()


def test_a_hub_model_is_pinned_to_its_commit(hub: list[tuple[str, str | None]]) -> None:
    config = serve_config(planned([rtx_5080()], entry(model="qwen3-embedding-0.6b"), entry("n", "BAAI/bge-m3")))
    *pools, gateway = config["applications"]
    specs = [pool["args"]["spec"] for pool in pools]
    assert {(spec["model"], spec["revision"]) for spec in specs} == {
        (f"{name}@{COMMIT}", COMMIT) for name in ("Qwen/Qwen3-Embedding-0.6B", "BAAI/bge-m3")
    }
    assert sorted(map(str, specs)) == sorted(str(model["spec"]) for model in gateway["args"]["models"])
    assert set(hub) == {("Qwen/Qwen3-Embedding-0.6B", None), ("BAAI/bge-m3", None)}


def test_a_branch_becomes_its_commit_and_a_commit_is_not_asked_for(hub: list[tuple[str, str | None]]) -> None:
    other = "f" * 40
    plan = planned([rtx_5080()], entry(model="BAAI/bge-m3@refs/pr/1"), entry("n", f"BAAI/bge-m3@{other}"))
    assert hub == [], "the shape is the catalogue's"
    models = serve_config(plan)["applications"][-1]["args"]["models"]
    assert {model["spec"]["model"] for model in models} == {f"BAAI/bge-m3@{COMMIT}", f"BAAI/bge-m3@{other}"}
    assert hub == [("BAAI/bge-m3", "refs/pr/1")]


def test_without_the_hub_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr("engine.download.snapshot_download", offline)
    with pytest.raises(ModelError, match=r"name the commit in models\.yaml: BAAI/bge-m3@COMMIT"):
        serve_config(planned([rtx_5080()], entry(model="BAAI/bge-m3")))


def test_a_folder_is_pinned_by_its_files(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("bert"), tmp_path / "mine")

    def spec() -> dict[str, Any]:
        found: dict[str, Any] = serve_config(planned([CPU], entry(model=str(folder))))["applications"][0]["args"]["spec"]
        return found

    assert spec() == {"name": "m", "model": str(folder), "dtype": "float32", "revision": revision_of(folder)}
    (folder / "model.safetensors").unlink()
    assert "revision" not in spec(), "weights that are not here cannot be compared"


def test_a_folder_that_is_not_the_expected_one_is_refused(minilm: Path) -> None:
    with pytest.raises(ModelError, match=r"has revision files-.* here, but the plan says files-0"):
        serve_config(planned([CPU], entry(model=str(minilm), revision="files-0")))


def test_a_model_may_run_on_transformers(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """The folder has no weights. The plan counts the network's parameters."""
    folder = shutil.copytree(tiny("bert"), tmp_path / "own")
    (folder / "model.safetensors").unlink()
    own = {"backend": "transformers", "trust_remote_code": True}
    plan = planned(MIXED, entry("ours", str(folder)), entry("theirs", str(folder), **own))
    name = plan.pools[0].node_class
    ours, theirs = plan.footprint("ours", name), plan.footprint("theirs", name)
    assert ours.weights < theirs.weights < 1.1 * ours.weights  # transformers also loads a pooler
    assert theirs.workspace > ours.workspace
    config = serve_config(plan)
    assert lost(config, read_by_ray(config)) == []
    pools = {pool["args"]["spec"]["name"]: pool["args"]["spec"] for pool in config["applications"][:-1]}
    assert own.items() <= pools["theirs"].items()
    assert not own.keys() & pools["ours"].keys()
    given = GatewayArgs.model_validate(config["applications"][-1]["args"]).models
    models = {model.spec.name: model.spec for model in given}
    assert (models["theirs"].backend, models["theirs"].trust_remote_code) == ("transformers", True)
    assert (models["ours"].backend, models["ours"].trust_remote_code) == ("emberforge", False)


def test_a_catalogue_is_of_our_engine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.download.snapshot_download", huggingface_hub.snapshot_download)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="neither a folder here nor in the Hub's cache"):
        planned(MIXED, entry("a", "BAAI/bge-m3", backend="transformers"))


@pytest.mark.parametrize("key", ["12345678", "[12345678]", "{a: 12345678}"])
def test_an_error_does_not_tell_an_api_key(key: str) -> None:
    with pytest.raises(ClusterError, match=r"line 2: settings\.api_key: Input should be a valid string") as caught:
        parse_models(f"models: [{{name: a, model: x}}]\nsettings: {{api_key: {key}}}")
    assert "12345678" not in str(caught.value)


BAD_MODELS = [
    ("", ["the file is empty", "a mapping with models"]),
    ("models: [}", ["cannot be read", "line 1"]),
    ("modles: []", ["modles is not a key", "models, default"]),
    ("models: []", ["models = []", "List should have at least 1 item, not 0"]),
    ("models: {a: 1}", ["models: expected a list"]),
    ("models: [{name: a, model: x, aliases: b}]", ["models.0.aliases = 'b': expected a list"]),
    ("models: [{name: a, model: x, tokens_per_s: 9}]", ["models.0.tokens_per_s = 9: expected a mapping"]),
    (
        "models: [{name: a, model: x}]\nsettings: [{api_key: k}]",
        ["settings is a list or a mapping with an api_key, not a mapping"],
    ),
    ("models: [{name: a}]", ["models.0.model is missing"]),
    ("models: [{name: a, model: qwen3-embedding-4b, repicas: 2}]", ["models.0.repicas is not a key", "min_replicas"]),
    ("models: [{name: a, model: qwen3-embedding-4b}]\nsettings: {prt: 1}", ["settings.prt is not a key", "port"]),
    ("models: [{name: a, model: x}]\nsettings: {backend: transformers}", ["settings.backend", "each model's entry"]),
    ("models: [{name: a, model: x, trust_remote_code: true}]", ["models.0", "needs backend transformers"]),
    ("models: [{name: a, model: x}]\nsettings: {dtype: fp32}", ["settings.dtype", "each model's entry"]),
    ("models: [{name: a, model: x}]\nsettings: {max_batch_tokens: 9}", ["settings.max_batch_tokens", "each model's entry"]),
    ("models: [{name: a, model: x}]\nsettings: {default_prompt: q}", ["settings.default_prompt", "each model's entry"]),
    ("models: [{name: a, model: x, default_prompt: q, default_prompt_name: q}]", ["models.0", "both set", "set only one"]),
    ("models: [{name: a, model: x, dtype: int2}]", ["models.0.dtype", "'int2'", "auto", "float32", "bfloat16"]),
    ("models: [{name: a, model: x, pooling: attention}]", ["models.0.pooling", "'attention'", "mean"]),
    (
        "models: [{name: a, model: x, min_replicas: 3, max_replicas: 2}]",
        ["models.0", "max_replicas is 2, less than min_replicas, 3"],
    ),
    ("models: [{name: a, model: x, min_replicas: -1}]", ["models.0.min_replicas = -1", "greater than or equal to 0"]),
    *(
        (f"models: [{{name: a, model: x, {key}: yes}}]", [f"models.0.{key} = True: expected a number"])
        for key in ("min_replicas", "max_replicas", "canary", "canary_s", "pipeline", "context", "streams", "max_batch_tokens")
    ),
    ("models: [{name: a, model: x, tokens_per_s: {c: yes}}]", ["models.0.tokens_per_s.c = True: expected a number"]),
    ("models: [{name: a, model: x}]\ngateways: yes", ["gateways = True: expected a number"]),
    ("models: [{name: a, model: x}]\nnetwork_gbit_s: yes", ["network_gbit_s = True: expected a number"]),
    ("models: [{name: a, model: x}]\nsettings: {cache_bytes: on}", ["settings.cache_bytes = True: expected a number"]),
    *(
        (f"models: [{{name: a, model: x, {key}: 1{'0' * 23}}}]", [f"models.0.{key} = 1000", "less than or equal to"])
        for key in ("min_replicas", "max_replicas", "pipeline", "context", "streams", "cache_tokens", "max_batch_tokens")
    ),
    ("models: [{name: a, model: Qwen/Qwen3-4B, streams: 1000000000}]", ["models.0.streams", "less than or equal to 100000"]),
    ("models: [{name: a, model: Qwen/Qwen3-4B, pipeline: 1000000000}]", ["models.0.pipeline", "less than or equal to 100000"]),
    ("models: [{name: a, model: x, tokens_per_s: {c: .inf}}]", ["models.0.tokens_per_s.c = inf", "less than or equal to"]),
    ("models: [{name: a, model: x, tokens_per_s: {c: 0}}]", ["models.0.tokens_per_s.c = 0", "greater than 0"]),
    ("models: [{name: a, model: x}, {name: a, model: y}]", ["two models are called 'a'", "differ"]),
    ("models: [{name: a, model: x}, {name: b, model: y, aliases: [a]}]", ["two models are called 'a'", "differ"]),
    ("models: [{name: a/x, model: x}, {name: b/x, model: y}]", ["2 models would have pools called 'x'", "differ"]),
    ("models: [{name: a, model: x}]\ndefault: b", ["default is 'b'", "the models are a"]),
    ("models: [{name: a, model: x}]\nasleep: maybe", ["asleep = 'maybe'", "'wait' or 'refuse'"]),
    ("models: [{name: a, model: qwen3-embedding-4b, nodes: [pc9]}]", ["model a names node 'pc9'", "the nodes are pc1, spark"]),
    ("models: [{name: a, model: qwen3-embedding-4b, not_nodes: [pc9]}]", ["node 'pc9'", "the nodes are pc1, spark"]),
    ("models: [{name: a, model: qwen3-embedding-4b, dtype: fp16}]", ["model a overflows float16", "bfloat16 or float32"]),
    ("models: [{name: a, model: Qwen/Qwen3-4B, context: 0}]", ["models.0.context = 0", "greater than 0"]),
    ("models: [{name: a, model: Qwen/Qwen3-4B, streams: 0}]", ["models.0.streams = 0", "greater than 0"]),
    (
        "models: [{name: a, model: Qwen/Qwen3-4B, streams: 2, cache_tokens: 9}]",
        ["models.0", "streams and cache_tokens", "leave one"],
    ),
    ("models: [{name: a, model: Qwen/Qwen3-4B, context: 50000}]", ["context: 50000", "Qwen/Qwen3-4B takes at most 40960 tokens"]),
    ("models: [{name: a, model: Qwen/Qwen3-4B, max_input_tokens: 99}]", ["generates text", "context: 99", "max_input_tokens"]),
    (
        "models: [{name: a, model: Qwen/Qwen3-4B, context: 900, cache_tokens: 800}]",
        ["too few for one stream of context: 900", "more cache"],
    ),
    (
        "models: [{name: a, model: qwen3-embedding-4b, streams: 2}]",
        ["a has streams: 2", "does not generate text; leave streams out"],
    ),
    ("models: [{name: a, model: qwen3-embedding-4b, context: 9}]", ["a has context: 9", "leave context out"]),
    ("models: [{name: a, model: ./no-such}]", ["./no-such is not a folder"]),
    ("models: [{name: a, model: HERE}]", ["has no config.json", "not a model folder"]),
]


@pytest.mark.parametrize(("content", "parts"), BAD_MODELS)
def test_a_bad_file_is_one_sentence_with_the_way_out(files: tuple[Path, Path], content: str, parts: list[str]) -> None:
    models, nodes = files
    models.write_text(content.replace("HERE", str(models.parent)))
    with pytest.raises(EmberError) as caught:
        Plan(load_models(models), load_nodes(nodes))
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    assert "{" not in message, "a whole entry is no help"
    for part in parts:
        assert part in message


def test_of_a_thousand_nodes_not_all_are_listed() -> None:
    nodes = [rtx_5080(f"pc{index:03}") for index in range(50)]
    with pytest.raises(ClusterError, match=r"names node 'pc', which does not exist; the nodes are pc000, .*pc007 and 42 more$"):
        planned(nodes, entry(nodes=["pc"]))


def shown(plan: Plan, width: int = 120) -> str:
    out = io.StringIO()
    plan_report.show(plan, Console(file=out, width=width, markup=False))
    return out.getvalue()


def test_the_table_says_what_is_where_and_why(example: Plan) -> None:
    text = shown(example)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert all(len(line) <= 120 for line in text.splitlines())
    pro, lite, more = (line for line in lines if line.startswith(("pro spark:0", "lite pc1:0", "lite spark:0")))
    assert re.fullmatch(r"pro spark:0 20\.3 109\.0 [\d,]+ predicted required no other node class can hold it", pro)
    assert re.fullmatch(r"lite pc1:0 3\.2 15\.6 [\d,]+ predicted required fastest class that holds it", lite)
    assert re.match(rf"lite spark:0 3\.5 109\.0 [\d,]+ predicted room to grow \d\d% of {PC_CLASS}", more)
    assert any(line.startswith("spark:0 gb10-") and line.endswith("23.8 109.0 22% pro, lite") for line in lines)
    assert any(line.startswith(f"lite.{PC_CLASS} bfloat16 1-1 0.20") for line in lines)
    assert "Does not fit" not in text


def test_how_many_gateways_requests_of_one_text_would_take_is_said() -> None:
    def said(texts_per_s: int, **more: object) -> list[str]:
        plan = planned([rtx_5080()], entry(tokens_per_s={PC_CLASS: 100 * texts_per_s}), **more)
        return [note for note in plan_report.notes(plan) if note.startswith("gateways")]

    (note,) = said(801)
    assert note.endswith("of 100 tokens need 2 gateways")
    (note,) = said(5600, gateways=6)
    assert note == (
        "gateways: 6 can take about 4,800 one-text requests/s; the replicas' 5,600 texts/s of 100 tokens need 7 gateways"
    )
    assert said(800) == said(5600, gateways=7) == []


def test_what_a_quantised_checkpoint_takes_is_said(tiny: Callable[..., Path], tmp_path: Path) -> None:
    shape = {"hidden_size": 128, "num_hidden_layers": 1, "intermediate_size": 256, "max_position_embeddings": 256}
    folders = quantize(tiny("qwen3_lm", **shape), FORMS["awq 64"], tmp_path)
    quantised, plain = (planned([rtx_5080()], entry("q", str(folder))) for folder in folders)
    (note,) = set(plan_report.notes(quantised)) - set(plan_report.notes(plain))
    assert note == (
        "q: the checkpoint is quantised (AWQ of 4 bits); it is dequantised at load, so it takes the memory of bfloat16"
    )
    assert [each.needs_bytes for each in quantised.assigned] == [each.needs_bytes for each in plain.assigned]
    for folder in folders:  # without this folder the model is a generation model
        shutil.rmtree(folder / "1_Pooling")
    quantised, plain = (planned([rtx_5080()], entry("q", str(folder))) for folder in folders)
    (note,) = set(plan_report.notes(quantised)) - set(plan_report.notes(plain))
    assert (
        "(AWQ of 4 bits); GPUs of compute capability 8.0 or later keep it in its bits, elsewhere it is dequantised at load"
        in note
    )
    assert quantised.footprint("q", PC_CLASS).weights < plain.footprint("q", PC_CLASS).weights


def small(name: str, cpus: int, cards: int = 1) -> Node:
    return Node(name, "amd64", 64 * GIB, cpus, (Card("NVIDIA GeForce RTX 5080", int(15.9 * GIB)),) * cards)


def tiny_models(count: int, **more: object) -> list[ModelEntry]:
    return [entry(f"m{index}", "all-MiniLM-L6-v2", **more) for index in range(count)]


@pytest.mark.parametrize(("gateways", "least", "most"), [(1, 1, 1), (1, 0, 4), (2, 1, 3), (5, 1, 1)])
@pytest.mark.parametrize("cpus", [1, 2, 3])
def test_no_node_with_cards_books_more_cpus_than_it_has(cpus: int, gateways: int, least: int, most: int) -> None:
    models = tiny_models(4, min_replicas=least, max_replicas=most)
    plan = planned([small("one", cpus), small("two", 2, cards=2)], *models, gateways=gateways)
    a_node = plan.gateways_a_node
    assert a_node == -(-gateways // 2)
    for each in plan_report.cpu_uses(plan):
        # Ray may put a gateway on any node and a replica on any node of its class. So both nodes count with the fewer CPUs.
        assert each.booked + 0.5 * a_node <= max(each.num_cpus, 0.5 * a_node)
        assert each.gateways >= a_node or not each.booked


def test_replicas_without_cpus_are_missing_and_the_reason_is_said() -> None:
    plan = planned([small("pc1", 1)], *tiny_models(4))
    assert sum(plan.placement.missing.values()) == 3
    why = "a replica needs 0.5 CPUs; all 1 of pc1 are reserved, 0.5 of them for gateways"
    assert {each.why for each in plan.unplaced} == {why}
    for each in plan.unplaced:
        assert "another node with a card of" in each.ways_out[-1]
    assert planned([small("pc1", 3)], *tiny_models(4)).unplaced == ()


def test_the_exact_search_keeps_to_the_cpus() -> None:
    """By memory alone the three large models and the small one fit. Each node has CPUs for two replicas."""
    large = [entry(f"l{index}", "Qwen/Qwen3-Embedding-4B", dtype="float8") for index in range(2)]
    nodes = [Node(name, "amd64", 64 * GIB, 1, (Card("L40", 48 * GIB),) * 2) for name in ("a", "b")]
    plan = planned(nodes, *large, *tiny_models(1), gateways=1)
    assert plan.placement.method == "exact"
    assert plan.placement.proven
    assert plan.placement.missing.keys() == {plan.unplaced[0].model}
    assert sorted(each.booked for each in plan_report.cpu_uses(plan)) == [0.5, 0.5]


def test_gateways_stand_apart_while_there_are_nodes() -> None:
    def apart(nodes: Sequence[Node], gateways: int) -> int:
        config = serve_config(planned(nodes, entry(), gateways=gateways))
        most: int = config["applications"][-1]["deployments"][0]["max_replicas_per_node"]
        return most

    assert apart([rtx_5080(), SPARK], 1) == apart([rtx_5080(), SPARK], 2) == 1
    assert apart([rtx_5080(), SPARK], 3) == 2
    assert apart([rtx_5080()], 8) == 8


def warned(plan: Plan) -> list[str]:
    return [note.removeprefix("warning: ") for note in plan_report.notes(plan) if note.startswith("warning: ")]


def test_a_plan_says_what_8_bits_make_slower() -> None:
    small, large = "BAAI/bge-small-en-v1.5", "BAAI/bge-base-en-v1.5"
    (warning,) = warned(planned([rtx_5080()], entry(model=small, dtype="int8")))
    assert warning.startswith("m: BERT models of hidden size 384 or less are slower in int8 than in bfloat16")
    assert warned(planned([rtx_5080()], entry(model=large, dtype="int8"))) == []
    for dtype in ("float8", "bfloat16"):
        assert warned(planned([rtx_5080()], entry(model=small, dtype=dtype))) == []


def test_one_gateway_for_several_nodes_is_warned_of() -> None:
    (warning,) = warned(planned([rtx_5080(), SPARK], entry()))
    assert warning == "with one gateway, requests wait for about 10 s if it or its node dies: set gateways: 2 or more"
    assert warned(planned([rtx_5080(), SPARK], entry(), gateways=2)) == warned(planned([SPARK], entry())) == []


def test_gateways_without_cpus_are_warned_of() -> None:
    (warning,) = warned(planned([Node("old", "amd64", 64 * GIB, 2)], entry(), gateways=4))
    assert warning == "4 gateways need 0.5 CPUs each, but beside the replicas there are CPUs for 2"


def test_nodes_that_a_dtype_leaves_out_are_warned_of() -> None:
    models = [entry(name) for name in "abcde"]
    (warning,) = warned(planned([A100, T4], *models, gateways=2))
    assert warning == (
        f"a, b, c and 2 more: one dtype on all nodes, bfloat16, excludes {T4.class_name}, which compute it slowly "
        "or not at all; dtype: float32 uses all nodes"
    )
    assert warned(planned([A100, T4], entry(dtype="fp32"), gateways=2)) == []
    assert planned([A100, T4], entry(min_replicas=16), gateways=2).left_out("m") == (), "the A100's node has no room for 16"


def test_a_host_too_small_for_loading_is_warned_of() -> None:
    less = replace(H200, ram_bytes=4 * GIB, cards=H200.cards[:1])
    (warning,) = warned(planned([less], entry(model="Qwen/Qwen3-Embedding-8B")))
    assert warning == "loading the replicas of big may take 6.2 GiB of the host's memory, but it has 4.0 GiB"
    assert warned(planned([replace(less, ram_bytes=7 * GIB)], entry(model="Qwen/Qwen3-Embedding-8B"))) == []


def test_a_summary_comes_first(example: Plan) -> None:
    first, second, third, warning, *rest = shown(example).splitlines()
    assert warning.startswith("warning: with one gateway, requests wait")
    assert not any("with one gateway" in line for line in rest)
    assert first == "Everything fits: every required replica has a place"
    assert second == "2 models; 3 replicas, 2 of them required; 2 of 2 nodes used; 1 gateway"
    assert third == "memory for models: 27.0 of 124.6 GiB; CPUs reserved for replicas: 1.5 of 16, on spark 1 of 8"
    plan = planned([rtx_5080(gib=1)], *(entry(name) for name in "abcde"))
    assert shown(plan).splitlines()[0] == "Some replicas have no place: of a, b, c and 2 more"


def test_what_does_not_fit_and_what_is_guessed_is_said() -> None:
    plan = planned(
        [UNKNOWN, CPU], entry("pro", "Qwen/Qwen3-Embedding-8B", dtype="bf16", min_replicas=3),
        entry("zero", "Qwen/Qwen3-Embedding-8B", min_replicas=0, nodes=["rx"]), entry("fast", tokens_per_s={"gb10": 5}),
    )  # fmt: skip
    text = shown(plan)
    assert "zero is scaled to zero and has no card for its start: a replica needs" in text
    assert "way out: another node with a card of" in text
    assert "the speed of some-gpu-24g-amd64 is a guess" in text
    assert "fast: tokens_per_s names gb10, but no node is of this class" in text
    assert "old:cpu" in text


def test_each_speed_is_shown_with_what_it_is() -> None:
    plan = planned(
        MIXED, entry("a", nodes=["pc1"], tokens_per_s={PC_CLASS: 12345.6}), entry("b", nodes=["big"]),
        entry("c", nodes=["spark"]), entry("d", "BAAI/bge-m3", nodes=["spark"]), entry("e", nodes=["old"]),
    )  # fmt: skip
    text = shown(plan)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    bases = {"a": "given", "b": "measured", "c": "predicted", "d": "estimated", "e": "estimated"}
    for name, basis in bases.items():
        assert any(re.match(rf"{name} \S+ \S+ \S+ [\d,]+ {basis} required ", line) for line in lines), name
        assert sum(line.startswith(f"* {basis}: ") for line in lines) == 1
    assert {each["model"]: each["basis"] for each in plan_report.as_data(plan)["replicas"]} == bases
    assert any(" 12,300 given " in line for line in lines)
    assert "estimated" not in shown(planned([H200], entry()))


def test_the_placement_note_does_not_promise_too_much() -> None:
    assert "every required replica has its card" in shown(planned([rtx_5080()], entry()))
    assert "proven, no arrangement places more" in shown(UNPLACED["too large"][0])
    many = [rtx_5080(f"pc{index}") for index in range(30)]
    unproven = planned(many, entry(model="Qwen/Qwen3-Embedding-8B", pipeline=1))
    assert "not proven, another arrangement may place more" in shown(unproven)


def run(files: tuple[Path, Path], *more: object) -> Any:
    models, nodes = files
    return CliRunner().invoke(cli, ["plan", "--models", str(models), "--inventory", str(nodes), *map(str, more)])


def test_the_command_writes_a_file_that_ray_reads(files: tuple[Path, Path], tmp_path: Path, example: Plan) -> None:
    output = tmp_path / "serve.yaml"
    result = run(files, "-o", output)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 120
    assert "Replicas" in result.stdout
    text = output.read_text()
    assert text.startswith("# Deploy with: serve deploy FILE\n# Start every node")
    assert "&id" not in text, "an operator reads each spec where it stands"
    assert "`emberforge node start`" in text.splitlines()[1]
    assert yaml.safe_load(text) == serve_config(example)


def test_json_is_all_there_is_on_stdout(files: tuple[Path, Path], tmp_path: Path, example: Plan) -> None:
    result = run(files, "--json", "-o", tmp_path / "serve.yaml")
    data = json.loads(result.stdout)
    assert data == json.loads(json.dumps(plan_report.as_data(example)))
    assert data["complete"] is True
    assert {"model": "pro", "node": "spark", "card": 0, "basis": "predicted", "required": True}.items() <= data["replicas"][
        0
    ].items()


def test_what_is_unplaced_fails_the_command_and_the_rest_is_written(files: tuple[Path, Path], tmp_path: Path) -> None:
    models, nodes = files
    nodes.write_text(NODES.splitlines()[0] + "\n" + NODES.splitlines()[2] + "\n")
    output = tmp_path / "serve.yaml"
    result = run((models, nodes), "-o", output)
    assert result.exit_code == 1
    assert "Does not fit" in result.stdout
    assert f"pro lacks 1 required replica; {output} has all other replicas" in str(result.exception)
    names = [application["name"] for application in yaml.safe_load(output.read_text())["applications"]]
    assert names == [f"lite.{PC_CLASS}", "gateway"]


def test_without_the_default_model_nothing_is_written(files: tuple[Path, Path], tmp_path: Path) -> None:
    models, nodes = files
    models.write_text(MODELS + "default: pro\n")
    nodes.write_text(NODES.splitlines()[0] + "\n" + NODES.splitlines()[2] + "\n")
    result = run((models, nodes), "-o", tmp_path / "serve.yaml")
    assert isinstance(result.exception, ClusterError)
    assert "pro, the default model, has no place" in str(result.exception)
    assert "Does not fit" in result.stdout
    assert not (tmp_path / "serve.yaml").exists()


def test_a_default_may_be_an_alias(example: Plan) -> None:
    file = example.file.model_copy(update={"default": "default"})
    assert serve_config(Plan(file, example.nodes))["applications"][-1]["args"]["default"] == "default"


def test_an_output_that_cannot_be_written_is_named(files: tuple[Path, Path], tmp_path: Path) -> None:
    result = run(files, "-o", tmp_path / "none" / "serve.yaml")
    assert isinstance(result.exception, ClusterError)
    assert "serve.yaml cannot be written: No such file" in str(result.exception)


def test_a_larger_reserve_moves_the_model() -> None:
    less = replace(rtx_5080(), reserve_bytes=14 * GIB)
    assert planned([less, SPARK], entry()).assigned[0].node == "spark"


def test_of_equal_nodes_the_one_with_least_counts_for_all() -> None:
    """A plan places replicas on a class, and Ray chooses the node."""
    less = replace(rtx_5080("pc2"), reserve_bytes=6 * GIB)
    plan = planned([rtx_5080(), less], entry(model="Qwen/Qwen3-Embedding-4B", pipeline=1))
    assert plan.placement.missing == {"m": 1}
    assert {slot.capacity for slot in plan.slots} == {less.usable_bytes}


def test_brackets_in_a_name_are_shown(files: tuple[Path, Path]) -> None:
    files[0].write_text("models: [{name: 'a[red]b', model: qwen3-embedding-0.6b}]")
    assert "a[red]b" in run(files).stdout


def test_a_model_of_a_cluster_has_one_card() -> None:
    with pytest.raises(ValueError, match="devices is for `emberforge serve`: in a cluster Ray chooses the cards"):
        entry(devices=["cuda:0", "cuda:1"])
