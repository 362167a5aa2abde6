"""What keeps two Rays of one machine apart."""

import socket

import pytest

from cluster.local_ray import SERVE_ENV, grpc_ports

LOW, HIGH = (int(SERVE_ENV[f"RAY_SERVE_DIRECT_INGRESS_{end}_GRPC_PORT"]) for end in ("MIN", "MAX"))


def span(ports: dict[str, str]) -> set[int]:
    first, last = map(int, ports.values())
    return set(range(first, last + 1))


def test_each_ray_has_grpc_ports_of_its_own_for_as_long_as_it_runs() -> None:
    with grpc_ports() as one:
        with grpc_ports() as other:
            assert not span(one) & span(other)
            assert span(one) | span(other) <= set(range(LOW, HIGH + 1))
        with grpc_ports() as after:
            assert after == other


def test_ports_that_somebody_shares_are_not_taken() -> None:
    """A replica listens so that others may listen beside it."""
    with grpc_ports() as ports:
        taken = span(ports)
    with (
        socket.create_server(("::", max(taken)), family=socket.AF_INET6, dualstack_ipv6=True, reuse_port=True),
        grpc_ports() as others,
    ):
        assert not span(others) & taken


def test_an_error_of_what_runs_meanwhile_is_its_own() -> None:
    with pytest.raises(OSError, match="theirs"), grpc_ports():
        raise OSError("theirs")
