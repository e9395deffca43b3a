"""llama.cpp for Python, made ready: the one place that imports cyllama, an optional dependency of some 100 MB.

Raises ImportError where it is not installed; who imports this says what that means there.
"""

import os

# Read once, when the library is loaded. Its threads wait for each other many times in a step, by spinning; next to any
# other process on the same cores a step then took 30 times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# When it aborts it would start a debugger and wait for it; a dead worker should be dead at once.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")

from cyllama.llama import llama_cpp

llama_cpp.disable_logging()

__all__ = ["llama_cpp"]
