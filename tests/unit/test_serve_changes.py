"""The changes of a deployment: another number of replicas replaces none, and every replacement is listed beforehand."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve.schema import ServeDeploySchema
from stub_hub import stub_hub
from typer.testing import CliRunner

from cluster.files import ClusterError
from cluster.models_file import ModelsFile
from cluster.nodes import GIB, Card, Node
from cluster.plan import Plan
from cluster.serve_changes import changes, deployed_before
from cluster.serve_client import running_config
from cluster.serve_config import serve_config
from serve_app.cli.commands import cli

NODES = [Node(f"pc{index}", "amd64", 64 * GIB, 8, (Card("NVIDIA GeForce RTX 5080", 16 * GIB),)) for index in range(3)]
POOL = "lite.rtx-5080-16g-amd64"
hub = pytest.fixture(stub_hub)
pytestmark = pytest.mark.usefixtures("hub")


def config(nodes: Sequence[Node] = NODES, gateways: int = 2, port: int = 8000, **entry: Any) -> dict[str, Any]:
    lite = {"name": "lite", "model": "Qwen/Qwen3-Embedding-0.6B"} | entry
    file = {"models": [lite], "gateways": gateways, "settings": {"port": port}}
    return serve_config(Plan(ModelsFile.model_validate(file), nodes))


def versions(content: dict[str, Any]) -> dict[str, Any]:
    """The values that Ray compares. It replaces an application whose version differs, and a deployment whose options differ."""
    applications = ServeDeploySchema.model_validate(content).applications
    return {
        each.name: (get_app_code_version(each), [(d.ray_actor_options, d.max_replicas_per_node) for d in each.deployments])
        for each in applications
    }


def test_serve_tells_a_config_as_it_was_given() -> None:
    """`emberforge apply` compares the plan with the config that Serve reports."""
    content = config(min_replicas=0, aliases=["l"])
    applications = ServeDeploySchema.model_validate(content).applications
    told = {each.name: {"deployed_app_config": each.model_dump(exclude_unset=True)} for each in applications}
    details = {
        "applications": told,
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": 8000, "root_path": ""},
    }
    assert running_config(json.loads(json.dumps(details)), content) == content


@pytest.mark.slow
def test_planning_imports_no_ray() -> None:
    """`plan --live` asks the cluster before it writes a config. Ray reads its token at import, so the plan imports no Ray."""
    code = "import sys, cluster.serve_config, cluster.serve_changes, cluster.node_live; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


COUNTS = [{}, {"min_replicas": 2}, {"min_replicas": 1, "max_replicas": 3}, {"min_replicas": 2, "max_replicas": 3}]


@pytest.mark.parametrize("entry", COUNTS[1:])
@pytest.mark.parametrize("nodes", [NODES, [Node("big", "amd64", 999 * GIB, 64, (Card("NVIDIA H200", 140 * GIB),) * 8)]])
def test_other_numbers_replace_nothing(nodes: list[Node], entry: dict[str, Any]) -> None:
    before, after = config(nodes), config(nodes, gateways=3 if len(nodes) > 1 else 2, **entry)
    assert versions(before) == versions(after)
    lines = list(changes(before, after))
    assert lines
    assert all(line.startswith("moves ") and line.endswith(" replicas, and replaces none") for line in lines)


def test_the_numbers_are_said() -> None:
    after = config(gateways=3, min_replicas=1, max_replicas=3)
    assert list(changes(config(), after)) == [
        f"moves {POOL} from 1-1 to 1-3 replicas, and replaces none",
        "moves gateway from 2 to 3 replicas, and replaces none",
    ]


@pytest.mark.parametrize(
    ("entry", "lines"),
    [
        ({}, []),
        (
            {"max_batch_tokens": 4096},
            [
                f"replaces all replicas of {POOL}, one after another, because of other Engine.ray_actor_options, "
                "args.spec.max_batch_tokens (default -> 4096)",
                "replaces all replicas of gateway, one after another, because of other args.models",
            ],
        ),
        ({"aliases": ["l"]}, ["replaces all replicas of gateway, one after another, because of other args.models"]),
        (
            {"min_replicas": 0},
            [
                f"replaces all replicas of {POOL}, one after another, because of other args.sleeps",
                "replaces all replicas of gateway",
            ],
        ),
        (
            {"gateways": 4},
            ["replaces all replicas of gateway, one after another, because of other Gateway.max_replicas_per_node"],
        ),
        ({"nodes": [*NODES[:1], Node("cpu", "amd64", 64 * GIB, 16)]}, []),
    ],
    ids=["nothing", "options", "an alias", "sleep", "gateways that share nodes", "another node"],
)
def test_what_is_replaced_is_said_and_is_what_ray_replaces(entry: dict[str, Any], lines: list[str]) -> None:
    before, after = config(), config(**entry)
    said = list(changes(before, after))
    assert len(said) == len(lines)
    assert all(line.startswith(start) for line, start in zip(said, lines, strict=True))
    old, new = versions(before), versions(after)
    assert {name for name in new if old[name] != new[name]} == {
        name for name in new if any(line.startswith(f"replaces all replicas of {name},") for line in said)
    }


def test_what_comes_and_goes_is_said() -> None:
    before, after = config(), config(port=9000, name="pro")
    assert set(changes(before, after)) == {
        "starts pro.rtx-5080-16g-amd64",
        f"ends {POOL}",
        "replaces all replicas of gateway, one after another, because of other args.default, args.models, args.settings.port",
        "does not change http_options: that takes effect after `emberforge destroy` and a new deployment",
    }


def test_only_a_config_or_an_empty_file_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    assert deployed_before(file) is None
    file.write_text("\n")
    assert deployed_before(file) is None
    file.write_text(yaml.safe_dump(config()))
    assert deployed_before(file) == config()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "line 1: the file is \\[], not a mapping with applications"),
        ("{", "cannot be read"),
        ("models: []", "applications is missing"),
        ("1: 2\napplications: []", "line 1: 1 = 1: Keys should be strings"),
        ("applications: [{name: gateway, 3: 4}]", "applications.0.3 = 3: Keys should be strings"),
        ("applications: [{name: [1]}]", "applications.0.name = \\[1]: Input should be a valid string"),
        ("applications: [{name: gateway, args: abc}]", "applications.0.args = 'abc': expected a mapping"),
        (
            "applications: [{name: gateway, deployments: [{name: Gateway, autoscaling_config: 3}]}]",
            "applications.0.deployments.0.autoscaling_config = 3: expected a mapping",
        ),
    ],
)
def test_a_file_of_something_else_stays(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ClusterError, match=f"{reason}.*; --output replaces only a Serve config: name another file"):
        deployed_before(file)


def test_the_plan_does_not_replace_its_own_models_file(tmp_path: Path) -> None:
    models = tmp_path / "models.yaml"
    models.write_text("models: [{name: lite, model: qwen3-embedding-0.6b}]")
    with pytest.raises(ClusterError, match="applications is missing; --output replaces only a Serve config"):
        CliRunner().invoke(
            cli, ["plan", "--models", str(models), "--live", "-o", str(models)], catch_exceptions=False, standalone_mode=False
        )
    assert models.read_text().startswith("models:")


def test_the_command_says_it_before_anything_is_deployed(tmp_path: Path) -> None:
    models, nodes, output = tmp_path / "models.yaml", tmp_path / "nodes.yaml", tmp_path / "serve.yaml"
    cards = "[{name: NVIDIA GeForce RTX 5080, vram_gib: 16}]"
    nodes.write_text(yaml.safe_dump({"nodes": [{"name": "pc1", "ram_gib": 64, "gpus": yaml.safe_load(cards)}]}))

    def planned(more: str) -> str:
        models.write_text(f"models: [{{name: lite, model: qwen3-embedding-0.6b{more}}}]")
        command = ["plan", "--models", str(models), "--inventory", str(nodes), "-o", str(output)]
        said = CliRunner().invoke(cli, command, catch_exceptions=False).output
        return " ".join(said.partition("`serve deploy` now")[2].split())

    assert planned("") == ""
    assert planned("") == "nothing"
    assert planned(", min_replicas: 0").startswith(
        f"replaces all replicas of {POOL}, one after another, because of other args.sleeps"
    )
