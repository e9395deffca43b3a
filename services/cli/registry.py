"""`unbroken registry`: runs a registry."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from services.cli.certs.options import peer_files, peer_options
from services.cli.environment import start_logging
from services.cli.options import Address, Addresses, logging_options
from services.registry.config import EtcdConfig, RegistryConfig
from services.runtime.process import run_process
from services.tls.roles import Role

PEM = click.Path(exists=True, dir_okay=False, path_type=Path)
Option = Callable[[Callable[..., Any]], Callable[..., Any]]


class Endpoints(Addresses):
    """`[http[s]://]host:port,…` as a sequence. Schemes are kept."""

    name = "[http[s]://]host:port,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Sequence[str]:
        if not isinstance(value, str):
            return list(value)
        endpoints = [endpoint.strip().rstrip("/") for endpoint in value.split(",")]
        super().convert(",".join(map(_bare, endpoints)), param, ctx)
        if len({_is_https(endpoint) for endpoint in endpoints}) > 1:
            self.fail("either all endpoints are https:// or none", param, ctx)
        return endpoints


class _OfEtcd(click.Option):
    """An option whose second variable is read with `--store etcd` only: otherwise it is there for other programs."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        if ctx.params.get("store") == "etcd":
            return super().resolve_envvar_value(ctx)
        assert isinstance(self.envvar, list)
        return os.environ.get(self.envvar[0]) or None


def _etcd_option(name: str, variable: str, **attributes: Any) -> Option:
    """An option that reads `DYN_<variable>`, or `<variable>`, which other clients of etcd use, too."""
    return click.option(
        name,
        cls=_OfEtcd,
        envvar=[f"DYN_{variable}", variable],
        show_envvar=True,
        **{"show_default": True, **attributes},
    )


@click.command(help="Keep the set of registered workers.", context_settings={"show_default": True})
@click.option(
    "--listen",
    envvar="DYN_REGISTRY_LISTEN",
    show_envvar=True,
    default="127.0.0.1:50050",
    type=Address(),
    help="Address of the gRPC service. Port 0: any free port.",
)
@click.option(
    "--store",
    envvar="DYN_REGISTRY_STORE",
    show_envvar=True,
    default="memory",
    is_eager=True,  # Read before the options of etcd: see _OfEtcd.
    type=click.Choice(["memory", "etcd"]),
    help="memory: in this process, for a single registry. etcd: shared by all registries that use the same etcd.",
)
@_etcd_option(
    "--etcd-endpoints",
    "ETCD_ENDPOINTS",
    default="127.0.0.1:2379",
    type=Endpoints(),
    help="Members of one etcd cluster. https:// enables TLS.",
)
@_etcd_option("--etcd-username", "ETCD_AUTH_USERNAME", default="", help="User name for etcd.")
@_etcd_option(
    "--etcd-password",
    "ETCD_AUTH_PASSWORD",
    show_default=False,
    default="",
    help="Password for etcd. Prefer the environment: other users can see the command line.",
)
@_etcd_option("--etcd-ca", "ETCD_AUTH_CA", type=PEM, help="PEM file of the CA of etcd's certificate. Enables TLS.")
@_etcd_option("--etcd-client-cert", "ETCD_AUTH_CLIENT_CERT", type=PEM, help="PEM file of the client certificate.")
@_etcd_option("--etcd-client-key", "ETCD_AUTH_CLIENT_KEY", type=PEM, help="PEM file of the client certificate's key.")
@peer_options(Role.REGISTRY)
@click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help='File that is written when the registry listens: {"address": "host:port"}.',
)
@logging_options
@click.pass_context
def command(context: click.Context, /, **given: Any) -> None:
    _check_store(context)
    config = RegistryConfig(
        listen=given["listen"],
        etcd=_etcd_config(given) if given["store"] == "etcd" else None,
        ready_file=given["ready_file"],
        peers=peer_files(given),
    )
    start_logging("registry", given, config)
    from services.registry.server import serve

    run_process(lambda stopping: serve(config, stopping))


def _check_store(context: click.Context) -> None:
    """Refuse etcd options without `--store etcd`. Environment variables may be set for other programs, and are ignored.

    Raises UsageError.
    """
    for option in context.command.params:
        is_given = context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
        if is_given and option.opts[0].startswith("--etcd-") and context.params["store"] != "etcd":
            raise click.UsageError(f"{option.opts[0]} needs --store etcd")


def _etcd_config(given: dict[str, Any]) -> EtcdConfig:
    if bool(given["etcd_client_cert"]) != bool(given["etcd_client_key"]):
        raise click.UsageError("--etcd-client-cert and --etcd-client-key go together")
    endpoints = given["etcd_endpoints"]
    is_tls = given["etcd_ca"] is not None or any(map(_is_https, endpoints))
    if given["etcd_client_cert"] and not is_tls:
        raise click.UsageError("--etcd-client-cert needs TLS: give --etcd-ca or https:// endpoints")
    return EtcdConfig(
        endpoints=tuple(map(_bare, endpoints)),
        is_tls=is_tls,
        username=given["etcd_username"],
        password=given["etcd_password"],
        ca=_read(given["etcd_ca"]),
        client_cert=_read(given["etcd_client_cert"]),
        client_key=_read(given["etcd_client_key"]),
    )


def _bare(endpoint: str) -> str:
    return endpoint.removeprefix("http://").removeprefix("https://")


def _is_https(endpoint: str) -> bool:
    return endpoint.startswith("https://")


def _read(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()
