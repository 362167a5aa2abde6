"""Describes this machine as a `Node`: cards, memory and cores, each value with its source.

`read_machine` collects facts. The functions on `Facts` are pure, so a test can describe any machine.
"""

import hashlib
import os
import platform
import re
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pynvml  # type: ignore[import-untyped]
import torch

from cluster.files import ClusterError
from cluster.measurement import Circumstances, usable
from cluster.node_token import home_folder
from cluster.nodes import Card, Node, checked, normal_arch
from engine.devices import cpu_name, has_native_bf16
from engine.kernels.compile import source_texts

INTEGRATED = "MemAvailable (integrated GPU)"
_NOT_SUPPORTED = "Not Supported"  # NVML's own text


@dataclass(frozen=True, slots=True)
class NvmlDevice:
    """A GPU or a MIG slice, as NVML describes it. `error` says why the bytes are missing.

    `slices` is None if the GPU is not in MIG mode. It is empty if the GPU is in MIG mode and has no slices.
    """

    name: str
    uuid: str  # GPU-... or MIG-...
    total_bytes: int | None = None
    reserved_bytes: int = 0  # the part of the total that no program can use
    free_bytes: int | None = None
    error: str | None = None
    capability: tuple[int, int] | None = None
    slices: tuple["NvmlDevice", ...] | None = None


@dataclass(frozen=True, slots=True)
class TorchDevice:
    """A GPU as CUDA shows it to torch. `uuid` is bare, without GPU- or MIG-."""

    name: str
    uuid: str
    total_bytes: int
    integrated: bool
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The limits of this process's control group. None means no limit."""

    memory_bytes: int | None = None
    cpus: float | None = None
    memory_folder: Path | None = field(default=None, compare=False)  # the folder of the group with this memory limit


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that the machine reports, without checks."""

    hostname: str
    machine: str
    num_cpus: int  # cores that this process may run on
    mem_total_bytes: int
    mem_available_bytes: int
    cgroup: Cgroup = Cgroup()
    nvml: tuple[NvmlDevice, ...] = ()
    torch: tuple[TorchDevice, ...] = ()
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    read_at: float = 0.0  # seconds since the epoch
    cpu_bf16: bool = False  # whether the CPUs have instructions for bfloat16
    cpu_name: str = ""
    driver: str = ""  # the GPUs'

    @property
    def ram_bytes(self) -> int:
        return min(self.mem_total_bytes, self.cgroup.memory_bytes or self.mem_total_bytes)

    @property
    def usable_cpus(self) -> int:
        return max(1, int(min(self.num_cpus, self.cgroup.cpus or self.num_cpus)))


Source = Callable[[], Facts]
_Device = tuple[NvmlDevice | None, TorchDevice | None]


def read_machine() -> Facts:
    """Asks NVML, torch, the kernel and the control group. Creates no CUDA context, so it takes no GPU memory."""
    memory = psutil.virtual_memory()
    return Facts(
        hostname=socket.gethostname(),
        machine=platform.machine(),
        num_cpus=available_cpus(),
        mem_total_bytes=memory.total,
        mem_available_bytes=memory.available,
        cgroup=_own_cgroup(),
        nvml=_read_nvml(),
        torch=_read_torch(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        read_at=time.time(),
        cpu_bf16=has_native_bf16(torch.device("cpu")),
        cpu_name=cpu_name(),
        driver=_driver(),
    )


def card_of(device: torch.device) -> str:
    """The uuid of a GPU, without a prefix. Empty for a CPU."""
    return _bare(str(torch.cuda.get_device_properties(device).uuid)) if device.type == "cuda" else ""


def available_cpus() -> int:
    """The cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def this_node(name: str | None = None, reserve_bytes: int | None = None, source: Source = read_machine) -> Node:
    """This machine as a node. The node has the host's name unless `name` is given.

    Raises: ClusterError if the cards differ, if a card's memory is unknown, or if no memory is left for models.
    """
    facts = source()
    measurement, problem = usable(home_folder(), circumstances(facts))
    return checked(
        Node(
            name=name or facts.hostname,
            arch=normal_arch(facts.machine),
            ram_bytes=facts.ram_bytes,
            num_cpus=facts.usable_cpus,
            cards=cards(facts),
            reserve_bytes=reserve_bytes,
            read_at=facts.read_at,
            cpu_bf16=facts.cpu_bf16,
            measurement=measurement,
            measurement_problem=problem,
        )
    )


