"""A rogue worker that keeps answers: it begins each as it should, and lies when a frontend comes back for it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.stubs import worker_pb2
from tests.integration.harness.plane.rogue_worker import RogueSession

BEGUN = 3
"""Tokens of the right answer that a client gets before it leaves."""
CLAIMED = 60
"""How many tokens it says to have if the answer has gone on elsewhere: more than the other worker."""
HEARTBEAT_S = 0.1

Reply = Callable[["RogueKeeper", RogueSession, Any], Awaitable[None]]
"""What it does for a question (Locate) or an adoption (Adopt)."""


async def say_nothing(keeper: "RogueKeeper", session: RogueSession, asked: Any) -> None:
    """It lives, and does not reply."""


def holding(**lies: Any) -> Reply:
    """Reply to a question: what it has, apart from these fields of `Holding` or of `Located`."""

    async def reply(keeper: "RogueKeeper", session: RogueSession, locate: worker_pb2.Locate) -> None:
        kept = keeper.kept(locate.generation_id)
        about: dict[str, Any] = {"query": locate.query, "presentation": kept.presentation}
        one: dict[str, Any] = {"index": 0, "token_count": CLAIMED if keeper.is_lost else BEGUN, "epoch": kept.epoch}
        about |= {name: value for name, value in lies.items() if name in about}
        one |= {name: value for name, value in lies.items() if name in one}
        located = worker_pb2.Located(holdings=[worker_pb2.Holding(**one)], **about)
        await session.send(worker_pb2.WorkerMessage(located=[located]))

    return reply


def record(*parts: tuple[int, Sequence[int]]) -> Reply:
    """Reply to an adoption: the engine has begun, and these tokens at their positions."""

    async def reply(keeper: "RogueKeeper", session: RogueSession, adopt: worker_pb2.Adopt) -> None:
        await session.send(worker_pb2.WorkerMessage(begun=[adopt.stream_id]))
        for position, token_ids in parts:
            await session.send_tokens(adopt.stream_id, position, token_ids)

    return reply


def refusal(reason: str) -> Reply:
    """Reply to an adoption: it fails."""

    async def reply(keeper: "RogueKeeper", session: RogueSession, adopt: worker_pb2.Adopt) -> None:
        await session.end(adopt.stream_id, error=worker_pb2.Error(reason=reason, detail="a lie"))

    return reply


@dataclass
class RogueKeeper:
    """`is_lost`: its session breaks once it has begun an answer. `is_lying`: it replies; before that, to nothing."""

    locate: Reply
    adopt: Reply
    is_lost: bool = False
    is_lying: bool = False
    _kept: dict[bytes, worker_pb2.Generation] = field(default_factory=dict)

    def kept(self, generation_id: bytes) -> worker_pb2.Generation:
        """What the frontend said of an answer. It claims that it has any that it is asked for."""
        return self._kept.get(generation_id) or next(iter(self._kept.values()))

    async def act(self, session: RogueSession) -> None:
        """Run one session."""
        await session.send_welcome()
        beating = asyncio.ensure_future(_beat(session))
        try:
            while (message := await session.read()) is not None:
                for submit in message.submits:
                    await self._begin(session, submit)
                for locate in message.locates if self.is_lying else ():
                    await self.locate(self, session, locate)
                for adopt in message.adopts if self.is_lying else ():
                    await self.adopt(self, session, adopt)
        finally:
            beating.cancel()
        await session.wait_forever()

    async def _begin(self, session: RogueSession, submit: worker_pb2.Submit) -> None:
        self._kept[submit.generation.id] = submit.generation
        await session.send(worker_pb2.WorkerMessage(begun=[submit.stream_id]))
        await session.send_tokens(submit.stream_id, 0, session.answer[:BEGUN])
        if self.is_lost:
            session.abort()


async def _beat(session: RogueSession) -> None:
    while True:
        await session.send(worker_pb2.WorkerMessage(load=worker_pb2.Load()))
        await asyncio.sleep(HEARTBEAT_S)
