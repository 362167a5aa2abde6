"""`emberforge doctor --measure`: its results, when they are valid, their use in a plan, and the report for an issue."""

import json
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cluster import measure, plan_report
from cluster.catalogue import CATALOGUE
from cluster.generation import decode_rate, decode_tokens_per_s, prefill_rate, prefill_tokens_per_s
from cluster.inventory import Facts, TorchDevice, circumstances, this_node
from cluster.measure_report import markdown
from cluster.measurement import Circumstances, DeviceRate, KernelResult, Measurement, ModelRate, save, usable
from cluster.models_file import ModelsFile
from cluster.nodes import GIB, Card, Node
from cluster.plan import Plan
from cluster.throughput import Rate, is_known, speed_of, tokens_per_s
from engine.errors import OutOfMemory
from engine.measure.kernel_checks import Checked
from serve_app.cli.commands import cli

BF16 = torch.bfloat16
THEN = Circumstances(card="NVIDIA GB10", driver="580.95", torch="2.11", kernels="abc")
MEASUREMENT = Measurement(
    measured_at="2026-11-25T09:00:00+00:00",
    emberforge="0.1.0",
    circumstances=THEN,
    capability=(12, 1),
    memory_gib=119.0,
    free_gib=100.0,
    others_percent=0,
    kernels=(KernelResult(kernel="embed", shape="1 x 8", error=0.0, tolerance=1e-6, is_right=True),),
    rates=(
        DeviceRate(what="GEMM", dtype="bfloat16", size=2048, per_s=90e12),
        DeviceRate(what="GEMM", dtype="bfloat16", size=8192, per_s=80e12),
        DeviceRate(what="GEMM", dtype="float8", size=8192, per_s=150e12),
        DeviceRate(what="copy", size=1 << 31, per_s=200e9),
    ),
    models=(
        ModelRate(model="Qwen/Qwen3-Embedding-0.6B", dtype="bfloat16", what="embed", tokens_per_s=50_000, predicted=67_000),
        ModelRate(
            model="Qwen/Qwen3-8B", dtype="bfloat16", what="decode", streams=1, length=192, tokens_per_s=12.0, predicted=14.0
        ),
        ModelRate(
            model="Qwen/Qwen3-8B", dtype="bfloat16", what="decode", streams=64, length=192, tokens_per_s=700.0, predicted=650.0
        ),
        ModelRate(
            model="Qwen/Qwen3-8B", dtype="bfloat16", what="prefill", length=4096, tokens_per_s=5000.0, predicted=5500.0
        ),
    ),
    left_out=("Qwen/Qwen3-4B: too large for 3.0 GiB of free memory",),
)  # fmt: skip
SPARK = Node("spark", "arm64", 119 * GIB, 20, (Card("NVIDIA GB10", 119 * GIB, unified=True),))
MEASURED = replace(SPARK, measurement=MEASUREMENT)
QWEN3, QWEN3_8B = CATALOGUE["Qwen/Qwen3-Embedding-0.6B"], CATALOGUE["Qwen/Qwen3-8B"]


def test_what_was_saved_is_used_while_nothing_has_changed(tmp_path: Path) -> None:
    assert usable(tmp_path, THEN) == (None, None)
    file = save(MEASUREMENT, tmp_path / "new")
    assert file.stat().st_size < 16_000
    assert usable(tmp_path / "new", THEN) == (MEASUREMENT, None)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"driver": "590.1"}, "driver 580.95 then and 590.1 now"),
        ({"card": "NVIDIA GeForce RTX 5080"}, "card NVIDIA GB10 then and NVIDIA GeForce RTX 5080 now"),
        ({"kernels": ""}, "emberforge's kernels abc then and none now"),
        ({"torch": "2.12"}, "torch 2.11 then and 2.12 now"),
    ],
)
def test_an_old_measurement_is_not_used(changed: dict[str, str], words: str, tmp_path: Path) -> None:
    save(MEASUREMENT, tmp_path)
    found, problem = usable(tmp_path, THEN.model_copy(update=changed))
    assert found is None
    assert problem == f"its measurement of 2026-11-25 is not used ({words}): run emberforge doctor --measure there again"


def test_a_measurement_beside_other_work_is_not_used(tmp_path: Path) -> None:
    save(MEASUREMENT.model_copy(update={"others_percent": 40}), tmp_path)
    found, problem = usable(tmp_path, THEN)
    assert found is None
    assert problem is not None
    assert "other processes used 40 % of its time" in problem


