"""Reads `--devices`, the GPUs or CPUs of this machine that compute a model."""

import os
from collections.abc import Sequence

from engine.errors import InvalidInput
from serve_app.cli.console import say


def chosen_devices(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the devices of `--devices` for `Engine.load`. Without names: the first GPU, or the CPU on a machine without a GPU.

    On a machine without a GPU, `--devices 0` means the CPU, and a line says so.
    Raises: InvalidInput for a device that this machine does not have, a GPU that is named twice, or a mix of GPUs and CPUs.
    """
    import torch

    num_gpus = torch.cuda.device_count()
    said = f"--devices {','.join(names)}"
    if not names:
        return ("cuda:0" if num_gpus else "cpu",)
    if all(name == "cpu" for name in names):
        return tuple(names)
    if not all(name.isascii() and name.isdigit() for name in names):
        raise InvalidInput(f"{said}: expected the numbers of GPUs, or cpu, separated by commas")
    numbers = [int(name) for name in names]
    if numbers == [0] and not num_gpus:
        say("this machine has no GPU: the CPU computes")
        return ("cpu",)
    if max(numbers) >= num_gpus:
        raise InvalidInput(f"{said}: this machine has {num_gpus} GPUs, and their numbers begin with 0")
    if len(set(numbers)) < len(numbers):
        raise InvalidInput(f"{said}: a GPU is named twice; each stage of the model needs its own GPU")
    return tuple(f"cuda:{number}" for number in numbers)


def show_only(devices: Sequence[str]) -> tuple[str, ...]:
    """Hides all other GPUs from this process and its children. Call it before the first use of CUDA.

    Args:
        devices: the result of `chosen_devices`.
    Returns: the result of `by_position`.
    """
    if devices[0] == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return tuple(devices)
    numbers = [int(device.removeprefix("cuda:")) for device in devices]  # positions among the GPUs that are visible so far
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[number] if visible != [""] else str(number) for number in numbers)
    return by_position(devices)


def by_position(devices: Sequence[str]) -> tuple[str, ...]:
    """The names of these GPUs in a process that sees no other GPUs, such as a replica, which sees the GPUs that it reserves."""
    return tuple(device if device == "cpu" else str(position) for position, device in enumerate(devices))
