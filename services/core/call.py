"""One call of a request: its id, its deadline, and what has been tried for it.

`Call` travels beside the request. Five of its fields can be changed after the call was made, and carry what neither
the request nor a token can: `core/interface.py` lists them.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct, field

from services.core.choice_group import ChoiceGroup
from services.core.errors import Failure
from services.core.generation.kept import Copy, Kept
from services.core.model_card import ModelCard
from services.core.tenant import EVERYBODY, Allowance, Tenant

DEADLINE_ROUNDING = 0.01
"""gRPC rounds a timeout up on the wire by at most this fraction, so a client's own timer may fire that much earlier."""
DEADLINE_TRAVEL_S = 0.1
"""How long a request may take from its client's timer to ours: on the way, and while the event loop is busy. A client
whose deadline passes before ours resets its rpc, as one does that leaves."""
IDS_AT_ONCE = 256
"""Ids made with one call of the operating system's random number generator."""


class Phase(StrEnum):
    """How far a worker has come with a request. PREFILL: submitted to the engine, without a token so far."""

    QUEUED = "queued"
    PREFILL = "prefill"
    RUNNING = "running"
    ENDED = "ended"


class RoutedSession(Protocol):
    """A frontend's session with a worker, as far as `core` knows it.

    `key`: unique among a frontend's sessions. `migration_limit`: how often a request on the worker may move; None: the
    worker sets no limit.
    """

    @property
    def key(self) -> str: ...

    @property
    def migration_limit(self) -> int | None: ...


class Attempt:
    """One try of a call on one worker. Through it, the layers below report to the layer that started it.

    `session`: set by `Route`, used by `Transport`. `adopts`: what the session's worker has of the request already, for
    another frontend. `has_begun`: whether the engine has the request. `phase`: kept by workers only. A subclass
    overrides `on_begun` and `on_leaving` to be notified, and `is_needed` if another attempt may take its place.
    """

    __slots__ = ("adopts", "has_begun", "phase", "session")

    def __init__(self, session: RoutedSession | None = None) -> None:
        self.session = session
        self.adopts: Copy | None = None
        self.has_begun = False
        self.phase = Phase.QUEUED

    @property
    def worker(self) -> str | None:
        """The key of the session; None before `Route` has chosen one."""
        return None if self.session is None else self.session.key

    @property
    def is_needed(self) -> bool:
        """Whether the answer comes from this attempt, rather than from another one."""
        return True

    def begin(self) -> None:
        """Record that the engine has the request."""
        self.has_begun, self.phase = True, Phase.PREFILL
        self.on_begun()

    def on_begun(self) -> None:
        """Called when the engine has the request."""

    def on_leaving(self, grace_s: float) -> None:
        """Called when the worker announces that it leaves: it ends its streams in `grace_s` seconds."""


class Cause(StrEnum):
    """What ended a request before its answer was complete.

    Only workers use the last five: the frontend cancelled the stream, the session was lost, a bug stopped the delivery
    of tokens, no frontend came for a generation within its grace, or the same generation was submitted again.
    """

    CLIENT_DISCONNECT = "client_disconnect"
    EXPLICIT = "explicit"
    DEADLINE = "deadline"
    SLOW_CLIENT = "slow_client"
    DRAIN = "drain"
    RESUME_REFUSED = "resume_refused"
    SIGNAL = "signal"
    SESSION_LOST = "session_lost"
    INTERNAL = "internal"
    GRACE_OVER = "grace_over"
    REPLACED = "replaced"


class Ending:
    """Ends a request from outside its own task: for a client that reads too slowly, a cancel by id, and a drain.

    The first failure and the first cause count. `Accept` listens, so that the request fails below the layers that
    count outcomes.
    """

    __slots__ = ("_on_failed", "cause", "failure")

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self.cause: Cause | None = None
        self._on_failed: Callable[[], None] | None = None

    def listen(self, on_failed: Callable[[], None] | None) -> None:
        """Set the callback for the failure; None removes it."""
        self._on_failed = on_failed

    def fail(self, failure: Failure, cause: Cause) -> None:
        """Fail the request, unless this was done before. Has no effect once the request has ended. Never raises."""
        if self.failure is None:
            self.failure, self.cause = failure, self.cause or cause
            if self._on_failed is not None:
                self._on_failed()


class Told:
    """What a client is told beside its tokens. `Preprocess` and `Validate` write it once, before the first token.

    `seed`: with it, the same request gets the same answers. None if the engine uses no seeds, or if the prompts of the
    request have different ones. `prompts`: the token ids of each prompt; known in frontends only. `generation_id`: by
    which the answer can be resumed, in hexadecimal; None: it cannot. `allowances`: what its tenant has left of its
    rates, written by `Limit`.
    """

    __slots__ = ("allowances", "generation_id", "prompts", "seed")

    def __init__(self) -> None:
        self.seed: int | None = None
        self.prompts: Sequence[tuple[int, ...]] = ()
        self.generation_id: str | None = None
        self.allowances: Sequence[Allowance] = ()


class Call(Struct, frozen=True, kw_only=True):
    """One call of a request.

    `deadline`: absolute, in event-loop time. `endpoint`: for metrics. `counts_prompt`: the client wants usage with each
    event, so each delta must have the tokens of its prompt. `migration_limit`: the client's own; it can only
    lower the frontend's. `ending`: ends the request from outside. `told`: what the client is told beside its tokens.
    `card`: the model's, set by `Preprocess`; only workers with this very card may answer. `attempt`: the current one.
    `excluded`: keys of sessions that must not be used any more. `replacement_deadline`: how long the request may wait
    for a worker, in event-loop time; None: it may not wait. `choice_group`: set while the choice is placed on a worker
    together with the others of its request. `kept`: set if the answer outlives its client's connection. `tenant`: whose
    request it is.
    """

    request_id: str
    tenant: Tenant = EVERYBODY
    deadline: float | None = None
    endpoint: str = "generate"
    is_streamed: bool = True
    counts_prompt: bool = False
    migration_limit: int | None = None
    ending: Ending = field(default_factory=Ending)
    told: Told = field(default_factory=Told)
    card: ModelCard | None = None
    attempt: Attempt = field(default_factory=Attempt)
    excluded: frozenset[str] = frozenset()
    replacement_deadline: float | None = None
    choice_group: ChoiceGroup | None = None
    kept: Kept | None = None


def _random_ids() -> Iterator[str]:
    """Ids of 128 random bits. They cannot be guessed: whoever knows an id can cancel its request."""
    while True:
        digits = secrets.token_hex(16 * IDS_AT_ONCE)
        for start in range(0, len(digits), 32):
            yield digits[start : start + 32]


_ids = _random_ids()


def new_request_id() -> str:
    """A random id of 32 hexadecimal digits."""
    return next(_ids)