@pytest.mark.parametrize("text", ["", "{}", '{"measured_at": 3}', "\xff"])
def test_a_file_that_cannot_be_read_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "measured.json").write_text(text, encoding="latin-1")
    found, problem = usable(tmp_path, THEN)
    assert found is None
    assert problem is not None
    assert problem.startswith("its measurement cannot be read")


def facts(**more: Any) -> Facts:
    return Facts("host", "x86_64", 8, 64 * GIB, 32 * GIB, cpu_name="Some CPU", **more)


def test_a_node_brings_its_own_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERFORGE_HOME", str(tmp_path))
    gpu = facts(torch=(TorchDevice("NVIDIA H100", "u", 80 * GIB, False, (9, 0)),), driver="580")
    for given in (facts(), gpu):
        own = MEASUREMENT.model_copy(update={"circumstances": circumstances(given)})
        save(own, tmp_path)
        assert this_node(source=lambda: given).measurement == own  # noqa: B023
    assert circumstances(facts()).card == "Some CPU, 8 cores"
    other = this_node(source=lambda: replace(gpu, driver="590"))
    assert other.measurement is None
    assert other.measurement_problem is not None


def test_a_measured_card_is_as_fast_as_it_was_measured() -> None:
    speed = speed_of(MEASURED)
    assert (speed.gemm, speed.copy) == (80e12, 200e9)
    unknown = replace(SPARK, cards=(Card("Some GPU", 119 * GIB),))
    assert not is_known(unknown)
    assert is_known(replace(unknown, measurement=MEASUREMENT))


def test_a_cpu_without_bf16_is_measured_in_float32() -> None:
    rates = (DeviceRate(what="GEMM", dtype="float32", size=1024, per_s=1e11), MEASUREMENT.rates[-1])
    node = Node("pc", "amd64", 32 * GIB, 4, measurement=MEASUREMENT.model_copy(update={"rates": rates}))
    assert speed_of(node).gemm == 2e11
    assert speed_of(node).copy == 200e9


def test_a_measured_model_has_its_own_rate_and_others_are_predicted() -> None:
    assert tokens_per_s(QWEN3, BF16, MEASURED) == Rate(50_000, "measured here")
    assert tokens_per_s(CATALOGUE["Qwen/Qwen3-Reranker-0.6B"], BF16, MEASURED).basis == "measured here"
    larger = CATALOGUE["Qwen/Qwen3-Embedding-4B"]
    assert tokens_per_s(larger, BF16, MEASURED).basis == "predicted"
    assert tokens_per_s(larger, BF16, MEASURED).tokens_per_s < tokens_per_s(larger, BF16, SPARK).tokens_per_s
    assert tokens_per_s(QWEN3, torch.float8_e4m3fn, MEASURED).basis == "predicted"


def test_decode_and_prefill_are_what_was_measured_and_the_formula_between() -> None:
    for streams, rate in ((1, 12.0), (64, 700.0)):
        found = decode_rate(QWEN3_8B, BF16, MEASURED, streams, 192)
        assert found == Rate(pytest.approx(rate), "measured here")
    share = 12.0 / decode_tokens_per_s(QWEN3_8B, BF16, MEASURED, 1, 192)
    between = decode_rate(QWEN3_8B, BF16, MEASURED, 4, 4096)  # 4 streams are nearer to 1 than to 64
    assert between.tokens_per_s == pytest.approx(share * decode_tokens_per_s(QWEN3_8B, BF16, MEASURED, 4, 4096))
    assert prefill_rate(QWEN3_8B, BF16, MEASURED, 4096) == Rate(pytest.approx(5000.0), "measured here")
    assert decode_rate(QWEN3_8B, BF16, SPARK, 4, 4096) == Rate(decode_tokens_per_s(QWEN3_8B, BF16, SPARK, 4, 4096), "estimated")
    assert prefill_rate(QWEN3_8B, BF16, SPARK, 512) == Rate(prefill_tokens_per_s(QWEN3_8B, BF16, SPARK, 512), "estimated")


def planned(*nodes: Node) -> Plan:
    entries = [{"name": "lite", "model": "Qwen/Qwen3-Embedding-0.6B"}, {"name": "chat", "model": "Qwen/Qwen3-8B"}]
    return Plan(ModelsFile.model_validate({"models": entries, "gateways": len(nodes)}), nodes)


