"""Options of certificates: of clients' ports, and of the processes among themselves."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from services.cli.options import combined, env_option

if TYPE_CHECKING:
    from services.tls.certificate import PairFiles

PEM = click.Path(dir_okay=False, path_type=Path)
VARIABLES = {"tls_cert": "DYN_TLS_CERT_PATH", "tls_key": "DYN_TLS_KEY_PATH"}

edge_tls_options = combined(
    env_option(
        "--tls-cert",
        VARIABLES["tls_cert"],
        type=PEM,
        help="PEM file of the certificate for clients, followed by its issuers. With it, all ports of clients and"
        " operators speak TLS, and nothing else. It is read anew when it changes. Default: no TLS.",
    ),
    env_option("--tls-key", VARIABLES["tls_key"], type=PEM, help="PEM file of the key of --tls-cert."),
)


def edge_pair(given: dict[str, Any]) -> "PairFiles | None":
    """The certificate for clients. Raises UsageError."""
    from services.tls.certificate import PairFiles

    _refuse_empty(VARIABLES)
    if given["tls_cert"] is None and given["tls_key"] is None:
        return None
    if given["tls_cert"] is None or given["tls_key"] is None:
        raise click.UsageError("--tls-cert and --tls-key go together: give both")
    return PairFiles(given["tls_cert"], given["tls_key"])


def _refuse_empty(variables: dict[str, str]) -> None:
    for variable in variables.values():
        if os.environ.get(variable) == "":  # click treats it as unset, which would leave the ports without TLS.
            raise click.UsageError(f"{variable} is empty: give it a value, or unset it")