def circumstances(facts: Facts) -> Circumstances:
    """The circumstances on which a measurement of this machine depends. Raises: ClusterError if a card's memory is unknown."""
    found = cards(facts)
    if not found:
        return Circumstances(card=f"{facts.cpu_name or facts.machine}, {facts.usable_cpus} cores", torch=str(torch.__version__))
    return Circumstances(card=found[0].name, driver=facts.driver, torch=str(torch.__version__), kernels=_kernels_digest())


@cache
def _kernels_digest() -> str:
    """The same for the same CUDA sources. Comments and white space do not count."""
    code = [re.sub(r"\s+", " ", re.sub(r"//.*", "", text)).strip() for text in source_texts()]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()[:12]


def cards(facts: Facts) -> tuple[Card, ...]:
    """The cards that a CUDA program sees; each MIG slice is a card. Raises: ClusterError if a card's memory is unknown."""
    return tuple(_card(nvml, seen, facts) for nvml, seen in _devices(facts))


def capability(facts: Facts) -> tuple[int, int] | None:
    """The compute capability of the node's cards, such as (12, 1). None without a card, or if it is unknown."""
    return next((_capability(nvml, seen) for nvml, seen in _devices(facts)), None)


def free_host_bytes(for_gpu: bool = False) -> int:
    """Bytes of the machine's memory that this process may still take: MemAvailable, and within the control group's limit.

    With `for_gpu`, bytes that an integrated GPU may take. The control group does not count this memory.

    No reserve is subtracted. A replica that serves subtracts 1 GiB. The check before a load subtracts 10 GiB
    (`engine.host.free_unified_bytes` says why).
    """
    available, group = psutil.virtual_memory().available, _own_cgroup()
    if for_gpu or group.memory_bytes is None or group.memory_folder is None:
        return available
    return max(0, min(available, group.memory_bytes - _held_bytes(group.memory_folder)))


def visible_devices(devices: Sequence[NvmlDevice], value: str | None) -> tuple[NvmlDevice, ...]:
    """The devices that stay visible with CUDA_VISIBLE_DEVICES = `value`, in the order of `value`. None keeps all.

    As in CUDA, the first unknown entry ends the list, and an entry given twice leaves no device. A GPU in MIG mode stands for
    all of its slices. CUDA would see only the first slice, but here each replica gets a slice of its own.
    """
    if value is None:
        return tuple(part for device in devices for part in _parts(device))
    chosen: list[NvmlDevice] = []
    for entry in value.split(","):
        found = _entry(devices, entry.strip())
        if not found:
            break
        if set(found) & set(chosen):
            return ()
        chosen += found
    return tuple(chosen)


def _entry(devices: Sequence[NvmlDevice], entry: str) -> tuple[NvmlDevice, ...]:
    """The devices that one entry of CUDA_VISIBLE_DEVICES names, by index or by the unambiguous start of a uuid."""
    if entry.isdecimal():
        return _parts(devices[int(entry)]) if int(entry) < len(devices) else ()
    if not entry.startswith(("GPU-", "MIG-")):
        return ()
    slices = [part for device in devices for part in device.slices or ()]
    matches = [device for device in (*devices, *slices) if device.uuid.startswith(entry)]
    return _parts(matches[0]) if len(matches) == 1 else ()


def _parts(device: NvmlDevice) -> tuple[NvmlDevice, ...]:
    """Raises: ClusterError for a GPU in MIG mode without slices, because no program can use such a GPU."""
    if device.slices is None:
        return (device,)
    if not device.slices:
        raise ClusterError(
            f"{device.name} is in MIG mode and has no MIG devices: create some with nvidia-smi mig -cgi PROFILE -C, "
            "or end the mode with nvidia-smi -mig 0"
        )
    return device.slices


