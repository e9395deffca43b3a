"""`unbroken models`: downloads models for the llamacpp engine."""

import click

from services.models.download import PUBLISHED, pull
from services.runtime.process import StartupError


@click.group()
def command() -> None:
    """Download models for the llamacpp engine."""


@command.command(name="pull")
@click.argument("name", type=click.Choice(sorted(PUBLISHED)))
def pull_command(name: str) -> None:
    """Download a model into the user's cache folder and verify it."""
    try:
        pull(PUBLISHED[name], click.echo)
    except StartupError as error:
        raise click.ClickException(str(error)) from error
