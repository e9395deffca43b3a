"""Unbroken: an LLM request plane whose token streams do not break."""

__version__ = "0.1.0"
