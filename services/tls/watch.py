"""Keeps the context of new connections up to date with files that may change at any time.

A connection keeps the context with which it began, so a change touches no stream.
"""

import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import structlog

from services.runtime.files.watch import WatchedFiles
from services.tls.certificate import Certificate, PairFiles, certificate_of, server_context

log = structlog.get_logger()

LOOK_S = 0.5
"""How often the files are looked at. A change counts from the second look at it."""
EXPIRY_WARNING_S = 7 * 86_400.0
"""How long before its end a certificate is warned of."""
EXPIRY_REMINDER_S = 86_400.0
"""How often it is warned of."""


@dataclass(frozen=True, slots=True)
class ServerPair:
    """A certificate with its context."""

    certificate: Certificate
    context: ssl.SSLContext


Loaded = TypeVar("Loaded", bound=ServerPair)


class WatchedCertificate(WatchedFiles[Loaded]):
    """A certificate with its key, and its CA if there is one. `failures`: handshakes that failed."""

    def __init__(self, files: Sequence[Path], load: Callable[[], Loaded], now: Callable[[], float]) -> None:
        """`load`: reads the files. `now`: the time since the epoch. Raises CertificateError as `load` does."""
        super().__init__(files, load, LOOK_S)
        self._now = now
        self._warned_at = 0.0
        self.failures = 0

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

    def look(self) -> None:
        super().look()
        self._warn()

    def on_used(self) -> None:
        self._warned_at = 0.0
        log.info("a new certificate is in use", expires=_day(self.loaded), path=str(self._files[0]))

    def on_fault(self, why: str) -> None:
        log.error("the new certificate cannot be used: the one before it stays in use", why=why)

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


def watched_pair(files: PairFiles, now: Callable[[], float]) -> WatchedCertificate[ServerPair]:
    """The pair of a server for clients without certificates. Raises CertificateError."""

    def load() -> ServerPair:
        context = server_context(files)
        return ServerPair(certificate_of(context, files), context)

    return WatchedCertificate((files.cert, files.key), load, now)


def _day(loaded: ServerPair) -> str:
    return f"{loaded.certificate.expires:%Y-%m-%d %H:%M} UTC"
