"""What the machine at hand has, as a `Node`: cards, memory and cores, each figure with where it was read.

`read_machine` gathers facts and judges nothing; all that follows is pure, so every machine can be had in a test.
"""

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
from cluster.nodes import Card, Node, checked, normal_arch

INTEGRATED = "MemAvailable (integrated GPU)"
_NOT_SUPPORTED = "Not Supported"  # NVML's own words


@dataclass(frozen=True, slots=True)
class NvmlDevice:
    """A GPU or a MIG slice, as NVML describes it. `error` is why there are no bytes.

    `slices` is None where the GPU is not in MIG mode, and empty where it is and nobody has made any.
    """

    name: str
    uuid: str  # GPU-... or MIG-...
    total_bytes: int | None = None
    reserved_bytes: int = 0  # part of the total that no program gets
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
    """The limits of the control group this process is in; None where there is none."""

    memory_bytes: int | None = None
    cpus: float | None = None
    memory_folder: Path | None = field(default=None, compare=False)  # of the group that has this limit


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything a machine said, unjudged."""

    hostname: str
    machine: str
    num_cpus: int  # that this process may run on
    mem_total_bytes: int
    mem_available_bytes: int
    cgroup: Cgroup = Cgroup()
    nvml: tuple[NvmlDevice, ...] = ()
    torch: tuple[TorchDevice, ...] = ()
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    read_at: float = 0.0  # seconds since the epoch

    @property
    def ram_bytes(self) -> int:
        return min(self.mem_total_bytes, self.cgroup.memory_bytes or self.mem_total_bytes)

    @property
    def usable_cpus(self) -> int:
        return max(1, int(min(self.num_cpus, self.cgroup.cpus or self.num_cpus)))


Source = Callable[[], Facts]
_Device = tuple[NvmlDevice | None, TorchDevice | None]


def read_machine() -> Facts:
    """Ask NVML, torch, the kernel and the control group. Creates no CUDA context, so it takes no GPU memory."""
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
    )


def available_cpus() -> int:
    """The cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def this_node(name: str | None = None, reserve_bytes: int | None = None, source: Source = read_machine) -> Node:
    """The machine at hand as a node, called after its host unless `name` is given.

    Raises: ClusterError where its cards differ, their memory cannot be known, or nothing is left for models.
    """
    facts = source()
    return checked(
        Node(
            name=name or facts.hostname,
            arch=normal_arch(facts.machine),
            ram_bytes=facts.ram_bytes,
            num_cpus=facts.usable_cpus,
            cards=cards(facts),
            reserve_bytes=reserve_bytes,
            read_at=facts.read_at,
        )
    )


def cards(facts: Facts) -> tuple[Card, ...]:
    """The cards a CUDA program would see, each MIG slice as one. Raises: ClusterError where a card's memory is unknown."""
    return tuple(_card(nvml, seen, facts) for nvml, seen in _devices(facts))


def capability(facts: Facts) -> tuple[int, int] | None:
    """The compute capability of the node's cards, as in (12, 1); None without a card, or where nobody says."""
    return next((_capability(nvml, seen) for nvml, seen in _devices(facts)), None)


def free_host_bytes(for_gpu: bool = False) -> int:
    """Bytes of the machine's memory that this process may still take: MemAvailable, and within the control group's limit.

    With `for_gpu`, bytes that an integrated GPU may take. The control group does not count this memory.
    """
    available, group = psutil.virtual_memory().available, _own_cgroup()
    if for_gpu or group.memory_bytes is None or group.memory_folder is None:
        return available
    return max(0, min(available, group.memory_bytes - _held_bytes(group.memory_folder)))


