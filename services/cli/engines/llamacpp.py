"""Options of `unbroken worker --engine llamacpp`."""

from pathlib import Path
from typing import Any

import click

from services.cli.options import Integer, combined, env_option
from services.models.download import PUBLISHED, resolve
from services.runtime.log import log_config
from services.runtime.process import StartupError
from services.worker.engine import Engine

llamacpp_options = combined(
    env_option("--threads", "DYN_THREADS", type=Integer(1, 512), help="For llamacpp: number of CPU threads."),
)


def check_llamacpp(given: dict[str, Any]) -> None:
    """Check that the model's file exists. Raises ClickException."""
    _model_path(given["model"])


def llamacpp_engine(given: dict[str, Any]) -> Engine:
    """Create the engine. Raises ClickException."""
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


def _model_path(model: str | None) -> Path:
    if model is None:
        raise click.UsageError(f"--engine llamacpp needs --model: a GGUF file, or {' or '.join(PUBLISHED)}")
    try:
        return resolve(model)
    except StartupError as error:
        raise click.ClickException(str(error)) from error
