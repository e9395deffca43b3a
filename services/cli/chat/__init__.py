"""`unbroken chat`: talks to a model in the terminal."""

from services.cli.chat.command import command

__all__ = ["command"]
