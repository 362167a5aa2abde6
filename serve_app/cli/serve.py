"""`emberforge serve` and `emberforge config`: start a server on this machine, or write the Serve config for it."""

import errno
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import ceil
from pathlib import Path
from threading import Event
from time import monotonic, sleep
from types import FrameType
from typing import Any

import yaml
from rich.markup import escape

from cluster.model_spec import IDLE_PROMPTS, pool_name
from engine.errors import EmberError, ModelError
from engine.model.config import ModelConfig
from serve_app.admission.key_file import read_keys
from serve_app.cli.console import console, report
from serve_app.cli.devices import by_position, chosen_devices, show_only
from serve_app.settings import GATEWAY, Settings, SettingsError

_OF_THIS_MACHINE = ("127.0.0.1", "::1", "localhost")
_READY_TIMEOUT_S = 60.0
# The port in an error of HAProxy, or of Serve's proxy, that cannot listen there.
_TAKEN = re.compile(r"(?:cannot bind socket \(Address already in use\) for \[|Failed to bind to address ')\S*:(\d+)[]']")
# A machine with few cores may have several gateways too, because a second one answers while the first one restarts.
_GATEWAYS_ON_ANY_MACHINE = 8
# With 64 requests for each of eight gateways, an H200 reached only 0.91 of the engine's rate (docs/decisions/039).
_REQUESTS_IN_A_GATEWAY = 128


def serve(settings: Settings) -> None:
    """Start the server, with its own Ray, on this machine. Ctrl-C stops it."""
    import torch

    from cluster import logs
    from cluster.inventory import available_cpus
    from cluster.local_ray import local_ray
    from cluster.model_files import check_files
    from cluster.model_folder import pinned, read_model
    from engine.devices import choose_dtype
    from serve_app.observe import traces

    logs.set_up("serve")
    _end_on_signal()
    _check_environment()
    _check_machine()
    settings = _for_this_machine(settings)
    if settings.devices:
        settings = settings.model_copy(update={"devices": show_only(chosen_devices(settings.devices))})
    _check_port(settings.host, settings.port, "--port")
    if settings.grpc_port is not None:
        _check_port(settings.host, settings.grpc_port, "--grpc-port")
    num_cpus = available_cpus()
    _check_gateways(settings.num_gateways, num_cpus)
    if settings.api_keys_file is not None:
        read_keys(Path(settings.api_keys_file))  # an invalid keys file must stop the start here, not in a replica
    traces.check()
    for name in ("API_KEY", "EMBERFORGE_API_KEY"):
        os.environ.pop(name, None)  # Ray's processes must not inherit the variable
    configs, models, num_gpus = [], [], torch.cuda.device_count()
    for spec in settings.specs:
        report(f"model {spec.model}")
        pin = pinned(spec)  # a replica that starts a week later must load the same revision
        models.append(pin.model)
        folder, config = read_model(pin, weights=True)
        check_files(folder, config)
        configs.append(config)
        if not num_gpus:  # a GPU's capability would take memory of the GPU, so its replica checks it
            choose_dtype(spec.dtype, torch.device("cpu"), overflows_float16=False)
        report(f"  {folder}\n  {config.architecture}, {_gives(config)}, up to {config.max_input_length} tokens")
        if (most := spec.max_input_tokens or 0) > config.max_input_length:
            report(f"  [yellow]warning:[/] max_input_tokens is {most}, which has no effect: the model takes fewer", markup=True)
        if config.idle_prompts:
            warning = IDLE_PROMPTS.format(model=spec.model, names=", ".join(config.idle_prompts))
            report(f"  [yellow]warning:[/] {escape(warning)}", markup=True)
    settings = settings.model_copy(update={"models": tuple(models), "served_model_name": settings.names})
    settings = _with_cache(settings, configs, num_gpus)
    settings = _with_requests(_with_gateways(settings, configs, num_gpus))
    # HAProxy's limit is for each process that takes requests.
    most_requests = ceil(settings.max_concurrent_requests / max(1, settings.num_gateways))
    report(f"starting Ray on {num_cpus} CPUs and {num_gpus or 'no'} GPUs")
    try:
        with _in_one_sentence(settings.port, settings.grpc_port), local_ray(num_cpus, most_requests, settings.host):
            _end_on_signal()  # again, because Ray has replaced the handlers
            _end_if_asked()
            report("starting Ray Serve and loading the model")
            _deploy(settings, num_cpus, num_gpus)
            _end_if_asked()
            _wait_until_ready(settings)
            _end_if_asked()
            _announce(settings, configs[0])
            while True:
                sleep(3600)
    except KeyboardInterrupt:
        report("stopped")
        logs.copy_rest()
        os._exit(0)  # not sys.exit: Ray's exit handlers would stop Ray a second time, and fail with status 1


