"""A fake TensorRT-LLM: the part of the LLM API of version 1.2.1 that our worker uses, with its defects, without a GPU.

Put tests/fakes on PYTHONPATH. Its model computes each token from all token ids before it and from nothing else, so
another process can continue an answer. `model` is a folder or any name; _fake/vocabulary.py says what is read from a
folder. The work of the real engine's processes is done in a thread, one step after another.

The fake reproduces unexpected behaviour of 1.2.1: one object for all iterations, lists that shrink, requests that are
aborted while they wait and never get a last result, seeds and penalties without effect, and more. tests/fakes/test_*.py
have a test for each. _fake/faults.py lists the faults that environment variables inject.

Names and their modules are those of the real package; everything that exists only in the fake is in `_fake`.
"""

from .llmapi import LLM, KvCacheConfig, SamplingParams
from .version import __version__

__all__ = ["LLM", "KvCacheConfig", "SamplingParams", "__version__"]
