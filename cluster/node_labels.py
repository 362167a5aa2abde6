"""The labels that `emberforge node start` gives a node. Placement reads them to choose nodes for models."""

from collections.abc import Mapping

from cluster.files import ClusterError
from cluster.nodes import GIB, Node, is_label

CLASS_LABEL = "emberforge-class"
NODE_LABEL = "emberforge-node"
VRAM_LABEL = "emberforge-vram-gib"  # GiB of each card that models may take
RESERVE_LABEL = "emberforge-reserve-gib"  # GiB left to the system; absent if the operator set no reserve
ARCH_LABEL = "emberforge-arch"
CAPABILITY_LABEL = "emberforge-cc"  # the cards' compute capability, as in 12.1


def node_labels(node: Node, compute: tuple[int, int] | None) -> dict[str, str]:
    """The labels of a node.

    Args:
        compute: compute capability of the node's cards; None if the node has no card or the capability is unknown.
    Raises: ClusterError if the node's name cannot be the value of a label.
    """
    if not is_label(node.name):
        raise ClusterError(
            f"{node.name!r} cannot name a node: choose one with --name. A name has 1 to 63 letters, digits, dots, dashes and "
            "underscores, and begins and ends with a letter or a digit"
        )
    labels = {CLASS_LABEL: node.class_name, NODE_LABEL: node.name, ARCH_LABEL: node.arch}
    if node.cards:
        labels[VRAM_LABEL] = f"{node.usable_bytes / GIB:.2f}"
    if node.reserve_bytes is not None:
        labels[RESERVE_LABEL] = f"{node.reserve_bytes / GIB:.3f}"
    if compute is not None:
        labels[CAPABILITY_LABEL] = f"{compute[0]}.{compute[1]}"
    return labels


def reserve_of(labels: Mapping[str, str]) -> int | None:
    """The reserve in bytes set by the operator; None if the label is absent. Raises: ClusterError for a bad label."""
    text = labels.get(RESERVE_LABEL)
    try:
        return None if text is None else int(float(text) * GIB)
    except (ValueError, OverflowError):
        raise ClusterError(f"its label {RESERVE_LABEL} is {text!r}, not a number of GiB") from None
