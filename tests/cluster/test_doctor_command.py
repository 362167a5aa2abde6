"""The command `emberforge doctor --measure` measures this machine, and the node finds the result."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.inventory import circumstances, read_machine, this_node
from cluster.measurement import usable
from cluster.node_token import home_folder

EMBERFORGE = str(Path(sys.executable).parent / "emberforge")


def test_a_machine_without_a_gpu_is_measured_and_the_node_finds_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = os.environ | {"EMBERFORGE_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [EMBERFORGE, "doctor", "--measure", "--report"], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("### emberforge doctor --measure: ")
    assert "| HuggingFaceTB/SmolLM2-135M-Instruct |" in done.stdout
    assert "this machine has no GPU: its CPU is measured" in done.stderr
    assert f"written to {tmp_path / 'measured.json'}" in done.stderr

    monkeypatch.setenv("EMBERFORGE_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found, problem = usable(home_folder(), circumstances(read_machine()))
    node = this_node()
    assert (node.measurement, node.measurement_problem) == (found, problem)
    if found is None:  # the machine was busy
        assert "other processes used" in str(problem)
    else:
        whats = [(rate.what, rate.streams) for rate in found.models]
        assert whats == [("embed", 1), ("decode", 1), ("decode", 8), ("prefill", 1)]
