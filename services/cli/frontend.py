"""`unbroken frontend`: runs a frontend, as one process or several."""

import re
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import structlog

from services.cli.admin import admin_config, admin_options
from services.cli.certs.options import edge_pair, edge_tls_options, peer_files, peer_options
from services.cli.environment import start_logging
from services.cli.options import (
    DAY_MS,
    DAY_S,
    MIB,
    Address,
    Integer,
    Number,
    Origins,
    env_option,
    logging_options,
    refuse_empty,
    registry_option,
)
from services.cli.processes import supervise
from services.runtime.address import is_local, split_address
from services.runtime.process import run_process
from services.tls.roles import Role

if TYPE_CHECKING:
    from services.access.keys_watch import AccessConfig
    from services.frontend.routing.thresholds import AdmissionConfig
    from services.frontend.server import FrontendConfig
    from services.http.server.config import HttpConfig

log = structlog.get_logger()

KEYS_FILE = "DYN_KEYS_FILE"
ALLOW_ANONYMOUS = "DYN_ALLOW_ANONYMOUS"


def _check_prefix(_: click.Context, __: click.Parameter, given: str) -> str:
    if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", given):
        raise click.BadParameter(f"{given!r} cannot begin a metric's name: use letters, digits and _")
    return given


@click.command(help="Serve clients: gRPC and the OpenAI HTTP API.", context_settings={"show_default": True})
@env_option(
    "--grpc-listen",
    "DYN_GRPC_LISTEN",
    default="127.0.0.1:50051",
    type=Address(),
    help="Address for clients of gRPC. Like the other one, it serves HTTP/1.1, HTTP/2 and gRPC. Port 0: any free port.",
)
@env_option(
    "--http-listen",
    "DYN_HTTP_LISTEN",
    default="127.0.0.1:8000",
    type=Address(),
    help="Address for clients of the HTTP API. It serves gRPC as well. Port 0: any free port.",
)
@env_option(
    "--processes",
    "DYN_PROCESSES",
    type=Integer(1, 64),
    default=1,
    help="Number of processes that share the ports, each with its own sessions to all workers: one for each CPU core to"
    " use. With more than one, this process starts them and restarts any that exits.",
)
@registry_option
@env_option(
    "--migration-limit",
    "DYN_MIGRATION_LIMIT",
    type=Integer(0),
    default=3,
    help="How often a request may move to another worker. 0: never.",
)
@env_option(
    "--migration-max-seq-len",
    "DYN_MIGRATION_MAX_SEQ_LEN",
    type=Integer(1),
    help="Requests with more prompt and generated tokens than this no longer move. Default: no limit.",
)
@env_option(
    "--resume-sampling",
    "DYN_RESUME_SAMPLING",
    type=click.Choice(["prefix", "exact"]),
    default="prefix",
    help="What happens to a sampled answer without a client's seed that loses its worker, if the engine draws without"
    " seeds (TensorRT-LLM). prefix: it continues after the delivered tokens with other draws, and says so; exact: it"
    " fails.",
)
@env_option(
    "--replacement-wait",
    "DYN_REPLACEMENT_WAIT_SECS",
    type=Number(0, DAY_S),
    default=10.0,
    help="Seconds that a request which has lost its worker waits for another.",
)
@env_option(
    "--stall-ms",
    "DYN_STALL_MS",
    type=Integer(100, DAY_MS),
    default=1000,
    help="Milliseconds of silence after which a worker with streams counts as lost. Workers send every 250 ms.",
)
@env_option(
    "--engine-stall-ms",
    "DYN_ENGINE_STALL_MS",
    type=Integer(100, DAY_MS),
    default=5000,
    help="Milliseconds without a step of its engine after which a worker with running requests counts as lost.",
)
@env_option(
    "--drain-timeout",
    "DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS",
    type=Number(0, DAY_S),
    default=30.0,
    help="Seconds that streams may continue after SIGTERM.",
)
@env_option(
    "--request-timeout",
    "DYN_REQUEST_TIMEOUT_SECS",
    type=Number(0, DAY_S, above=True),
    help="Timeout in seconds of HTTP requests without an X-Request-Timeout header. Default: none.",
)
@env_option(
    "--content-control-tokens",
    "DYN_CONTENT_CONTROL_TOKENS",
    type=click.Choice(["text", "parse"]),
    default="text",
    help="What a control token is that a chat's message spells out, such as <|im_end|>. text: characters like any"
    " other; parse: the token itself, so that users can forge turns.",
)
@env_option(
    "--admission-control",
    "DYN_ADMISSION_CONTROL",
    type=click.Choice(["none", "token-capacity"]),
    default="none",
    help="token-capacity: refuse new requests while every worker exceeds one of the thresholds below.",
)
@env_option(
    "--active-decode-blocks-threshold",
    "DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD",
    type=Number(0, 1),
    help="Fraction of used key-value cache blocks above which a worker is busy. Default: not checked.",
)
@env_option(
    "--active-prefill-tokens-threshold",
    "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD",
    type=Integer(0),
    help="Number of prompt tokens still to be computed above which a worker is busy. Default: not checked.",
)
@env_option(
    "--overload-status-code",
    "DYN_HTTP_OVERLOAD_STATUS_CODE",
    type=Integer(400, 599),
    default=503,
    help="HTTP status of requests that are refused for lack of capacity.",
)
@env_option(
    "--keys-file",
    KEYS_FILE,
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with the tenants and the hashes of their API keys (see `unbroken keys`). With it, clients need a key. It"
    " is read anew when it changes. Default: clients need none.",
)
@edge_tls_options
@peer_options(Role.FRONTEND)
@env_option(
    "--allow-anonymous",
    ALLOW_ANONYMOUS,
    is_flag=True,
    help="Let clients on other machines in without a key. Without it and --keys-file, a frontend listens on loopback"
    " only, and takes requests to names of loopback only.",
)
@env_option(
    "--cors-allow-origin",
    "DYN_HTTP_CORS_ALLOW_ORIGIN",
    type=Origins(),
    default=(),
    show_default=False,
    help="Origins whose pages may call the HTTP API from a browser, such as https://chat.example,http://localhost:3000;"
    " *: all. Admin calls with an origin are refused. Default: none.",
)
@env_option(
    "--unknown-fields",
    "DYN_HTTP_UNKNOWN_FIELDS",
    type=click.Choice(["refuse", "refuse-misspelt", "ignore"]),
    default="refuse-misspelt",
    help="What happens to HTTP requests with fields that no API has. refuse-misspelt: only those are refused that"
    " resemble a field, such as maxTokens.",
)
@env_option(
    "--client-buffer-max",
    "DYN_CLIENT_BUFFER_MAX_BYTES",
    type=Integer(65_536),
    default=4 * MIB,
    help="Number of unread bytes above which a client's request is ended.",
)
@env_option(
    "--client-stall-timeout",
    "DYN_CLIENT_STALL_TIMEOUT_SECS",
    type=Number(0, DAY_S, above=True),
    default=30.0,
    help="Seconds after which the request of a client that reads nothing, although data is waiting, is ended.",
)
@env_option(
    "--http-keepalive",
    "DYN_HTTP_KEEPALIVE_SECS",
    type=Number(1, DAY_S),
    default=75.0,
    help="Seconds that an idle HTTP connection stays open. Set it above a load balancer's own: some keep theirs for"
    " 600 s.",
)
@env_option(
    "--sse-keepalive",
    "DYN_SSE_KEEPALIVE_SECS",
    type=Number(0.1, DAY_S),
    help="Seconds of silence after which an SSE stream gets a comment, for proxies that cut silent streams. A comment"
    " before the first token sends status 200, so later failures are error events in the stream, without a status or"
    " Retry-After. Default: no comments.",
)
@env_option(
    "--on-disconnect",
    "DYN_ON_DISCONNECT",
    type=click.Choice(["cancel", "continue"]),
    default="cancel",
    help="What becomes of a request without an x-on-disconnect header whose client leaves. cancel: it ends; continue:"
    " its worker goes on, and the client can resume the answer on any frontend.",
)
@env_option(
    "--detach-grace",
    "DYN_DETACH_GRACE_SECS",
    type=Number(0, DAY_S, above=True),
    default=30.0,
    help="Seconds that an answer waits for its client, for requests without an x-detach-grace header. Workers limit it"
    " with --detach-grace-max.",
)
@admin_options
@env_option(
    "--body-limit-mb",
    "DYN_HTTP_BODY_LIMIT_MB",
    type=Integer(1, 2047),
    default=64,
    help="Maximum size of an HTTP request body in MiB.",
)
@env_option(
    "--metrics-prefix",
    "DYN_METRICS_PREFIX",
    default="dynamo_frontend",
    callback=_check_prefix,
    help="Prefix of all metric names.",
)
@click.option(
    "--member", type=click.Path(path_type=Path), hidden=True, help="Set by the supervisor: this process of the group."
)
@click.option(
    "--ready-file",
    type=click.Path(path_type=Path),
    help="File that is written with the real addresses when the frontend listens.",
)
@logging_options
def command(**given: Any) -> None:
    if given["processes"] > 1 and given["member"] is None:
        check_options(given)
        supervise(given, lambda: warn_of_unused_thresholds(_admission(given)))
        return
    name = "frontend" if given["member"] is None else given["member"].name
    config = frontend_config(given)
    start_logging(name, given, config)
    if config.member is None:
        warn_of_unused_thresholds(config.admission)

    async def serve(stopping: Any) -> None:
        from services.frontend.server import Frontend

        await Frontend(config).run(stopping)

    run_process(serve)


