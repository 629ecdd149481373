"""The command `pdserve`: options and exit codes. What a command does is imported when it runs, so that help is quick.

Exit codes: 0 ok, 1 failed, 2 wrong usage, 3 the cluster is not healthy.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.keys_options import app as keys_app
from deploy.cli.options import (
    AsJson,
    Attention,
    Autoscale,
    ConfigFile,
    Dtype,
    GrpcPort,
    HttpPort,
    Insecure,
    KVCacheDtype,
    LocalPrefill,
    Lora,
    Model,
    OwnRedisUrl,
    Purpose,
    Quantization,
    Role,
    Seconds,
    Server,
    Speculation,
    Tls,
    Traces,
    Url,
    Wait,
)
from deploy.cli.process_options import deploy, router, worker
from deploy.client.show import DEFAULT_SERVER, DEFAULT_URL
from deploy.load.options import bench

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_UNHEALTHY = 0, 1, 2, 3

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
config_app = typer.Typer(no_args_is_help=True, help="What the settings are and where they come from.")
app.add_typer(config_app, name="config")
app.add_typer(keys_app, name="keys")
app.command()(bench)


def _print_version(is_wanted: bool) -> None:
    from importlib.metadata import version as installed_version

    if is_wanted:
        print(installed_version("pdserve"))
        raise typer.Exit


@app.callback()
def prepare(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and end.")
    ] = False,
) -> None:
    """Serving for large language models, prefill and decode apart."""
    from deploy.config.variables import check_variables

    check_variables(os.environ)


@app.command()
def up(
    model: Model = None,
    lora: Lora = None,
    prefill: Annotated[int | None, typer.Option(min=0, help="Prefill workers (1).")] = None,
    decode: Annotated[int | None, typer.Option(min=0, help="Decode workers (1).")] = None,
    routers: Annotated[int | None, typer.Option(min=1, help="Routers, on ports that follow each other (1).")] = None,
    http_port: HttpPort = None,
    grpc_port: GrpcPort = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Weights and KV cache.")] = None,
    attention: Annotated[Attention | None, typer.Option(help="Attention kernels.")] = None,
    quantization: Annotated[Quantization | None, typer.Option(help="Weights in fewer bits, on CPUs.")] = None,
    kv_cache_dtype: Annotated[KVCacheDtype | None, typer.Option(help="KV cache in fewer bits.")] = None,
    speculation: Annotated[Speculation | None, typer.Option(help="Draft tokens on decode workers (off).")] = None,
    local_prefill_max_tokens: LocalPrefill = None,
    autoscale: Autoscale = None,
    redis_url: OwnRedisUrl = None,
    otlp_traces_endpoint: Traces = None,
    tls: Tls = None,
    insecure: Insecure = None,
    config: ConfigFile = None,
    json: AsJson = False,
) -> None:
    """Run a whole cluster on this machine, until Ctrl-C.

    Or until SIGTERM, or until the process that started it ends.
    """
    from deploy.cli.commands import run_up
    from deploy.config.settings import load_settings, tls_flags

    flags: dict[str, object] = {
        "model.path": model,
        "router.lora": tuple(lora) if lora else None,
        "pools.prefill": prefill,
        "pools.decode": decode,
        "pools.routers": routers,
        "router.http_port": http_port,
        "router.grpc_port": grpc_port,
        "router.local_prefill_max_tokens": local_prefill_max_tokens,
        "router.otlp_traces_endpoint": otlp_traces_endpoint,
        "decode_worker.speculation": speculation,
        "autoscale.enabled": autoscale,
        "redis_url": redis_url,
        "insecure": insecure,
        **tls_flags(tls),
    }
    for pool in ("prefill_worker", "decode_worker"):
        flags |= {f"{pool}.dtype": dtype, f"{pool}.attention": attention, f"{pool}.kv_cache_dtype": kv_cache_dtype}
        flags |= {f"{pool}.quantization": quantization}
    raise typer.Exit(run_up(load_settings(flags, config).config, as_json=json))


@app.command()
def demo() -> None:
    """Start a cluster with a small model, ask it, stop it.

    Shows the answer and where the time went.
    """
    from deploy.cli.demo import run_demo

    raise typer.Exit(run_demo())


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt, or the user's message with --chat.")],
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer; default: what the model allows.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 = the likeliest token each time.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Sample among the likeliest so much.")] = None,
    top_k: Annotated[int | None, typer.Option(min=-1, help="Sample among so many tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    timeout: Annotated[float | None, typer.Option(min=0.0, help="Deadline in seconds.")] = None,
    server: Server = DEFAULT_SERVER,
    json: AsJson = False,
) -> None:
    """Ask over gRPC; then show where the time went."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before gRPC is loaded: errors are said in our own words
    from deploy.cli.generate import Ask, run_generate

    question = Ask(prompt, chat, max_tokens, temperature, top_p, top_k, seed, tuple(stop or ()))
    run_generate(server, question, as_json=json, timeout_s=timeout)


