"""The Dockerfile, checked without Docker: the files that it copies exist and are enough, and its health check works."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from standins import Node

from loadtests.balancer import DEPLOY

ROOT = Path(__file__).parents[2]
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COPIED = {name for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE) for name in line.split()[:-1]}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, str(DEPLOY / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_it_copies_is_what_the_package_is_made_of() -> None:
    packages = {pattern.rstrip("*") for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    project = PROJECT["project"]
    assert {"pyproject.toml", "constraints.txt", project["readme"], *project["license-files"], *packages} == COPIED
    assert [name for name in COPIED if not (ROOT / name).exists()] == []


def test_every_package_reaches_the_last_stage_where_it_was_installed() -> None:
    """An editable install contains only the path of the source folder, so the last stage needs the sources at that path."""
    workdir = re.findall(r"^WORKDIR (.+)$", DOCKERFILE, re.MULTILINE)[0]
    moved = re.findall(r"^COPY --from=build (\S+) (\S+)$", DOCKERFILE, re.MULTILINE)
    assert all(source == target for source, target in moved)
    packages = {name for name in COPIED if (ROOT / name).is_dir()}
    assert {source for source, _ in moved} == {f"{workdir}/{name}" for name in packages | {"venv"}}


def test_the_builder_is_sent_no_less_and_little_more() -> None:
    lines = [line for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == COPIED
    again_out = [line for line in lines[1:] if not line.startswith("!")]
    sources = [path.relative_to(ROOT) for name in COPIED for path in (ROOT / name).rglob("*.cu")]
    assert sources, "the kernels' sources are gone"
    assert not [path for path in sources if any(fnmatch(str(path), pattern.replace("**/", "*")) for pattern in again_out)]


def test_the_health_check_fails_exactly_while_the_server_is_ill(nodes: tuple[Node, Node]) -> None:
    (command,) = re.findall(r"^HEALTHCHECK .*\n\s+CMD (.+)$", DOCKERFILE, re.MULTILINE)
    program, *arguments = json.loads(command)
    assert program == "python"

    def check() -> int:
        env = {"EMBERFORGE_PORT": str(nodes[0].port)}
        return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, check=False).returncode

    assert check() == 0
    nodes[0].set(statuses={"/health": 503})
    assert check() != 0
    nodes[0].kill()
    assert check() != 0
