"""One request that outlives its session: its record, its owner, and how it ends.

| event | owned, runs | owned, ended | detached, runs | detached, ended |
| --- | --- | --- | --- | --- |
| the engine ends it | owned, ended | – | detached, ended | – |
| the owner lets go, or its session ends | detached, runs | detached, ended | – | – |
| a frontend adopts it | owned, runs | owned, ended | owned, runs | owned, ended |
| the owner stops it | owned, ended | – | – | – |
| the engine fails | dropped | – | detached, ended | – |
| the owner cancels it | dropped | dropped | – | – |
| it is cancelled by the id of its answer | dropped | dropped | dropped | dropped |
| its grace is over | – | – | dropped | dropped |

An adoption ends the stream of the former owner with TAKEN_OVER, and a cancel by id that of the owner with CANCELLED.
The owner of a detached generation is its store.
"""

import asyncio
from array import array
from typing import Protocol

from msgspec import Struct

from services.core.call import Attempt, Cause, Ending
from services.core.choice_group import ChoiceGroup
from services.core.errors import Failure, Reason
from services.core.flow.delta_buffer import LOGPROB_BYTES, TOKEN_BYTES
from services.core.interface import Delta, TokenLogprobs
from services.core.request import FinishReason, Request
from services.stubs import inference_pb2


class Spec(Struct, frozen=True, kw_only=True):
    """What a submit says of its generation, for its first choice: see `Generation` in worker.proto.

    `continuation`: its number there.
    """

    id: bytes
    index: int
    base: int
    epoch: int
    grace_s: float
    presentation: bytes
    prior_logprobs: tuple[TokenLogprobs, ...] = ()
    continuation: inference_pb2.Continuation = inference_pb2.CONTINUATION_UNSPECIFIED


class TokenOutbox(Protocol):
    """Takes the tokens of streams by their ids."""

    def add_tokens(self, stream_id: int, delta: Delta) -> None: ...


class Owner(Protocol):
    """What a generation's tokens go to: the stream of the frontend that owns it, or the store while it is detached.

    `outbox`: takes the tokens, with `id` as that of their stream. None: they go to `on_tokens`. Nearly every token goes
    to an outbox, and the way past the owner saves a call.
    """

    @property
    def id(self) -> int: ...

    @property
    def outbox(self) -> TokenOutbox | None: ...

    def on_begun(self) -> None: ...

    def on_tokens(self, delta: Delta) -> None: ...

    def on_ended(self, outcome: "FinishReason | Failure") -> None: ...


class Generation(Attempt):
    """One choice of a request with `Submit.generation`. It is the attempt of its call, and the sink of its tokens.

    `outcome`: how it ended; None while it runs. `epoch`: of the last frontend that owned it. `timer`: drops it when its
    grace is over. `task`: runs it.
    """

    __slots__ = (
        "_logprobs",
        "_prompt_count",
        "_token_ids",
        "choice",
        "choice_group",
        "ending",
        "epoch",
        "index",
        "outcome",
        "owner",
        "spec",
        "task",
        "timer",
    )

    def __init__(
        self, spec: Spec, request: Request, choice: int, choice_group: ChoiceGroup | None, owner: Owner
    ) -> None:
        """`choice`: its number in the request. `request`: that of the first choice of its submit."""
        super().__init__()
        self.spec = spec
        self.index = spec.index + choice - request.choice
        self.choice = choice
        self.choice_group = choice_group
        self.epoch = spec.epoch
        self.ending = Ending()
        self.owner = owner
        self.outcome: FinishReason | Failure | None = None
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._token_ids = array("I", request.generated_token_ids[spec.base :])
        self._logprobs = None if request.logprobs is None else list(spec.prior_logprobs)
        self._prompt_count = len(request.token_ids or ())

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.spec.base + len(self._token_ids)

    @property
    def token_count(self) -> int:
        """How many tokens the record has."""
        return len(self._token_ids)

    @property
    def size(self) -> int:
        """The size of its record, in bytes."""
        size = len(self.spec.presentation) + TOKEN_BYTES * (self._prompt_count + len(self._token_ids))
        if self._logprobs is not None:
            size += LOGPROB_BYTES * sum(1 + len(one.top) for one in self._logprobs)
        return size

    def piece(self, position: int, weight_max: int) -> Delta:
        """The record from `position` on, up to a weight of about `weight_max`. Empty at its end."""
        start = stop = position - self.spec.base
        if self._logprobs is None:
            stop = start + weight_max
            return Delta(position, self._token_ids[start:stop].tolist(), choice=self.choice)
        weight = 0
        while stop < len(self._token_ids) and weight < weight_max:
            weight += 2 + len(self._logprobs[stop].top)
            stop += 1
        token_ids = self._token_ids[start:stop].tolist()
        return Delta(position, token_ids, choice=self.choice, logprobs=self._logprobs[start:stop])

    # The engine's events

    def on_begun(self) -> None:
        self.owner.on_begun()

    def deliver(self, delta: Delta) -> None:
        token_ids = delta.token_ids
        if len(token_ids) == 1:
            self._token_ids.append(token_ids[0])  # Nearly always: `extend` takes twice as long.
        else:
            self._token_ids.extend(token_ids)
        if self._logprobs is not None:
            self._logprobs.extend(delta.logprobs or ())
        owner = self.owner
        if (outbox := owner.outbox) is not None:
            outbox.add_tokens(owner.id, delta)
        else:
            owner.on_tokens(delta)

    def end_with(self, outcome: FinishReason | Failure) -> None:
        """The engine has ended it, or it was refused. Ignored if its owner has stopped it."""
        if self.outcome is None:
            self.outcome = outcome
            self.owner.on_ended(outcome)

    # The frontends' events

    def adopt(self, owner: Owner, epoch: int) -> None:
        """Give it a new owner, which gets the record by `piece`. Raises TAKEN_OVER unless `epoch` is a later one."""
        if epoch <= self.epoch:
            raise taken_over()
        former, self.owner, self.epoch = self.owner, owner, epoch
        self.stop_timer()
        former.on_ended(taken_over())

    def stop(self) -> bool:
        """Its owner needs no more tokens: it counts as finished. Returns False if it has ended already."""
        if not self.cancel(Cause.SIGNAL):
            return False
        self.outcome = FinishReason.STOP
        return True

    def cancel(self, cause: Cause) -> bool:
        """Stop the engine. Returns False if this has been done before, or it has ended."""
        if self.ending.cause is not None or self.outcome is not None:
            return False
        self.ending.cause = cause
        assert self.task is not None, "the store starts it at once"
        self.task.cancel()
        return True

    def stop_timer(self) -> None:
        """It has an owner again, or is dropped."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


def taken_over() -> Failure:
    """The failure of a stream whose generation has a newer owner."""
    return Failure(Reason.TAKEN_OVER, "the answer was resumed on another connection, which gets the rest of it")