@app.command()
def status(url: Url = DEFAULT_URL, wait: Wait = False, timeout: Seconds = 600.0, json: AsJson = False) -> None:
    """Show pools, workers, queues and KV blocks. Exit code 3 when a request would find no pair of workers."""
    from deploy.cli.commands import show_status

    raise typer.Exit(show_status(url, as_json=json, wait_s=timeout if wait else None))


@app.command()
def audit(url: Url = DEFAULT_URL, tls: Tls = None, config: ConfigFile = None, json: AsJson = False) -> None:
    """Ask every worker who holds its KV blocks, for how long.

    Exit code 1 when a pool does not add up.
    """
    from common.tls.identity import Component, Identity
    from deploy.cli.audit import run_audit
    from deploy.config.settings import load_settings, tls_flags

    settings = load_settings(tls_flags(tls), config).config
    operator = Identity(Component.OPERATOR, settings.namespace, settings.tls)
    raise typer.Exit(run_audit(url, as_json=json, identity=operator))


@app.command()
def certs(
    directory: Annotated[Path, typer.Argument(help="Where to put them; run again to renew them.")],
    host: Annotated[list[str] | None, typer.Option(help="Name or address of a router for clients; repeatable.")] = None,
    config: ConfigFile = None,
) -> None:
    """Make a CA and a certificate for each component.

    For development; --tls DIRECTORY then uses them.
    """
    from deploy.cli.certs import make_certs
    from deploy.config.settings import load_settings

    for path in make_certs(directory, load_settings({}, config).config.namespace, host or ()):
        print(path)


@app.command()
def scale(
    sizes: Annotated[
        list[str] | None, typer.Argument(help="prefill=N and decode=N, one or both.", metavar="[ROLE=N...]")
    ] = None,
    prefill: Annotated[int | None, typer.Option(min=0, max=1024, help="The same as prefill=N.")] = None,
    decode: Annotated[int | None, typer.Option(min=0, max=1024, help="The same as decode=N.")] = None,
    url: Url = DEFAULT_URL,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Until the pools have their sizes.")] = True,
    timeout: Seconds = 600.0,
    json: AsJson = False,
) -> None:
    """Change the size of the pools.

    Workers that leave finish what they have.

    What one pool has too many and the other lacks changes its role: its weights stay loaded.
    """
    from deploy.cli.commands import run_scale

    run_scale(url, _sizes(sizes or [], prefill, decode), timeout, as_json=json, is_waiting=wait)


@app.command()
def drain(
    worker: Annotated[str, typer.Argument(help="A worker's id, as pdserve status shows it.")],
    grace: Annotated[float | None, typer.Option(min=0.0, help="Seconds that it may finish what it has.")] = None,
    url: Url = DEFAULT_URL,
    wait: Wait = False,
    timeout: Seconds = 600.0,
) -> None:
    """Let a worker finish what it has and end.

    Returns when it is gone; its pool then replaces it, and --wait waits for that, too.
    """
    from deploy.cli.commands import run_drain

    run_drain(url, worker, grace, timeout, is_waiting=wait)


