"""What a node tells placement about itself: the labels that `emberforge node start` gives it and models are placed by."""

from collections.abc import Mapping

from cluster.files import ClusterError
from cluster.nodes import GIB, Node, is_label

CLASS_LABEL = "emberforge-class"
NODE_LABEL = "emberforge-node"
VRAM_LABEL = "emberforge-vram-gib"  # of one card, what models may take of it
RESERVE_LABEL = "emberforge-reserve-gib"  # what the operator leaves to the system; none where it is the default of its kind
ARCH_LABEL = "emberforge-arch"
CAPABILITY_LABEL = "emberforge-cc"  # as in 12.1


def node_labels(node: Node, compute: tuple[int, int] | None) -> dict[str, str]:
    """The labels of a node with cards of this compute capability. Raises: ClusterError for a name that cannot be one."""
    if not is_label(node.name):
        raise ClusterError(
            f"{node.name!r} cannot name a node: choose one with --name, of at most 63 letters, digits and -_. between them"
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
    """The reserve a node was started with; None for the default of its kind. Raises: ClusterError."""
    text = labels.get(RESERVE_LABEL)
    try:
        return None if text is None else int(float(text) * GIB)
    except (ValueError, OverflowError):
        raise ClusterError(f"its label {RESERVE_LABEL} is {text!r}, not a number of GiB") from None
