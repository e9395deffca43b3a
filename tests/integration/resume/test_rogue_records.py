"""A worker that lies about an answer harms nobody: its client gets the right rest, or is refused, and soon.

| workload | nemesis | checker |
| --- | --- | --- |
| a stream that a rogue began, over either protocol | the rogue's lie when the client comes back | as LIES says |
| the same, of which another worker has a record too | the same | the rest, of which no prompt is computed again |

`ADOPTION_S_MAX` and `LOCATE_S_MAX` bound how long a lie may take; tests wait for WAIT_S. Nothing is a bug of the
frontend: it logs no traceback.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import cycle

import pytest

from tests.integration.conftest import Start
from tests.integration.harness.clients.answers import Refused
from tests.integration.harness.clients.cases import SEEDED
from tests.integration.harness.clients.returning import Returning, ReturningClient
from tests.integration.harness.clients.returning_grpc import GrpcReturningClient
from tests.integration.harness.clients.send import answer, background_stream
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Process
from tests.integration.harness.plane.rogue_keeper import (
    BEGUN,
    Reply,
    RogueKeeper,
    holding,
    record,
    refusal,
    say_nothing,
)
from tests.integration.harness.plane.rogue_worker import RogueSession, rogue_worker
from tests.integration.resume.conftest import PLAIN
from tests.support.clock import WAIT_S

OTHER_TOKENS = [65] * BEGUN
"""Not those of the answer."""
BEYOND = 2**32 - 1
PROTOCOLS = ("sse", "grpc")


async def send_garbage(keeper: RogueKeeper, session: RogueSession, asked: object) -> None:
    await session.send(b"\xff\xff\xff\xffgarbage")


async def end_early(keeper: RogueKeeper, session: RogueSession, adopt: object) -> None:
    """The record has fewer tokens than the client."""
    stream_id = adopt.stream_id  # type: ignore[attr-defined]
    await record((0, session.answer[: BEGUN - 1]))(keeper, session, adopt)
    await session.end(stream_id, finish_reason=1, complete_final=True)


async def stop_short(keeper: RogueKeeper, session: RogueSession, adopt: object) -> None:
    """The first token of the answer, and then nothing, though it lives."""
    await record((0, session.answer[:1]))(keeper, session, adopt)


async def reply_to_another(keeper: RogueKeeper, session: RogueSession, locate: object) -> None:
    """It has what nobody asked for, and replies to no question."""
    locate.query += 1000  # type: ignore[attr-defined]
    await holding()(keeper, session, locate)


async def answer_unasked(keeper: RogueKeeper, session: RogueSession, adopt: object) -> None:
    """Tokens of streams that nobody opened, and then nothing of the adopted one."""
    await session.send_tokens(adopt.stream_id + 1000, 0, OTHER_TOKENS)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Lie:
    """`http`, `grpc`, `reason`: how its client is refused; no reason: it gets the rest, from another worker."""

    locate: Reply
    adopt: Reply
    http: int = 0
    grpc: str = ""
    reason: str | None = None


DIVERGED = (409, "ABORTED", "RESUME_DIVERGED")
VIOLATION = (502, "UNAVAILABLE", "PROTOCOL_VIOLATION")
LIES: dict[str, Lie] = {
    "other tokens at the same positions": Lie(holding(), record((0, OTHER_TOKENS)), *DIVERGED),
    "fewer tokens than the client has": Lie(holding(), end_early, 416, "OUT_OF_RANGE", "CURSOR_BEYOND_END"),
    "a record with a gap": Lie(holding(), record((1, OTHER_TOKENS))),
    "positions beyond the record": Lie(holding(), record((BEGUN + 100, OTHER_TOKENS))),
    "a token that the model does not have": Lie(holding(), record((0, [BEYOND]))),
    "no answer to the adoption": Lie(holding(), say_nothing),
    "fewer tokens than it said, and no more": Lie(holding(), stop_short),
    "tokens of another stream": Lie(holding(), answer_unasked),
    "no protocol": Lie(holding(), send_garbage),
    "an epoch that is too low": Lie(holding(epoch=0), refusal("TAKEN_OVER"), 409, "ABORTED", "TAKEN_OVER"),
    "an epoch that is yet to come": Lie(holding(epoch=2**64 - 1), say_nothing, *VIOLATION),
    "a record that it has not": Lie(holding(), refusal("STREAM_NOT_FOUND"), 404, "NOT_FOUND", "STREAM_NOT_FOUND"),
    "more tokens than the answer may have": Lie(holding(token_count=BEYOND), say_nothing, *VIOLATION),
    "a choice that the answer has not": Lie(holding(index=1), say_nothing, *VIOLATION),
    "a presentation that is none": Lie(holding(presentation=b"?"), say_nothing, *VIOLATION),
    "no answer to the question": Lie(say_nothing, say_nothing, 503, "UNAVAILABLE", "NO_WORKERS"),
    "an answer to no question": Lie(reply_to_another, say_nothing, 503, "UNAVAILABLE", "NO_WORKERS"),
}
BELIEVED = (
    "other tokens at the same positions",
    "fewer tokens than the client has",
    "fewer tokens than it said, and no more",
    "an epoch that is too low",
)
"""Lies that only the client's cursor shows, or nothing."""
FALLBACK = {name: lie for name, lie in LIES.items() if name not in BELIEVED}
"""Those after which the record of another worker is taken."""