@app.command()
def roll(
    role: Annotated[list[Role] | None, typer.Option(help="Only this pool; may be repeated.")] = None,
    release: Annotated[str, typer.Option(help="Release of the chart: replace the workers' pods.")] = "",
    namespace: Annotated[str, typer.Option(help="Kubernetes namespace of the release.")] = "default",
    url: Url = DEFAULT_URL,
    timeout: Seconds = 600.0,
) -> None:
    """Replace all workers, one by one, while serving.

    Each one finishes what it has; the next follows when its pool has its size again. With --release, pods are deleted
    through kubectl, so that the new ones have the image and the settings of the release as it is now.
    """
    from deploy.cli.roll import pod_remover, run_roll

    run_roll(url, [each.value for each in role or Role], timeout, pod_remover(release, namespace) if release else None)


@app.command()
def explain(
    request_id: Annotated[str, typer.Argument(help="Id of an answer, or its beginning.", show_default=False)] = "",
    last: Annotated[bool, typer.Option("--last", help="The newest request instead.")] = False,
    url: Url = DEFAULT_URL,
    json: AsJson = False,
) -> None:
    """Show where one request's time went, and how it was routed.

    With the costs of each worker that it could have gone to, and what was tried.
    """
    from deploy.cli.explain import explain_request

    if bool(request_id) == last:
        raise typer.BadParameter("give the id of a request, or --last")
    explain_request(url, request_id, as_json=json)


@app.command()
def top(
    url: Url = DEFAULT_URL,
    once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
    json: AsJson = False,
) -> None:
    """Watch latencies, pools, KV blocks, requests. Ctrl-C ends."""
    from deploy.cli.top import watch

    watch(url, once=once, as_json=json)


@app.command()
def doctor(
    purpose: Annotated[Purpose, typer.Option("--for", help="What the machine is to run.")] = Purpose.UP,
    config: ConfigFile = None,
    json: AsJson = False,
) -> None:
    """Check this machine, with a fix for what is wrong.

    Exit code 3 when something needed is missing.
    """
    from deploy.cli.doctor import diagnose
    from deploy.config.settings import load_settings

    raise typer.Exit(diagnose(load_settings({}, config).config, purpose.value, as_json=json))


app.command()(router)
app.command()(worker)
app.command()(deploy)


@app.command("fetch-model")
def fetch_model() -> None:
    """Fetch the demo model and print where it is."""
    from deploy.cli.commands import demo_model

    print(demo_model(lambda text: print(text, file=sys.stderr)))


@app.command()
def version() -> None:
    """Print the version."""
    _print_version(True)


@config_app.command("show")
def config_show(config: ConfigFile = None, json: AsJson = False) -> None:
    """Print each setting, its value and where that comes from."""
    from deploy.cli.commands import show_config

    show_config(config, as_json=json)


def _sizes(arguments: list[str], prefill: int | None, decode: int | None) -> dict[str, int]:
    sizes = {role: size for role, size in (("prefill", prefill), ("decode", decode)) if size is not None}
    for argument in arguments:
        role, _, number = argument.partition("=")
        if role not in (Role.PREFILL, Role.DECODE) or not number.isdecimal() or int(number) > 1024:
            raise typer.BadParameter(f"expected prefill=N or decode=N, got {argument!r}")
        sizes[role] = int(number)
    if not sizes:
        raise typer.BadParameter("expected prefill=N, decode=N or both")
    return sizes


def main() -> None:
    """Entry point: errors of ours become one line on stderr and an exit code."""
    from deploy.cli.exit_codes import explain

    try:
        app()
    except KeyboardInterrupt:
        sys.exit(EXIT_FAILED)
    except Exception as error:
        explained = explain(error)
        if explained is None:
            raise
        message, code = explained
        print(f"pdserve: {message}", file=sys.stderr)
        sys.exit(code)


if __name__ == "__main__":
    main()
