"""`unbroken worker`: runs a worker with one engine."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from services.cli.certs.options import peer_files, peer_options
from services.cli.engines.llamacpp import check_llamacpp, llamacpp_engine, llamacpp_options
from services.cli.engines.mocker import check_mocker, mocker_engine, mocker_options
from services.cli.engines.trtllm import check_trtllm, trtllm_engine, trtllm_options
from services.cli.environment import start_logging
from services.cli.options import DAY_S, MIB, Address, Integer, Number, env_option, logging_options, registry_option
from services.runtime.address import is_wildcard, split_address
from services.runtime.process import exiting_at_once, run_process
from services.tls.roles import Role

if TYPE_CHECKING:
    from services.worker.server import WorkerConfig

ENGINES = {"mocker": mocker_engine, "llamacpp": llamacpp_engine, "trtllm": trtllm_engine}


@click.command(help="Serve one engine to frontends.", context_settings={"show_default": True})
@env_option("--engine", "DYN_ENGINE", default="mocker", type=click.Choice([*ENGINES]), help="Engine to run.")
@env_option(
    "--model",
    "DYN_MODEL",
    help="For llamacpp: a GGUF file, or the name of a model for `unbroken models pull`. For trtllm: a folder with a"
    " Hugging Face model. mocker uses it as the model's name.",
)
@env_option("--served-model-name", "DYN_SERVED_MODEL_NAME", help="The model's name for clients. Default: its own name.")
@env_option(
    "--listen",
    "DYN_WORKER_LISTEN",
    default="127.0.0.1:0",
    type=Address(),
    help="Address of the gRPC services. Port 0: any free port.",
)
@env_option(
    "--session-listen",
    "DYN_WORKER_SESSION_LISTEN",
    type=Address(),
    help="Address for sessions with frontends, which connect to it on the host of --advertise. Default: any port on the"
    " host of --listen.",
)
@env_option(
    "--advertise",
    "DYN_WORKER_ADVERTISE",
    type=Address(),
    help="Address by which frontends reach the worker. Port 0 means the port of --listen. Default: the address of"
    " --listen.",
)
@registry_option
@peer_options(Role.WORKER)
@env_option(
    "--metrics-port",
    "DYN_SYSTEM_PORT",
    type=Integer(-1, 65535),
    help="HTTP port of /metrics, /live and /health. 0: any free port. Default: none, as with -1.",
)
@env_option(
    "--engine-request-limit",
    "DYN_ENGINE_REQUEST_LIMIT",
    type=Integer(1),
    help="Number of requests that run at the same time. Default: the engine's own limit. llamacpp reserves the"
    " key-value cache of a full context for each of them: about 47 MB with SmolLM2 and 2,048 tokens.",
)
@env_option(
    "--request-queue-limit",
    "DYN_DYNAMO_REQUEST_QUEUE_LIMIT",
    type=Integer(0),
    default=16,
    help="Number of further requests that may wait. Beyond it, requests are refused at once.",
)
@env_option(
    "--queue-timeout",
    "DYN_QUEUE_TIMEOUT_SECS",
    type=Number(0, DAY_S, above=True),
    default=60.0,
    help="Seconds that a request may wait for a slot. After that it moves to another worker or is refused.",
)
@env_option(
    "--queue-token-limit",
    "DYN_QUEUE_TOKEN_LIMIT",
    type=Integer(0),
    help="Maximum number of prompt tokens of all waiting requests. Default: no limit.",
)
@env_option(
    "--drain-timeout",
    "DYN_DRAIN_TIMEOUT_SECS",
    type=Number(0, DAY_S),
    default=30.0,
    help="Seconds that streams may continue after SIGTERM if no other worker takes them over at once.",
)
@env_option(
    "--migration-limit",
    "DYN_WORKER_MIGRATION_LIMIT",
    type=Integer(0),
    help="How often a request of this worker may move; others may have another limit. 0: never. Default: the "
    "frontend's limit.",
)
@env_option(
    "--detach-grace-max",
    "DYN_DETACH_GRACE_MAX_SECS",
    type=Number(0, DAY_S, above=True),
    default=300.0,
    help="Maximum number of seconds that a request goes on, and its answer is kept, after its client or its frontend is"
    " gone. Clients that ask for more get this.",
)
@env_option(
    "--detached-limit",
    "DYN_DETACHED_LIMIT",
    type=Integer(0),
    default=4096,
    help="Number of answers without a frontend that are kept. Beyond it, the oldest are dropped, complete ones first.",
)
@env_option(
    "--detached-mb",
    "DYN_DETACHED_MB",
    type=Integer(0, 1_048_576),
    default=256,
    help="Size of these answers together, in MiB. Beyond it, they are dropped likewise.",
)
@env_option(
    "--lease",
    "DYN_LEASE_SECS",
    type=Integer(1, 300),
    default=10,
    help="Seconds that the registry keeps a worker from which it hears nothing.",
)
@env_option(
    "--context-length",
    "DYN_CONTEXT_LENGTH",
    type=Integer(2),
    help="Maximum length of prompt and answer together, in tokens. Default: the engine's own limit.",
)
@trtllm_options
@llamacpp_options
@mocker_options
@click.option(
    "--ready-file",
    type=click.Path(path_type=Path),
    help="File that is written with the real addresses when the worker serves.",
)
@logging_options
def command(**given: Any) -> None:
    check_options(given)
    config = worker_config(given)
    start_logging("worker", given, config)

    async def serve(stopping: Any) -> None:
        from services.worker.server import Worker

        await Worker(ENGINES[given["engine"]](given), config).run(stopping)

    with exiting_at_once() if given["engine"] == "trtllm" else nullcontext():
        run_process(serve)


def worker_config(given: dict[str, Any]) -> "WorkerConfig":
    """The configuration of the worker, without its engine's."""
    from services.worker.generations.store import DetachConfig
    from services.worker.server import WorkerConfig
    from services.worker.session import FrontendSessionConfig

    detach = DetachConfig(
        grace_s_max=given["detach_grace_max"],
        records_max=given["detached_limit"],
        bytes_max=given["detached_mb"] * MIB,
    )
    port, host = given["metrics_port"], given["listen"].rpartition(":")[0]
    return WorkerConfig(
        listen=given["listen"],
        session_listen=given["session_listen"],
        advertise=given["advertise"],
        metrics_listen=None if port in (None, -1) else f"{host}:{port}",
        registries=tuple(given["registries"]),
        engine_request_limit=given["engine_request_limit"],
        request_queue_limit=given["request_queue_limit"],
        queue_timeout_s=given["queue_timeout"],
        queue_token_limit=given["queue_token_limit"],
        drain_timeout_s=given["drain_timeout"],
        lease_s=given["lease"],
        ready_file=given["ready_file"],
        peers=peer_files(given),
        session=FrontendSessionConfig(migration_limit=given["migration_limit"], detach=detach),
    )


