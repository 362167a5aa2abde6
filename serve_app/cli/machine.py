"""`emberforge doctor` and `emberforge kernels`: examine this machine, and compile all kernels."""

import sys
from time import monotonic
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from engine.errors import InvalidInput
from serve_app.cli.console import console, say
from serve_app.settings import Settings


def doctor(settings: Settings, measure: bool | None, report: bool | None) -> None:
    """Print the hardware, software and models that emberforge finds on this machine, and their problems.

    With --measure: check each kernel on this machine's GPU and measure the GPU's speed, in two minutes, without a network.
    """
    if measure:
        _measure(bool(report))
        return
    if report:
        raise InvalidInput("--report prints the result of --measure: give --measure --report")
    from cluster.doctor import examine

    checks = examine(settings.specs, settings.port)
    for check in checks:
        mark = "[green]ok[/]   " if check.problem is None else "[red]wrong[/]"
        console.print(f"{mark} {check.name:<12} {escape(check.found)}", markup=True)
        if check.problem is not None:
            console.print(f"                   {check.problem}", markup=False)
    if any(check.problem for check in checks):
        raise typer.Exit(1)


def _measure(report: bool) -> None:
    """Prints progress on standard error and the result on standard output. Saves the result for `emberforge plan --live`."""
    from cluster import measure_report
    from cluster.measure import measure
    from cluster.measurement import save
    from cluster.node_token import home_folder
    from serve_app.garbage import collect_seldom

    collect_seldom()  # as a replica does
    start = monotonic()
    try:
        found = measure(say)
    except KeyboardInterrupt:
        say("stopped: nothing was written")
        raise typer.Exit(130) from None
    file = save(found, home_folder())
    say(f"written to {file} after {monotonic() - start:.0f} s; emberforge plan --live reads this file")
    if report:
        sys.stdout.write(measure_report.markdown(found))
    else:
        output = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 120)
        output.print(measure_report.rates_table(found.models))
        output.print(measure_report.kernels_in_short(found.kernels), soft_wrap=True)
    if any(not each.is_right for each in found.kernels):
        raise typer.Exit(1)


def kernels(
    arch: Annotated[
        str | None,
        typer.Option(metavar="LIST", help=escape("Chips, for example 90,sm_120 [default: every chip that our kernels support]")),
    ] = None,
) -> None:
    """Compile every kernel for the given chips, without a GPU, and print its registers and shared memory."""
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
        line += "; chips before sm_80 have no attention kernel, and fp16 only"
    line += f"; wrong: {'; '.join(problems)}" if problems else "; no register spills"
    output = Console(highlight=False, markup=False, width=120)  # wide enough for one line per row, also in a pipe
    output.print(table)
    output.print(line, soft_wrap=True)
    if problems:
        raise typer.Exit(1)
