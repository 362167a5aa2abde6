"""The `emberforge` command. Ray is imported only after its environment is set, so the imports here stay light."""

import inspect
import json
import os
import re
import shlex
import signal
import socket
import sys
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from time import monotonic, sleep
from types import FrameType
from typing import Annotated, Any

import grpc
import torch
import typer
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster import doctor as doctor_report
from cluster import node, plan_report, status
from cluster.files import ClusterError
from cluster.inventory import available_cpus
from cluster.local_ray import SERVE_ENV, local_ray
from cluster.model_folder import read_model
from cluster.model_spec import IDLE_PROMPTS
from cluster.models_file import load_models
from cluster.node_head import DEFAULT_PORT
from cluster.node_live import live_nodes
from cluster.nodes import load_nodes
from cluster.plan import Plan
from cluster.serve_config import serve_config
from engine.errors import EmberError, ModelError
from engine.kernels import report as kernel_report
from engine.model.config import ModelConfig
from serve_app import keys
from serve_app.cli import tei
from serve_app.settings import Settings, SettingsError, load_settings

cli = typer.Typer(help="Serve embedding models over HTTP.", no_args_is_help=True, add_completion=False)
console = Console(highlight=False, soft_wrap=True, stderr=True)

_READY_TIMEOUT_S = 60.0


def main() -> None:
    """Entry point: an error meant for the user is one line on stderr and exit status 1."""
    arguments, secrets = tei.without_secrets(sys.orig_argv)
    if secrets:  # `ps` shows a command line to everybody, and Ray keeps it with the job
        os.execve(sys.executable, arguments, os.environ | secrets)  # noqa: S606
    try:
        cli(tei.with_values(sys.argv[1:]))
    except EmberError as error:
        console.print(f"[red]error:[/] {escape(str(error))}", markup=True)
        sys.exit(1)


