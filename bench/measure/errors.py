"""The error that every part of the bench raises for the user."""


class BenchError(Exception):
    """A measurement cannot be made; the message says what the user must do first."""
