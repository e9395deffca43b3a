"""`unbroken frontend`."""

import os
import re
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import structlog

from services.cli.options import Address, Origins, env_option, logging_options, registry_option
from services.cli.processes import supervise
from services.runtime.log import configure_logging, log_config
from services.runtime.process import run_process

if TYPE_CHECKING:
    from services.frontend.api.admin.admin import AdminConfig
    from services.frontend.routing.thresholds import AdmissionConfig
    from services.http.server.config import HttpConfig

log = structlog.get_logger()

MIB = 1024 * 1024
DAY_S = 86_400
TOKEN_VARIABLES = ("DYN_ADMIN_TOKEN", "DYN_ADMIN_TOKEN_FILE")
TOKEN_FORM = re.compile(r"[!-~]{1,512}")
"""What fits a header and gRPC metadata."""


@click.command(help="Serve clients: gRPC and the OpenAI HTTP API.", context_settings={"show_default": True})
@env_option(
    "--grpc-listen", "DYN_GRPC_LISTEN", default="127.0.0.1:50051", type=Address(), help="Port 0 takes a free one."
)
@env_option(
    "--http-listen", "DYN_HTTP_LISTEN", default="127.0.0.1:8000", type=Address(), help="Port 0 takes a free one."
)
@env_option(
    "--processes",
    "DYN_PROCESSES",
    type=click.IntRange(1, 64),
    default=1,
    help="How many processes share the ports, each with its own sessions to all workers: one for each core that is to"
    " serve. With more than one, this process starts them, and starts them again when they die.",
)
@registry_option
@env_option(
    "--migration-limit",
    "DYN_MIGRATION_LIMIT",
    type=click.IntRange(0),
    default=3,
    help="How often a request may move to another worker. 0: never.",
)
@env_option(
    "--migration-max-seq-len",
    "DYN_MIGRATION_MAX_SEQ_LEN",
    type=click.IntRange(1),
    help="Prompt and generated tokens above which a request does not move any more. Default: no limit.",
)
@env_option(
    "--replacement-wait",
    "DYN_REPLACEMENT_WAIT_SECS",
    type=click.FloatRange(0),
    default=10.0,
    help="Seconds that a request which lost its worker waits for another.",
)
@env_option(
    "--stall-ms",
    "DYN_STALL_MS",
    type=click.IntRange(100),
    default=1000,
    help="Silence after which a worker with streams counts as lost. Workers send something every 250 ms.",
)
@env_option(
    "--engine-stall-ms",
    "DYN_ENGINE_STALL_MS",
    type=click.IntRange(100),
    default=5000,
    help="How long a worker's engine may make no step, with requests running, before it counts as lost.",
)
@env_option(
    "--drain-timeout",
    "DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS",
    type=click.FloatRange(0),
    default=30.0,
    help="Seconds that streams may go on after SIGTERM.",
)
@env_option(
    "--request-timeout",
    "DYN_REQUEST_TIMEOUT_SECS",
    type=click.FloatRange(0, DAY_S, min_open=True),
    help="Deadline in seconds of HTTP requests that bring none in X-Request-Timeout. Default: none.",
)
@env_option(
    "--admission-control",
    "DYN_ADMISSION_CONTROL",
    type=click.Choice(["none", "token-capacity"]),
    default="none",
    help="token-capacity: refuse new requests while all workers are over a threshold below.",
)
@env_option(
    "--active-decode-blocks-threshold",
    "DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD",
    type=click.FloatRange(0, 1),
    help="Fraction of a worker's key-value cache blocks in use above which it is busy. Default: not looked at.",
)
@env_option(
    "--active-prefill-tokens-threshold",
    "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD",
    type=click.IntRange(0),
    help="Prompt tokens still to be computed above which a worker is busy. Default: not looked at.",
)
@env_option(
    "--overload-status-code",
    "DYN_HTTP_OVERLOAD_STATUS_CODE",
    type=click.IntRange(400, 599),
    default=503,
    help="HTTP status of refusals for want of capacity.",
)
@env_option(
    "--cors-allow-origin",
    "DYN_HTTP_CORS_ALLOW_ORIGIN",
    type=Origins(),
    default=(),
    show_default=False,
    help="Origins whose pages may call and read answers in a browser, as https://chat.example,http://localhost:3000; *:"
    " all. Admin calls are refused where they have an origin. Default: none.",
)
@env_option(
    "--client-buffer-max",
    "DYN_CLIENT_BUFFER_MAX_BYTES",
    type=click.IntRange(65_536),
    default=4 * MIB,
    help="Bytes that a client may leave unread before its request is ended.",
)
@env_option(
    "--client-stall-timeout",
    "DYN_CLIENT_STALL_TIMEOUT_SECS",
    type=click.FloatRange(0, DAY_S, min_open=True),
    default=30.0,
    help="Seconds that a client may take nothing at all, while something waits for it, before its request is ended.",
)
@env_option(
    "--admin-listen",
    "DYN_ADMIN_LISTEN",
    type=Address(),
    help="Where /busy_threshold is answered, with /health, /live, /metrics and their /openapi.json. Default: where"
    " clients' calls are, or nowhere with --admin-grpc-listen.",
)
@env_option(
    "--admin-grpc-listen",
    "DYN_ADMIN_GRPC_LISTEN",
    type=Address(),
    help="Where the gRPC service Admin is answered. Default: where clients' calls are, or nowhere with --admin-listen.",
)
@env_option(
    "--admin-token",
    "DYN_ADMIN_TOKEN",
    help="What admin calls must bring as a bearer token. Default: they need none. A command line is seen by all who may"
    " use this machine, and its variable or --admin-token-file is not.",
)
@env_option(
    "--admin-token-file",
    "DYN_ADMIN_TOKEN_FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file that has it, read at start.",
)
@env_option("--disable-admin-api", "DYN_DISABLE_FRONTEND_ADMIN_API", is_flag=True, help="Answer no admin calls at all.")
@env_option("--body-limit-mb", "DYN_HTTP_BODY_LIMIT_MB", type=click.IntRange(1), default=64, help="Largest HTTP body.")
@env_option("--metrics-prefix", "DYN_METRICS_PREFIX", default="dynamo_frontend", help="What metric names begin with.")
@click.option("--member", type=click.Path(path_type=Path), hidden=True, help="Which of several processes this one is.")
@click.option("--ready-file", type=click.Path(path_type=Path), help="Written with the real addresses when it listens.")
@logging_options
def command(**given: Any) -> None:
    from services.frontend.layers.migrate import MigrateConfig
    from services.frontend.pipeline import PipelineConfig
    from services.frontend.server import Frontend, FrontendConfig
    from services.frontend.session.pool import PoolConfig
    from services.frontend.session.session import WorkerSessionConfig

    if given["processes"] > 1 and given["member"] is None:
        check_options(given)
        supervise(given, lambda: _warn_of_idle_thresholds(_admission(given)))
        return
    name = "frontend" if given["member"] is None else given["member"].name
    configure_logging(name, level=given["log_level"], log_format=given["log_format"])
    session = WorkerSessionConfig(stall_s=given["stall_ms"] / 1e3, engine_stall_s=given["engine_stall_ms"] / 1e3)
    migrate = MigrateConfig(
        limit=given["migration_limit"],
        seq_len_max=given["migration_max_seq_len"],
        replacement_wait_s=given["replacement_wait"],
    )
    config = FrontendConfig(
        grpc_listen=given["grpc_listen"],
        http_listen=given["http_listen"],
        registries=tuple(given["registries"]),
        drain_timeout_s=given["drain_timeout"],
        metrics_prefix=given["metrics_prefix"],
        ready_file=given["ready_file"],
        member=given["member"],
        pipeline=PipelineConfig(migrate=migrate),
        pool=PoolConfig(session=session),
        http=_http(given),
        admission=_admission(given),
        admin=_admin(given),
    )
    log_config(config)
    if config.member is None:
        _warn_of_idle_thresholds(config.admission)

    async def serve(stopping: Any) -> None:
        await Frontend(config).run(stopping)

    run_process(serve)