def _devices(facts: Facts) -> list[_Device]:
    """Each visible device as NVML and as torch describe it."""
    if facts.torch and not any(device.slices for device in facts.nvml):
        # CUDA orders cards by speed and NVML by bus, so the same index may mean different cards. A uuid identifies a card.
        by_uuid = {_bare(device.uuid): device for device in facts.nvml}
        return [(by_uuid.get(seen.uuid), seen) for seen in facts.torch]
    seen_by_uuid = {seen.uuid: seen for seen in facts.torch}
    return [(device, seen_by_uuid.get(_bare(device.uuid))) for device in visible_devices(facts.nvml, facts.visible)]


def _card(nvml: NvmlDevice | None, seen: TorchDevice | None, facts: Facts) -> Card:
    if nvml is not None:
        name, uuid = nvml.name, nvml.uuid
    else:
        assert seen is not None, "a device that neither NVML nor torch has seen"
        name, uuid = seen.name, f"GPU-{seen.uuid}"
    compute = _capability(nvml, seen)
    unified = _unified(nvml, seen, facts)
    if unified is not None:
        # Without the control group's limit, because it does not count memory that the GPU takes.
        return Card(name, facts.mem_total_bytes, facts.mem_available_bytes, True, uuid, unified, compute)
    if nvml is not None and nvml.total_bytes:
        return Card(name, nvml.total_bytes - nvml.reserved_bytes, nvml.free_bytes, False, uuid, "NVML", compute)
    if seen is not None:
        return Card(name, seen.total_bytes, None, False, uuid, "torch", compute)
    error = nvml.error if nvml is not None else None
    raise ClusterError(f"the memory of {name} is unknown (NVML: {error}): install a CUDA build of torch, which reports it")


def _capability(nvml: NvmlDevice | None, seen: TorchDevice | None) -> tuple[int, int] | None:
    return seen.capability if seen else nvml.capability if nvml else None


def _unified(nvml: NvmlDevice | None, seen: TorchDevice | None, facts: Facts) -> str | None:
    """The source of the values of a card that uses the host's memory. None for a card with its own memory.

    torch reports whether a GPU is integrated. NVML does not: depending on the driver it reports an error, zero, or the host's
    memory.
    """
    if seen is not None:
        return INTEGRATED if seen.integrated else None
    if nvml is None:
        return None
    if nvml.error == _NOT_SUPPORTED:
        return "MemAvailable (NVML: Not Supported, torch sees no GPU)"
    if nvml.total_bytes is not None and (nvml.total_bytes == 0 or abs(nvml.total_bytes - facts.mem_total_bytes) < 1 << 20):
        return f"MemAvailable (NVML: {nvml.total_bytes} bytes, torch sees no GPU)"
    return None


def _bare(uuid: str) -> str:
    return re.sub(r"^(GPU|MIG)-", "", uuid)


def _read_nvml() -> tuple[NvmlDevice, ...]:
    """Empty if NVML is missing or fails. Then torch is the only source."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return tuple(_read_gpu(handle) for handle in handles)
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _driver() -> str:
    """The version of NVIDIA's driver. Empty without one."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ""
    try:
        return str(_asked(pynvml.nvmlSystemGetDriverVersion) or "")
    finally:
        pynvml.nvmlShutdown()


def _read_gpu(handle: Any) -> NvmlDevice:
    mode = _asked(pynvml.nvmlDeviceGetMigMode, handle)
    slices = tuple(_read_slices(handle)) if mode and mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE else None
    return _read_device(
        handle, pynvml.nvmlDeviceGetName(handle), _asked(pynvml.nvmlDeviceGetCudaComputeCapability, handle), slices
    )


