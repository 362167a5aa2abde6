"""Nodes: their classes, their memory for models, and the errors of inventory files."""

from pathlib import Path

import pytest

from cluster.files import ClusterError
from cluster.nodes import CARD_RESERVE, GIB, HOST_RESERVE, UNIFIED_RESERVE, Card, Node, checked, is_label, load_nodes, normal_arch
from cluster.throughput import capability_of, has_bf16, is_known, speed_of

EXAMPLE = """\
nodes:
  - {name: spark, arch: aarch64, ram_gib: 119, gpus: [{name: NVIDIA GB10, vram_gib: 119, unified: true}]}
  - {name: pc1, arch: x86_64, ram_gib: 64, gpus: [{name: NVIDIA GeForce RTX 5080, vram_gib: 15.9}]}
  - {name: old, ram_gib: 32, cpus: 12}
"""


def loaded(tmp_path: Path, content: str) -> tuple[Node, ...]:
    file = tmp_path / "nodes.yaml"
    file.write_text(content, encoding="utf-8")
    return load_nodes(file)


def with_card(name: str, gib: float = 24, **more: object) -> Node:
    return Node("n", "amd64", 64 * GIB, 8, (Card(name, int(gib * GIB)),), **more)  # type: ignore[arg-type]


def test_a_file_gives_nodes_with_their_class_and_what_models_may_take(tmp_path: Path) -> None:
    spark, pc, old = loaded(tmp_path, EXAMPLE)
    assert [node.class_name for node in (spark, pc, old)] == ["gb10-120g-arm64", "rtx-5080-16g-amd64", "cpu-12c-32g-amd64"]
    assert spark.usable_bytes == 119 * GIB - UNIFIED_RESERVE
    assert pc.usable_bytes == int(15.9 * GIB) - CARD_RESERVE
    assert old.usable_bytes == 32 * GIB - HOST_RESERVE
    assert (old.num_cpus, pc.num_cpus, pc.read_at) == (12, 8, None)


def test_a_reserve_is_what_the_file_says_even_none(tmp_path: Path) -> None:
    half, none = loaded(
        tmp_path,
        "nodes: [{name: a, ram_gib: 9, reserve_gib: .5}, {name: b, ram_gib: 9, reserve_gib: 0, gpus: [{name: x, vram_gib: 8}]}]",
    )
    assert half.usable_bytes == int(8.5 * GIB)
    assert none.usable_bytes == 8 * GIB


def test_equal_nodes_share_a_class_and_others_do_not() -> None:
    first = with_card("NVIDIA GeForce RTX 4090", 23.99)
    assert with_card("NVIDIA GeForce RTX 4090", 24.01).class_name == first.class_name
    assert with_card("NVIDIA GeForce RTX 4090", 48).class_name != first.class_name
    assert with_card("NVIDIA GB10", 119.2).class_name == with_card("NVIDIA GB10", 121.7).class_name
    assert Node("x", "arm64", 64 * GIB, 8, first.cards).class_name != first.class_name
    assert Node("x", "amd64", 64 * GIB, 8, first.cards * 2).class_name == first.class_name


def test_unlike_cards_are_a_class_of_their_own_in_their_order() -> None:
    l4, t4 = Card("NVIDIA L4", 24 * GIB), Card("NVIDIA T4", 16 * GIB)
    names = [Node("x", "amd64", 64 * GIB, 8, cards).class_name for cards in ((l4, t4), (t4, l4), (l4, l4, t4), (l4, l4), (l4,))]
    assert names == ["l4-24g.t4-16g-amd64", "t4-16g.l4-24g-amd64", "l4-24g.l4-24g.t4-16g-amd64", "l4-24g-amd64", "l4-24g-amd64"]
    assert is_label(Node("x", "amd64", 64 * GIB, 8, (l4, t4) * 8).class_name)


