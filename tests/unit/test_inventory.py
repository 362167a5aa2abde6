"""Nodes from the reports of machines. The reports of GPUs are fake, so the tests need no GPU."""

import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
import torch

from cluster import inventory
from cluster.files import ClusterError
from cluster.inventory import (
    INTEGRATED,
    Cgroup,
    Facts,
    NvmlDevice,
    TorchDevice,
    capability,
    cards,
    free_host_bytes,
    read_cgroup,
    read_machine,
    this_node,
    visible_devices,
)
from cluster.nodes import GIB

MIB = 1 << 20
HOST = Facts("host", "x86_64", num_cpus=16, mem_total_bytes=128 * GIB, mem_available_bytes=100 * GIB, read_at=5.0)
GB10_MEMORY = 127_600_748 << 10
GB10 = Facts(
    "spark",
    "aarch64",
    num_cpus=20,
    mem_total_bytes=GB10_MEMORY,
    mem_available_bytes=52 * GIB,
    nvml=(NvmlDevice("NVIDIA GB10", "GPU-b1", error="Not Supported", capability=(12, 1)),),
    torch=(TorchDevice("NVIDIA GB10", "b1", GB10_MEMORY, True, (12, 1)),),
)


def nvml(name: str, uuid: str, total: int, **more: Any) -> NvmlDevice:
    return NvmlDevice(name, f"GPU-{uuid}", total, free_bytes=total // 2, **more)


def seen(name: str, uuid: str, total: int, compute: tuple[int, int] = (9, 0)) -> TorchDevice:
    return TorchDevice(name, uuid, total, False, compute)


def h200s(count: int) -> Facts:
    devices = [f"{index}{index}" for index in range(count)]
    return replace(
        HOST,
        nvml=tuple(nvml("NVIDIA H200", uuid, 141 * GIB, reserved_bytes=GIB, capability=(9, 0)) for uuid in devices),
        torch=tuple(seen("NVIDIA H200", uuid, 139 * GIB) for uuid in devices),
    )


def mig_a100() -> Facts:
    """One A100 with two slices, beside a whole A100. CUDA shows a program only the first slice."""
    slices = tuple(
        NvmlDevice("NVIDIA A100-SXM4-80GB MIG 3g.40gb", f"MIG-{uuid}", 40 * GIB, free_bytes=39 * GIB) for uuid in ("aa", "ab")
    )
    cut = nvml("NVIDIA A100-SXM4-80GB", "a", 80 * GIB, slices=slices)
    whole = nvml("NVIDIA A100-SXM4-80GB", "b", 80 * GIB)
    return replace(HOST, nvml=(cut, whole), torch=(seen("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "aa", 40 * GIB),))


def test_a_discrete_card_is_what_nvml_says_less_what_it_reserves() -> None:
    facts = replace(
        HOST,
        nvml=(nvml("NVIDIA GeForce RTX 5080", "5", 16303 * MIB, reserved_bytes=300 * MIB),),
        torch=(seen("NVIDIA GeForce RTX 5080", "5", 15900 * MIB, (12, 0)),),
    )
    (card,) = cards(facts)
    assert (card.name, card.uuid, card.source, card.unified) == ("NVIDIA GeForce RTX 5080", "GPU-5", "NVML", False)
    assert (card.total_bytes, card.free_bytes) == (16003 * MIB, 16303 * MIB // 2)
    assert capability(facts) == card.capability == (12, 0)
    node = this_node(source=lambda: facts)
    assert (node.name, node.arch, node.class_name, node.num_cpus, node.read_at) == (
        "host",
        "amd64",
        "rtx-5080-16g-amd64",
        16,
        5.0,
    )


@pytest.mark.parametrize(
    "said",
    [
        NvmlDevice("NVIDIA GB10", "GPU-b1", error="Not Supported"),
        NvmlDevice("NVIDIA GB10", "GPU-b1", total_bytes=0, free_bytes=0),
        NvmlDevice("NVIDIA GB10", "GPU-b1", total_bytes=GB10_MEMORY, free_bytes=3 * GIB),
        NvmlDevice("NVIDIA GB10", "GPU-b1", total_bytes=64 * GIB, free_bytes=60 * GIB),
    ],
    ids=["not-supported", "zero", "the-host's", "anything"],
)
def test_an_integrated_gpu_has_the_hosts_memory_whatever_nvml_says(said: NvmlDevice) -> None:
    (card,) = cards(replace(GB10, nvml=(said,)))
    assert (card.total_bytes, card.free_bytes, card.unified, card.source) == (GB10_MEMORY, 52 * GIB, True, INTEGRATED)


def test_an_integrated_gpu_without_nvml_is_found_by_torch() -> None:
    facts = replace(GB10, nvml=())
    (card,) = cards(facts)
    assert (card.name, card.unified, card.uuid, card.source) == ("NVIDIA GB10", True, "GPU-b1", INTEGRATED)
    assert this_node("one", source=lambda: facts).class_name == "gb10-120g-arm64"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"error": "Not Supported"}, "Not Supported"),
        ({"total_bytes": 0}, "0 bytes"),
        ({"total_bytes": GB10_MEMORY}, f"{GB10_MEMORY} bytes"),
    ],
)
def test_without_torch_a_card_whose_memory_nvml_cannot_tell_shares_the_hosts(said: dict[str, Any], why: str) -> None:
    facts = replace(GB10, torch=(), nvml=(NvmlDevice("NVIDIA GB10", "GPU-b1", capability=(12, 1), **said),))
    (card,) = cards(facts)
    assert (card.unified, card.total_bytes, card.free_bytes) == (True, GB10_MEMORY, 52 * GIB)
    assert why in card.source
    assert "torch sees no GPU" in card.source
    assert capability(facts) == (12, 1)


def test_a_card_whose_memory_nobody_knows_is_refused_with_the_way_out() -> None:
    facts = replace(HOST, nvml=(NvmlDevice("NVIDIA L4", "GPU-4", error="Unknown Error"),))
    with pytest.raises(ClusterError, match=r"NVIDIA L4 is unknown \(NVML: Unknown Error\): install a CUDA build of torch"):
        cards(facts)


@pytest.mark.parametrize("broken", [(), (NvmlDevice("NVIDIA L4", "GPU-4", error="Unknown Error"),)])
def test_where_nvml_fails_torch_gives_the_total_and_nobody_what_is_free(broken: tuple[NvmlDevice, ...]) -> None:
    (card,) = cards(replace(HOST, nvml=broken, torch=(seen("NVIDIA L4", "4", 22 * GIB),)))
    assert (card.total_bytes, card.free_bytes, card.source, card.uuid) == (22 * GIB, None, "torch", "GPU-4")


def test_two_cards_are_two_cards() -> None:
    node = this_node(source=lambda: h200s(2), reserve_bytes=20 * GIB)
    assert [card.uuid for card in node.cards] == ["GPU-00", "GPU-11"]
    assert {card.total_bytes for card in node.cards} == {140 * GIB}
    assert node.usable_bytes == 120 * GIB


def test_cards_of_two_kinds_are_in_the_class_and_count_as_the_smallest() -> None:
    facts = replace(HOST, nvml=(nvml("NVIDIA L4", "4", 22 * GIB), nvml("NVIDIA H200", "0", 140 * GIB)))
    node = this_node(source=lambda: facts, reserve_bytes=2 * GIB)
    assert node.class_name == f"l4-22g.h200-140g-{node.arch}"
    assert node.usable_bytes == 20 * GIB
    assert [node.with_card(index).usable_bytes for index in (0, 1)] == [20 * GIB, 138 * GIB]


def test_cuda_and_nvml_count_differently_and_the_uuid_decides() -> None:
    """CUDA_VISIBLE_DEVICES=0 is the faster card. NVML lists it second, because NVML orders cards by their bus."""
    both = (nvml("NVIDIA T4", "4", 15 * GIB), nvml("NVIDIA H200", "0", 140 * GIB))
    facts = replace(HOST, nvml=both, torch=(seen("NVIDIA H200", "0", 139 * GIB),), visible="0")
    assert [card.name for card in cards(facts)] == ["NVIDIA H200"]


def test_no_gpu_is_a_node_of_its_cpus_and_what_the_container_leaves() -> None:
    node = this_node(source=lambda: replace(HOST, cgroup=Cgroup(memory_bytes=8 * GIB, cpus=2.5)))
    assert (node.cards, node.ram_bytes, node.num_cpus, node.class_name) == ((), 8 * GIB, 2, "cpu-2c-8g-amd64")
    assert capability(HOST) is None


@pytest.mark.parametrize("limit", [8 * GIB, 24 * GIB, 40 * GIB])
def test_a_containers_limit_changes_no_card(limit: int) -> None:
    """The limit does not count memory of a GPU, although an integrated GPU takes memory of the host."""
    in_a_pod = replace(GB10, cgroup=Cgroup(memory_bytes=limit))
    (card,) = cards(in_a_pod)
    assert (card.total_bytes, card.free_bytes) == (GB10_MEMORY, 52 * GIB)
    node, outside = this_node(source=lambda: in_a_pod), this_node(source=lambda: GB10)
    assert (node.class_name, node.usable_bytes) == (outside.class_name, outside.usable_bytes)
    assert node.ram_bytes == limit
    assert cards(replace(h200s(1), cgroup=Cgroup(memory_bytes=limit)))[0].total_bytes == 140 * GIB


def test_a_limit_above_what_the_host_has_is_none() -> None:
    facts = replace(GB10, cgroup=Cgroup(memory_bytes=9_223_372_036_854_771_712, cpus=64.0))
    node = this_node(source=lambda: facts)
    assert (node.cards[0].total_bytes, node.cards[0].free_bytes, node.num_cpus) == (GB10_MEMORY, 52 * GIB, 20)


def test_less_than_one_core_is_one() -> None:
    assert this_node(source=lambda: replace(HOST, cgroup=Cgroup(cpus=0.5))).num_cpus == 1


def test_mig_slices_are_cards_and_their_gpu_is_none() -> None:
    facts = replace(mig_a100(), nvml=mig_a100().nvml[:1])
    node = this_node(source=lambda: facts)
    assert [(card.uuid, card.total_bytes) for card in node.cards] == [("MIG-aa", 40 * GIB), ("MIG-ab", 40 * GIB)]
    assert node.class_name == "a100-sxm4-80gb-mig-3g-40gb-40g-amd64"
    assert capability(facts) == (9, 0)


def test_mig_mode_without_a_slice_is_refused_unless_nobody_asks_for_that_gpu() -> None:
    empty = nvml("NVIDIA A100", "a", 80 * GIB, slices=())
    facts = replace(HOST, nvml=(empty, nvml("NVIDIA A100", "b", 80 * GIB)))
    with pytest.raises(ClusterError, match="MIG mode and has no MIG devices: create some"):
        cards(facts)
    assert [card.uuid for card in cards(replace(facts, visible="1"))] == ["GPU-b"]


@pytest.mark.parametrize(
    ("value", "uuids"),
    [
        (None, ["MIG-aa", "MIG-ab", "GPU-b", "GPU-c"]),
        ("", []),
        ("1", ["GPU-b"]),
        ("2,1", ["GPU-c", "GPU-b"]),
        (" 2 , 1 ", ["GPU-c", "GPU-b"]),
        ("0", ["MIG-aa", "MIG-ab"]),
        ("1,7,2", ["GPU-b"]),
        ("-1", []),
        ("1,-1,2", ["GPU-b"]),
        ("1,1", []),
        ("NoDevFiles", []),
        ("GPU-c", ["GPU-c"]),
        ("GPU-", []),
        ("GPU-x,GPU-b", []),
        ("GPU-b,GPU-x", ["GPU-b"]),
        ("MIG-ab", ["MIG-ab"]),
        ("MIG-ab,MIG-aa", ["MIG-ab", "MIG-aa"]),
        ("MIG-a", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(value: str | None, uuids: list[str]) -> None:
    devices = (*mig_a100().nvml, nvml("NVIDIA L4", "c", 22 * GIB))
    assert [device.uuid for device in visible_devices(devices, value)] == uuids


def test_an_empty_cuda_visible_devices_makes_a_cpu_node() -> None:
    assert cards(replace(h200s(2), torch=(), visible="")) == ()


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_the_tightest_limit_on_the_way_to_the_root_counts(tmp_path: Path) -> None:
    write(tmp_path, memory__max="max", cpu__max="max 100000")
    write(tmp_path / "outer", memory__max=str(8 * GIB), cpu__max="150000 100000")
    write(tmp_path / "outer" / "inner", memory__max="max", cpu__max="400000 100000")
    assert read_cgroup("0::/outer/inner\n", tmp_path) == Cgroup(8 * GIB, 1.5)
    assert read_cgroup("0::/\n", tmp_path) == Cgroup(None, None)


def test_version_1_has_a_tree_per_controller(tmp_path: Path) -> None:
    write(tmp_path / "memory" / "job", memory__limit_in_bytes=str(4 * GIB))
    write(tmp_path / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    write(tmp_path / "cpu" / "job", cpu__cfs_quota_us="300000", cpu__cfs_period_us="100000")
    membership = "5:memory:/job\n3:cpu,cpuacct:/job\n2:devices:/\n0::/\n"
    assert read_cgroup(membership, tmp_path) == Cgroup(4 * GIB, 3.0)
    assert read_cgroup("3:cpu,cpuacct:/\n", tmp_path) == Cgroup(None, None)


def test_in_a_container_the_root_is_the_group(tmp_path: Path) -> None:
    write(tmp_path, memory__max=str(2 * GIB), cpu__max="50000 100000")
    assert read_cgroup("0::/docker/0123\n", tmp_path) == Cgroup(2 * GIB, 0.5)


def test_this_very_machine_can_be_read() -> None:
    facts = read_machine()
    assert facts.mem_total_bytes == psutil.virtual_memory().total
    assert 0 < facts.mem_available_bytes <= facts.mem_total_bytes
    assert facts.num_cpus == len(os.sched_getaffinity(0))
    assert facts.read_at == pytest.approx(time.time(), abs=60)
    assert len(facts.torch) == torch.cuda.device_count()


class FakeNvml:
    """NVML with one A100, in MIG mode and with slices if `slices` is given. A handle is the uuid."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slices: dict[int, str] | None = None, memory: int | None = 80 * GIB):
        self.slices, self.memory, self.open = slices, memory, 0
        for name in (
            *("Init", "Shutdown", "DeviceGetCount", "DeviceGetHandleByIndex", "DeviceGetName", "DeviceGetUUID"),
            *("DeviceGetMemoryInfo", "DeviceGetMigMode", "DeviceGetMaxMigDeviceCount", "DeviceGetMigDeviceHandleByIndex"),
            *("DeviceGetAttributes", "DeviceGetCudaComputeCapability", "DeviceGetHandleByUUID"),
        ):
            monkeypatch.setattr(pynvml, f"nvml{name}", getattr(self, name))

    def Init(self) -> None:
        self.open += 1

    def Shutdown(self) -> None:
        self.open -= 1

    def DeviceGetCount(self) -> int:
        return 1

    def DeviceGetHandleByIndex(self, index: int) -> str:
        return "GPU-a"

    def DeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def DeviceGetName(self, handle: str) -> str:
        return "NVIDIA A100"

    def DeviceGetUUID(self, handle: str) -> str:
        return handle

    def DeviceGetMemoryInfo(self, handle: str, version: int | None = None) -> SimpleNamespace:
        if self.memory is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        total = 10 * GIB if handle.startswith("MIG-") else self.memory
        return SimpleNamespace(total=total, free=total - 2 * GIB, reserved=GIB if version else None)

    def DeviceGetMigMode(self, handle: str) -> list[int]:
        if self.slices is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [pynvml.NVML_DEVICE_MIG_ENABLE, pynvml.NVML_DEVICE_MIG_ENABLE]

    def DeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        return 7

    def DeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:
        if not self.slices or index not in self.slices:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self.slices[index]

    def DeviceGetAttributes(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(gpuInstanceSliceCount=1, memorySizeMB=9856)

    def DeviceGetCudaComputeCapability(self, handle: str) -> tuple[int, int]:
        return (8, 0)


def test_nvml_is_read_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml(monkeypatch)
    assert read_machine().nvml == (NvmlDevice("NVIDIA A100", "GPU-a", 80 * GIB, GIB, 78 * GIB, None, (8, 0)),)
    assert fake.open == 0


def test_what_nvml_cannot_tell_is_kept_as_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(monkeypatch, memory=None)
    assert read_machine().nvml == (NvmlDevice("NVIDIA A100", "GPU-a", error="Not Supported", capability=(8, 0)),)
    assert cards(replace(read_machine(), torch=(), visible=None))[0].unified


def test_mig_slices_are_read_across_empty_slots_and_named_by_their_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(monkeypatch, slices={1: "MIG-x", 4: "MIG-y"})
    (gpu,) = read_machine().nvml
    assert gpu.slices is not None
    assert [part.uuid for part in gpu.slices] == ["MIG-x", "MIG-y"]
    assert {part.name for part in gpu.slices} == {"NVIDIA A100 MIG 1g.10gb"}
    assert {part.total_bytes for part in gpu.slices} == {10 * GIB}


def test_an_nvml_that_does_not_start_is_no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert read_machine().nvml == ()


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"memory.max": "max"}, 52 * GIB),
        ({"memory.max": f"{30 * GIB}"}, 30 * GIB),
        ({"memory.max": f"{30 * GIB}", "memory.current": f"{9 * GIB}"}, 21 * GIB),
        (
            {"memory.max": f"{30 * GIB}", "memory.current": f"{9 * GIB}", "memory.stat": f"anon 7\ninactive_file {4 * GIB}"},
            25 * GIB,
        ),
        ({"memory.max": f"{90 * GIB}", "memory.current": f"{9 * GIB}"}, 52 * GIB),
        ({"memory.max": f"{GIB}", "memory.current": f"{2 * GIB}"}, 0),
    ],
)
def test_what_a_process_may_still_take_of_the_host(
    files: dict[str, str], free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=52 * GIB))
    monkeypatch.setattr(inventory, "_own_cgroup", lambda: read_cgroup("0::/\n", tmp_path))
    assert free_host_bytes() == free
    assert free_host_bytes(for_gpu=True) == 52 * GIB


def test_what_is_free_under_version_1_of_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "memory" / "docker"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{8 * GIB}")
    (folder / "memory.usage_in_bytes").write_text(f"{5 * GIB}")
    (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {2 * GIB}")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=52 * GIB))
    monkeypatch.setattr(inventory, "_own_cgroup", lambda: read_cgroup("4:memory:/docker\n", tmp_path))
    assert free_host_bytes() == 5 * GIB


def test_a_comment_in_a_kernel_makes_no_measurement_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(*texts: str) -> str:
        inventory._kernels_digest.cache_clear()
        monkeypatch.setattr(inventory, "source_texts", lambda: list(texts))
        return inventory._kernels_digest()

    before = digest("int a = 1;  // one\nint b;\n", "int c;")
    assert digest("// new\nint a = 1;\n\nint b;", "int c;  // three") == before
    assert digest("int a = 2;\nint b;", "int c;") != before
    assert digest("int a = 1; int b; int c;") != before
    inventory._kernels_digest.cache_clear()
