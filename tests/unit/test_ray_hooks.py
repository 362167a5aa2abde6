"""The private parts of Ray that we use: this Ray has all of them, and a Ray that lacks one is named."""

import ast
import re
from pathlib import Path

import pytest

from cluster import haproxy, local_ray, ray_hooks
from cluster.files import ClusterError
from cluster.local_ray import SERVE_ENV, serve_environment

ROOT = Path(__file__).parents[2]
VARIABLES = [*serve_environment(Path("/x")), *local_ray._ALONE_ENV]


def test_this_ray_has_all_that_we_use() -> None:
    assert list(ray_hooks.missing(VARIABLES)) == []
    ray_hooks.check(VARIABLES)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("ray._private.node.Node.get_session_dir_path", "Node.get_session_dir_path in ray._private.node"),
        ("ray._private.state.available_resources_per_node", "available_resources_per_node in ray._private.state"),
        ("ray.serve._private.haproxy_templates.HAPROXY_CONFIG_TEMPLATE", "HAPROXY_CONFIG_TEMPLATE in ray.serve"),
    ],
)
def test_a_part_that_is_gone_is_named(target: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(target)
    install = r"install .* -m pip install 'ray\[serve\]<2\.61,>=2\.60'"
    with pytest.raises(ClusterError, match=rf"^Ray 2\.\d+\.\d+ lacks {re.escape(said)}.*, which \S+\.py uses: {install}"):
        ray_hooks.check(VARIABLES)


def test_a_parameter_a_text_and_a_variable_that_are_gone_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.serve.delete", lambda name: None)
    monkeypatch.setattr("ray.serve._private.grpc_util.__file__", str(ROOT / "pyproject.toml"))
    *gone, variable = ray_hooks.missing(["RAY_SERVE_NO_SUCH"])
    assert gone[0] == "delete(_blocking=) in ray.serve, which cluster/local_ray.py uses"
    assert "'options=DEFAULT_GRPC_SERVER_OPTIONS' in ray.serve._private.grpc_util, which cluster/listening.py uses" in gone
    assert variable.startswith("'\"RAY_SERVE_NO_SUCH\"' in ray.serve._private.constants")


@pytest.mark.parametrize("part", haproxy._PARTS)
def test_a_part_of_haproxys_file_that_is_gone_is_named(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(haproxy._PARTS, part, re.compile("no Ray writes this"))
    with pytest.raises(ClusterError, match=re.escape(part)):
        ray_hooks.check(SERVE_ENV)


@pytest.mark.slow
def test_every_file_that_uses_a_private_part_is_in_the_table() -> None:
    """A private part is a name with an underscore in a module or on an object of Ray's."""
    found = set()
    for package in ("cluster", "serve_app"):
        for file in (ROOT / package).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            modules = {node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.module}
            strings = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
            names = modules | {each for each in strings if isinstance(each, str)}
            if any(re.search(r"\bray\.(\w+\.)*_\w", each) for each in names) or re.search(
                r"handle\._|serve\.\w+\([^()]*\b_\w+=", text
            ):
                found.add(str(file.relative_to(ROOT)))
    found.discard("cluster/ray_hooks.py")
    assert found <= {hook.use for hook in ray_hooks.HOOKS}
    assert {"cluster/node_head.py", "serve_app/gateway/connection.py", "cluster/status.py"} <= found