def check_options(given: dict[str, Any]) -> None:
    """Check options that depend on each other. Raises ClickException."""
    for name in ("served_model_name", "model"):
        _check_utf8(name, given[name])
    _check_reachable(given["listen"], given["advertise"])
    if given["advertise"] is None and given["session_listen"] is not None:
        _check_one_host(given["listen"], given["session_listen"])
    peer_files(given)
    check_mocker(given)
    if given["engine"] == "llamacpp":
        check_llamacpp(given)
    if given["engine"] == "trtllm":
        check_trtllm(given)


def _check_utf8(name: str, value: str | None) -> None:
    """Refuse a name with bytes that are not UTF-8: it could not be sent. Python reads them as lone surrogates."""
    try:
        (value or "").encode()
    except UnicodeEncodeError as error:
        raise click.UsageError(f"--{name.replace('_', '-')} is not valid UTF-8: {value!a}") from error


def _check_reachable(listen: str, advertise: str | None) -> None:
    """Refuse to advertise a wildcard address: a frontend on another machine would connect to itself."""
    option, address = ("--listen", listen) if advertise is None else ("--advertise", advertise)
    host, _port = split_address(address)
    if is_wildcard(host):
        raise click.UsageError(
            f"{option} {address} is not an address that frontends can reach: give one with --advertise host:port"
            " (port 0 means the port of --listen)"
        )


def _check_one_host(listen: str, session_listen: str) -> None:
    """Refuse different hosts for both addresses: only one host is advertised, by default that of --listen."""
    session_host, _port = split_address(session_listen)
    if not is_wildcard(session_host) and session_host != split_address(listen)[0]:
        raise click.UsageError(
            f"frontends would connect to --session-listen {session_listen} on the host of --listen {listen}: give both"
            " the same host, or a host that reaches both with --advertise host:port"
        )