def check_options(given: dict[str, Any]) -> None:
    """Check options that depend on each other. Raises UsageError."""
    admin_config(given)
    _admission(given)
    edge_pair(given)
    peer_files(given)
    _access(given)


def frontend_config(given: dict[str, Any]) -> "FrontendConfig":
    """The configuration of one frontend process. Raises UsageError."""
    from services.frontend.layers.migrate import MigrateConfig
    from services.frontend.pipeline import PipelineConfig
    from services.frontend.server import FrontendConfig
    from services.frontend.session.pool import PoolConfig
    from services.frontend.session.session import WorkerSessionConfig

    session = WorkerSessionConfig(stall_s=given["stall_ms"] / 1e3, engine_stall_s=given["engine_stall_ms"] / 1e3)
    migrate = MigrateConfig(
        limit=given["migration_limit"],
        seq_len_max=given["migration_max_seq_len"],
        resume_sampling=given["resume_sampling"],
        replacement_wait_s=given["replacement_wait"],
    )
    return FrontendConfig(
        grpc_listen=given["grpc_listen"],
        http_listen=given["http_listen"],
        registries=tuple(given["registries"]),
        drain_timeout_s=given["drain_timeout"],
        metrics_prefix=given["metrics_prefix"],
        ready_file=given["ready_file"],
        member=given["member"],
        pipeline=PipelineConfig(migrate=migrate, parses_contents=given["content_control_tokens"] == "parse"),
        pool=PoolConfig(session=session),
        http=_http(given),
        admission=_admission(given),
        admin=admin_config(given),
        access=_access(given),
        tls=edge_pair(given),
        peers=peer_files(given),
    )


