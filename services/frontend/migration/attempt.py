"""One attempt of a request that may migrate: the sink of its worker's tokens, and what the migration knows of it."""

from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from services.core.call import Attempt, Call
from services.core.errors import Failure
from services.core.interface import Delta, Finish, Layer
from services.core.request import Request


class AttemptObserver(Protocol):
    """Receives the events of an attempt: `Migration`."""

    def on_tokens(self, attempt: "MigrationAttempt", delta: Delta) -> None: ...

    def is_current(self, attempt: "MigrationAttempt") -> bool:
        """Whether the client's tokens come from this attempt."""
        ...

    def on_begun(self) -> None: ...

    def on_leaving(self, attempt: "MigrationAttempt", grace_s: float) -> None: ...


def _nothing() -> None:
    """Cancels an attempt that does not run."""


class MigrationAttempt(Attempt):
    """An attempt, with the facts that its migration needs.

    `outcome`: how it ended; None: it runs. `leaves_at`: when its worker leaves, in event-loop time; None: it stays.
    `has_own_task`: it started as a second attempt. `rounds_left`: how often another second attempt may still replace
    it. `cancel`: ends it.
    """

    __slots__ = ("_observer", "cancel", "has_own_task", "leaves_at", "outcome", "rounds_left")

    def __init__(self, observer: AttemptObserver, rounds_left: int, *, has_own_task: bool = False) -> None:
        super().__init__()
        self._observer = observer
        self.rounds_left = rounds_left
        self.has_own_task = has_own_task
        self.cancel: Callable[[], object] = _nothing
        self.outcome: Finish | Failure | None = None
        self.leaves_at: float | None = None

    async def run(self, inner: Layer, request: Request, call: Call) -> None:
        """Try the request, and keep how that ends."""
        try:
            self.outcome = await inner(request, replace(call, attempt=self), self)
        except Failure as failure:
            self.outcome = failure

    def deliver(self, delta: Delta) -> None:
        self._observer.on_tokens(self, delta)

    @property
    def is_needed(self) -> bool:
        return self._observer.is_current(self)

    def on_begun(self) -> None:
        self._observer.on_begun()

    def on_leaving(self, grace_s: float) -> None:
        self._observer.on_leaving(self, grace_s)
