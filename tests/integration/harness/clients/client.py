"""Clients that keep their request open until a test ends it, for tests that count requests."""

import asyncio
from dataclasses import dataclass, field

from tests.integration.harness.clients.answers import Answer, Refused
from tests.integration.harness.clients.requests import Request
from tests.integration.harness.clients.send import outcome
from tests.integration.harness.plane.processes import Frontend
from tests.integration.harness.waiting import until

ENDLESS = 100_000
"""More tokens than any engine produces during a test."""


@dataclass(eq=False)
class Client:
    """One client with one request.

    `ended`: what it received; None while the request runs and after the client has hung up. `has_begun`: whether a
    token has arrived; always false over unary HTTP.
    """

    frontend: Frontend
    request: Request
    ended: Answer | Refused | None = None
    has_begun: bool = False
    _task: asyncio.Task[None] | None = field(default=None, repr=False)

    def start(self, group: asyncio.TaskGroup) -> "Client":
        self._task = group.create_task(self._run())
        return self

    async def _run(self) -> None:
        self.ended = await outcome(self.frontend, self.request, self._note)

    def _note(self, _: int) -> None:
        self.has_begun = True

    def hang_up(self) -> None:
        """Close the connection."""
        assert self._task is not None
        self._task.cancel()

    @property
    def is_refused(self) -> bool:
        return isinstance(self.ended, Refused)

    async def wait_end(self) -> Answer | Refused:
        """Wait for the outcome and return it."""
        await until(lambda: self.ended is not None)
        assert self.ended is not None
        return self.ended

    async def refusal(self) -> Refused:
        """Wait for the outcome, which must be a refusal, and return it."""
        ended = await self.wait_end()
        assert isinstance(ended, Refused), ended
        return ended
