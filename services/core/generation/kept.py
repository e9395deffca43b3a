"""What a call carries if its answer outlives the connection of its client and its frontend."""

import re
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from msgspec import Struct

from services.core.errors import Failure, Reason
from services.core.generation.cursor import Cursor
from services.core.request import Continuation
from services.core.tenant import EVERYBODY, Tenant

ID_FORM = "[0-9a-fA-F]{32}|[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
RANDOM_ID = re.compile(ID_FORM)
"""Request ids with room for 128 random bits: 32 hexadecimal digits, or a UUID."""

ID_BYTES = 16
EPOCH_BITS = 20
"""The random part of an epoch. Of two resumes at the same time, the one with the higher number wins on all workers. The
rest begins with the time in ms, and each resume adds 1: a request that repeats the id of an earlier answer comes later
than that answer and its resumes."""
LAST_EPOCH = 2**63 - 1
"""The highest epoch of an owner. The next owner needs a higher one, which must fit into 64 bits."""


def expired() -> Failure:
    """The failure of a resume that comes too late."""
    return Failure(Reason.STREAM_EXPIRED, "nobody came back for this answer in time, and it was ended")


def scoped_id(generation_id: bytes, tenant: Tenant) -> bytes:
    """The id by which workers know a tenant's answer. Clients choose ids, and two tenants may choose the same one."""
    if not tenant.name:
        return generation_id
    return blake2b(generation_id + tenant.name.encode(), digest_size=ID_BYTES).digest()


class Copy(Struct, frozen=True, kw_only=True):
    """The record that a worker has of one choice.

    `session`: the key of the session with the worker. `token_count`: its tokens. `is_over`: it has ended. `discard`:
    drops it, with the epoch of the one who found it.
    """

    session: str
    token_count: int
    is_over: bool
    discard: Callable[[], None]


class Generation:
    """One answer, shared by all its choices.

    `id`: by which workers know it: see `scoped_id`. `name`: by which its client does, in hexadecimal. `grace_s`: how
    long it may be without a frontend. `epoch`: of this frontend as its owner.
    `presentation`: what a frontend needs to resume it; set by `Keep`, or as it was found. `copies`: the records of each
    choice that were found and have not been tried, by index, the best one first. `record_ends`: the position after the
    best one, by index. `continuations`: what choices have lost by moving, by index. `is_told`: the client knows the id.
    `is_resumed`: it was found on workers, rather than prepared from a client's request.
    `has_failed`: one of its choices has failed, so that the others are not needed. `on_begun`: called when an engine
    has begun with a choice.
    """

    __slots__ = (
        "_held",
        "_left",
        "continuations",
        "copies",
        "epoch",
        "grace_s",
        "has_failed",
        "id",
        "is_resumed",
        "is_told",
        "name",
        "on_begun",
        "presentation",
        "record_ends",
    )

    def __init__(self, generation_id: bytes, grace_s: float, *, is_told: bool, tenant: Tenant = EVERYBODY) -> None:
        """`generation_id`: by which its client knows it. `tenant`: the client's."""
        self.id = scoped_id(generation_id, tenant)
        self.name = generation_id.hex()
        self.grace_s = grace_s
        self.is_told = is_told
        self.epoch = int(time.time() * 1000) << EPOCH_BITS
        self.is_resumed = False
        self.presentation = b""
        self.copies: dict[int, list[Copy]] = {}
        self.record_ends: dict[int, int] = {}
        self.continuations: dict[int, Continuation] = {}
        self.has_failed = False
        self.on_begun: Callable[[], None] | None = None
        self._held: list[Callable[[], None]] = []
        self._left: dict[int, dict[str, Callable[[], None]]] = {}

    def take_copy(self, index: int) -> Copy | None:
        """Remove the best record of a choice and return it; None if there is none."""
        copies = self.copies.get(index)
        return copies.pop(0) if copies else None

    def begin(self) -> None:
        """An engine has begun with a choice."""
        if self.on_begun is not None:
            self.on_begun()

    def drop_others(self, index: int) -> None:
        """Tokens of a choice have come: discard its other records.

        Not before that. The worker may be lost or wrong, and of two frontends that resume an answer at once, each might
        drop the record of the other.
        """
        for copy in self.copies.pop(index, ()):
            copy.discard()
        for discard in self._left.pop(index, {}).values():
            discard()

    def leave(self, index: int, worker: str, discard: Callable[[], None]) -> None:
        """A record of a choice stays on a worker whose session is lost. Discard it once another one has tokens."""
        self._left.setdefault(index, {})[worker] = discard

    def return_to(self, index: int, worker: str) -> None:
        """A choice is sent to this worker: it replaces the record that was left there."""
        if index in self._left:
            self._left[index].pop(worker, None)

    def hold(self, let_go: Callable[[], None]) -> None:
        """Keep the record of a choice that has ended, until the answer is over. `let_go`: lets go of it."""
        self._held.append(let_go)

    def release(self) -> None:
        """The answer is over: let go of the records."""
        held, self._held = self._held, []
        for let_go in held:
            let_go()


class Kept(Struct, frozen=True, kw_only=True):
    """The generation of a call, and what a choice has to do with it.

    `form`: how the answer is presented, as bytes of the API that presents it. `first_index`: the index, in the whole
    answer, of choice 0 of the prompt. `base`: how many of the request's generated tokens the client itself has sent;
    `prior_logprobs`: of those after them. `cursor`: how far the client is; None: it has nothing. `is_stopped`: whether
    a stop string has ended the choice. `early_s`: how long before the deadline the client's own timer may end the
    request.
    """

    generation: Generation
    form: bytes = b""
    first_index: int = 0
    base: int = 0
    prior_logprobs: Sequence[Any] = ()
    cursor: Cursor | None = None
    is_stopped: Callable[[], bool] | None = None
    early_s: float = 0.0

    def index_of(self, choice: int) -> int:
        """The index of a choice of the prompt in the whole answer."""
        return self.first_index + choice
