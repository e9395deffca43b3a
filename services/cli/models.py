"""`unbroken models`: downloads models for the llamacpp engine."""

from contextlib import suppress

import click

from services.models.download import PUBLISHED, pull
from services.runtime.process import StartupError


def _say(text: str) -> None:
    """Print a line. A model is stored although nobody can read it; the program reports that at its end."""
    with suppress(OSError):
        click.echo(text)


@click.group()
def command() -> None:
    """Download models for the llamacpp engine."""


@command.command(name="pull")
@click.argument("name", type=click.Choice(sorted(PUBLISHED)))
def pull_command(name: str) -> None:
    """Download a model into the user's cache folder and verify it."""
    try:
        pull(PUBLISHED[name], _say)
    except StartupError as error:
        raise click.ClickException(str(error)) from error