def _with_settings(command: Callable[..., None], as_tei: bool = False, **own: Any) -> Callable[..., None]:
    """Give `command(settings, ...)` an option for every setting, so that a setting is described in one place.

    With `as_tei` TEI's options and its environment are taken too.
    """

    def run(config: Path | None, **values: Any) -> None:
        arguments = {name: values.pop(name) for name in own}
        given = tei.translate(values, os.environ) if as_tei else tei.Given()
        for note in given.notes:
            _say(note)
        os.environ.update(given.environment)
        ours = {name: value for name, value in values.items() if name in Settings.model_fields}
        command(load_settings(ours | given.flags, config=config, tei=given.variables), **arguments)

    def parameter(name: str, annotation: Any) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=None)

    aliases = {option.key: [f"--{option.name}"] for option in tei.OPTIONS if as_tei and option.setting and tei.is_setting(option)}
    if as_tei:
        aliases["port"] = ["-p"]
    parameters = []
    for name, field in Settings.model_fields.items():
        default = "" if "[default" in (field.description or "") else f" [default: {field.default}]"
        text = f"{field.description}{default} (env EMBERFORGE_{name.upper()})"
        if name == "models":
            kind: Any = Annotated[list[str] | None, typer.Argument(metavar="[MODEL]...", help=text, show_default=False)]
        else:
            one_or_more: Any = list[str] if field.annotation == tuple[str, ...] else str
            spellings = [_flag(name), *aliases.get(name, [])]
            kind = Annotated[one_or_more | None, typer.Option(*spellings, help=text, show_default=False)]
        parameters.append(parameter(name, kind))
    parameters += [
        parameter(tei.parameter_name(option), _tei_option(option))
        for option in tei.OPTIONS
        if as_tei and not tei.is_setting(option)
    ]
    help_text = "YAML file of settings (env EMBERFORGE_CONFIG)"
    parameters.append(parameter("config", Annotated[Path | None, typer.Option(envvar="EMBERFORGE_CONFIG", help=help_text)]))
    parameters += [parameter(name, annotation) for name, annotation in own.items()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _tei_option(option: tei.Option) -> Any:
    """The command line's option for one of TEI's that is none of our settings."""
    text = f"no effect: {option.no_effect}" if option.no_effect else option.differs or option.refused or f"sets {option.variable}"
    help_panel = "Options of text-embeddings-router"
    if not option.takes_value:
        return Annotated[bool | None, typer.Option(f"--{option.name}", help=text, rich_help_panel=help_panel)]
    return Annotated[str | None, typer.Option(f"--{option.name}", help=text, rich_help_panel=help_panel, show_default=False)]


def serve(settings: Settings) -> None:
    """Start Ray and the server on this machine, until Ctrl-C."""
    _end_on_signal()
    _check_port(settings.host, settings.port, "--port")
    if settings.grpc_port is not None:
        _check_port(settings.host, settings.grpc_port, "--grpc-port")
    keys.Keys.of(settings)  # a keys file that is none stops the start here, not in a replica
    for name in ("API_KEY", "EMBERFORGE_API_KEY"):
        os.environ.pop(name, None)  # Ray's processes have no business with it
    configs = []
    for spec in settings.specs:
        console.print(f"model {spec.model}")
        folder, config = read_model(spec, weights=True)
        configs.append(config)
        console.print(f"  {folder}\n  {config.architecture}, {_gives(config)}, up to {config.max_input_length} tokens")
        if config.idle_prompts:
            warning = IDLE_PROMPTS.format(model=spec.model, names=", ".join(config.idle_prompts))
            console.print(f"  [yellow]warning:[/] {escape(warning)}", markup=True)
    num_cpus, num_gpus = available_cpus(), torch.cuda.device_count()
    console.print(f"starting Ray on {num_cpus} CPUs and {num_gpus or 'no'} GPUs")
    try:
        with local_ray(num_cpus, settings.max_concurrent_requests):
            _end_on_signal()  # Ray has put its own handlers in
            console.print("starting Ray Serve and loading the model")
            _deploy(settings, num_cpus, num_gpus)
            _wait_until_ready(settings)
            _announce(settings, configs[0])
            while True:
                sleep(3600)
    except KeyboardInterrupt:
        console.print("stopped")
        os._exit(0)  # Ray has ended; to end it at exit once more, under a thread that still asks it, gives status 1


def config(settings: Settings, output: Path | None) -> None:
    """Write the Serve config of these settings, for `serve deploy FILE` on a running Ray."""
    from serve_app import app

    share = app.machine_share(len(settings.models), available_cpus(), torch.cuda.device_count())
    exports = "".join(f"#   export {name}={value}\n" for name, value in SERVE_ENV.items())
    text = (
        "# Deploy with: serve deploy FILE\n"
        "# Every node needs emberforge installed, and this environment before `ray start`:\n"
        f"{exports}{yaml.safe_dump(app.deploy_config(settings, share), sort_keys=False)}"
    )
    if output is None:
        sys.stdout.write(text)
    else:
        output.write_text(text, encoding="utf-8")
        console.print(f"written to {output}; deploy it with: serve deploy {shlex.quote(str(output))}")


def doctor(settings: Settings) -> None:
    """Print what emberforge sees on this machine, and what is wrong with it."""
    checks = doctor_report.examine(settings.port)
    for check in checks:
        mark = "[green]ok[/]   " if check.problem is None else "[red]wrong[/]"
        console.print(f"{mark} {check.name:<12} {check.found}", markup=True)
        if check.problem is not None:
            console.print(f"                   {check.problem}")
    if any(check.problem for check in checks):
        raise typer.Exit(1)


def kernels(
    arch: Annotated[str, typer.Option(metavar="LIST", help="Chips, as in 90,sm_120")] = kernel_report.DEFAULT_ARCHS,
) -> None:
    """Compile every kernel for every chip named, with no GPU, and print what each takes."""
    capabilities = kernel_report.parse_archs(arch)
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
    output = Console(highlight=False, markup=False, width=120)  # so that a row is one line, in a pipe too
    output.print(table)
    output.print(line, soft_wrap=True)
    if problems:
        raise typer.Exit(1)


def plan(
    models: Annotated[Path, typer.Option(metavar="FILE", help="YAML: the models, how many replicas, where they may be")],
    inventory: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML: the nodes and their cards")] = None,
    live: Annotated[bool, typer.Option("--live", help="Take the nodes of the running cluster instead")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the Serve config there")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON")] = False,
) -> None:
    """Show which model goes on which card of a cluster and why, and write the Serve config that does it.

    Exit status 1 where something has no place; what has one is shown and written all the same.
    """
    if live == (inventory is not None):
        raise ClusterError("say either --inventory FILE, or --live on a node of a running cluster")
    file = load_models(models)  # first: it is the quicker to be wrong
    made = Plan(file, load_nodes(inventory) if inventory else live_nodes(say=_say))
    if as_json:
        sys.stdout.write(json.dumps(plan_report.as_data(made), indent=1) + "\n")
    else:
        plan_report.show(made, Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 120))
    if output is not None:
        text = plan_report.FILE_HEADER + yaml.safe_dump(serve_config(made), sort_keys=False)
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ClusterError(f"{output} cannot be written: {error.strerror}") from error
        console.print(
            f"written to {output}; on the head, in the environment that node start said: serve deploy {shlex.quote(str(output))}"
        )
    if made.unplaced:
        raise ClusterError(f"{plan_report.failure(made)}{'' if output is None else f'; {output} has the rest'}")


