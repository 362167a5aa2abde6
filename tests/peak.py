"""The peak memory of a call, by torch's allocator."""

from collections.abc import Callable

from torch.autograd.profiler import profile


def peak_bytes(call: Callable[[], object]) -> int:
    """The largest number of bytes of CPU tensors that `call` has allocated at once."""
    with profile(profile_memory=True) as profiler:
        call()
    held = most = 0
    assert profiler.kineto_results is not None
    for event in profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most
