"""Queries of the head from another machine: addresses, versions, and our error texts for Ray's output."""

import pytest

from cluster.files import ClusterError
from cluster.node_head import Cluster, Member, explain, head_address, refuse_mismatch


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1", "10.0.0.1", 6379),
        ("head.lan:7000", "head.lan", 7000),
        ("[fd00::1]:7000", "fd00::1", 7000),
        ("[::1]", "::1", 6379),
    ],
)
def test_an_address_is_a_host_and_perhaps_a_port(text: str, host: str, port: int) -> None:
    assert head_address(text) == (host, port)


@pytest.mark.parametrize("text", ["", ":6379", "head:", "head:x", "head:70000", "head:0", "ray://head:1", "fd00::1", "a b"])
def test_what_is_no_address_is_named(text: str) -> None:
    with pytest.raises(ClusterError, match="is not HEAD or HEAD:PORT"):
        head_address(text)


def test_another_ray_or_python_than_the_heads_is_refused() -> None:
    cluster = Cluster("2.60.0", "3.12.3")
    refuse_mismatch(cluster, "2.60.0", "3.12.3", "patch")
    refuse_mismatch(cluster, "2.60.0", "3.12.9", "minor")
    install = r"python.* -m pip install 'ray\[serve\]==2\.60\.0' here"
    with pytest.raises(ClusterError, match=rf"Ray 2\.60\.0 and this node 2\.61\.0: .*{install}"):
        refuse_mismatch(cluster, "2.61.0", "3.12.3", "patch")
    with pytest.raises(ClusterError, match=r"Python 3\.12\.3 and this node 3\.12\.9.*MATCH_LEVEL=minor"):
        refuse_mismatch(cluster, "2.60.0", "3.12.9", "patch")
    with pytest.raises(ClusterError, match=r"Python 3\.12\.3 and this node 3\.11\.3"):
        refuse_mismatch(cluster, "2.60.0", "3.11.3", "minor")


# The output of Ray 2.60.0.
VERSIONS = (
    "RuntimeError: Version mismatch: The cluster was started with:\n    Ray: 2.60.0\n    Python: 3.12.3\n"
    "This process on node 10.0.0.2 was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n"
)
TOKENS = (
    "Traceback (most recent call last):\nray.exceptions.AuthenticationError: RPC error: InvalidAuthToken: Authentication token "
    "is missing or incorrect. Ensure that the token for the cluster is available\n"
)
RANGE = (
    "ValueError: Ray component worker_ports is trying to use a port number 16379 that is used by other components.\n"
    "If you allocate ports, please make sure the same port is not used by multiple components.\n"
)
SECOND_HEAD = "AssertionError: Session name session_2 does not match persisted value b'session_1'. Perhaps\n"
NO_RAY = "rpc_client.h:153: Failed to connect to GCS at address 10.0.0.1:6379 within 5 seconds.\n"
DASHBOARD = "ValueError: Failed to bind to 127.0.0.1:8265 because it's already occupied. You can use `ray start ...`\n"


@pytest.mark.parametrize(
    ("output", "parts"),
    [
        (VERSIONS, ["the head runs Ray 2.60.0 and Python 3.12.3", "this node Ray 2.60.0 and Python 3.11.7", "install"]),
        (TOKENS, ["h:1 refuses this node's token", "copy the head's"]),
        (RANGE, ["port 16379", "choose another with --port"]),
        (SECOND_HEAD, ["a head already runs at h:1", "--port"]),
        (NO_RAY, ["h:1 is not a Ray head", "give the address"]),
        (DASHBOARD, ["dashboard", "choose another with --dashboard-port"]),
        ("one\n\x1b[31mtwo\x1b[39m\n\n", ["Ray did not start: two"]),
        ("", ["Ray did not start: its output is empty"]),
    ],
)
def test_what_ray_prints_becomes_one_sentence(output: str, parts: list[str]) -> None:
    sentence = explain(output, "h:1")
    assert "\n" not in sentence
    for part in parts:
        assert part in sentence


def test_a_member_is_found_by_its_label() -> None:
    members = (Member("1", {}), Member("2", {"emberforge-node": "b"}))
    cluster = Cluster("", "", members)
    assert cluster.member("b") == members[1]
    assert cluster.member("c") is None
