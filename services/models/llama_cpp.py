"""Imports and configures llama.cpp for Python. No other module imports cyllama, an optional dependency of about 100 MB.

Importing this module raises ImportError if cyllama is not installed; its importers turn that into their own errors.
"""

import os

# Read once, when the library is loaded. By default its threads spin while they wait for each other, many times in each
# step: with another process on the same cores, a step then took 30 times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# On an abort, llama.cpp would start a debugger and wait for it; a worker should exit at once.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")

from cyllama.llama import llama_cpp

llama_cpp.disable_logging()

__all__ = ["llama_cpp", "why"]
_ADVICE = " Run with verbose="
"""cyllama's advice to set an option that none of our users has."""


def why(error: Exception) -> str:
    """What cyllama says about a failure, without advice for programmers."""
    return str(error).partition(_ADVICE)[0]
