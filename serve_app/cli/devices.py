"""`--devices`: the devices of this machine that compute a model, by the numbers of GPUs, or CPUs."""

import os
from collections.abc import Sequence

from engine.errors import InvalidInput
from serve_app.cli.console import say


def chosen_devices(names: Sequence[str]) -> tuple[str, ...]:
    """The devices that `--devices` means, as `Engine.load` takes them. None named: the first GPU, or a CPU without one.

    A machine without a GPU computes on its CPU instead of GPU 0, and says so.
    Raises: InvalidInput for a device that this machine does not have, a GPU that is named twice, and GPUs beside CPUs.
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
        raise InvalidInput(f"{said}: a GPU is named twice; each stage of the model needs its own")
    return tuple(f"cuda:{number}" for number in numbers)


def show_only(devices: Sequence[str]) -> tuple[str, ...]:
    """Hide all other GPUs from this process and from those that it starts. Call it before CUDA is used.

    Args:
        devices: as `chosen_devices` gives them.
    Returns: as `by_position`.
    """
    if devices[0] == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return tuple(devices)
    numbers = [int(device.removeprefix("cuda:")) for device in devices]  # of those that are visible so far
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[number] if visible != [""] else str(number) for number in numbers)
    return by_position(devices)


def by_position(devices: Sequence[str]) -> tuple[str, ...]:
    """The names for `--devices` where these GPUs alone are visible, as in a replica of Ray, which sees those that it books."""
    return tuple(device if device == "cpu" else str(position) for position, device in enumerate(devices))