def _read_slices(handle: Any) -> Iterator[NvmlDevice]:
    gpu_name, compute = pynvml.nvmlDeviceGetName(handle), _asked(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        part = _asked(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        if part is None:  # any slot may be empty
            continue
        yield _read_device(part, _slice_name(gpu_name, part), compute)


def _slice_name(gpu_name: str, part: Any) -> str:
    """The GPU's name with the profile, as in `NVIDIA A100-SXM4-80GB MIG 1g.10gb`. Older drivers give only the GPU's name."""
    name = str(_asked(pynvml.nvmlDeviceGetName, part) or gpu_name)
    attributes = _asked(pynvml.nvmlDeviceGetAttributes, part)
    if "MIG" in name or attributes is None:
        return name
    return f"{name} MIG {attributes.gpuInstanceSliceCount}g.{round(attributes.memorySizeMB / 1024)}gb"


def _read_device(
    handle: Any, name: str, compute: tuple[int, int] | None, slices: tuple[NvmlDevice, ...] | None = None
) -> NvmlDevice:
    uuid = pynvml.nvmlDeviceGetUUID(handle)
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError as error:
        return NvmlDevice(name, uuid, error=str(error), capability=compute, slices=slices)
    second = _asked(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    reserved = second.reserved if second else 0
    return NvmlDevice(name, uuid, memory.total, reserved, memory.free, None, compute, slices)


def _asked(question: Callable[..., Any], *arguments: Any) -> Any:
    """NVML's answer, or None if NVML raises an error."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None


def _read_torch() -> tuple[TorchDevice, ...]:
    """Empty for a CPU build, and for a driver that does not match the build."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a driver that does not match; the doctor reports it
        num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(_torch_device(torch.cuda.get_device_properties(index)) for index in range(num_devices))


def _torch_device(properties: Any) -> TorchDevice:
    return TorchDevice(
        name=properties.name,
        uuid=_bare(str(properties.uuid)),
        total_bytes=properties.total_memory,
        integrated=bool(properties.is_integrated),
        capability=(properties.major, properties.minor),
    )


@cache
def _own_cgroup() -> Cgroup:
    try:
        membership = Path("/proc/self/cgroup").read_text(encoding="utf-8")
    except OSError:
        return Cgroup()
    return read_cgroup(membership, Path("/sys/fs/cgroup"))


def read_cgroup(membership: str, root: Path) -> Cgroup:
    """The tightest limits of a process's group and of all groups above it. Reads version 1, version 2, or both.

    Args:
        membership: the text of /proc/PID/cgroup.
        root: the folder where the control groups are mounted.
    """
    memory: list[tuple[int, Path]] = []
    cpus: list[float] = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for folder in _upward(root, path):
                memory += [(limit, folder) for limit in _numbers(folder / "memory.max")[:1]]
                cpus += _quota(_numbers(folder / "cpu.max"))
        for controller in controllers.split(","):
            for folder in _upward(root / controller, path) if controller in ("memory", "cpu") else ():
                memory += [(limit, folder) for limit in _numbers(folder / "memory.limit_in_bytes")[:1]]
                cpus += _quota(_numbers(folder / "cpu.cfs_quota_us") + _numbers(folder / "cpu.cfs_period_us"))
    tightest = min(memory) if memory else (None, None)
    return Cgroup(tightest[0], min(cpus, default=None), tightest[1])


def _held_bytes(folder: Path) -> int:
    """Bytes that a group holds and cannot free at once. 0 if the group does not report them."""
    held = next(iter(_numbers(folder / "memory.current") + _numbers(folder / "memory.usage_in_bytes")), 0)
    try:
        words = (folder / "memory.stat").read_text(encoding="utf-8").split()
    except OSError:
        return held
    stat = dict(zip(words[::2], words[1::2], strict=False))
    return held - int(
        stat.get("total_inactive_file", stat.get("inactive_file", 0))
    )  # version 1 has both figures; the first one counts


def _upward(root: Path, path: str) -> Iterator[Path]:
    """The folder of a group and the folders of all groups above it. In a container possibly only the root exists."""
    inner = Path(path.lstrip("/"))
    for part in (inner, *inner.parents):
        yield root / part


def _numbers(file: Path) -> list[int]:
    """The whole numbers in a file. Empty if the file is missing, or holds the word `max`, which means no limit."""
    try:
        words = file.read_text(encoding="utf-8").split()
    except OSError:
        return []
    return [int(word) for word in words] if all(re.fullmatch(r"-?\d+", word) for word in words) else []


def _quota(numbers: list[int]) -> list[float]:
    """Quota and period in microseconds as a number of cores; version 1 writes -1 for no limit."""
    return [numbers[0] / numbers[1]] if len(numbers) == 2 and numbers[0] > 0 and numbers[1] > 0 else []
