"""`unbroken keys`: makes, lists and revokes API keys."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date, datetime
from pathlib import Path
from typing import Any

import click

from services.access.keyring import today
from services.access.keys_edit import add_key, revoke_key
from services.access.keys_file import KeysFileError, keys_in, text_of

_file_option: Callable[[Callable[..., Any]], Callable[..., Any]] = click.option(
    "--keys-file",
    "path",
    envvar="DYN_KEYS_FILE",
    show_envvar=True,
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with the tenants and the hashes of their keys. Running frontends read it anew when it changes.",
)


@contextmanager
def _errors_reported() -> Iterator[None]:
    """Turn what is wrong with the file into an error of the command line."""
    try:
        yield
    except KeysFileError as error:
        raise click.ClickException(str(error)) from error


@click.group()
def command() -> None:
    """Make, list and revoke the API keys of tenants."""


@command.command()
@_file_option
@click.option("--tenant", required=True, help="Whose key it is. A tenant that is new gets no limits.")
@click.option(
    "--expires",
    type=click.DateTime(["%Y-%m-%d"]),
    help="The first day, in UTC, on which the key is not valid any more.",
)
def new(path: Path, tenant: str, expires: datetime | None) -> None:
    """Make a key and print it. It is shown this once: the file has only its hash."""
    with _errors_reported():
        key = add_key(path, tenant, None if expires is None else expires.date())
    click.echo(key.text)


@command.command(name="list")
@_file_option
def list_keys(path: Path) -> None:
    """List the keys: their id, their tenant, and when they expire."""
    with _errors_reported():
        keys = keys_in(text_of(path), path)
    for key in keys:
        click.echo(f"{key.id}  {key.tenant.name}{_expiry(key.expires)}")


def _expiry(expires: date | None) -> str:
    if expires is None:
        return ""
    return f"  {'expired' if today() >= expires else 'expires'} {expires}"


@command.command()
@_file_option
@click.argument("key_id", metavar="ID")
def revoke(path: Path, key_id: str) -> None:
    """Revoke the key with this ID: the part between `ub_` and the next `_`.

    Frontends refuse it within a second of the change of their file.
    """
    with _errors_reported():
        revoked = revoke_key(path, key_id)
    click.echo(f"revoked {revoked}")
