"""What a simulated client does with a request of the plan, whatever protocol it speaks."""

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable

from simulation.clients.answer import Answer, Choice, Visit
from simulation.runtime.world import World
from simulation.scenario.plan import RequestPlan
from simulation.tenants import KEYS

PATIENCE_S = 60.0
"""A connection that brings nothing for so long has hung."""
RETURNS_MAX = 40
BACK_S_MAX = 0.5
"""A client that was refused waits up to this long before it comes back."""
SLOW_S = 0.05
"""A slow client reads a piece of its answer, and then nothing for so long."""
DROPPED = "dropped"
"""Why a connection has ended that the client has dropped."""
HUNG = "hung"
"""Why a connection has ended that brought nothing for `PATIENCE_S`."""
TRANSIENT = frozenset({"NO_WORKERS", "TAKEN_OVER", "DRAINING", "STALLED", "CANNOT_CONNECT", "DISCONNECTED"})
"""With these reasons, a kept answer may still be there."""


class Client(ABC):
    """Sends one request, and reads its answer to the end. `answer`: what has come. `id`: of the request."""

    def __init__(
        self, world: World, plan: RequestPlan, frontends: int, chance: random.Random, on_left: Callable[[str], None]
    ) -> None:
        """`frontends`: how many there are. `chance`: chooses where and when the client comes back.

        `on_left`: called with the id of the request when its client has all of the answer, or gives it up.
        """
        self._on_left = on_left
        self._world = world
        self._plan = plan
        self._frontends = frontends
        self._chance = chance
        self._drops = list(plan.drops)
        self._has_cancelled = self._goes_on = False
        self.id = f"{plan.number if plan.rival_of is None else plan.rival_of:032x}"
        self.answer = Answer([Choice() for _ in range(plan.choice_count)])

    @property
    def _wishes(self) -> dict[str, str]:
        """What the client wants to become of its request, as headers or metadata."""
        plan, wishes = self._plan, dict[str, str]()
        if plan.is_kept:
            wishes |= {"x-on-disconnect": "continue", "x-detach-grace": f"{plan.grace_s:g}"}
        if plan.migration_limit is not None:
            wishes["x-migration-limit"] = str(plan.migration_limit)
        return wishes

    @property
    def _key(self) -> dict[str, str]:
        """The key of the client's tenant, as a header or metadata."""
        return {"x-api-key": KEYS[self._plan.tenant].text} if self._plan.tenant else {}

    async def run(self) -> None:
        """Send the request at its time, and come back to an answer that is kept until it is over."""
        plan, answer = self._plan, self.answer
        await asyncio.sleep(plan.at_s)
        if plan.is_foreign:
            self._say("tries to cancel what is another tenant's")
            await self._cancel()
        self._say("is sent")
        await self._visit(plan.frontend, resumes=plan.rival_of is not None)
        if self._goes_on:
            self._say(f"goes on after {answer.token_count} tokens")
            await self._visit(self._any_frontend(), resumes=False)
        for _ in range(RETURNS_MAX):
            if not (plan.is_kept and plan.is_streamed) or self._is_settled:
                break
            has_dropped = answer.failure is None and answer.losses[-1:] == [DROPPED]
            await asyncio.sleep(plan.away_s if has_dropped else self._chance.random() * BACK_S_MAX)
            answer.failure = None
            frontend = self._any_frontend()
            self._say(f"comes back at frontend-{frontend} with {answer.cursor or 'nothing'}")
            await self._visit(frontend, resumes=True)
        self._say(f"ends: complete={answer.is_complete} failure={answer.failure} losses={answer.losses}")

    async def _visit(self, frontend: int, *, resumes: bool) -> None:
        """Send one request, and note how that ends."""
        answer, loss_count = self.answer, len(self.answer.losses)
        visit = Visit(f"frontend-{frontend}", resumes, self._world.now)
        answer.visits.append(visit)
        await self._attempt(frontend, resumes=resumes)
        visit.ended_s = self._world.now
        visit.ending = answer.failure or ("complete" if answer.is_complete else "")
        if len(answer.losses) > loss_count:
            visit.loss = answer.losses[-1]
        if answer.is_complete and not self._plan.is_kept:
            self._on_left(self.id)
        if visit.loss == HUNG:
            answer.faults.append(f"nothing came from {visit.frontend} for {PATIENCE_S:g} s")

    @abstractmethod
    async def _attempt(self, frontend: int, *, resumes: bool) -> None:
        """Open a connection, send the request or ask for the rest of its answer, and read what comes."""

    @abstractmethod
    async def _cancel(self) -> None:
        """Cancel the request by its name."""

    def _any_frontend(self) -> int:
        return self._chance.randrange(self._frontends)

    @property
    def _is_settled(self) -> bool:
        return self.answer.failure not in TRANSIENT and self.answer.is_over

    def _acts(self) -> bool:
        """Do what the plan says about the tokens so far. Returns whether the client ends this connection now."""
        plan, answer = self._plan, self.answer
        if answer.is_over:
            return False
        if self._drops and answer.token_count >= self._drops[0]:
            self._drops.pop(0)
            answer.losses.append(DROPPED)
            self._say(f"drops its connection after {answer.token_count} tokens")
            return True
        # A choice that has its finish is complete: nothing of it is left to ask for.
        if plan.reader == "goes on" and answer.token_count >= plan.after and not (self._goes_on or answer.has_finished):
            self._goes_on = True
            return True
        if plan.reader == "leaves" and answer.token_count >= plan.after:
            answer.has_left = True
            self._say("leaves")
            self._on_left(self.id)
            return True
        if plan.reader == "cancels" and answer.token_count >= plan.after and not self._has_cancelled:
            self._has_cancelled = True
            self._say("is cancelled by its name")
            asyncio.get_running_loop().create_task(self._cancel())
        return False

    def _lose(self, why: str) -> None:
        if not self.answer.is_over:
            self.answer.losses.append(why)

    def _say(self, what: str) -> None:
        self._world.say(f"request-{self._plan.number}", what)
