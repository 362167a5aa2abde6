"""Two ingress nodes, and a folder with a name short enough for the socket of a load balancer."""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from standins import Node, is_open, wait_for


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    both = Node("node1"), Node("node2")
    try:
        for node in both:
            wait_for(partial(is_open, node.port))
        yield both
    finally:
        for node in both:
            node.kill()


@pytest.fixture
def short() -> Iterator[Path]:
    """pytest's own folders are too long for a Unix socket."""
    with tempfile.TemporaryDirectory(prefix="ef-") as folder:
        yield Path(folder)
