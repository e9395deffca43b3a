"""Options of a frontend's admin API: where it listens, and its token."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from services.cli.options import Address, combined, env_option, refuse_empty

if TYPE_CHECKING:
    from services.frontend.api.admin.admin import AdminConfig

TOKEN_VARIABLES = ("DYN_ADMIN_TOKEN", "DYN_ADMIN_TOKEN_FILE")
TOKEN_FORM = re.compile(r"[!-~]{1,512}")
"""Tokens that fit an HTTP header and gRPC metadata."""

admin_options = combined(
    env_option(
        "--admin-listen",
        "DYN_ADMIN_LISTEN",
        type=Address(),
        help="Address of the admin API, over HTTP and gRPC: /busy_threshold, with /health, /live, /metrics and"
        " /openapi.json, and the service Admin. Default: the addresses for clients.",
    ),
    env_option(
        "--admin-grpc-listen",
        "DYN_ADMIN_GRPC_LISTEN",
        type=Address(),
        help="Second address of the admin API, over HTTP and gRPC as well. Default: the addresses for clients.",
    ),
    env_option(
        "--admin-token",
        "DYN_ADMIN_TOKEN",
        help="Bearer token that admin calls must send. Default: none is needed; with --keys-file, admin calls then have"
        " to have an address of their own. All users of the machine can see a"
        " command line; prefer the variable or --admin-token-file.",
    ),
    env_option(
        "--admin-token-file",
        "DYN_ADMIN_TOKEN_FILE",
        type=click.Path(dir_okay=False, path_type=Path),
        help="File that contains the admin token. Read at start.",
    ),
    env_option("--disable-admin-api", "DYN_DISABLE_FRONTEND_ADMIN_API", is_flag=True, help="Disable the admin API."),
)


def admin_config(given: dict[str, Any]) -> "AdminConfig":
    """The configuration of the admin API. Raises UsageError."""
    from services.frontend.api.admin.admin import AdminConfig

    token = admin_token(given["admin_token"], given["admin_token_file"])
    names = [name for name in ("admin_listen", "admin_grpc_listen", "admin_token", "admin_token_file") if given[name]]
    if given["disable_admin_api"] and names:
        options = " and ".join(f"--{name.replace('_', '-')}" for name in names)
        raise click.UsageError(f"--disable-admin-api contradicts {options}: give one or the other")
    return AdminConfig(
        listen=given["admin_listen"],
        grpc_listen=given["admin_grpc_listen"],
        token=token,
        is_on=not given["disable_admin_api"],
    )


def admin_token(token: str | None, file: Path | None) -> str | None:
    """The token from the option, the variable or the file. Raises UsageError, whose text never contains the token."""
    refuse_empty(*TOKEN_VARIABLES)
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
