"""`emberforge doctor` and `emberforge kernels`: what this machine has, and whether the kernels compile."""

from time import monotonic
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from serve_app.cli.console import console
from serve_app.settings import Settings


def doctor(settings: Settings) -> None:
    """Print what emberforge sees on this machine, and what is wrong with it."""
    from cluster.doctor import examine

    checks = examine(settings.port)
    for check in checks:
        mark = "[green]ok[/]   " if check.problem is None else "[red]wrong[/]"
        console.print(f"{mark} {check.name:<12} {check.found}", markup=True)
        if check.problem is not None:
            console.print(f"                   {check.problem}")
    if any(check.problem for check in checks):
        raise typer.Exit(1)


def kernels(
    arch: Annotated[
        str | None, typer.Option(metavar="LIST", help=escape("Chips, as in 90,sm_120 [default: every chip we have kernels for]"))
    ] = None,
) -> None:
    """Compile every kernel for every chip named, with no GPU, and print what each takes."""
    from engine.kernels import report as kernel_report

    capabilities = kernel_report.parse_archs(kernel_report.DEFAULT_ARCHS if arch is None else arch)
    start = monotonic()
    with console.status("compiling"):
        rows = kernel_report.report(capabilities)
    seconds = monotonic() - start

    table = Table("arch", "kernel", "variant", box=box.SIMPLE_HEAD)
    for heading in ("registers", "shared KB", "spills B"):
        table.add_column(heading, justify="right")
    for row in rows:
        numbers = (str(row.registers), f"{row.shared_bytes / 1024:.1f}", str(row.spill_bytes))
        cells = ("", "", "failed") if row.error else numbers
        table.add_row(row.arch, row.kernel, row.label, *cells, style="red" if kernel_report.problem(row) else None)
    problems = kernel_report.problems(rows)
    line = f"{sum(not row.error for row in rows)} of {len(rows)} kernels compiled in {seconds:.0f} s"
    if min(capabilities) < (8, 0):
        line += "; before sm_80 without attention and in fp16 only"
    line += f"; wrong: {'; '.join(problems)}" if problems else "; nothing spills"
    output = Console(highlight=False, markup=False, width=120)  # wide enough that each row is one line, in a pipe too
    output.print(table)
    output.print(line, soft_wrap=True)
    if problems:
        raise typer.Exit(1)
