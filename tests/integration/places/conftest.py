"""Places that differ from a developer's machine, as words before a command: see `Place`. They need root."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.integration.harness.plane.commands import BARE

NEEDS = "needs root and `unshare` of util-linux; deselect with -m 'not netns'"
_PRIVATE = "mount --make-rprivate /; "
_READ_ONLY = (
    "awk '{print $5}' /proc/self/mountinfo | sort -r | while read -r place; do case $place in /proc*|/sys*) ;;"
    ' *) mount -o remount,bind,ro "$place" 2>/dev/null;; esac; done; '
)


@dataclass(frozen=True)
class Place:
    """`setup`: shell commands in a mount namespace of the command's own. `environment`: besides the PATH."""

    setup: str = ""
    unshared: str = "-m"
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def prefix(self) -> tuple[str, ...]:
        assert os.geteuid() == 0, NEEDS
        assert shutil.which("unshare"), NEEDS
        return ("unshare", self.unshared, "sh", "-c", f'{_PRIVATE}{self.setup}exec "$@"', "sh")

    @property
    def variables(self) -> dict[str, str]:
        return {**BARE, **self.environment}


READ_ONLY = Place(_READ_ONLY)
SHARED_MEMORY_ONLY = Place(_READ_ONLY + "mount -t tmpfs none /dev/shm; ")
TMP_ONLY = Place(_READ_ONLY + "mount --bind /tmp /tmp; mount -o remount,bind,rw /tmp; ")  # The checkout may be in it.
NO_PROC = Place("mount -t tmpfs none /proc; ")
NO_SHARED_MEMORY = Place("umount /dev/shm; ")
NO_USER = Place("mount --bind /dev/null /etc/passwd; mount --bind /dev/null /etc/nsswitch.conf; ")
NO_IPV6 = Place("ip link set lo up; sysctl -qw net.ipv6.conf.all.disable_ipv6=1; ", "-mn")
