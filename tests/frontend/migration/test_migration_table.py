"""Migration: the table in the docstring of the module is what happens, effect by effect."""

import asyncio
from collections.abc import Callable

import pytest

from services.core.errors import Reason
from services.frontend.migration import migration as module
from services.frontend.migration.policy import LAG_TOKENS_MAX
from tests.frontend.migration.support import Play, Stage, staged

Effect = tuple[str, str, str]
"""Event, state, and one of the effects that its cell names."""

SETTLED_TURNS = 5
"""Turns of the loop in which a failure is noticed."""
ONE, TWO = "one attempt", "a second attempt is prepared"
PLAYS: dict[Effect, tuple[Play, list[int]]] = {}
"""For each effect a play that has it, and the tokens of the whole answer."""


def effects_of_table() -> list[Effect]:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (module.__doc__ or "").splitlines()
        if line.startswith("|") and "---" not in line
    ]
    states = rows[0][1:]
    cells = [(row[0], state, cell) for row in rows[1:] for state, cell in zip(states, row[1:], strict=True)]
    return [(event, state, effect) for event, state, cell in cells if cell != "–" for effect in cell.split("; ")]


def effect(event: str, state: str, text: str, answer: list[int]) -> Callable[[Play], Play]:
    """Register the play of an effect. `answer`: the tokens that the client has in the end."""

    def register(play: Play) -> Play:
        PLAYS[event, state, text] = play, answer
        return play

    return register


def test_every_effect_in_the_table_has_a_play_and_every_play_has_an_effect() -> None:
    assert sorted(effects_of_table()) == sorted(PLAYS)


@pytest.mark.parametrize(("event", "state", "text"), effects_of_table())
def test_the_table_says_what_happens(event: str, state: str, text: str) -> None:
    play, expected = PLAYS[event, state, text]

    _, answer = staged(play)

    assert answer.token_ids == expected


@effect("the current attempt delivers", ONE, "its tokens go to the client", [7])
async def current_delivers(stage: Stage) -> None:
    only = await stage.attempt(0)
    only.deliver(7)
    only.finish()


@effect("the current attempt delivers", TWO, "its tokens go to the client", [7])
async def current_delivers_beside_second(stage: Stage) -> None:
    current = await stage.attempt(0)
    current.leave()
    await stage.attempt(1)
    current.deliver(7)
    current.finish()


@effect("the second attempt delivers", TWO, "close behind: it replaces the current one", [7, 8])
async def second_replaces_current(stage: Stage) -> None:
    current = await stage.attempt(0)
    current.leave()
    second = await stage.attempt(1)
    current.deliver(*[7] * LAG_TOKENS_MAX)
    second.deliver(7, 8)
    current.deliver(99)
    second.finish()


@effect("the second attempt delivers", TWO, "far behind: another starts in its place", [7, 8, 9])
async def second_starts_again(stage: Stage) -> None:
    current = await stage.attempt(0)
    current.leave()
    second = await stage.attempt(1)
    current.deliver(7, 8)
    second.deliver(99)
    again = await stage.attempt(2)
    assert again.request.generated_token_ids == (7, 8)
    again.deliver(9)
    again.finish()


@effect("the worker of the current attempt leaves", ONE, "a second attempt starts", [7])
async def second_starts(stage: Stage) -> None:
    current = await stage.attempt(0)
    current.leave()
    assert "worker-1" in (await stage.attempt(1)).call.excluded
    assert not current.is_cancelled
    current.deliver(7)
    current.finish()


@effect("the worker of the current attempt leaves", TWO, "no other attempt starts", [7])
async def no_third_starts(stage: Stage) -> None:
    current = await stage.attempt(0)
    current.leave()
    second = await stage.attempt(1)
    current.leave()
    second.deliver(7)
    second.finish()
    assert len(stage.attempts) == 2


@effect(
    "the worker of the second attempt leaves", TWO, "a third attempt starts once the second is the current one", [7, 8]
)
async def third_starts(stage: Stage) -> None:
    current = await stage.attempt(0)
    current.leave()
    second = await stage.attempt(1)
    second.leave()
    assert len(stage.attempts) == 2
    second.deliver(7)
    third = await stage.attempt(2)
    third.deliver(8)
    third.finish()


@effect("the current attempt fails", ONE, "the next attempt starts, if it may", [7, 8])
async def next_starts(stage: Stage) -> None:
    current = await stage.attempt(0)
    current.deliver(7)
    current.fail(Reason.DISCONNECTED)
    following = await stage.attempt(1)
    following.deliver(8)
    following.finish()


@effect("the current attempt fails", TWO, "the second replaces it, if it has a worker", [7, 8])
async def second_replaces_failed(stage: Stage) -> None:
    current = await stage.attempt(0)
    current.deliver(7)
    current.leave()
    second = await stage.attempt(1)
    current.fail(Reason.DISCONNECTED)
    for _ in range(SETTLED_TURNS):
        await asyncio.sleep(0)
    second.deliver(8)
    second.finish()
    assert len(stage.attempts) == 2


@effect("the second attempt fails", TWO, "another starts in its place, if it may", [7])
async def failed_second_is_replaced(stage: Stage) -> None:
    current = await stage.attempt(0)
    current.leave()
    (await stage.attempt(1)).fail(Reason.STALLED)
    another = await stage.attempt(2)
    another.deliver(7)
    another.finish()


@effect("the second attempt fails", TWO, "the current one goes on", [7])
async def current_goes_on(stage: Stage) -> None:
    current = await stage.attempt(0)
    current.leave()
    (await stage.attempt(1)).fail(Reason.NO_WORKERS)
    current.deliver(7)
    current.finish()


@effect("the current attempt finishes", ONE, "the request finishes", [])
async def request_finishes(stage: Stage) -> None:
    (await stage.attempt(0)).finish()


@effect("the current attempt finishes", TWO, "the request finishes", [7])
async def request_finishes_beside_second(stage: Stage) -> None:
    current = await stage.attempt(0)
    current.leave()
    await stage.attempt(1)
    current.deliver(7)
    current.finish()
