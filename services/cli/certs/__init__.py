"""`unbroken certs`, and the options of certificates of other commands."""

from services.cli.certs.command import command

__all__ = ["command"]
