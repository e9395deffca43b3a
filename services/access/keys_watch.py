"""Keeps the keyring up to date with the keys file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.access.keyring import Keyring
from services.access.keys_file import KeysFileError, keyring_of, text_of
from services.core.tenant import Tenant
from services.runtime.files.watch import WatchedFiles

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """`keys_file`: the tenants and their keys; None: clients need no keys. `allows_anonymous`: from anywhere."""

    keys_file: Path | None = None
    allows_anonymous: bool = False


LOOK_S = 0.25
"""How often the file is looked at. A change counts from the second look at it."""


class WatchedKeys(WatchedFiles[Keyring]):
    """The keys of a file that may change at any time. A file that cannot be used leaves the last keys valid."""

    def __init__(self, path: Path) -> None:
        """Raises KeysFileError if the file cannot be used at the start."""
        self._path = path
        self._unusable: tuple[str, str] | None = None  # The last such content, and what is wrong with it.
        super().__init__([path], self._read, LOOK_S)

    def tenant_of(self, headers: Mapping[str, str]) -> Tenant:
        """See Keyring."""
        return self.loaded.tenant_of(headers)

    def _read(self) -> Keyring:
        text = text_of(self._path)
        if self._unusable is not None and text == self._unusable[0]:
            raise KeysFileError(self._unusable[1])  # To parse it again at each look would hold up the event loop.
        try:
            return keyring_of(text, self._path)
        except KeysFileError as error:
            self._unusable = text, str(error)
            raise

    def on_used(self) -> None:
        log.info("the keys file was read", path=str(self._path))

    def on_fault(self, why: str) -> None:
        log.error("the keys file cannot be used: the keys before it stay valid", why=why)
