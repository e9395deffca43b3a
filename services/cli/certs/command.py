"""`unbroken certs`: makes a certificate authority, and certificates for clients' ports and for each role."""

import re
from pathlib import Path
from typing import Any

import click

from services.cli.options import Integer
from services.core.errors import quoted
from services.tls.certificate import CertificateError
from services.tls.roles import Role, dns_name, spiffe_id

EDGE = "edge"
HOSTS = ("localhost", "127.0.0.1", "::1")
DAYS = Integer(1, 3650)
MISSING = "this command needs the library cryptography: pip install 'unbroken[certs]'"
_LABEL = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_DOMAIN = re.compile(rf"(?=.{{1,200}}$){_LABEL}(\.{_LABEL})*")
"""A trust domain of SPIFFE that is also a DNS name, and has room for a role before it."""


class Domain(click.ParamType[str]):
    """A trust domain."""

    name = "domain"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not _DOMAIN.fullmatch(value):
            self.fail(f"{quoted(value)} is not a domain: write it in lower case, such as plane.example", param, ctx)
        return str(value)


@click.command(short_help="Make a CA and certificates for TLS.", context_settings={"show_default": True})
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="HOST",
    help="Name or address by which clients reach a frontend, besides localhost. May be repeated.",
)
@click.option(
    "--domain", default="unbroken.local", type=Domain(), help="Trust domain of the roles: spiffe://DOMAIN/frontend."
)
@click.option("--days", default=90, type=DAYS, help="Number of days that the certificates are valid.")
def command(folder: Path, hosts: tuple[str, ...], domain: str, days: int) -> None:
    """Make a CA and certificates in FOLDER, for trying TLS and for small set-ups.

    A CA that is there already is kept, and its certificates are made anew: running processes take them over. Keep
    ca.key where nobody else can read it: whoever has it can pose as any role.

    edge.pem is for the ports of clients (--tls-cert, --tls-key); frontend.pem, worker.pem, registry.pem and
    operator.pem are for the processes among themselves (--peer-cert, --peer-key, with ca.pem as --peer-ca).
    """
    try:
        made = _make(folder, hosts, domain, days)
    except ImportError as error:
        raise click.ClickException(MISSING) from error
    except CertificateError as error:
        raise click.ClickException(str(error)) from error
    for line in made:
        click.echo(line)


def _make(folder: Path, hosts: tuple[str, ...], domain: str, days: int) -> list[str]:
    """Make them. Returns a line about each."""
    from services.tls.issue import authority_in, host_name, issue, uri_name, write_pair

    names = [host_name(host) for host in dict.fromkeys((*HOSTS, *hosts))]
    roles = {role: [uri_name(spiffe_id(domain, role)), host_name(dns_name(domain, role))] for role in Role}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CertificateError(f"{folder} cannot be made: {error.strerror}") from error
    authority, is_new = authority_in(folder)
    lines = [f"{folder / 'ca.pem'}  {'a new CA' if is_new else 'the CA that was there'}"]
    write_pair(folder, EDGE, *issue(authority, EDGE, names, days=days, is_client=False))
    lines.append(f"{folder / 'edge.pem'}  for {', '.join((*HOSTS, *hosts))}")
    for role, ids in roles.items():
        write_pair(folder, role, *issue(authority, role, ids, days=days, is_client=True))
        lines.append(f"{folder / f'{role}.pem'}  {spiffe_id(domain, role)}")
    return lines
