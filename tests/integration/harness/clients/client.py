"""Clients that stay until they are told to leave: what a test needs that counts who is inside."""

import asyncio
from dataclasses import dataclass, field

from tests.integration.harness.clients.answers import Answer, Refused
from tests.integration.harness.clients.requests import Request
from tests.integration.harness.clients.send import outcome
from tests.integration.harness.plane.processes import Frontend
from tests.integration.harness.waiting import until

ENDLESS = 100_000
"""Tokens that no engine of a test lives to make."""


@dataclass(eq=False)
class Client:
    """One request of one client. ended: what it got, None while it goes on and after the client left.

    has_begun: whether a token has come, never over unary HTTP.
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
        """Hang up."""
        assert self._task is not None
        self._task.cancel()

    @property
    def is_refused(self) -> bool:
        return isinstance(self.ended, Refused)

    async def wait_end(self) -> Answer | Refused:
        """What it got."""
        await until(lambda: self.ended is not None)
        assert self.ended is not None
        return self.ended

    async def refusal(self) -> Refused:
        """How it was refused, which it must be."""
        ended = await self.wait_end()
        assert isinstance(ended, Refused), ended
        return ended
