"""One asking of a request: who asks, until when, and what was tried."""

from collections.abc import Callable
from enum import StrEnum

from msgspec import Struct, field

from services.core.choice_group import ChoiceGroup
from services.core.errors import Failure
from services.core.model_card import ModelCard


def _ignore(*_: object) -> None:
    """Not everybody has to know."""


class Phase(StrEnum):
    """How far a request has come in a worker. PREFILL: the engine has it, and there is no token yet."""

    QUEUED = "queued"
    PREFILL = "prefill"
    RUNNING = "running"
    ENDED = "ended"


class Attempt(Struct):
    """One try of a call on one worker. worker: the session, named by route. has_begun: the engine works on it.

    phase: how far it has come, kept by workers alone. on_begun: called when it begins. on_leaving: called with the
    seconds that are left when the worker says it leaves.
    """

    worker: str | None = None
    has_begun: bool = False
    phase: Phase = Phase.QUEUED
    on_begun: Callable[[], None] = _ignore
    on_leaving: Callable[[float], None] = _ignore

    def begin(self) -> None:
        """The engine works on it from now on."""
        self.has_begun, self.phase = True, Phase.PREFILL
        self.on_begun()

    def release(self) -> None:
        """It has ended, and calls nobody any more."""
        self.on_begun = self.on_leaving = _ignore


class Cause(StrEnum):
    """Why a request was ended before its answer was complete, by somebody who did not want it any more.

    The last three are a worker's: its frontend cancelled the stream, or hung up; a bug on the way of its tokens.
    """

    CLIENT_DISCONNECT = "client_disconnect"
    EXPLICIT = "explicit"
    DEADLINE = "deadline"
    SLOW_CLIENT = "slow_client"
    DRAIN = "drain"
    SIGNAL = "signal"
    SESSION_LOST = "session_lost"
    INTERNAL = "internal"


class Ending:
    """Ends a request from outside of its own task: for a sink whose client does not read, a process that leaves, and a
    client that cancels by name.

    The first failure counts, and the first cause. `Accept` listens, so that the request fails below whatever counts
    outcomes.
    """

    __slots__ = ("_on_failed", "cause", "failure")

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self.cause: Cause | None = None
        self._on_failed: Callable[[], None] | None = None

    def listen(self, on_failed: Callable[[], None] | None) -> None:
        """Who is told of the failure; None: nobody any more."""
        self._on_failed = on_failed

    def fail(self, failure: Failure, cause: Cause) -> None:
        """The request is to fail with this, unless it has failed or ended already. Never raises."""
        if self.failure is None:
            self.failure, self.cause = failure, self.cause or cause
            if self._on_failed is not None:
                self._on_failed()


class Call(Struct, frozen=True, kw_only=True):
    """This asking of a request: who, until when, and what has been tried.

    deadline: absolute, in the event loop's time. endpoint: for metrics. migration_limit: the client's own, at most the
    frontend's. ending: for who has to end it from outside. card: the model's, from preprocess on; only workers with
    this very card may answer. attempt: the one under way. excluded: sessions that this request must not go on any more.
    replacement_deadline: until when it may wait for a worker; None: not at all. party: of a choice whose first attempt
    goes to one worker with the others'.
    """

    request_id: str
    deadline: float | None = None
    endpoint: str = "generate"
    is_streamed: bool = True
    migration_limit: int | None = None
    ending: Ending = field(default_factory=Ending)
    card: ModelCard | None = None
    attempt: Attempt = field(default_factory=Attempt)
    excluded: frozenset[str] = frozenset()
    replacement_deadline: float | None = None
    choice_group: ChoiceGroup | None = None

    @property
    def worker(self) -> str | None:
        """The session that the attempt under way goes on."""
        return self.attempt.worker
