"""The grammar of one guided answer, as an engine's thread sees it.

A helper process computes which tokens may follow, while the engine computes the scores of all. Almost always the mask
is there first, so guided answers cost the thread no time.
"""

import asyncio
import threading
from collections.abc import Callable

from services.core.errors import Failure
from services.worker.guided.guide_jobs import Step

Post = Callable[[Callable[[int], object], int], object]
"""Calls a function with an argument on the event loop, soon, from any thread."""


class Guide:
    """Passes tokens from the engine's thread to the event loop, and what may follow them back."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._accepted: asyncio.Queue[int] = asyncio.Queue()  # At most one: the next is drawn after the next mask.
        self._is_ready = threading.Event()
        self._step = Step(b"", is_complete=False)
        self._failure: Failure | None = None

    # The engine's thread

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until it is known which tokens may follow. Returns False if that takes longer."""
        return self._is_ready.wait(max(0.0, timeout_s))

    def token_mask(self) -> bytes:
        """See `Grammar.token_mask`. Call it when `wait_ready` has returned True. Raises Failure."""
        assert self._is_ready.is_set(), "the mask is not known yet"
        if self._failure is not None:
            raise self._failure
        return self._step.mask

    def accept_token(self, token: int) -> None:
        """Advance by one token of the mask that is not an end token."""
        self._is_ready.clear()
        self._post(self._accepted.put_nowait, token)

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here."""
        return self._step.is_complete

    # The event loop

    async def accepted_token(self) -> int:
        """Wait for the next token."""
        return await self._accepted.get()

    def put(self, step: Step) -> None:
        """What may follow the last token."""
        self._step = step
        self._is_ready.set()

    def fail(self, failure: Failure) -> None:
        """There is no more that may follow: the answer fails at its next token."""
        self._failure = failure
        self._is_ready.set()
