"""Options of `unbroken worker --engine mocker`."""

import re
from typing import Any

import click

from services.cli.options import DAY_MS, DAY_S, INTEGER_MAX, Integer, Number, combined, env_option
from services.runtime.log import log_config
from services.worker.engine import Engine

FAULTS = {
    "die_after": "K: kill the process when a request has K tokens",
    "freeze_after": "K: stop the process (SIGSTOP) then",
    "leave_after": "K: ask the process to stop (SIGTERM) then",
    "hang_after": "K: stop the engine then, while the server goes on",
    "raise_after": "K: fail the request then",
    "die_on_token": "T: kill the process at the first step of a prompt with token T",
    "refuse": "M: refuse the first M requests",
    "hold": "M: make no step before there are M requests",
    "linger_ms": "T: die or stop T ms later, when all generated tokens have been sent",
    "mute_after": "K: stop reporting the load of all ranks when a request has K tokens; 0: from the first request on",
    "mute_rank": "R: never report the load of data-parallel rank R, counted from 0",
}
_DIGITS = re.compile("[0-9]{1,10}")
_FAULT_HELP = "For tests with the mocker, repeatable. " + "; ".join(
    f"{name}={meaning}" for name, meaning in FAULTS.items()
)


def _parse_faults(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, int]:
    faults = {}
    for text in given:
        name, _sign, number = text.partition("=")
        if name not in FAULTS or not _DIGITS.fullmatch(number) or int(number) > INTEGER_MAX:
            known = ", ".join(f"{name}=N" for name in FAULTS)
            raise click.BadParameter(f"{text!r} is not one of {known} with a number N from 0 to {INTEGER_MAX}")
        faults[name] = int(number)
    return faults


mocker_options = combined(
    env_option(
        "--mocker-itl-ms",
        "DYN_MOCKER_ITL_MS",
        type=Number(0, DAY_MS),
        default=6.0,
        help="Milliseconds between two tokens of a request.",
    ),
    env_option(
        "--mocker-prefill-us-per-token",
        "DYN_MOCKER_PREFILL_US_PER_TOKEN",
        type=Number(0, 1_000_000),
        default=0.0,
        help="Microseconds that each prompt token adds to the step that computes it.",
    ),
    env_option(
        "--mocker-prefill-chunk-tokens",
        "DYN_MOCKER_PREFILL_CHUNK_TOKENS",
        type=Integer(1),
        default=2048,
        help="Maximum number of prompt tokens in one step of each rank. A cancelled request gets no further chunk.",
    ),
    env_option(
        "--mocker-dp-ranks",
        "DYN_MOCKER_DP_RANKS",
        type=Integer(1, 1024),
        default=1,
        help="Number of simulated data-parallel ranks, each with its own cache and its own prompt chunk per step. All"
        " ranks step together. A request goes to the rank with the fewest tokens.",
    ),
    env_option(
        "--mocker-kv-blocks",
        "DYN_MOCKER_KV_BLOCKS",
        type=Integer(1),
        default=65_536,
        help="Key-value cache blocks of each rank. Requests that do not fit wait. They limit the context length.",
    ),
    env_option(
        "--mocker-kv-block-tokens",
        "DYN_MOCKER_KV_BLOCK_TOKENS",
        type=Integer(1),
        default=16,
        help="Number of tokens in a block.",
    ),
    env_option(
        "--mocker-startup-s",
        "DYN_MOCKER_STARTUP_SECS",
        type=Number(0, DAY_S),
        default=0.0,
        help="Seconds that loading the model takes.",
    ),
    click.option("--mocker-fault", "mocker_faults", multiple=True, callback=_parse_faults, help=_FAULT_HELP),
)


def check_mocker(given: dict[str, Any]) -> None:
    """Check that the faults name existing ranks. Raises UsageError."""
    mute_rank = given["mocker_faults"].get("mute_rank", 0)
    if mute_rank >= given["mocker_dp_ranks"]:
        raise click.UsageError(f"--mocker-fault mute_rank={mute_rank}: --mocker-dp-ranks gives no such rank")


def mocker_engine(given: dict[str, Any]) -> Engine:
    """Create the engine."""
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
