"""A TensorRT-LLM of ours: the part of version 1.2.1's LLM API that our worker uses, with its traps, on no GPU.

Put tests/fakes on PYTHONPATH. Its model gives each token from all token ids before it and from nothing else, so what
one process began another goes on with. `model` is a folder or any name: see _fake/vocabulary.py for what is read from
a folder. What really happens in the processes of the engine happens here in a thread, one step after another.

What 1.2.1 does and a caller may not expect is done here too: one object for all iterations, lists that shrink,
requests that are aborted while they wait and of which nothing is ever heard, seeds and penalties that do nothing, and
so on. tests/fakes/test_*.py say which, one test each. _fake/faults.py lists what goes wrong on demand, by environment
variables.

Names are those of the real package, and where they are found there; all that is ours alone is in `_fake`.
"""

from .llmapi import LLM, KvCacheConfig, SamplingParams
from .version import __version__

__all__ = ["LLM", "KvCacheConfig", "SamplingParams", "__version__"]