def config(settings: Settings, output: Path | None) -> None:
    """Write a Serve config with these settings, for `serve deploy FILE` on a running Ray."""
    import torch

    from cluster.inventory import available_cpus
    from cluster.local_ray import SERVE_ENV
    from cluster.model_folder import pinned, read_model
    from serve_app import app

    num_gpus = torch.cuda.device_count()
    if num_gpus and settings.gateways is None:
        configs = [read_model(pinned(spec))[1] for spec in settings.specs]
        settings = _with_gateways(settings, configs, num_gpus)
    settings = _with_requests(settings)
    settings = settings.model_copy(update={"devices": by_position(settings.devices)})
    share = app.machine_share(len(settings.models), available_cpus(), num_gpus, settings.devices)
    traced = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("OTEL_") and not name.endswith("_HEADERS")  # these hold secrets
    }
    exports = "".join(f"#   export {name}={shlex.quote(value)}\n" for name, value in (SERVE_ENV | traced).items())
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


_asked_to_end = Event()


def _end_on_signal() -> None:
    """Makes the first Ctrl-C or SIGTERM stop the server gracefully. Ignores further signals."""

    def end(_number: int, _frame: FrameType | None) -> None:
        _asked_to_end.set()
        for other in (signal.SIGINT, signal.SIGTERM):
            signal.signal(other, signal.SIG_IGN)
        report("stopping: requests in flight finish first, within at most a minute")
        raise KeyboardInterrupt

    if not _asked_to_end.is_set():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end)


def _end_if_asked() -> None:
    """Raises: KeyboardInterrupt after a signal. Python drops a handler's exception in some places, such as at a fork."""
    if _asked_to_end.is_set():
        raise KeyboardInterrupt


def _check_environment() -> None:
    """Raises: SettingsError for a Ray without a token: anybody who reaches its ports could run code on this machine."""
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode.lower() != "token":
        raise SettingsError(
            f"RAY_AUTH_MODE is {mode!r}, and a Ray without a token runs code for anybody who reaches its ports: unset it"
        )


def _check_machine() -> None:
    """Raises: SettingsError for a full disk or full shared memory, before Ray waits on it."""
    from cluster import machine_limits

    if problems := machine_limits.problems():
        raise SettingsError("; ".join(problems))


def _check_gateways(number: int, num_cpus: int) -> None:
    """Raises: SettingsError for more processes than the machine can run."""
    most = max(_GATEWAYS_ON_ANY_MACHINE, num_cpus)
    if number > most:
        raise SettingsError(
            f"gateways is {number}, but each gateway is a process that can keep a core busy, and this machine has {num_cpus} "
            f"cores: give at most {most}"
        )


def _for_this_machine(settings: Settings) -> Settings:
    """Sets the address to 127.0.0.1 if neither an address nor a key is given. A container's ports are closed anyway."""
    if settings.has_keys or os.environ.get("EMBERFORGE_IMAGE"):
        return settings
    if "host" in settings.model_fields_set:  # also as TEI's default
        if settings.host not in _OF_THIS_MACHINE:
            report(
                f"[yellow]warning:[/] requests need no API key, and {escape(settings.host)} is open to the network: "
                "set --api-key, or --host 127.0.0.1",
                markup=True,
            )
        return settings
    report("listening on 127.0.0.1 only, because requests need no API key; --host 0.0.0.0 opens the server to the network")
    return settings.model_copy(update={"host": "127.0.0.1"})


def _check_port(host: str, port: int, flag: str) -> None:
    """Raises: SettingsError for a port in use. Otherwise HAProxy would fail a minute later, without the port's number."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        is_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        way_out = "choose an address of this machine with --host" if is_host else f"choose another port with {flag}"
        raise SettingsError(f"cannot listen on {host}:{port} ({error.strerror}); {way_out}") from error


@contextmanager
def _in_one_sentence(port: int, grpc_port: int | None = None) -> Iterator[None]:
    """Turns Ray's errors into one sentence. Ray has ended before, so a process on a port is not ours.

    Raises: ModelError with the error's last line, and with the problems of the machine.
    """
    try:
        yield
    except EmberError:
        raise
    except Exception as error:
        from cluster import machine_limits

        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = lines[-1] if lines else type(error).__name__
        if (taken := _TAKEN.search(str(error))) and (number := int(taken[1])) not in (port, grpc_port):
            # `free_port` chose the port before Ray started. HAProxy and Serve's proxy open it seconds later.
            by = machine_limits.holder(number) or "another process"
            said = f"{by} took port {number}, which this start had chosen for itself; start again, and other ports are chosen"
            raise ModelError(f"the server did not start: {said}") from error
        reasons = machine_limits.problems()
        if not reasons and (holder := machine_limits.holder(port)):
            reasons = [f"{holder} uses port {port} now; choose another port with --port"]
        raise ModelError(f"the server did not start: {'; '.join([said, *reasons])}") from error


def _deploy(settings: Settings, num_cpus: int, num_gpus: int) -> None:
    from ray import serve
    from ray.exceptions import RayError

    from cluster.serve_progress import last_words
    from serve_app import app

    try:
        app.run(settings, app.machine_share(len(settings.models), num_cpus, num_gpus, settings.devices))
    except (RuntimeError, TimeoutError, RayError) as error:
        failed: list[str] = []
        with suppress(Exception):  # if the controller has ended too, the first error says more
            failed = [each.message for its in serve.status().applications.values() for each in its.deployments.values()]
        if not (words := last_words(failed)):
            raise
        raise ModelError(f"the server did not start: {words}") from error


def _wait_until_ready(settings: Settings) -> None:
    """Waits for health answers through HAProxy, which learns a replica's HTTP and gRPC ports at different times."""
    import urllib.request

    import grpc

    # Without the proxies of the environment, because they cannot reach 127.0.0.1 of this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    asks: list[Callable[[], Any]] = [lambda: opener.open(f"{_address(settings)}/health", timeout=2).close()]
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
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    host = _address(settings).removeprefix("http://").rpartition(":")[0]
    with grpc.insecure_channel(f"{host}:{settings.grpc_port}", [("grpc.enable_http_proxy", 0)]) as channel:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)