@dataclass
class Setup:
    """A plane with one good worker, and the whole answers of both protocols."""

    plane: Plane
    worker: Process
    wholes: dict[str, Returning]
    token_ids: tuple[int, ...]

    def traces(self) -> list[dict[str, object]]:
        return [entry for entry in self.plane.frontend.events_until_now() if "exception" in entry]

    async def prefilled(self) -> float:
        return await self.worker.metric("unbroken_engine_prefill_tokens_total")


def client_over(protocol: str) -> Returning:
    return ReturningClient(PLAIN) if protocol == "sse" else GrpcReturningClient(SEEDED)


@pytest.fixture(scope="module")
def setup(start_plane: Start) -> Setup:
    plane = start_plane()

    async def fill() -> Setup:
        worker = await plane.worker("--mocker-itl-ms=5")
        wholes = {protocol: await client_over(protocol).ask(plane.frontend) for protocol in PROTOCOLS}
        token_ids = (await answer(plane.frontend, replace(SEEDED, protocol="grpc"))).token_ids
        assert token_ids is not None
        return Setup(plane, worker, wholes, token_ids)

    return asyncio.run(fill())


@asynccontextmanager
async def begun(setup: Setup, keeper: RogueKeeper, client: Returning) -> AsyncIterator[None]:
    """The client has the first tokens of its answer, and no connection; the rogue lies from now on."""
    frontend = setup.plane.frontend
    async with rogue_worker(setup.plane.registry_address, keeper.act, setup.token_ids) as instance:
        await frontend.logged("worker found", instance=instance)
        async with background_stream(frontend):
            await client.ask(frontend, events_max=BEGUN if keeper.is_lost else 1)
        if keeper.is_lost:
            await frontend.logged("worker found", 2, instance=instance)
        keeper.is_lying = True
        yield


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_lie_ends_in_a_refusal_or_in_the_right_answer(setup: Setup, lie: Lie, protocol: str) -> None:
    client = client_over(protocol)

    async def scenario() -> Refused | None:
        async with begun(setup, RogueKeeper(lie.locate, lie.adopt), client), asyncio.timeout(WAIT_S):
            try:
                await client.come_back(setup.plane.frontend)
            except Refused as refused:
                return refused
        return None

    got = asyncio.run(scenario())

    if lie.reason is None:
        assert got is None, got
        assert client.whole == setup.wholes[protocol].whole
    else:
        assert got is not None
        assert (got.code, got.reason) == (lie.http if protocol == "sse" else lie.grpc, lie.reason)
        assert client.choices[0].token_ids in ([], list(setup.token_ids[:BEGUN])), "nothing has come"
    assert setup.traces() == []


@pytest.mark.parametrize(
    ("lie", "protocol"), list(zip(FALLBACK.values(), cycle(PROTOCOLS), strict=False)), ids=list(FALLBACK)
)
def test_record_of_another_worker_is_taken_instead(setup: Setup, lie: Lie, protocol: str) -> None:
    """The answer moved when the rogue's session broke. It is there again, and says that it has more.

    Each lie is told over one of the protocols: they differ only above what finds records.
    """
    client = client_over(protocol)

    async def scenario() -> None:
        async with begun(setup, RogueKeeper(lie.locate, lie.adopt, is_lost=True), client), asyncio.timeout(WAIT_S):
            before = await setup.prefilled()
            await client.come_back(setup.plane.frontend)
            assert await setup.prefilled() == before

    asyncio.run(scenario())

    assert client.whole == setup.wholes[protocol].whole
    assert setup.traces() == []
