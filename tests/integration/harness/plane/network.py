"""A network namespace with a virtual cable to this machine, on which packets can be made to vanish without a trace.

Needs root and iproute2. To cut the cable, a neighbour entry points to an address that no interface has: packets leave,
and no error reports that they do not arrive.
"""

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

NOBODY = "02:00:00:00:00:ff"
CABLES = 50 * 250
"""The number of networks from 10.200.0.0 to 10.249.249.0, one for each cable."""
TRIES_MAX = 20
NEEDS = "needs root and `ip` of iproute2 (Debian: apt-get install iproute2); deselect with -m 'not netns'"


class Cable:
    """A cable between this machine (`here`) and the namespace (`there`); both attributes are IPv4 addresses."""

    def __init__(self, number: int) -> None:
        """`number`: below CABLES; names and addresses derived from it must be unused on this machine."""
        self.name = f"ub{number}"
        self._ends = (f"ub{number}h", f"ub{number}t")
        net = f"10.{200 + number // 250}.{number % 250}"
        self.here, self.there = f"{net}.1", f"{net}.2"

    @property
    def prefix(self) -> tuple[str, ...]:
        """The words before a command that make it run in the namespace."""
        return ("ip", "netns", "exec", self.name)

    def plug(self) -> None:
        """Connect this machine and the namespace, which must exist: see `_claimed`."""
        here, there = self._ends
        _ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", self.name)
        _ip("address", "add", f"{self.here}/30", "dev", here)
        _ip("link", "set", here, "up")
        self._ip_there("address", "add", f"{self.there}/30", "dev", there)
        self._ip_there("link", "set", there, "up")
        self._ip_there("link", "set", "lo", "up")

    def unplug(self) -> None:
        """Delete the link, then the namespace. The namespace alone would remove the link only after a delay."""
        _ip("link", "delete", self._ends[0])
        _ip("netns", "delete", self.name)

    def cut(self, *, is_one_way: bool = False) -> None:
        """Drop all packets from here to there, and back unless `is_one_way`."""
        _ip("neighbour", "replace", self.there, "lladdr", NOBODY, "dev", self._ends[0], "nud", "permanent")
        if not is_one_way:
            self._ip_there(
                "neighbour", "replace", self.here, "lladdr", NOBODY, "dev", self._ends[1], "nud", "permanent"
            )

    def mend(self) -> None:
        _ip("neighbour", "flush", "dev", self._ends[0], "nud", "permanent")
        self._ip_there("neighbour", "flush", "dev", self._ends[1], "nud", "permanent")

    def _ip_there(self, *words: str) -> None:
        _ip("-netns", self.name, *words)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _claimed() -> Cable:
    """Return a cable with a namespace of its own. Skips namespaces that others use or have left behind."""
    said = ""
    for number in random.sample(range(CABLES), TRIES_MAX):
        one = Cable(number)
        done = subprocess.run(["ip", "netns", "add", one.name], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return one
        said = done.stderr
    raise AssertionError(f"no network namespace can be created: {said}")


@contextmanager
def cable() -> Iterator[Cable]:
    """Connect a cable, and remove it when the context ends."""
    assert os.geteuid() == 0, NEEDS
    assert shutil.which("ip"), NEEDS
    one = _claimed()
    one.plug()
    try:
        yield one
    finally:
        one.unplug()