def _http(given: dict[str, Any]) -> "HttpConfig":
    from services.core.client_flow import ClientBounds
    from services.http.server.config import HttpConfig

    return HttpConfig(
        body_bytes_max=given["body_limit_mb"] * MIB,
        request_timeout_s=given["request_timeout"],
        overload_status=given["overload_status_code"],
        cors_origins=tuple(given["cors_allow_origin"]),
        client=ClientBounds(
            buffer_bytes_max=given["client_buffer_max"],
            stall_s_max=given["client_stall_timeout"],
        ),
    )


def check_options(given: dict[str, Any]) -> None:
    """What each option alone does not show. Raises UsageError."""
    _admin(given)
    _admission(given)


def _admin(given: dict[str, Any]) -> "AdminConfig":
    from services.frontend.api.admin.admin import AdminConfig

    token = admin_token(given["admin_token"], given["admin_token_file"])
    names = [name for name in ("admin_listen", "admin_grpc_listen", "admin_token", "admin_token_file") if given[name]]
    if given["disable_admin_api"] and names:
        options = " and ".join(f"--{name.replace('_', '-')}" for name in names)
        raise click.UsageError(f"--disable-admin-api leaves no admin calls for {options}: give one or the other")
    return AdminConfig(
        listen=given["admin_listen"],
        grpc_listen=given["admin_grpc_listen"],
        token=token,
        is_on=not given["disable_admin_api"],
    )


def admin_token(token: str | None, file: Path | None) -> str | None:
    """The token, wherever it is given. What is wrong with it is said without it. Raises UsageError."""
    for variable in TOKEN_VARIABLES:
        if os.environ.get(variable) == "":  # To click it is as good as unset, and would leave the door open.
            raise click.UsageError(f"{variable} is empty: give it a value, or unset it")
    if token is not None and file is not None:
        raise click.UsageError("--admin-token and --admin-token-file are both given: give one of them")
    if file is not None:
        try:
            token = file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise click.UsageError(f"--admin-token-file: {file} cannot be read: {error}") from error
    if token is not None and not TOKEN_FORM.fullmatch(token):
        raise click.UsageError("the admin token must be 1 to 512 visible ASCII characters, without spaces")
    return token


def _admission(given: dict[str, Any]) -> "AdmissionConfig":
    from services.core.errors import Failure
    from services.frontend.routing.thresholds import AdmissionConfig, Thresholds

    try:
        thresholds = Thresholds(
            active_decode_blocks=given["active_decode_blocks_threshold"],
            active_prefill_tokens=given["active_prefill_tokens_threshold"],
        )
    except Failure as failure:  # Not a number is in no range, and click lets it through.
        raise click.UsageError(f"{failure.param}: {failure.detail}") from failure
    return AdmissionConfig(is_on=given["admission_control"] == "token-capacity", thresholds=thresholds)


def _warn_of_idle_thresholds(admission: "AdmissionConfig") -> None:
    """They can be given all the same: an operator may want to see them in the metrics before they act."""
    if not admission.is_on and any(value is not None for value in astuple(admission.thresholds)):
        log.warning("the thresholds do nothing", why="--admission-control is none", remedy="make it token-capacity")
