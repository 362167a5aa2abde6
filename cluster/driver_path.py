"""Keeps the working directory of a command off the import path of Ray's workers.

Ray puts the directory in which a driver was started first on the import path of all of its workers. A folder there that is called
`engine` or `cluster` would be imported instead of ours.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Where our own packages are. Tests and benchmarks run there, and their workers import from there too.
_ROOT = Path(__file__).resolve().parents[1]


class _Closed(list[str]):
    """A list to which Ray adds the driver's directories in vain."""

    def extend(self, paths: Iterable[str]) -> None:
        pass


def job_config() -> Any:
    """The `job_config` of `ray.init`. None, which is Ray's default, if the working directory holds our own packages."""
    if Path.cwd() == _ROOT:
        return None
    from ray.job_config import JobConfig

    config = JobConfig()
    config._py_driver_sys_path = _Closed()
    return config