def test_a_class_is_a_label_however_long_the_cards_name() -> None:
    long = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition MIG 1g.24gb"
    names = [with_card(f"{long}{end}").class_name for end in ("", " a", " b" * 99)]
    assert len(set(names)) == 3
    for name in names:
        assert is_label(name)
        assert len(name) <= 63
        assert name.startswith("rtx-pro-6000-blackwell-max-q-")
        assert name.endswith("-24g-amd64")
    assert with_card(long).class_name == names[0]


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("nodes: [{name: a, ram_gb: 4}]", ["nodes.0.ram_gb is not a key", "ram_gib"]),
        ("node: []", ["node is not a key", "nodes"]),
        (
            "nodes: [{name: a, ram_gib: 9, gpus: [{name: x, vram: 4}]}]",
            ["nodes.0.gpus.0.vram is not a key", "vram_gib", "unified"],
        ),
        ("nodes: [{name: a}]", ["nodes.0.ram_gib is missing"]),
        ("nodes: []", ["nodes = []", "at least 1"]),
        ("", ["the file is empty", "a mapping with nodes"]),
        ("- a", ["the file is ['a']", "a mapping with nodes"]),
        ("nodes: [7]", ["nodes.0 is 7", "a mapping with name, arch"]),
        ("nodes: [{name: a, ram_gib: [}]", ["cannot be read", "line 1"]),
        ("nodes:\n- {name: a, ram_gib: !!int ''}", ["'' is not a valid int", "line 2"]),
        ("nodes:\n- {name: a, ram_gib: !!float ''}", ["'' is not a valid float", "line 2"]),
        ("nodes:\n- {name: a, ram_gib: !!bool foo}", ["'foo' is not a valid bool", "line 2"]),
        ("nodes:\n- {name: a, ram_gib: !!timestamp x}", ["'x' is not a valid timestamp", "line 2"]),
        ("nodes:\n- {name: a, ram_gib: 2024-13-45}", ["'2024-13-45' is not a valid timestamp", "line 2"]),
        ("nodes: [{name: a, ram_gib: 9, ram_gib: 8}]", ["the key 'ram_gib' is there twice", "line 1"]),
        ("nodes: [{name: a, ram_gib: 9}]\nnodes: [{name: b, ram_gib: 9}]", ["the key 'nodes' is there twice", "line 2"]),
        ("nodes: [{name: a, ram_gib: -1}]", ["nodes.0.ram_gib = -1", "greater than 0"]),
        ("nodes: [{name: a, ram_gib: 9, cpus: yes}]", ["nodes.0.cpus = True", "expected a number"]),
        ("nodes: [{name: a, ram_gib: 9, reserve_gib: no}]", ["nodes.0.reserve_gib = False", "expected a number"]),
        ("nodes: [{name: a, ram_gib: 9, gpus: [{name: x, vram_gib: yes}]}]", ["nodes.0.gpus.0.vram_gib = True", "a number"]),
        ("nodes: [{name: a, ram_gib: 1e10}]", ["nodes.0.ram_gib = '1e10'", "less than or equal to 1000000"]),
        ("nodes: [{name: a, ram_gib: .nan}]", ["nodes.0.ram_gib = nan"]),
        ("nodes: [{name: a, ram_gib: 9, reserve_gib: 1e300}]", ["nodes.0.reserve_gib", "less than or equal to 1000000"]),
        ("nodes: [{name: a, ram_gib: 9, cpus: 10000000000}]", ["nodes.0.cpus = 10000000000", "less than or equal to 100000"]),
        (
            "nodes: [{name: a, ram_gib: 9, gpus: [{name: x, vram_gib: 1e10}]}]",
            ["nodes.0.gpus.0.vram_gib", "less than or equal to 1000000"],
        ),
        ("nodes: [{name: a, ram_gib: .inf}]", ["nodes.0.ram_gib = inf", "less than or equal to 1000000"]),
        ("nodes: [{name: a, ram_gib: 9, arch: sparc}]", ["nodes.0.arch = 'sparc'", "x86_64"]),
        ("nodes: [{name: a b, ram_gib: 9}]", ["nodes.0.name = 'a b'", "letters"]),
        ("nodes: [{name: a, ram_gib: 9}, {name: a, ram_gib: 8}]", ["two nodes are called 'a'", "differ"]),
        (
            "nodes: [{name: a, ram_gib: 9, gpus: [{name: L4, vram_gib: 24}, {name: H100 MIG 1g.10gb, vram_gib: 10}]}]",
            ["node a", "H100 MIG 1g.10gb 10 GiB, L4 24 GiB", "CUDA_VISIBLE_DEVICES"],
        ),
        ("nodes: [{name: a, ram_gib: 3}]", ["node a", "3.00 GiB", "reserve of 4.00 GiB", "reserve_gib"]),
        (
            "nodes: [{name: a, ram_gib: 9, gpus: [{name: L4, vram_gib: 0.2}]}]",
            ["node a", "L4 has 0.20 GiB", "reserve of 0.25 GiB", "reserve_gib"],
        ),
        (
            "nodes: [{name: a, ram_gib: 9, gpus: [{name: GB10, vram_gib: 9, unified: true}]}]",
            ["GB10 has 9.00 GiB", "reserve of 10.00 GiB"],
        ),
    ],
)
def test_a_bad_file_is_one_sentence_with_the_way_out(tmp_path: Path, content: str, parts: list[str]) -> None:
    with pytest.raises(ClusterError) as caught:
        loaded(tmp_path, content)
    message = str(caught.value)
    assert "\n" not in message
    for part in ("nodes.yaml", *parts):
        assert part in message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"none\.yaml cannot be read.*No such file"):
        load_nodes(tmp_path / "none.yaml")