def visible_devices(devices: Sequence[NvmlDevice], value: str | None) -> tuple[NvmlDevice, ...]:
    """The devices that CUDA_VISIBLE_DEVICES = `value` leaves, in its order; None leaves all.

    As CUDA reads it: what follows the first entry it does not know is ignored, and an entry given twice leaves nothing. A
    GPU in MIG mode stands for its slices. CUDA itself would stop at the first of them, but each replica gets its own.
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
    """What one entry of CUDA_VISIBLE_DEVICES names: an index, or the unambiguous start of a uuid."""
    if entry.isdecimal():
        return _parts(devices[int(entry)]) if int(entry) < len(devices) else ()
    if not entry.startswith(("GPU-", "MIG-")):
        return ()
    slices = [part for device in devices for part in device.slices or ()]
    matches = [device for device in (*devices, *slices) if device.uuid.startswith(entry)]
    return _parts(matches[0]) if len(matches) == 1 else ()


def _parts(device: NvmlDevice) -> tuple[NvmlDevice, ...]:
    """Raises: ClusterError for a GPU that can run nothing, being in MIG mode without a slice."""
    if device.slices is None:
        return (device,)
    if not device.slices:
        raise ClusterError(
            f"{device.name} is in MIG mode and has no MIG devices: create some with nvidia-smi mig -cgi PROFILE -C, "
            "or end the mode with nvidia-smi -mig 0"
        )
    return device.slices


def _devices(facts: Facts) -> list[_Device]:
    """What NVML and torch know of each visible device."""
    if facts.torch and not any(device.slices for device in facts.nvml):
        # CUDA counts the fastest card first and NVML by bus, so an index means different cards; a uuid does not.
        by_uuid = {_bare(device.uuid): device for device in facts.nvml}
        return [(by_uuid.get(seen.uuid), seen) for seen in facts.torch]
    seen_by_uuid = {seen.uuid: seen for seen in facts.torch}
    return [(device, seen_by_uuid.get(_bare(device.uuid))) for device in visible_devices(facts.nvml, facts.visible)]


def _card(nvml: NvmlDevice | None, seen: TorchDevice | None, facts: Facts) -> Card:
    if nvml is not None:
        name, uuid = nvml.name, nvml.uuid
    else:
        assert seen is not None, "a device nobody saw"
        name, uuid = seen.name, f"GPU-{seen.uuid}"
    compute = _capability(nvml, seen)
    unified = _unified(nvml, seen, facts)
    if unified is not None:
        # Without the control group's limit: it does not count memory that the GPU takes.
        return Card(name, facts.mem_total_bytes, facts.mem_available_bytes, True, uuid, unified, compute)
    if nvml is not None and nvml.total_bytes:
        return Card(name, nvml.total_bytes - nvml.reserved_bytes, nvml.free_bytes, False, uuid, "NVML", compute)
    if seen is not None:
        return Card(name, seen.total_bytes, None, False, uuid, "torch", compute)
    error = nvml.error if nvml is not None else None
    raise ClusterError(f"the memory of {name} is unknown (NVML: {error}): install a CUDA build of torch, which can tell")


def _capability(nvml: NvmlDevice | None, seen: TorchDevice | None) -> tuple[int, int] | None:
    return seen.capability if seen else nvml.capability if nvml else None


def _unified(nvml: NvmlDevice | None, seen: TorchDevice | None, facts: Facts) -> str | None:
    """Why this card's memory is the host's, as the source of its figures; None where it has its own.

    torch knows. NVML can only be guessed from: on an integrated GPU it says nothing, zero, or the host's memory, by driver.
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
    """Empty where there is no NVML, or it fails: then torch is left to tell."""
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
        if part is None:  # slots may be empty anywhere
            continue
        yield _read_device(part, _slice_name(gpu_name, part), compute)


def _slice_name(gpu_name: str, part: Any) -> str:
    """The GPU's name with the profile, as in `NVIDIA A100-SXM4-80GB MIG 1g.10gb`. Older drivers give the GPU's alone."""
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
    """NVML's answer, or None where it has none."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None


def _read_torch() -> tuple[TorchDevice, ...]:
    """Empty for a CPU build, and where the driver does not fit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a driver that does not fit is a warning here, and a line in the doctor's report
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
    """The tightest limits on the way from a process's group up to the root; version 1, version 2, or both at once.

    Args:
        membership: what /proc/PID/cgroup says.
        root: where the control groups are mounted.
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
    """What a group holds and would not give back at once; 0 where it does not say."""
    held = next(iter(_numbers(folder / "memory.current") + _numbers(folder / "memory.usage_in_bytes")), 0)
    try:
        words = (folder / "memory.stat").read_text(encoding="utf-8").split()
    except OSError:
        return held
    stat = dict(zip(words[::2], words[1::2], strict=False))
    return held - int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))  # version 1 has both, and means the first


def _upward(root: Path, path: str) -> Iterator[Path]:
    """The folders of a group and of all that contain it. In a container only the root may be there, as its own group."""
    inner = Path(path.lstrip("/"))
    for part in (inner, *inner.parents):
        yield root / part


def _numbers(file: Path) -> list[int]:
    """The whole numbers in a file, none where it is missing. The word `max` ends them: no limit."""
    try:
        words = file.read_text(encoding="utf-8").split()
    except OSError:
        return []
    return [int(word) for word in words] if all(re.fullmatch(r"-?\d+", word) for word in words) else []


def _quota(numbers: list[int]) -> list[float]:
    """Quota and period in microseconds as a number of cores; version 1 writes -1 for no limit."""
    return [numbers[0] / numbers[1]] if len(numbers) == 2 and numbers[0] > 0 and numbers[1] > 0 else []
