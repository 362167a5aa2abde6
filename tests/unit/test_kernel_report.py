"""Every kernel compiles for every chip without spilling registers, and `emberforge kernels` fails if a kernel does not."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from engine.errors import ModelError
from engine.kernels import report
from engine.kernels.compile import MAX_SHARED_BYTES
from engine.kernels.report import Row, Variant, compile_rows, parse_archs, problems, variants
from serve_app.cli.commands import cli

GOOD = Row("sm_90", "attention", "head_dim 128", registers=128, shared_bytes=64 * 1024)


def only(*sources: str) -> Callable[[tuple[int, int]], list[Variant]]:
    """A replacement for `variants` that gives only the first variant of each source."""
    return lambda capability: [next(v for v in variants(capability) if v.source == source) for source in sources]


@pytest.mark.slow
def test_every_kernel_compiles_for_every_chip_without_spilling(kernel_reports: "subprocess.Popen[str]") -> None:
    output, errors = kernel_reports.communicate()
    assert kernel_reports.returncode == 0, errors
    rows = [Row(**row) for row in json.loads(output.splitlines()[-1])]
    assert {row.arch for row in rows} == {f"sm_{arch}" for arch in (80, 86, 89, 90, "90a", 100, 120, "120a", 121, "121a")}
    found = problems(rows)
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["activation", "attention", "attention_decode", "embed", "norm", "pool", "rope"])
def test_rows_hold_what_the_compiler_says(source: str) -> None:
    (variant,) = only(source)((9, 0))
    for row in compile_rows(variant, "sm_90"):
        assert (row.registers > 0, row.spill_bytes, row.error) == (True, 0, "")


def test_shared_memory_is_static_and_dynamic() -> None:
    variant = next(v for v in variants((9, 0)) if v.label == "C 1024, Layer")
    (row,) = compile_rows(variant, "sm_90")
    (more,) = compile_rows(replace(variant, dynamic_shared_bytes=1000), "sm_90")
    assert more.shared_bytes == row.shared_bytes + 1000


def test_labels_of_one_source_tell_its_variants_apart() -> None:
    for capability in ((7, 5), (8, 0), (12, 0)):
        named = [(v.source, v.label, v.defines["HALF"]) for v in variants(capability)]
        assert len(named) == len(set(named))


def test_before_sm_80_there_is_no_attention_and_no_bf16() -> None:
    assert all(v.source != "attention" and v.defines["HALF"] for v in variants((7, 5)))
    assert {v.source for v in variants((8, 0))} == {v.source for v in variants((7, 5))} | {
        "attention",
        "attention_decode",
        "packed_rows",
        "packed_tiles",
        "quantize",
    }


@pytest.mark.parametrize("arch", ["sm_86", "sm_89", "sm_90", "sm_120", "sm_121"])
def test_too_much_shared_memory_is_a_problem_where_there_is_little(arch: str) -> None:
    assert problems([replace(GOOD, arch=arch, shared_bytes=MAX_SHARED_BYTES)]) == []
    too_much = f"attention (head_dim 128) on {arch} takes 100.0 KB of shared memory, 99 is the limit"
    found = problems([replace(GOOD, arch=arch, shared_bytes=MAX_SHARED_BYTES + 1024)])
    assert found == ([] if arch == "sm_90" else [too_much])


def test_a_spill_and_a_failed_compile_are_problems() -> None:
    rows = [GOOD, replace(GOOD, spill_bytes=8), replace(GOOD, error="no such thing")]
    assert problems(rows) == [
        "attention (head_dim 128) on sm_90 spills 8 bytes",
        "attention (head_dim 128) on sm_90 does not compile: no such thing",
    ]


def test_archs_in_either_spelling_each_once() -> None:
    assert parse_archs("80, sm_90,sm_120,90") == [(8, 0), (9, 0), (12, 0)]


def test_the_command_prints_a_row_for_each_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "variants", only("embed", "activation"))
    result = CliRunner().invoke(cli, ["kernels", "--arch", "75,sm_120"])
    assert result.exit_code == 0, result.output
    rows = [tuple(line.split()[:2]) for line in result.stdout.splitlines() if line.strip().startswith("sm_")]
    assert sorted(rows) == [
        (arch, kernel) for arch in ("sm_120", "sm_75") for kernel in ("embed", "geglu", "geglu_tanh", "gelu", "swiglu")
    ]
    assert "10 of 10 kernels compiled" in result.stdout
    assert "chips before sm_80 have no attention kernel, and fp16 only; no register spills" in result.stdout


@pytest.mark.parametrize(
    "row", [replace(GOOD, spill_bytes=8), replace(GOOD, arch="sm_120", shared_bytes=2**17), replace(GOOD, error="no such thing")]
)
def test_the_command_fails_where_there_is_a_problem(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "report", lambda capabilities: [GOOD, row])
    result = CliRunner().invoke(cli, ["kernels", "--arch", "90"])
    assert result.exit_code == 1
    assert problems([row])[0] in result.stdout


def test_a_source_that_does_not_compile_is_a_row() -> None:
    (row,) = compile_rows(Variant("embed", "nothing", {"HALF": 0}), "sm_90")
    assert "THREADS" in row.error
    assert row.registers == 0


@pytest.mark.parametrize("arch", ["77", "sm_9", "", "90,h100"])
def test_an_unknown_arch_is_refused_by_name(arch: str) -> None:
    result = CliRunner().invoke(cli, ["kernels", "--arch", arch])
    assert result.exit_code == 1
    assert isinstance(result.exception, ModelError)
    assert f"arch {arch.split(',')[-1]!r} is unknown" in str(result.exception)
    assert " 90," in str(result.exception)