def start_node(
    head: Annotated[bool, typer.Option("--head", help="Be the first node, which the others join")] = False,
    address: Annotated[str | None, typer.Option(metavar="HEAD[:PORT]", help="Join the cluster of this head")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where a head listens for its nodes")] = DEFAULT_PORT,
    name: Annotated[str | None, typer.Option(help="What the node is called, if not as its host is")] = None,
    reserve_gib: Annotated[float | None, typer.Option(min=0, help="What models leave of each card, if not the usual")] = None,
    object_store_gib: Annotated[float | None, typer.Option(help="Of Ray's object store, if not 2 or a tenth of memory")] = None,
    dashboard_port: Annotated[int, typer.Option(min=1, max=65535, help="Of Ray's dashboard")] = node.DEFAULT_DASHBOARD_PORT,
) -> None:
    """Make this machine the head of a new cluster, or a node of one that is there. It goes on when this command has ended."""
    node.start(
        head,
        address,
        port=port,
        name=name,
        reserve_gib=reserve_gib,
        object_store_gib=object_store_gib,
        dashboard_port=dashboard_port,
        say=_say,
    )


def stop_node() -> None:
    """End the node that was started on this machine, and nothing else."""
    num_ended = node.stop()
    console.print(f"ended {num_ended} processes" if num_ended else "no node runs here")


def cluster_status(
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as JSON")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every 2 s, until Ctrl-C")] = False,
    address: Annotated[str | None, typer.Option(metavar="HEAD[:PORT]", help="Of the cluster, if not this node's")] = None,
) -> None:
    """Show the cluster's nodes with their cards, and its pools with their load."""
    if as_json and watch:
        raise ClusterError("say either --json or --watch")
    output = Console(width=None if sys.stdout.isatty() else 160)
    with status.watching(address) as watcher:
        if watch:
            status.show_forever(watcher, output)
        elif as_json:
            sys.stdout.write(json.dumps(status.as_data(watcher.look()), indent=1) + "\n")
        else:
            status.show(watcher.look(), output)


KeysFile = Annotated[
    Path, typer.Option("--file", "-f", envvar="EMBERFORGE_API_KEYS_FILE", help="The keys file, as given to --api-keys-file")
]
KeyName = Annotated[str, typer.Argument(metavar="NAME", help="What the key is called: who has it, or for what")]


def add_key(name: KeyName, file: KeysFile) -> None:
    """Make a key and print it, this once: the file has only its hash. Servers take it within a second or two."""
    key = keys.add_key(file, name)
    console.print(f"{file}: {name} added; this is the key, which is kept nowhere:", markup=False)
    sys.stdout.write(key + "\n")


def list_keys(file: KeysFile) -> None:
    """Print the names of the keys."""
    for name in keys.read_keys(file):
        sys.stdout.write(name + "\n")


def remove_key(name: KeyName, file: KeysFile) -> None:
    """Take a key back. Servers refuse it within a second or two."""
    keys.remove_key(file, name)
    console.print(f"{file}: {name} removed", markup=False)


cli.command()(_with_settings(serve, as_tei=True))
cli.command()(
    _with_settings(
        config, as_tei=True, output=Annotated[Path | None, typer.Option("--output", "-o", help="File [default: stdout]")]
    )
)
cli.command()(_with_settings(doctor))
cli.command()(kernels)
cli.command()(plan)

node_commands = typer.Typer(help="Make this machine a node of a cluster, and undo it.", no_args_is_help=True)
node_commands.command("start")(start_node)
node_commands.command("stop")(stop_node)
cli.add_typer(node_commands, name="node")

cluster_commands = typer.Typer(help="Look at the running cluster.", no_args_is_help=True)
cluster_commands.command("status")(cluster_status)
cli.add_typer(cluster_commands, name="cluster")

