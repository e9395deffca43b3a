"""Replaces the clocks and the sources of chance of Python's standard library, in a process that does nothing else."""

import os
import random
import sys
import time
from typing import Any

_START_S = 1_800_000_000.0
"""What `time.time` begins with: a day in 2027."""


class Clocks:
    """The clocks of the process that runs at present. `skew_s`: what its wall clock differs by."""

    now: float = 0.0
    skew_s: float = 0.0


class Entropy:
    """Where all randomness of the simulated processes comes from."""

    source: random.Random = random.Random(0)


class SeededRandom(random.Random):
    """Without a seed it takes one from `Entropy`, not from the system."""

    def __init__(self, seed: Any = None) -> None:
        super().__init__(Entropy.source.getrandbits(64) if seed is None else seed)


def begin(seed: str) -> None:
    """Start the clocks and the randomness of one run."""
    Clocks.now = Clocks.skew_s = 0.0
    Entropy.source = SeededRandom(f"{seed}/entropy")


def _urandom(size: int) -> bytes:
    return Entropy.source.randbytes(size)


def _monotonic() -> float:
    return Clocks.now


def _time() -> float:
    return _START_S + Clocks.now + Clocks.skew_s


def _time_ns() -> int:
    return round(_time() * 1e9)


def _monotonic_ns() -> int:
    return round(Clocks.now * 1e9)


def install() -> None:
    """Replace them. Call it once, before `services` is imported."""
    assert not any(name.startswith("services.") for name in sys.modules), "services has bound the real clock already"
    random.Random = SeededRandom  # type: ignore[assignment,misc]
    random._urandom = os.urandom = _urandom  # type: ignore[attr-defined]
    time.monotonic, time.monotonic_ns = _monotonic, _monotonic_ns
    time.time, time.time_ns = _time, _time_ns


def is_installed() -> bool:
    """Whether this process has virtual time."""
    return time.monotonic is _monotonic
