"""Ray's workers do not import a folder in the working directory."""

import inspect
import os
from pathlib import Path

import pytest
from ray._private import worker
from ray.core.generated.common_pb2 import JobConfig

from cluster import driver_path, local_ray, node, node_live
from cluster.driver_path import job_config


def test_the_working_directory_is_not_on_the_workers_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = job_config()
    config._py_driver_sys_path.extend([str(tmp_path)])  # as Ray does
    sent = JobConfig.FromString(config._serialize())
    assert list(sent.py_driver_sys_path) == []


def test_in_our_own_folder_ray_does_as_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(driver_path.__file__).parents[1])
    assert job_config() is None


def test_ray_still_does_it_this_way() -> None:
    """Another version of Ray may add the directories elsewhere. Then `cluster/driver_path.py` must be checked again."""
    assert "job_config._py_driver_sys_path.extend(code_paths)" in inspect.getsource(worker.connect)


def test_every_driver_of_ours_takes_it() -> None:
    for module in (local_ray, node_live):
        source = inspect.getsource(module)
        assert source.count("ray.init(") == source.count("job_config=job_config()") == 1


def test_a_node_starts_in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster's Serve is also a driver, with the head's working directory. A script replaces Ray's command."""
    package, home, here = (tmp_path / name for name in ("path/ray/scripts", "home", "here"))
    for folder in (package, home, here / "ray"):
        folder.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (here / "ray" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    (package / "scripts.py").write_text(f"import os; open({str(tmp_path / 'cwd')!r}, 'w').write(os.getcwd())")
    monkeypatch.chdir(here)
    node._run_ray([], os.environ | {"PYTHONPATH": str(tmp_path / "path"), "EMBERFORGE_HOME": str(home)}, "h:1")
    assert (tmp_path / "cwd").read_text() == str(home)