keys_commands = typer.Typer(help="Make and take back the API keys of a keys file.", no_args_is_help=True)
keys_commands.command("add")(add_key)
keys_commands.command("list")(list_keys)
keys_commands.command("remove")(remove_key)
cli.add_typer(keys_commands, name="keys")


def _say(line: str) -> None:
    """A line as it is: rich would take an IPv6 address in brackets for a style."""
    console.print(line, markup=False)


def _end_on_signal() -> None:
    """Make the first Ctrl-C or SIGTERM end the server in order; more of them change nothing."""

    def end(_number: int, _frame: FrameType | None) -> None:
        for other in (signal.SIGINT, signal.SIGTERM):
            signal.signal(other, signal.SIG_IGN)
        console.print("stopping: requests in flight are finished first, which takes a minute at most")
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def _check_port(host: str, port: int, flag: str) -> None:
    """HAProxy would only fail minutes later, and not by name. Raises: SettingsError."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise SettingsError(f"cannot listen on {host}:{port} ({error.strerror}); choose another with {flag}") from error


def _deploy(settings: Settings, num_cpus: int, num_gpus: int) -> None:
    from serve_app import app

    try:
        app.run(settings, app.machine_share(len(settings.models), num_cpus, num_gpus))
    except RuntimeError as error:
        from ray import serve

        failed = (each.message for its in serve.status().applications.values() for each in its.deployments.values())
        raise ModelError(f"the server did not start: {_last_words(failed) or error}") from error


def _last_words(messages: Iterable[str]) -> str:
    """What a replica raised, of the traceback that Serve keeps: its own error only names the deployment."""
    message = next((each for each in messages if "Traceback" in each), "")
    return re.sub(r"^(engine|serve_app)[\w.]*: ", "", message.rstrip().rpartition("\n")[2])


def _wait_until_ready(settings: Settings) -> None:
    """Ask for health through HAProxy, the way a client comes in: it hears of a replica's two ports at different moments."""
    asks: list[Callable[[], Any]] = [lambda: urllib.request.urlopen(f"{_address(settings)}/health", timeout=2).close()]  # noqa: S310 - our own address
    if settings.grpc_port is not None:
        asks.append(lambda: _ask_grpc(settings))
    deadline = monotonic() + _READY_TIMEOUT_S
    for ask in asks:
        while True:
            try:
                ask()
                break
            except (OSError, grpc.RpcError) as error:
                if monotonic() > deadline:
                    raise ModelError(f"no answer on {_address(settings)} within {_READY_TIMEOUT_S:g} s: {error}") from error
                sleep(0.1)


def _ask_grpc(settings: Settings) -> None:
    host = _address(settings).removeprefix("http://").rpartition(":")[0]
    with grpc.insecure_channel(f"{host}:{settings.grpc_port}") as channel:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)


def _gives(config: ModelConfig) -> str:
    if config.task == "embedding":
        return f"{config.embedding_size} dimensions"
    return config.task if config.task == "reranker" else f"{config.task} of {len(config.labels)} labels"


def _example(config: ModelConfig, name: str) -> tuple[str, str]:
    """(path, body) of a request that a model of this kind answers."""
    if config.task == "reranker":
        return "/rerank", '{"query": "What is a greeting?", "texts": ["Hello, world", "The sky is blue"]}'
    if config.task == "classifier":
        return "/predict", '{"inputs": "Hello, world"}'
    if config.pooling == "splade":
        return "/embed_sparse", '{"inputs": "Hello, world"}'
    return "/v1/embeddings", f'{{"model": "{name}", "input": "Hello, world"}}'


def _announce(settings: Settings, config: ModelConfig) -> None:
    """`config` is the first model's, which an example is for."""
    from serve_app import app

    address = _address(settings)
    console.print(f"[bold green]ready[/] {address}  (docs: {address}/docs)", markup=True)
    for name in settings.names[1:]:
        console.print(f"      {address}{app.route_prefix(settings, name)}  {name}")
    if settings.grpc_port is not None:
        console.print(f"      {address.removeprefix('http://').rpartition(':')[0]}:{settings.grpc_port}  (gRPC)")
    key = "-H 'Authorization: Bearer KEY' " if settings.api_key or settings.api_keys_file else ""
    path, body = _example(config, settings.names[0])
    console.print(f"\ncurl {address}{path} -H 'Content-Type: application/json' {key}-d '{body}'\n")


def _address(settings: Settings) -> str:
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host  # noqa: S104
    return f"http://{host}:{settings.port}"
