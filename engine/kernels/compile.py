"""Compiles CUDA C++ to a cubin for one compute capability with NVRTC, and caches it on disk.

Compiling needs the NVRTC library, which torch's CUDA builds include. It needs no compiler, no headers and no GPU. Macros
specialise a kernel, so a model's widths are constants. The first compilation takes 0.05 to 0.5 s. Later ones come from the cache.
Its key is source, options, target and NVRTC version.
"""

import io
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cuda.bindings import nvrtc
from cuda.core import ObjectCode, Program, ProgramOptions
from cuda.core.utils import FileStreamProgramCache, InMemoryProgramCache, make_program_cache_key

from engine.errors import ModelError
from engine.packages import install

_SOURCES = Path(__file__).parent / "csrc"
# The most shared memory of a block, in bytes, on the chips with the least (sm_86, sm_89, sm_12x).
MAX_SHARED_BYTES = 99 * 1024
_NO_NVRTC = "NVRTC cannot be used ({}); install it with: " + install("nvidia-cuda-nvrtc")


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of one kernel, from the compiler's report."""

    registers: int
    shared_bytes: int  # only static shared memory; the launcher adds dynamic shared memory
    spill_bytes: int


def compile_kernel(source: str, defines: Mapping[str, int], arch: str) -> ObjectCode:
    """Compile `csrc/<source>.cu` for `arch`, e.g. "sm_90", or read the cubin from the cache.

    Raises: ModelError with the compiler's message.
    """
    program = _program(source, defines, arch)
    try:
        return program.compile("cubin", cache=_cache())
    except Exception as error:  # cuda.core's NVRTCError is private
        raise ModelError(f"kernel {source}.cu does not compile for {arch}: {error}") from error


def is_compiled(source: str, defines: Mapping[str, int], arch: str) -> bool:
    """Whether the cache has the cubin of this kernel. If not, `compile_kernel` compiles it."""
    key = make_program_cache_key(code=whole_source(source), code_type="c++", options=_options(defines, arch), target_type="cubin")
    return _cache().get(key) is not None


def compile_report(source: str, defines: Mapping[str, int], arch: str) -> dict[str, Resources]:
    """Compile without the cache and read the assembler's report: entry point -> resources. Needs no GPU."""
    log = io.StringIO()
    _program(source, defines, arch, report=True).compile("cubin", logs=log)
    found = {}
    for part in log.getvalue().split("Compiling entry function ")[1:]:
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        used = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        assert spills, f"the assembler reports in another form now: {part}"
        assert used, f"the assembler reports in another form now: {part}"
        found[part.split("'")[1]] = Resources(int(used[1]), int(shared[1]) if shared else 0, int(spills[1]) + int(spills[2]))
    return found


def read_source(source: str) -> str:
    """The text of `csrc/<source>.cu`."""
    return _read(f"{source}.cu")


def whole_source(source: str) -> str:
    """What is compiled for `csrc/<source>.cu`: the files that all kernels share, and then its text."""
    return "".join(_read(name) for name in ("common.cuh", "async.cuh", "codes.cuh", "cache8.cuh", f"{source}.cu"))


def source_texts() -> list[str]:
    """The texts of all CUDA sources, in the order of their names."""
    return [path.read_text(encoding="utf-8") for path in sorted(_SOURCES.iterdir())]


def nvrtc_version() -> str:
    """The version of NVRTC. Raises: ModelError if NVRTC is not installed."""
    major, minor = _ask(nvrtc.nvrtcVersion)
    return f"{major}.{minor}"


def known_archs() -> list[str]:
    """Returns this NVRTC's compute capabilities, in the form "90". Raises: ModelError if NVRTC is not installed."""
    (archs,) = _ask(nvrtc.nvrtcGetSupportedArchs)
    return [str(arch) for arch in archs]


def cache_folder() -> Path:
    """Returns the folder of cached cubins: `EMBERFORGE_KERNEL_CACHE`, or a folder in the user's cache."""
    chosen = os.environ.get("EMBERFORGE_KERNEL_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "emberforge" / "kernels"


def _ask(question: Callable[[], Any]) -> list[Any]:
    answer: list[Any]
    try:
        status, *answer = question()
    except Exception as error:  # there is no library: cuda.bindings passes on its loader's error
        raise ModelError(_NO_NVRTC.format(error)) from error
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, status
    return answer


def _read(name: str) -> str:
    return (_SOURCES / name).read_text(encoding="utf-8")


def _program(source: str, defines: Mapping[str, int], arch: str, report: bool = False) -> Program:
    options = _options(defines, arch)
    options.ptxas_options = ["-v"] if report else None
    try:
        return Program(whole_source(source), "c++", options)
    except Exception as error:  # there is no library: cuda.core passes on its loader's error
        raise ModelError(_NO_NVRTC.format(error)) from error


def _options(defines: Mapping[str, int], arch: str) -> ProgramOptions:
    return ProgramOptions(
        arch=arch,
        std="c++17",
        device_as_default_execution_space=True,  # NVRTC 13.0 takes lambdas with `auto` parameters for host code
        define_macro=[(name, str(value)) for name, value in sorted(defines.items())],
    )


@cache
def _cache() -> FileStreamProgramCache | InMemoryProgramCache:
    """Returns a cache on disk. In a read-only container, returns a cache of this process."""
    try:
        return FileStreamProgramCache(cache_folder())
    except OSError:
        return InMemoryProgramCache()
