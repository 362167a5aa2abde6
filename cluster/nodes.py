"""Describes the nodes of a cluster as plain data: their cards, and the class that equal nodes share.

`cluster/inventory.py` reads a running node. `load_nodes` reads a file, so a cluster can be planned before it is bought.
"""

import platform
import re
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from cluster.files import ClusterError, read_yaml
from cluster.measurement import Measurement
from cluster.numbers import MOST, MOST_GIB, Float, Int
from engine.host import UNIFIED_RESERVE as UNIFIED_RESERVE

GIB = 1 << 30
# Bytes left to the system, like `UNIFIED_RESERVE` on machines whose GPU shares the host's memory.
HOST_RESERVE = 4 * GIB
CARD_RESERVE = GIB // 4

_LABEL_LENGTH = 63  # the longest value of a label in Ray and Kubernetes

_ARCHS = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU, or one MIG slice of a GPU.

    `total_bytes` is the card's memory; with `unified`, the host's memory. `free_bytes` is None if it was not measured.
    """

    name: str
    total_bytes: int
    free_bytes: int | None = None
    unified: bool = False
    uuid: str | None = None
    source: str = "file"  # the source of these two values
    capability: tuple[int, int] | None = None  # compute capability, such as (12, 1); None if unknown

    @property
    def is_slice(self) -> bool:
        """Whether this is a MIG slice. CUDA gives a process at most one slice."""
        return " mig " in f" {self.name.lower()} "


@dataclass(frozen=True, slots=True)
class Node:
    """One machine. `read_at` is in seconds since the epoch. It is None for a node from a file."""

    name: str
    arch: str  # amd64 or arm64
    ram_bytes: int
    num_cpus: int
    cards: tuple[Card, ...] = ()
    reserve_bytes: int | None = None  # None means the default for the kind of node
    read_at: float | None = None
    cpu_bf16: bool = False  # whether the CPUs have instructions for bfloat16; False for a node from a file, because it is unknown
    measurement: Measurement | None = None  # by `emberforge doctor --measure` on this node
    measurement_problem: str | None = None  # why the node's measurement is not used
    # Of a group (`cluster/groups.py`): for each stage of a model its node with only its card. Empty for a machine.
    members: "tuple[Node, ...]" = ()

    @property
    def class_name(self) -> str:
        """The node's class. Nodes of one class are interchangeable: same card, memory and architecture, or the same CPUs.

        The class is also the value of the label by which models are placed. If the cards differ, it names all of them in order.
        """
        if self.members:
            return _shortened(".".join(each.class_name for each in self.members), _LABEL_LENGTH)
        if self.cards:
            cards = [f"{_slug(card.name)}-{_nominal_gib(card.total_bytes)}g" for card in self.cards]
            if not self.is_mixed:
                *_, size = cards[0].rpartition("-")
                end = f"-{size}-{self.arch}"
                return _shortened(_slug(self.cards[0].name), _LABEL_LENGTH - len(end)) + end
            return _shortened(".".join(cards), _LABEL_LENGTH - len(self.arch) - 1) + f"-{self.arch}"
        return f"cpu-{self.num_cpus}c-{round(self.ram_bytes / GIB)}g-{self.arch}"

    @property
    def reserved(self) -> int:
        """Bytes that models leave to the system: of each card, or of the host if there is no card."""
        if self.reserve_bytes is not None:
            return self.reserve_bytes
        if not self.cards:
            return HOST_RESERVE
        return UNIFIED_RESERVE if self.cards[0].unified else CARD_RESERVE

    @property
    def usable_bytes(self) -> int:
        """Bytes that models may take: of each card, or of the host if there is no card.

        Ray chooses the card of a replica on one card. So if the cards differ, each one counts as the smallest. Of a group: the
        bytes of all its cards or hosts.
        """
        if self.members:
            return sum(each.usable_bytes for each in self.members)
        return min((card.total_bytes for card in self.cards), default=self.ram_bytes) - self.reserved

    @property
    def is_mixed(self) -> bool:
        """Whether the cards are of different kinds, so that Ray cannot choose among them."""
        return not self.members and len({(card.name, round(card.total_bytes / GIB)) for card in self.cards}) > 1

    def with_card(self, index: int) -> "Node":
        """The node as if it had only this card."""
        return replace(self, cards=(self.cards[index],))


def checked(node: Node) -> Node:
    """Returns the node. Raises: ClusterError for cards that no model can share, or if no memory is left for models."""
    if node.is_mixed and any(card.unified or card.is_slice for card in node.cards):
        names = ", ".join(sorted(f"{card.name} {round(card.total_bytes / GIB)} GiB" for card in set(node.cards)))
        raise ClusterError(
            f"node {node.name} has cards of different kinds ({names}), and Ray cannot choose among the cards of a node: "
            "start one node per kind, each with its own CUDA_VISIBLE_DEVICES"
        )
    if node.usable_bytes <= 0:
        has = (
            f"{node.cards[0].name} has {node.cards[0].total_bytes / GIB:.2f}"
            if node.cards
            else f"it has {node.ram_bytes / GIB:.2f}"
        )
        raise ClusterError(
            f"node {node.name}: {has} GiB, and a reserve of {node.reserved / GIB:.2f} GiB leaves nothing for models; "
            "set another reserve with reserve_gib"
        )
    return node


def normal_arch(machine: str = platform.machine()) -> str:
    """Raises: ClusterError for a machine that is neither x86-64 nor ARM64."""
    if machine.lower() not in _ARCHS:
        raise ClusterError(f"architecture {machine!r} is not supported; supported are {', '.join(_ARCHS)}")
    return _ARCHS[machine.lower()]


def is_label(text: str) -> bool:
    """Whether Ray accepts the text as the value of a label."""
    return len(text) <= _LABEL_LENGTH and bool(re.fullmatch(r"[a-zA-Z0-9]([a-zA-Z0-9_.-]*[a-zA-Z0-9])?", text))


def _label(name: str) -> str:
    """Raises: ValueError for a name that cannot be a label. Models are pinned to a node by a label with the node's name."""
    if not is_label(name):
        raise ValueError(
            "a node's name has 1 to 63 letters, digits, dots, dashes or underscores, and begins and ends with a letter or a digit"
        )
    return name


