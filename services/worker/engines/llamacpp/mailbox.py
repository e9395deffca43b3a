"""The mailbox between the event loop and the engine's thread: requests to start, requests to cancel, and the end."""

import threading
from dataclasses import dataclass

from services.worker.engines.llamacpp.sequence import LlamaSequence

_IDLE_WAIT_S = 1.0


@dataclass(slots=True)
class Mail:
    """What the event loop has asked the thread to do."""

    submitted: dict[int, LlamaSequence]
    cancelled: set[int]
    is_closed: bool = False


class Mailbox:
    """Written by the event loop, read by the thread. The lock is held only while an entry is added or removed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._mail = Mail({}, set())

    def submit(self, sequence: LlamaSequence) -> None:
        with self._changed:
            self._mail.submitted[sequence.key] = sequence
            self._changed.notify()

    def cancel(self, key: int) -> None:
        with self._changed:
            if self._mail.submitted.pop(key, None) is None:
                self._mail.cancelled.add(key)
            self._changed.notify()

    def is_cancelled(self, key: int) -> bool:
        """Whether the request was cancelled since the last `collect`."""
        with self._changed:
            return key in self._mail.cancelled

    def close(self) -> None:
        with self._changed:
            self._mail.is_closed = True
            self._changed.notify()

    def collect(self, *, wait: bool) -> Mail:
        """Remove and return all mail since the last call. `wait`: block until there is some, at most one second."""
        with self._changed:
            if wait and not (self._mail.submitted or self._mail.cancelled or self._mail.is_closed):
                self._changed.wait(_IDLE_WAIT_S)
            mail, self._mail = self._mail, Mail({}, set(), self._mail.is_closed)
        return mail