def test_a_plan_says_what_was_measured_here() -> None:
    plan = planned(replace(SPARK, name="other"), MEASURED)
    assert {each.basis for each in plan.assigned} == {"measured here"}
    assert plan.rates["lite", SPARK.class_name].tokens_per_s == 50_000
    rates = plan.generation_rates("chat")[SPARK.class_name]
    assert (rates.decode_basis, rates.prefill_basis) == ("measured here", "measured here")
    notes = plan_report.notes(plan)
    speed = "its speed was measured here on 2026-11-25: GEMM 80 TFLOP/s in 16 bits, copy 200 GB/s"
    assert f"{SPARK.class_name}: {speed}" in notes
    assert any(note.startswith("measured here: by emberforge doctor --measure") for note in notes)
    assert any(note.startswith("measured here, of streams") for note in notes)
    data = json.loads(json.dumps(plan_report.as_data(plan)))
    assert {each["basis"] for each in data["replicas"]} == {"measured here"}


def test_the_newest_measurement_of_a_class_counts() -> None:
    newer = MEASUREMENT.model_copy(update={"measured_at": "2026-11-26T00:00:00+00:00", "rates": ()})
    plan = planned(MEASURED, replace(SPARK, name="b", measurement=newer), replace(SPARK, name="c"))
    assert plan.classes[SPARK.class_name].measurement == newer


def test_a_plan_without_a_measurement_says_predicted_and_why() -> None:
    plan = planned(replace(SPARK, measurement_problem="its measurement of 2026-11-25 is not used (driver ...)"))
    assert {each.basis for each in plan.assigned} == {"predicted", "estimated"}
    notes = plan_report.notes(plan)
    assert "spark: its measurement of 2026-11-25 is not used (driver ...)" in notes
    assert not any("measured here" in note for note in notes)


def test_a_plan_warns_of_kernels_that_are_wrong() -> None:
    wrong = KernelResult(kernel="embed", shape="", error=None, tolerance=0, is_right=False)
    node = replace(SPARK, measurement=MEASUREMENT.model_copy(update={"kernels": (wrong,)}))
    assert any(
        "1 kernel check failed: see emberforge doctor --measure there" in note for note in plan_report.notes(planned(node))
    )


def test_the_block_for_an_issue_has_all_and_tells_nothing_of_the_host() -> None:
    host = socket.gethostname()
    wrong = KernelResult(
        kernel="attention",
        shape="large tiles causal",
        error=None,
        tolerance=0,
        problem=f"ModelError: /home/me/.venv/lib/attention.cu on {host}",
        is_right=False,
    )
    text = markdown(MEASUREMENT.model_copy(update={"kernels": (*MEASUREMENT.kernels, wrong)}))
    assert text.startswith("### emberforge doctor --measure: NVIDIA GB10\n")
    for part in (
        "sm_121, 119 GiB, 100 GiB free", "driver 580.95", "| GEMM bfloat16 | 8192 x 8192 | 80 TFLOP/s |",
        "| Qwen/Qwen3-8B | bfloat16 | decode 64 | 700 | 650 | 1.08 |", "1 of 2 checks of kernels against plain torch are right",
        "| attention | large tiles causal | ModelError: (path) on (host) |", "* not measured: Qwen/Qwen3-4B: too large",
    ):  # fmt: skip
        assert part in text
    assert "/home" not in text
    assert not re.search(rf"\b{host}\b", text)


