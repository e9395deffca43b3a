"""A worker that is killed costs its clients nothing but time: at every position, the answer is the undisturbed one.

| workload | nemesis | checker |
| --- | --- | --- |
| text and chat, greedy and seeded, gRPC, SSE and unary HTTP | SIGKILL at each of 20 positions | `Answer`, one move |
| seeded text with a stop string | SIGKILL before, at each token of, and after the string | `Answer` |
| 100 streams of all kinds at a time | one SIGKILL from outside | `Answer`, all moved |

`Answer` is text, token ids, usage and finish reason; who reads it (clients.py) checks positions, marker and [DONE].
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, product

import pytest

from tests.integration.answers import Answer
from tests.integration.asks import PROTOCOLS, Ask
from tests.integration.clients import answer, ballast, gathered, move_reasons, under_streams
from tests.integration.conftest import Start
from tests.integration.plane import Plane, until

POSITIONS = 20
LANES = ("lane0", "lane1", "lane2", "lane3")
"""Each lane is a model with one healthy worker and, one after the other, the workers that die."""
STREAMS = 100
NUMBERS = count()

WORKLOAD = [
    Ask(protocol, is_chat=is_chat, temperature=temperature)
    for protocol, is_chat, temperature in product(PROTOCOLS, (False, True), (0.0, 0.8))
]


@pytest.fixture(scope="module")
def lanes(start_plane: Start) -> Iterator[Plane]:
    """A plane with a healthy worker on each lane."""
    plane = start_plane()

    async def fill() -> None:
        for lane in LANES:
            await plane.worker("--mocker-itl-ms=3", f"--served-model-name={lane}")

    asyncio.run(fill())
    yield plane
    assert not plane.frontend.events(level="error")


@pytest.mark.parametrize("ask", WORKLOAD, ids=str)
def test_at_each_position_the_answer_goes_on_as_if_nothing_had_been(lanes: Plane, ask: Ask) -> None:
    async def scenario() -> None:
        undisturbed = await answer(lanes.frontend, replace(ask, model=LANES[0]))
        after = spread(undisturbed)

        moved_at = await kill_at(lanes, ask, after, undisturbed)

        assert [len(moves) for moves in moved_at] == [1] * POSITIONS
        assert all(move < tokens for (move,), tokens in zip(moved_at, after, strict=True))
        assert len({move for (move,) in moved_at}) > POSITIONS / 2, "the kills were not spread over the answer"

    asyncio.run(scenario())


@pytest.mark.parametrize("ask", [ask for ask in WORKLOAD if ask.temperature and not ask.is_chat], ids=str)
def test_a_stop_string_across_the_cut_ends_the_answer_where_it_did(lanes: Plane, ask: Ask) -> None:
    async def scenario() -> None:
        whole = await answer(lanes.frontend, replace(ask, model=LANES[0]))
        stop = whole.text[20:26]
        first = len(whole.text[:20].encode())
        undisturbed = await answer(lanes.frontend, replace(ask, model=LANES[0], stop=stop))
        assert undisturbed.text == whole.text[:20]
        assert undisturbed.finish == "stop"
        assert undisturbed.completion_tokens == first + len(stop.encode())

        await kill_at(lanes, replace(ask, stop=stop), range(first, undisturbed.completion_tokens + 2), undisturbed)

    asyncio.run(scenario())


def test_100_streams_lose_nothing_when_the_worker_under_all_of_them_is_killed(start_plane: Start) -> None:
    plane = start_plane()
    asks = [
        replace(ask, prompt=f"Stream {number}", seed=number, max_tokens=100)
        for number, ask in zip(range(STREAMS), WORKLOAD * STREAMS, strict=False)
    ]

    async def scenario() -> None:
        fast = await plane.worker("--mocker-itl-ms=1")
        undisturbed = await gathered(answer(plane.frontend, ask) for ask in asks)
        fast.kill()
        await until(lambda: plane.frontend.events("worker lost", instance=fast.ready["instance_id"]))
        victim = await plane.worker("--mocker-itl-ms=40")  # Slow, so that all have begun before any ends.

        async def kill() -> None:
            victim.kill()
            await plane.worker("--mocker-itl-ms=1")

        assert await under_streams(plane.frontend, asks, kill) == undisturbed
        assert move_reasons(plane.frontend, asks) == [["DISCONNECTED"]] * STREAMS

    asyncio.run(scenario())


def spread(undisturbed: Answer) -> Sequence[int]:
    """20 counts of tokens at which to die: the first two, the last, in the middle of characters, and all over.

    The last token drawn before a death is not sent any more, so a client has one less. The mocker's tokens are bytes.
    """
    text = undisturbed.text.encode()
    inside = [at + 1 for at, byte in enumerate(text) if byte & 0xC0 == 0x80]
    last = undisturbed.completion_tokens - 1
    chosen = {1, 2, last, *inside[: POSITIONS // 2]}
    others = sorted(set(range(3, last)) - chosen)
    missing = POSITIONS - len(chosen)
    return sorted(chosen | {others[at * len(others) // missing] for at in range(missing)})


async def kill_at(plane: Plane, ask: Ask, after: Sequence[int], expected: Answer) -> list[list[int]]:
    """Ask once for each of `after`, on a worker that dies when it has drawn so many tokens; check each answer.

    Returns the positions at which each request moved.
    """
    moved_at: dict[int, list[int]] = {}

    async def run_lane(lane: str, share: Sequence[int]) -> None:
        async with ballast(plane.frontend, lane):
            for tokens in share:
                request_id = f"kill-{next(NUMBERS)}"
                fault = f"--mocker-fault=die_after={tokens}"
                victim = await plane.worker(f"--served-model-name={lane}", "--mocker-itl-ms=3", fault)
                got = await answer(plane.frontend, ask.named(request_id, model=lane))
                assert got == expected, f"killed after {tokens} tokens"
                moved_at[tokens] = [move["position"] for move in plane.frontend.moves(request_id)]
                victim.kill()  # It lives if the stop string came first.

    async with asyncio.TaskGroup() as group:
        for number, lane in enumerate(LANES):
            group.create_task(run_lane(lane, after[number :: len(LANES)]))
    return [moved_at[tokens] for tokens in after]
