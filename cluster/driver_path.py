"""Keeps the working directory of a command off the import path of Ray's workers.

Ray puts the driver's working directory at the front of the import path of all its workers. If this directory has a folder
`engine` or `cluster`, the workers would import it instead of our package.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

# The directory of our own packages. Tests and benchmarks run there, and their workers import from it.
_ROOT = Path(__file__).resolve().parents[1]


class _Closed(list[str]):
    """A list that ignores the driver's directories that Ray adds."""

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
