"""The version whose behaviour this package has."""

__version__ = "1.2.1"
