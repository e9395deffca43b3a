"""`unbroken worker`."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from services.cli.options import Address, env_option, logging_options, registry_option
from services.cli.trtllm import check_trtllm, trtllm_engine, trtllm_options
from services.models.download import PUBLISHED, resolve
from services.runtime.address import is_wildcard, split_address
from services.runtime.log import configure_logging, log_config
from services.runtime.process import StartupError, exiting_at_once, run_process
from services.worker.engine import Engine

ENGINES = ("mocker", "llamacpp", "trtllm")
FAULTS = {
    "die_after": "K: kill the process when a request has K tokens",
    "freeze_after": "K: stop the process (SIGSTOP) then",
    "leave_after": "K: ask the process to leave (SIGTERM) then",
    "hang_after": "K: stop the engine under a live server then",
    "raise_after": "K: fail the request then",
    "die_on_token": "T: kill the process at the first step of a prompt with token T",
    "refuse": "M: refuse the first M requests",
    "hold": "M: make no step before there are M requests",
    "linger_ms": "T: die or stop T ms later, when all that was drawn has been sent",
    "mute_after": "K: report no rank's load any more when a request has K tokens; 0: from the first request on",
    "mute_rank": "R: never report the load of data-parallel rank R, counted from 0",
}


_FAULT_HELP = "For tests, with the mocker, repeatable. " + "; ".join(
    f"{name}={meaning}" for name, meaning in FAULTS.items()
)


def _parse_faults(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, int]:
    faults = {}
    for text in given:
        name, _sign, number = text.partition("=")
        if name not in FAULTS or not number.isdigit():
            raise click.BadParameter(f"{text!r} is none of {', '.join(f'{name}=N' for name in FAULTS)}")
        faults[name] = int(number)
    return faults


@click.command(help="Serve one engine to frontends.", context_settings={"show_default": True})
@env_option("--engine", "DYN_ENGINE", default="mocker", type=click.Choice(ENGINES))
@env_option(
    "--model",
    "DYN_MODEL",
    help="For llamacpp: a GGUF file, or a name that `unbroken models pull` knows. For trtllm: a folder with a model of "
    "Hugging Face. The mocker only takes its name.",
)
@env_option("--served-model-name", "DYN_SERVED_MODEL_NAME", help="What clients ask for. Default: the model's name.")
@env_option("--listen", "DYN_WORKER_LISTEN", default="127.0.0.1:0", type=Address(), help="Port 0 takes a free one.")
@env_option(
    "--session-listen",
    "DYN_WORKER_SESSION_LISTEN",
    type=Address(),
    help="For sessions with frontends, which reach it on the host of --advertise. Default: any port, on the host of "
    "--listen.",
)
@env_option(
    "--advertise",
    "DYN_WORKER_ADVERTISE",
    type=Address(),
    help="Where frontends reach it; port 0 stands for the port it listens on. Default: where it listens.",
)
@registry_option
@env_option(
    "--metrics-port", "DYN_SYSTEM_PORT", type=click.IntRange(0, 65535), help="/metrics, /live, /health over HTTP."
)
@env_option(
    "--engine-request-limit",
    "DYN_ENGINE_REQUEST_LIMIT",
    type=click.IntRange(1),
    help="N: how many requests run at a time. Default: what the engine runs at a time. llamacpp reserves the key-value "
    "cache of a whole context for each of them: about 47 MB with SmolLM2 and 2,048 tokens.",
)
@env_option(
    "--request-queue-limit",
    "DYN_DYNAMO_REQUEST_QUEUE_LIMIT",
    type=click.IntRange(0),
    default=16,
    help="Q: how many more may wait. One more is refused at once.",
)
@env_option(
    "--queue-timeout",
    "DYN_QUEUE_TIMEOUT_SECS",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    help="Seconds that a request may wait for a slot. One that waits longer goes to another worker, or is refused.",
)
@env_option(
    "--queue-token-limit",
    "DYN_QUEUE_TOKEN_LIMIT",
    type=click.IntRange(0),
    help="How many prompt tokens may wait in all. Default: no limit but that of requests.",
)
@env_option(
    "--drain-timeout",
    "DYN_DRAIN_TIMEOUT_SECS",
    type=click.FloatRange(0),
    default=30.0,
    help="Seconds that streams may go on after SIGTERM where no other worker takes them over at once.",
)
@env_option(
    "--migration-limit",
    "DYN_WORKER_MIGRATION_LIMIT",
    type=click.IntRange(0),
    help="How often a request of this worker may move, at most. 0: never. Default: as often as the frontend allows.",
)
@env_option(
    "--lease", "DYN_LEASE_SECS", type=click.IntRange(1, 300), default=10, help="Seconds in the registry if silent."
)
@env_option(
    "--context-length", "DYN_CONTEXT_LENGTH", type=click.IntRange(2), help="Tokens of prompt and answer together."
)
@trtllm_options
@env_option("--threads", "DYN_THREADS", type=click.IntRange(1), help="For llamacpp: CPU threads.")
@env_option("--mocker-itl-ms", "DYN_MOCKER_ITL_MS", type=click.FloatRange(0), default=6.0, help="Time between tokens.")
@env_option(
    "--mocker-prefill-us-per-token",
    "DYN_MOCKER_PREFILL_US_PER_TOKEN",
    type=click.FloatRange(0),
    default=0.0,
    help="Microseconds that a step takes longer for each prompt token it computes.",
)
@env_option(
    "--mocker-prefill-chunk-tokens",
    "DYN_MOCKER_PREFILL_CHUNK_TOKENS",
    type=click.IntRange(1),
    default=2048,
    help="Prompt tokens that a step computes at most, on each rank. A cancelled request gets no further chunk.",
)
@env_option(
    "--mocker-dp-ranks",
    "DYN_MOCKER_DP_RANKS",
    type=click.IntRange(1),
    default=1,
    help="Data-parallel ranks to play, each with its own cache and its own chunk of prompts in a step. They step "
    "together, and a request goes to the one with the fewest tokens.",
)
@env_option(
    "--mocker-kv-blocks",
    "DYN_MOCKER_KV_BLOCKS",
    type=click.IntRange(1),
    default=65_536,
    help="Key-value cache blocks of each rank. Requests that do not fit wait; no context is longer than all blocks.",
)
@env_option(
    "--mocker-kv-block-tokens",
    "DYN_MOCKER_KV_BLOCK_TOKENS",
    type=click.IntRange(1),
    default=16,
    help="Tokens that a block holds.",
)
@env_option(
    "--mocker-startup-s", "DYN_MOCKER_STARTUP_SECS", type=click.FloatRange(0), default=0.0, help="Loading time."
)
@click.option("--mocker-fault", "mocker_faults", multiple=True, callback=_parse_faults, help=_FAULT_HELP)
@click.option("--ready-file", type=click.Path(path_type=Path), help="Written with the real addresses when it serves.")
@logging_options
def command(**given: Any) -> None:
    from services.worker.server import Worker, WorkerConfig
    from services.worker.session import FrontendSessionConfig

    check_options(given)
    configure_logging("worker", level=given["log_level"], log_format=given["log_format"])
    port, host = given["metrics_port"], given["listen"].rpartition(":")[0]
    config = WorkerConfig(
        listen=given["listen"],
        session_listen=given["session_listen"],
        advertise=given["advertise"],
        metrics_listen=None if port is None else f"{host}:{port}",
        registries=tuple(given["registries"]),
        engine_request_limit=given["engine_request_limit"],
        request_queue_limit=given["request_queue_limit"],
        queue_timeout_s=given["queue_timeout"],
        queue_token_limit=given["queue_token_limit"],
        drain_timeout_s=given["drain_timeout"],
        lease_s=given["lease"],
        ready_file=given["ready_file"],
        session=FrontendSessionConfig(migration_limit=given["migration_limit"]),
    )
    log_config(config)

    async def serve(stopping: Any) -> None:
        await Worker(_engine(given), config).run(stopping)

    with exiting_at_once() if given["engine"] == "trtllm" else nullcontext():
        run_process(serve)


def check_options(given: dict[str, Any]) -> None:
    """What each option alone does not show. Raises ClickException."""
    _check_reachable(given["listen"], given["advertise"])
    if given["advertise"] is None and given["session_listen"] is not None:
        _check_one_host(given["listen"], given["session_listen"])
    mute_rank = given["mocker_faults"].get("mute_rank", 0)
    if mute_rank >= given["mocker_dp_ranks"]:
        raise click.UsageError(f"--mocker-fault mute_rank={mute_rank}: --mocker-dp-ranks gives no such rank")
    if given["engine"] == "llamacpp":
        _model_path(given["model"])
    if given["engine"] == "trtllm":
        check_trtllm(given)


def _model_path(model: str | None) -> Path:
    if model is None:
        raise click.UsageError(f"--engine llamacpp needs --model: a GGUF file, or {' or '.join(PUBLISHED)}")
    try:
        return resolve(model)
    except StartupError as error:
        raise click.ClickException(str(error)) from error


def _check_reachable(listen: str, advertise: str | None) -> None:
    """To a frontend elsewhere "all addresses" would mean its own machine."""
    option, address = ("--listen", listen) if advertise is None else ("--advertise", advertise)
    host, _port = split_address(address)
    if is_wildcard(host):
        raise click.UsageError(
            f"{option} {address} is no address that frontends can reach: give one by --advertise host:port"
            " (port 0 stands for the port it listens on)"
        )


def _check_one_host(listen: str, session_listen: str) -> None:
    """One host is advertised for both: by default that of --listen."""
    session_host, _port = split_address(session_listen)
    if not is_wildcard(session_host) and session_host != split_address(listen)[0]:
        raise click.UsageError(
            f"frontends would look for --session-listen {session_listen} on the host of --listen {listen}: give both"
            " the same host, or the one where both can be reached by --advertise host:port"
        )


def _engine(given: dict[str, Any]) -> Engine:
    make = {"mocker": _mocker, "llamacpp": _llamacpp, "trtllm": trtllm_engine}[given["engine"]]
    return make(given)


def _mocker(given: dict[str, Any]) -> Engine:
    from services.worker.engines.mocker import Faults, MockerConfig, MockerEngine

    optional = {"request_limit": given["engine_request_limit"], "context_length": given["context_length"]}
    config = MockerConfig(
        served_model_name=given["served_model_name"] or given["model"] or "mocker",
        itl_ms=given["mocker_itl_ms"],
        prefill_us_per_token=given["mocker_prefill_us_per_token"],
        startup_s=given["mocker_startup_s"],
        prefill_chunk_tokens=given["mocker_prefill_chunk_tokens"],
        dp_ranks=given["mocker_dp_ranks"],
        kv_blocks_total=given["mocker_kv_blocks"],
        kv_block_tokens=given["mocker_kv_block_tokens"],
        faults=Faults(**given["mocker_faults"]),
        **{name: value for name, value in optional.items() if value is not None},
    )
    log_config(config)
    return MockerEngine(config)


def _llamacpp(given: dict[str, Any]) -> Engine:
    from services.worker.engines.llamacpp import LlamaCppConfig, LlamaCppEngine

    path = _model_path(given["model"])
    optional = {
        "sequences": given["engine_request_limit"],
        "context_length": given["context_length"],
        "threads": given["threads"],
    }
    config = LlamaCppConfig(
        path=path,
        served_model_name=given["served_model_name"] or path.stem,
        **{name: value for name, value in optional.items() if value is not None},
    )
    log_config(config)
    return LlamaCppEngine(config)
