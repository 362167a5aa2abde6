"""The address that a head gives to its nodes. The machine's network interfaces are fakes."""

import pytest

from cluster import node_address
from cluster.files import ClusterError
from cluster.node_address import checked_ip, head_ip, host_port, reachable

LOOPBACK = {"lo": ["127.0.0.1", "::1"]}
CABLE = LOOPBACK | {"eth1": ["10.0.0.2", "fe80::1%eth1"]}
TWO_NETWORKS = CABLE | {"eth0": ["192.168.1.7"], "eth2": ["169.254.3.4"]}


def machine(monkeypatch: pytest.MonkeyPatch, interfaces: dict[str, list[str]], routed: str | None) -> None:
    monkeypatch.setattr(node_address, "_interfaces", lambda: interfaces)
    monkeypatch.setattr(node_address, "_toward", lambda address: routed)


@pytest.mark.parametrize(
    ("interfaces", "routed", "ip"),
    [(TWO_NETWORKS, "192.168.1.7", "192.168.1.7"), (CABLE, None, "10.0.0.2"), (CABLE, "127.0.0.1", "10.0.0.2")],
    ids=["default route", "only a cable", "cable and a route to itself"],
)
def test_a_head_takes_the_address_that_others_reach(
    monkeypatch: pytest.MonkeyPatch, interfaces: dict[str, list[str]], routed: str | None, ip: str
) -> None:
    machine(monkeypatch, interfaces, routed)
    assert head_ip(None) == ip


def test_without_a_clear_choice_the_operator_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, TWO_NETWORKS, None)
    with pytest.raises(ClusterError, match=r"choose with --ip one of 10\.0\.0\.2, 192\.168\.1\.7, 169\.254\.3\.4$"):
        head_ip(None)
    assert head_ip("192.168.1.7") == "192.168.1.7"


def test_a_machine_without_a_network_is_no_head(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, LOOPBACK, "127.0.0.1")
    with pytest.raises(ClusterError, match="no address that other machines could reach"):
        head_ip(None)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("127.0.0.1", r"other machines cannot reach --ip 127\.0\.0\.1; this machine has 10\.0\.0\.2$"),
        ("::1", "other machines cannot reach"),
        ("10.9.9.9", r"is not an address of this machine; it has 10\.0\.0\.2$"),
        ("head.lan", "is not an IP address"),
    ],
)
def test_an_address_that_others_cannot_reach_is_refused(monkeypatch: pytest.MonkeyPatch, given: str, sentence: str) -> None:
    machine(monkeypatch, CABLE, "10.0.0.2")
    with pytest.raises(ClusterError, match=sentence):
        head_ip(given)


def test_addresses_of_an_interface_alone_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reachable(CABLE | {"eth3": ["fd00::2"]}) == ["10.0.0.2", "fd00::2"]
    machine(monkeypatch, CABLE | {"eth3": ["fd00::2"]}, None)
    assert checked_ip("[fd00::2]") == "fd00::2"
    assert (host_port("fd00::2", 6379), host_port("10.0.0.2", 7000)) == ("[fd00::2]:6379", "10.0.0.2:7000")


def test_this_machine_has_its_loopback() -> None:
    assert "127.0.0.1" in {ip for addresses in node_address._interfaces().values() for ip in addresses}
    assert node_address._toward(("127.0.0.1", 53)) == "127.0.0.1"
