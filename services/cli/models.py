"""`unbroken models`: get models for the llamacpp engine."""

import click

from services.models.download import PUBLISHED, pull
from services.runtime.process import StartupError


@click.group()
def command() -> None:
    """Get models for the llamacpp engine."""


@command.command(name="pull")
@click.argument("name", type=click.Choice(sorted(PUBLISHED)))
def pull_command(name: str) -> None:
    """Get a model, check it, and keep it in the user's cache folder."""
    try:
        pull(PUBLISHED[name], click.echo)
    except StartupError as error:
        raise click.ClickException(str(error)) from error
