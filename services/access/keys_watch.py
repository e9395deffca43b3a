"""Keeps the keyring up to date with the keys file."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.access.keyring import Keyring
from services.access.keys_file import KeysFileError, keyring_of, read_keys_file, text_of
from services.core.tenant import Tenant

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """`keys_file`: the tenants and their keys; None: clients need no keys. `allows_anonymous`: from anywhere."""

    keys_file: Path | None = None
    allows_anonymous: bool = False


LOOK_S = 0.25
"""How often the file is looked at. A change counts from the second look at it."""


class WatchedKeys:
    """The keys of a file that may change at any time. A file that cannot be used leaves the last keys valid."""

    def __init__(self, path: Path) -> None:
        """Raises KeysFileError if the file cannot be used at the start."""
        self._path = path
        self._used = self._seen = _state_of(path)
        self._keyring: Keyring = read_keys_file(path)
        self._unusable: tuple[int, ...] | None = None  # The state in which its content could not be used.
        self._fault = ""  # Why the file cannot be used, as the log has it.

    def tenant_of(self, headers: Mapping[str, str]) -> Tenant:
        """See Keyring."""
        return self._keyring.tenant_of(headers)

    async def run(self) -> None:
        """Look at the file until the task is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self.look)  # A file on a network may keep it waiting.

    def look(self) -> None:
        """Read the file if it has changed since it was used, and is the same as at the last look.

        So a file that is being written is not taken for whole. Kubernetes changes what a link refers to, so the inode
        counts as well.
        """
        before, self._seen = self._seen, _state_of(self._path)
        if self._seen == self._used or self._seen != before or self._seen == self._unusable is not None:
            return
        try:
            text = text_of(self._path)  # What cannot be read now may be readable at the next look.
        except KeysFileError as error:
            self._keep(error)
            return
        self._take(text)

    def _take(self, text: str) -> None:
        """Use what was read, unless the file has changed meanwhile."""
        try:
            keyring = keyring_of(text, self._path)
        except KeysFileError as error:
            self._keep(error)
            if _state_of(self._path) == self._seen:
                self._unusable = self._seen  # To parse it again at each look would hold up the event loop.
            return
        if _state_of(self._path) == self._seen:
            self._keyring, self._used, self._fault = keyring, self._seen, ""
            log.info("the keys file was read", path=str(self._path))

    def _keep(self, error: KeysFileError) -> None:
        """Keep the last keys. The log says why, once."""
        if str(error) != self._fault:
            log.error("the keys file cannot be used: the keys before it stay valid", why=str(error))
        self._fault = str(error)


def _state_of(path: Path) -> tuple[int, ...] | None:
    """What changes with the file; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