def _with_cache(settings: Settings, configs: list[ModelConfig], num_gpus: int) -> Settings:
    """Sets the size of the KV cache if several models share a card and one of them generates text.

    Raises: ModelError if the card lacks memory for the cache, or if the memory cannot be determined.
    """
    from cluster.files import ClusterError
    from cluster.inventory import this_node
    from cluster.shared_card import replicas_on_a_card, shared_cache_tokens

    count = replicas_on_a_card(len(configs), num_gpus) if num_gpus else 1
    if count == 1 or settings.cache_tokens is not None or all(config.generation is None for config in configs):
        return settings
    try:
        node = this_node()
    except ClusterError as error:
        raise ModelError(f"the free memory beside {count} models on a card is unknown: {error}; give cache_tokens") from error
    tokens = shared_cache_tokens(node, list(zip(settings.specs, configs, strict=True)), count)
    report(f"{count} models share a card: each generation model gets a KV cache of {tokens} tokens")
    return settings.model_copy(update={"cache_tokens": tokens})


def _with_gateways(settings: Settings, configs: list[ModelConfig], num_gpus: int) -> Settings:
    """Sets the number of gateways by the engines' rates and this machine's cores, if the settings do not give it.

    Without a GPU the number does not change, because the engines need the cores.
    """
    from cluster.files import ClusterError
    from cluster.gateways import gateways_beside_engines
    from cluster.inventory import this_node

    # A single model named `gateway` would have the name of the gateways' application.
    if settings.gateways is None and num_gpus and pool_name(settings.names[0]) != GATEWAY:
        try:
            number = gateways_beside_engines(list(zip(settings.specs, configs, strict=True)), this_node())
        except ClusterError as error:  # for example on a machine with different cards
            report(f"the best number of gateways is unknown, so the server starts few: {error}")
            return settings
        settings = settings.model_copy(update={"gateways": max(number, settings.num_gateways)})
        if settings.num_gateways:
            report(f"{settings.num_gateways} gateways take the requests; --gateways sets another number")
    return settings


def _with_requests(settings: Settings) -> Settings:
    """Sets `max_concurrent_requests` by the number of gateways, if the settings do not give it.

    An engine behind eight gateways has more than 512 requests in flight at 0.9 of its rate (whole_server.md).
    """
    if "max_concurrent_requests" in settings.model_fields_set:
        return settings
    most = max(settings.max_concurrent_requests, _REQUESTS_IN_A_GATEWAY * settings.num_gateways)
    return settings.model_copy(update={"max_concurrent_requests": most})


def _gives(config: ModelConfig) -> str:
    if config.task == "generation":
        return f"generates text, {config.embedding_size} dimensions" if config.embeds else "generates text"
    if config.task == "embedding":
        return f"{config.embedding_size} dimensions"
    return config.task if config.task == "reranker" else f"{config.task} of {len(config.labels)} labels"


def _example(config: ModelConfig, name: str) -> tuple[str, str]:
    """Returns: (path, body) of an example request for a model of this kind."""
    if config.task == "generation":
        message = '{"role": "user", "content": "What is the capital of France?"}'
        return "/v1/chat/completions", f'{{"model": "{name}", "messages": [{message}]}}'
    if config.task == "reranker":
        return "/rerank", '{"query": "What is a greeting?", "texts": ["Hello, world", "The sky is blue"]}'
    if config.task == "classifier":
        return "/predict", '{"inputs": "Hello, world"}'
    if config.pooling == "splade":
        return "/embed_sparse", '{"inputs": "Hello, world"}'
    return "/v1/embeddings", f'{{"model": "{name}", "input": "Hello, world"}}'


def _announce(settings: Settings, config: ModelConfig) -> None:
    """Prints the addresses, and an example request for the first model. `config`: of the first model."""
    address = _address(settings)
    report(f"[bold green]ready[/] {address}  (docs: {address}/docs)", markup=True)
    if len(settings.models) > 1:
        report(f"      `model` in a request chooses: {', '.join(settings.names)}")
    if settings.grpc_port is not None:
        report(f"      {address.removeprefix('http://').rpartition(':')[0]}:{settings.grpc_port}  (gRPC)")
    key = "-H 'Authorization: Bearer KEY' " if settings.has_keys else ""
    path, body = _example(config, settings.names[0])
    report(f"\ncurl {address}{path} -H 'Content-Type: application/json' {key}-d '{body}'\n")


def _address(settings: Settings) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"