def _known_arch(machine: str) -> str:
    if machine.lower() not in _ARCHS:
        raise ValueError(f"not supported; supported are {', '.join(_ARCHS)}")
    return machine


class _FileCard(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(min_length=1)
    vram_gib: Float = Field(gt=0, le=MOST_GIB)
    unified: bool = False


class _FileNode(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, AfterValidator(_label)]
    arch: Annotated[str, AfterValidator(_known_arch)] = "x86_64"
    ram_gib: Float = Field(gt=0, le=MOST_GIB)
    cpus: Int = Field(8, gt=0, le=MOST)
    gpus: list[_FileCard] = []
    reserve_gib: Float | None = Field(None, ge=0, le=MOST_GIB)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")
    nodes: list[_FileNode] = Field(min_length=1)


def load_nodes(path: Path) -> tuple[Node, ...]:
    """Reads an inventory file. Raises: ClusterError naming the place, the value and the allowed values."""
    nodes = tuple(map(_node, read_yaml(path, _File).nodes))
    names = [node.name for node in nodes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ClusterError(f"{path}: two nodes are called {twice!r}; names must differ")
    try:
        return tuple(map(checked, nodes))
    except ClusterError as error:
        raise ClusterError(f"{path}: {error}") from None


def _node(file: _FileNode) -> Node:
    cards = tuple(Card(card.name, int(card.vram_gib * GIB), unified=card.unified) for card in file.gpus)
    node = Node(file.name, normal_arch(file.arch), int(file.ram_gib * GIB), file.cpus, cards)
    return node if file.reserve_gib is None else replace(node, reserve_bytes=int(file.reserve_gib * GIB))


def _nominal_gib(size: int) -> int:
    """Whole GiB. From 64 GiB on in steps of four, because equal machines with shared memory report slightly different sizes."""
    gib = size / GIB
    return round(gib) if gib < 64 else 4 * round(gib / 4)


def _slug(name: str) -> str:
    """A GPU's name as a label: `NVIDIA GeForce RTX 5080` -> `rtx-5080`."""
    short = re.sub(r"\b(nvidia|geforce)\b", "", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", short).strip("-") or "gpu"


def _shortened(slug: str, length: int) -> str:
    """Cuts a long slug to `length`. A digest at the end keeps it unique."""
    if len(slug) <= length:
        return slug
    return f"{slug[: length - 9].rstrip('-')}-{uuid.uuid5(uuid.NAMESPACE_OID, slug).hex[:8]}"