def test_cards_that_differ_only_in_bytes_are_one_kind() -> None:
    cards = (Card("NVIDIA H200", 140 * GIB), Card("NVIDIA H200", 140 * GIB - 4096))
    node = Node("h", "amd64", 64 * GIB, 8, cards)
    assert checked(node) is node


def test_architectures_have_one_spelling() -> None:
    assert [normal_arch(name) for name in ("x86_64", "AMD64", "aarch64", "arm64")] == ["amd64", "amd64", "arm64", "arm64"]
    with pytest.raises(ClusterError, match=r"'riscv64' is not supported; supported are x86_64"):
        normal_arch("riscv64")


def test_a_longer_name_is_not_taken_for_a_shorter_one() -> None:
    names = ["NVIDIA L4", "NVIDIA L40", "NVIDIA L40S", "NVIDIA GeForce RTX 5070", "NVIDIA GeForce RTX 5070 Ti"]
    assert len({speed_of(with_card(name)) for name in names}) == len(names)
    assert all(is_known(with_card(name)) for name in names)
    assert not is_known(with_card("NVIDIA GH200 480GB"))


def test_a_slice_is_as_fast_as_its_share() -> None:
    whole, slice_ = with_card("NVIDIA H100 80GB HBM3"), with_card("NVIDIA H100 80GB HBM3 MIG 2g.20gb")
    part, all_ = speed_of(slice_), speed_of(whole)
    assert (part.gemm / all_.gemm, part.copy / all_.copy) == pytest.approx((2 / 7, 2 / 7))


def test_bfloat16_begins_with_ampere() -> None:
    old = ["Tesla T4", "Tesla V100-SXM2-16GB", "NVIDIA GeForce RTX 2080 Ti", "NVIDIA GeForce GTX 1080"]
    new = ["NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 3090", "NVIDIA L4", "NVIDIA GB10"]
    assert [has_bf16(with_card(name)) for name in old + new] == [False] * 4 + [True] * 4
    assert not has_bf16(Node("c", "amd64", 64 * GIB, 8))


def test_what_a_card_says_of_itself_counts_before_its_name() -> None:
    names = {"Tesla T4": (7, 5), "NVIDIA A100-SXM4-80GB": (8, 0), "NVIDIA RTX A6000": (8, 6), "NVIDIA RTX 3000 Ada": (8, 9)}
    assert {name: capability_of(with_card(name)) for name in names} == names
    asked = Node("n", "amd64", 64 * GIB, 8, (Card("A card of tomorrow", GIB, capability=(13, 0)),))
    assert capability_of(asked) == (13, 0)
    assert capability_of(Node("c", "amd64", 64 * GIB, 8)) is None