TINY = {
    "bert": replace(
        CATALOGUE["BAAI/bge-base-en-v1.5"], hidden_size=64, intermediate_size=96, n_layers=2, n_heads=4, n_kv_heads=4, head_dim=16
    ),
    "qwen": replace(
        CATALOGUE["Qwen/Qwen3-0.6B"], vocab_size=2000, hidden_size=64, intermediate_size=96, n_layers=2, n_heads=4, n_kv_heads=2,
        head_dim=16, max_position_embeddings=512, max_input_length=512,
    ),
}  # fmt: skip
WORKLOAD = measure.Workload(("bert",), ("qwen",), (), (1, 3), 64, 128, 0.1)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EMBERFORGE_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "CATALOGUE", TINY)
    monkeypatch.setattr(measure, "choose_device", lambda name: torch.device("cpu"))
    rate = DeviceRate(what="copy", size=1 << 20, per_s=1e9)
    monkeypatch.setattr(measure, "_cpu_rates", lambda: iter((rate,)))


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_a_machine_is_measured() -> None:
    said: list[str] = []
    found = measure.measure(said.append, WORKLOAD)
    assert [(rate.model, rate.what, rate.streams) for rate in found.models] == [
        ("bert", "embed", 1), ("qwen", "decode", 1), ("qwen", "decode", 3), ("qwen", "prefill", 1),
    ]  # fmt: skip
    embedding, *decoding, prompt = (rate.length for rate in found.models)
    assert (embedding, prompt) == (0, 64)
    assert all(128 < length <= 192 for length in decoding)
    assert all(rate.tokens_per_s > 0 and rate.predicted > 0 for rate in found.models)
    assert found.rates[0].what == "copy"
    assert found.left_out == ()
    assert found.circumstances.card.endswith("cores")
    assert any(line.startswith("qwen in ") and "decodes 3 at once" in line for line in said)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_a_part_that_fails_is_left_out_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> float:
        raise OutOfMemory("no memory for a batch\nof 8 tokens")

    monkeypatch.setattr(measure, "embed_tokens_per_s", broken)
    monkeypatch.setattr(measure, "_cpu_rates", lambda: (broken() for _ in range(1)))
    found = measure.measure(lambda line: None, WORKLOAD)
    assert found.left_out == ("the other rates of the device: no memory for a batch", "bert: no memory for a batch")
    assert {rate.model for rate in found.models} == {"qwen"}


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_no_model_is_begun_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_LAST_START_S", -1.0)
    found = measure.measure(lambda line: None, WORKLOAD)
    assert found.models == ()
    assert found.left_out == ("bert: the time is up", "qwen: the time is up")


@pytest.mark.parametrize("percent", [0, 40])
def test_use_by_others_is_told(percent: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EMBERFORGE_HOME", str(tmp_path))
    monkeypatch.setattr(measure.psutil, "cpu_percent", lambda interval: float(percent))
    said: list[str] = []
    run = measure._Run(facts(), torch.device("cpu"), said.append)
    run.say_use_by_others()
    run.node = SPARK
    run.say_use_by_others()
    assert said[0].startswith(f"this machine has no GPU: its CPU is measured, 8 cores, {percent} % of its time taken by others")
    assert said[1].startswith(f"NVIDIA GB10: 32.0 of 119.0 GiB free, {percent} % of its time taken by others")
    assert all(line.endswith("no plan will use them") == (percent == 40) for line in said)


@pytest.mark.slow
def test_a_wrong_kernel_is_told_at_once_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EMBERFORGE_HOME", str(tmp_path))
    checks = [Checked("embed", "a", 0.0, 1.0), Checked("norm", "b", 2.0, 1.0), Checked("norm", "c", problem="no image")]

    def check(device: torch.device, heard: Any) -> list[Checked]:
        for each in checks:
            heard(each)
        return checks

    monkeypatch.setattr(measure, "check_kernels", check)
    said: list[str] = []
    run = measure._Run(facts(), torch.device("cpu"), said.append)
    run._device = torch.device("cuda")
    results = run.kernels()
    assert [(each.kernel, each.error, each.is_right) for each in results] == [
        ("embed", 0.0, True), ("norm", 2.0, False), ("norm", None, False),
    ]  # fmt: skip
    assert said == [
        "kernel embed: 1 of 1 checks right",
        "WRONG: kernel norm, b: error 2.00e+00, tolerance 1.00e+00",
        "WRONG: kernel norm, c: no image",
        "kernel norm: 2 of 2 checks WRONG",
    ]


def test_the_command_ends_cleanly_at_ctrl_c(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EMBERFORGE_HOME", str(tmp_path))

    def interrupted(say: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "measure", interrupted)
    result = CliRunner().invoke(cli, ["doctor", "--measure"])
    assert result.exit_code == 130
    assert "stopped: nothing was written" in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_right", [True, False])
def test_the_command_fails_if_a_kernel_is_wrong(is_right: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EMBERFORGE_HOME", str(tmp_path))
    kernels = (KernelResult(kernel="embed", shape="", error=1.0, tolerance=0.5, is_right=is_right),)
    monkeypatch.setattr(measure, "measure", lambda say: MEASUREMENT.model_copy(update={"kernels": kernels}))
    result = CliRunner().invoke(cli, ["doctor", "--measure"])
    assert result.exit_code == (0 if is_right else 1)
    assert f"{int(is_right)} of 1 checks of kernels" in result.stdout
    assert "decode 64" in result.stdout
    assert usable(tmp_path, THEN)[0] is not None


def test_the_block_needs_a_measurement() -> None:
    result = CliRunner().invoke(cli, ["doctor", "--report"])
    assert "give --measure --report" in str(result.exception)
