"""Writes results with the machine that they were measured on: JSON for programs, Markdown for people."""

import json
import os
import platform
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """The date, the hardware and the versions of a result."""
    model = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine())
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "date": date.today().isoformat(),
        "cpu": f"{model}, {os.cpu_count()} cores",
        "gpu": ", ".join(gpus) or "none",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "ray", "transformers", "sentence-transformers") if _installed(name)},
    }


def write(name: str, command: str, tables: dict[str, Sequence[dict[str, Any]]], notes: Sequence[str] = ()) -> None:
    """Prints the tables and writes them to `results/<name>.json` and `.md`."""
    facts = machine()
    lines = [f"# {name}", "", f"`{command}`", "", ", ".join(f"{key} {value}" for key, value in facts.items()), ""]
    for title, rows in tables.items():
        columns = list({column: None for row in rows for column in row})
        lines += [f"## {title}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(_cell(row.get(column, "")) for column in columns) + " |" for row in rows] + [""]
    lines += [f"* {note}" for note in notes]
    text = "\n".join(lines).rstrip() + "\n"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    data = {"command": command, "machine": facts, "tables": tables, "notes": list(notes)}
    (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(text)


def _cell(value: Any) -> str:
    return (
        f"{value:,.0f}"
        if isinstance(value, float) and abs(value) >= 100
        else f"{value:.3g}"
        if isinstance(value, float)
        else str(value)
    )


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _installed(name: str) -> bool:
    try:
        version(name)
    except ImportError:
        return False
    return True
