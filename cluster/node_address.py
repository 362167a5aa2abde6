"""Finds the address at which the other nodes of a cluster reach this machine."""

import ipaddress
import socket
from collections.abc import Mapping

import psutil

from cluster.files import ClusterError

# Nothing is sent to this address. The kernel chooses a route to it, and with the route one of our addresses.
_FAR_AWAY = ("8.8.8.8", 53)


def head_ip(given: str | None) -> str:
    """The address of a head: `given`, else that of the default route, else the only one that other machines can reach.

    Raises: ClusterError for an address that this machine does not have or that other machines cannot reach, and if there are
    several addresses and no default route.
    """
    if given is not None:
        return checked_ip(given)
    routed = _toward(_FAR_AWAY)
    if routed and not ipaddress.ip_address(routed).is_loopback:
        return routed
    found = reachable(_interfaces())
    if len(found) == 1:
        return found[0]
    if found:
        raise ClusterError(f"this machine has no default route and several addresses: choose with --ip one of {', '.join(found)}")
    raise ClusterError(
        "this machine has no address that other machines could reach, so it cannot be a head: connect it to a network"
    )


def checked_ip(given: str) -> str:
    """Returns an address that the operator has given. Raises: ClusterError if other machines cannot reach this one there."""
    found = reachable(_interfaces())
    try:
        address = str(ipaddress.ip_address(given.strip("[]")))
    except ValueError:
        raise ClusterError(f"--ip {given!r} is not an IP address; this machine has {', '.join(found) or 'none'}") from None
    if ipaddress.ip_address(address).is_loopback:
        raise ClusterError(f"other machines cannot reach --ip {given}; this machine has {', '.join(found) or 'no other address'}")
    if address not in found:
        raise ClusterError(f"--ip {given} is not an address of this machine; it has {', '.join(found) or 'none'}")
    return address


def host_port(ip: str, port: int) -> str:
    """HOST:PORT, with an IPv6 address in brackets."""
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def reachable(interfaces: Mapping[str, list[str]]) -> list[str]:
    """The addresses that other machines may reach. IPv4 comes first, and within each kind the network's own addresses last."""
    addresses = [ipaddress.ip_address(text) for texts in interfaces.values() for text in texts if "%" not in text]
    found = {each for each in addresses if not each.is_loopback and not each.is_unspecified}
    return [str(each) for each in sorted(found, key=lambda each: (each.version, each.is_link_local, int(each)))]


def _interfaces() -> dict[str, list[str]]:
    """The IP addresses of each interface that is up."""
    families, stats = (socket.AF_INET, socket.AF_INET6), psutil.net_if_stats()
    return {
        name: [each.address for each in addresses if each.family in families]
        for name, addresses in psutil.net_if_addrs().items()
        if name in stats and stats[name].isup
    }


def _toward(address: tuple[str, int]) -> str | None:
    """Our address on the route to `address`. None without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)
        except OSError:
            return None
        ip: str = probe.getsockname()[0]
        return ip
