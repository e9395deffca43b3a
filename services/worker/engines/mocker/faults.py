"""Fault injection: what fails in the mocker, and when."""

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from services.core.errors import CAUSE, Failure, Reason, RefusedFor
from services.worker.engines.mocker.sequence import MockerSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The faults to inject.

    Those with `_after` happen once a request has this many tokens from this process; 0: before its first token; None:
    never. `die_after`: the process kills itself. `freeze_after`: it stops itself (SIGSTOP). `leave_after`: it sends
    itself SIGTERM. `hang_after`: the engine stops stepping for good, while the server continues. `raise_after`: the
    request fails. `mute_after`: no rank reports its load from then on; 0: from the first submission on.

    `die_on_token`: a prompt with this token kills the process at its first step. `refuse`: the number of submissions
    that are refused, from the first on. `hold`: the first step waits for this many requests, so that all of them are at
    the same position when a fault happens. `linger_ms`: delay before the process dies or stops, so that the tokens
    drawn before have been sent. `mute_rank`: this rank never reports its load.
    """

    die_after: int | None = None
    freeze_after: int | None = None
    leave_after: int | None = None
    hang_after: int | None = None
    raise_after: int | None = None
    die_on_token: int | None = None
    refuse: int = 0
    hold: int = 1
    linger_ms: int = 0
    mute_after: int | None = None
    mute_rank: int | None = None


class FaultInjector:
    """Injects the configured faults when their conditions are met."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._refusals_left = faults.refuse
        self._has_left = False
        self._is_mute = False

    def check_submission(self) -> None:
        """Called for each submission. Raises Failure(WORKER_AT_CAPACITY) for the first `refuse` of them."""
        if self._refusals_left > 0:
            self._refusals_left -= 1
            detail = "Server overloaded: worker at capacity (injected fault)"
            raise Failure(Reason.WORKER_AT_CAPACITY, detail, metadata={CAUSE: RefusedFor.CAPACITY})
        self._is_mute |= self._faults.mute_after == 0

    def is_muted(self, rank: int) -> bool:
        return self._is_mute or rank == self._faults.mute_rank

    def failure_of(self, sequence: MockerSequence) -> Failure | None:
        """The failure of a request that has as many tokens as `raise_after`; otherwise None."""
        after = self._faults.raise_after
        if after is None or sequence.emitted_count < after:
            return None
        return Failure(Reason.ENGINE_ERROR, f"the mocker failed after {after} tokens (injected fault)")

    async def act(self, running: Sequence[MockerSequence]) -> None:
        """Called before and after each step, with the sequences that draw a token in it."""
        faults = self._faults
        self._is_mute |= _has_one_at(faults.mute_after, running)
        if _has_one_at(faults.die_after, running) or _has_one_with(faults.die_on_token, running):
            await asyncio.sleep(faults.linger_ms * 1e-3)
            os.kill(os.getpid(), signal.SIGKILL)
        if _has_one_at(faults.freeze_after, running):
            await asyncio.sleep(faults.linger_ms * 1e-3)
            os.kill(os.getpid(), signal.SIGSTOP)
        if _has_one_at(faults.leave_after, running) and not self._has_left:
            self._has_left = True
            os.kill(os.getpid(), signal.SIGTERM)
        if _has_one_at(faults.hang_after, running):
            await asyncio.Event().wait()


def _has_one_at(count: int | None, running: Sequence[MockerSequence]) -> bool:
    return count is not None and any(sequence.emitted_count >= count for sequence in running)


def _has_one_with(token: int | None, running: Sequence[MockerSequence]) -> bool:
    return token is not None and any(token in sequence.request.prompt_token_ids for sequence in running)