def _http(given: dict[str, Any]) -> "HttpConfig":
    from services.core.flow.client_flow import ClientBounds
    from services.core.generation.wish import KeepConfig
    from services.http.server.config import HttpConfig

    return HttpConfig(
        body_bytes_max=given["body_limit_mb"] * MIB,
        request_timeout_s=given["request_timeout"],
        overload_status=given["overload_status_code"],
        cors_origins=tuple(given["cors_allow_origin"]),
        unknown_fields=given["unknown_fields"],
        keepalive_s=given["http_keepalive"],
        sse_keepalive_s=given["sse_keepalive"],
        keep=KeepConfig(on_disconnect=given["on_disconnect"], grace_s=given["detach_grace"]),
        client=ClientBounds(
            buffer_bytes_max=given["client_buffer_max"],
            stall_s_max=given["client_stall_timeout"],
        ),
    )


def _access(given: dict[str, Any]) -> "AccessConfig":
    """Raises UsageError if everybody could come in, and nobody has said that they may."""
    from services.access.keys_watch import AccessConfig

    refuse_empty(KEYS_FILE)
    if given["keys_file"] is None and not given["allow_anonymous"]:
        for option in ("http_listen", "grpc_listen"):
            if not is_local(split_address(given[option])[0]):
                name = "--" + option.replace("_", "-")
                raise click.UsageError(
                    f"{name} {given[option]} can be reached from other machines, and clients need no keys: set keys"
                    " (--keys-file, see `unbroken keys`), or allow it (--allow-anonymous)"
                )
    return AccessConfig(keys_file=given["keys_file"], allows_anonymous=given["allow_anonymous"])


def _admission(given: dict[str, Any]) -> "AdmissionConfig":
    from services.core.errors import Failure
    from services.frontend.routing.thresholds import AdmissionConfig, Thresholds

    try:
        thresholds = Thresholds(
            active_decode_blocks=given["active_decode_blocks_threshold"],
            active_prefill_tokens=given["active_prefill_tokens_threshold"],
        )
    except Failure as failure:  # `nan` passes click's check of the range.
        raise click.UsageError(f"{failure.param}: {failure.detail}") from failure
    return AdmissionConfig(is_on=given["admission_control"] == "token-capacity", thresholds=thresholds)


def warn_of_unused_thresholds(admission: "AdmissionConfig") -> None:
    """Warn about thresholds without admission control. They are allowed, because metrics show them."""
    if not admission.is_on and any(value is not None for value in astuple(admission.thresholds)):
        log.warning(
            "the thresholds have no effect", why="--admission-control is none", remedy="set it to token-capacity"
        )
