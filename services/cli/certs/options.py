"""Options of certificates: of clients' ports, and of the processes among themselves."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from services.cli.options import Function, combined, env_option, refuse_empty
from services.tls.roles import Role

if TYPE_CHECKING:
    from services.tls.certificate import PairFiles
    from services.tls.peers import PeerFiles

PEM = click.Path(dir_okay=False, path_type=Path)
PEER_VARIABLES = {"peer_cert": "DYN_PEER_CERT_PATH", "peer_key": "DYN_PEER_KEY_PATH", "peer_ca": "DYN_PEER_CA_PATH"}
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


def peer_options(of: Role) -> Callable[[Function], Function]:
    """Adds the certificate of a process for the others. `of`: the role of the process."""
    return combined(
        env_option(
            "--peer-cert",
            PEER_VARIABLES["peer_cert"],
            type=PEM,
            help=f"PEM file of this process's certificate for the others of the plane, with the SPIFFE id of a {of}."
            " With it, they speak TLS to each other, and nothing else. It is read anew when it changes. Default: none.",
        ),
        env_option("--peer-key", PEER_VARIABLES["peer_key"], type=PEM, help="PEM file of the key of --peer-cert."),
        env_option(
            "--peer-ca",
            PEER_VARIABLES["peer_ca"],
            type=PEM,
            help="PEM file of the CA of all certificates of the plane.",
        ),
    )


def peer_files(given: dict[str, Any]) -> "PeerFiles | None":
    """The certificate for the other processes of the plane. Raises UsageError."""
    from services.tls.peers import PeerFiles

    files = _together(given, PEER_VARIABLES, "--peer-cert, --peer-key and --peer-ca go together: give all three")
    return None if files is None else PeerFiles(*files)


def edge_pair(given: dict[str, Any]) -> "PairFiles | None":
    """The certificate for clients. Raises UsageError."""
    from services.tls.certificate import PairFiles

    files = _together(given, VARIABLES, "--tls-cert and --tls-key go together: give both")
    return None if files is None else PairFiles(*files)


def _together(given: dict[str, Any], variables: dict[str, str], why: str) -> list[Path] | None:
    """The files of options that are given all or not at all. `variables`: by option. Raises UsageError with `why`."""
    refuse_empty(*variables.values())
    files = [given[name] for name in variables]
    if None not in files:
        return files
    if any(files):
        raise click.UsageError(why)
    return None
