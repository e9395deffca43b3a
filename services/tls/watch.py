"""Keeps the context of new connections up to date with files that may change at any time.

A connection keeps the context with which it began, so a change touches no stream.
"""

import asyncio
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from services.tls.certificate import Certificate, CertificateError, PairFiles, certificate_of, server_context

log = structlog.get_logger()

LOOK_S = 0.5
"""How often the files are looked at. A change counts from the second look at it."""
EXPIRY_WARNING_S = 7 * 86_400.0
"""How long before its end a certificate is warned of."""
EXPIRY_REMINDER_S = 86_400.0
"""How often it is warned of."""

_State = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class ServerPair:
    """A certificate with its context."""

    certificate: Certificate
    context: ssl.SSLContext


Loaded = TypeVar("Loaded", bound=ServerPair)


class WatchedFiles(Generic[Loaded]):
    """What certificate files hold. Files that cannot be used leave the last ones in use."""

    def __init__(self, files: Sequence[Path], load: Callable[[], Loaded], now: Callable[[], float]) -> None:
        """`load`: reads the files. `now`: the time since the epoch. Raises CertificateError as `load` does."""
        self._files = files
        self._load = load
        self._now = now
        self._used = self._seen = _state_of(files)
        self._fault = ""  # Why the files cannot be used, as the log has it.
        self.loaded = load()
        self._warned_at = 0.0
        self.failures = 0
        """Handshakes that failed."""

    @property
    def context(self) -> ssl.SSLContext:
        """For the next connection to a server."""
        return self.loaded.context

    def admit(self, tls: ssl.SSLObject) -> None:
        """Accept every peer."""

    @property
    def expires_in_s(self) -> float:
        """How long the certificate is valid; less than 0: it has expired."""
        return self.loaded.certificate.expires_at - self._now()

    async def run(self) -> None:
        """Look at the files until the task is cancelled."""
        while True:
            await asyncio.to_thread(self.look)  # A file on a network may keep it waiting.
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Read the files if they have changed since they were used, and are the same as at the last look.

        So a pair that is being replaced is not taken for whole. Kubernetes changes what links refer to, so the inode
        counts as well. Files that cannot be used are read at each look: a certificate may become valid later.
        """
        before, self._seen = self._seen, _state_of(self._files)
        if self._seen == before and self._seen != self._used:
            self._read()
        self._warn()

    def _read(self) -> None:
        try:
            loaded = self._load()
        except CertificateError as error:
            if str(error) != self._fault:
                log.error("the new certificate cannot be used: the one before it stays in use", why=str(error))
            self._fault = str(error)
            return
        if _state_of(self._files) == self._seen:
            self.loaded, self._used, self._fault = loaded, self._seen, ""
            self._warned_at = 0.0
            log.info("a new certificate is in use", expires=_day(loaded), path=str(self._files[0]))

    def _warn(self) -> None:
        left_s, now = self.expires_in_s, self._now()
        if left_s > EXPIRY_WARNING_S or now - self._warned_at < EXPIRY_REMINDER_S:
            return
        self._warned_at = now
        facts = {"expires": _day(self.loaded), "path": str(self._files[0]), "remedy": "replace the files"}
        if left_s > 0:
            log.warning("the certificate expires soon", **facts)
        else:
            log.error("the certificate has expired: peers refuse it", **facts)


def watched_pair(files: PairFiles, now: Callable[[], float]) -> WatchedFiles[ServerPair]:
    """The pair of a server for clients without certificates. Raises CertificateError."""

    def load() -> ServerPair:
        context = server_context(files)
        return ServerPair(certificate_of(context, files), context)

    return WatchedFiles((files.cert, files.key), load, now)


def _state_of(files: Sequence[Path]) -> _State:
    return tuple(map(_stat, files))


def _stat(file: Path) -> tuple[int, ...] | None:
    """What changes with the file; None if there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


def _day(loaded: ServerPair) -> str:
    return f"{loaded.certificate.expires:%Y-%m-%d %H:%M} UTC"
