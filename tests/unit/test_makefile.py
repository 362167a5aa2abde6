"""`make serve` makes the virtual environment on a fresh machine, and `make help` lists the targets."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

MAKEFILE = Path(__file__).parents[2] / "Makefile"
# Stands in for a Python without ensurepip as long as the file `broken` exists: `-m venv` fails and leaves a Python without pip
# behind, as Debian's does. Afterwards the Python in the venv prints its arguments.
PYTHON = f"""#!/bin/sh
if [ "$1" != -m ]; then exec {sys.executable} "$@"; fi
for folder; do :; done
mkdir -p "$folder/bin"
if [ -e broken ]; then status=1; else status=0; fi
printf '#!/bin/sh\\necho "$@"\\nexit %s\\n' $status > "$folder/bin/python"
chmod +x "$folder/bin/python"
exit $status
"""


def test_a_venv_without_pip_is_made_again(tmp_path: Path) -> None:
    shutil.copy(MAKEFILE, tmp_path)
    for name in ("pyproject.toml", "constraints.txt", "broken"):
        (tmp_path / name).touch()
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # `make test` runs this

    def make() -> "subprocess.CompletedProcess[str]":
        command = ["make", "--no-print-directory", "PYTHON=./python", ".venv/.installed"]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    assert make().returncode != 0
    assert (tmp_path / ".venv" / "bin" / "python").exists()
    (tmp_path / "broken").unlink()
    made = make()
    assert made.returncode == 0
    assert (tmp_path / ".venv" / ".installed").exists()
    size, pip = made.stdout.index("downloads 3.2 GB"), made.stdout.index("-m pip install")
    assert size < pip
    assert "quiet" not in made.stdout[pip:]  # pip shows its progress


def test_help_has_one_line_for_each_target() -> None:
    made = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=MAKEFILE.parent, capture_output=True, text=True, check=True
    )
    text = MAKEFILE.read_text()
    targets = re.findall(r"^([a-z-]+):", text, re.MULTILINE)
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony.split() == targets
    assert [line.split()[0] for line in made.stdout.splitlines()] == targets
    assert all(len(line.split()) > 1 for line in made.stdout.splitlines())
