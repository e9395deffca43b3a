"""Unbroken: an LLM request plane whose token streams survive the loss of a worker."""

__version__ = "0.1.0"
