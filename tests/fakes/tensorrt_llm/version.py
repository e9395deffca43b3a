"""The version whose behaviour this package reproduces."""

__version__ = "1.2.1"
