"""A crowd has a few events a turn, in the order they came; everybody else has all of theirs, in every turn."""

import asyncio
import selectors
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise

import pytest

from services.fair_loop import CROWD_EVENTS_MAX, FairLoop, FairSelector, add_to_crowd

TEST_S_MAX = 10.0
CROWD = 5 * CROWD_EVENTS_MAX


@pytest.fixture
def open_sockets() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(TEST_S_MAX):
            await test()

    with asyncio.Runner(loop_factory=FairLoop) as runner:
        runner.run(bounded())


def pair(stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
        stack.enter_context(end)
    return ends


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def test_a_crowd_has_a_few_events_a_turn_and_each_of_it_its_own(open_sockets: ExitStack) -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        seen: list[int] = []
        for number in range(CROWD):
            ours, theirs = pair(open_sockets)
            add_to_crowd(ours)
            loop.add_reader(ours, seen.append, number)
            theirs.send(b"x")

        counts = []
        for _ in range(CROWD // CROWD_EVENTS_MAX + 1):
            counts.append(len(seen))
            await turns(1)

        assert max(now - before for before, now in pairwise(counts)) == CROWD_EVENTS_MAX
        assert sorted(seen[:CROWD]) == list(range(CROWD))

    run(test)


def test_whoever_is_not_of_the_crowd_does_not_wait_for_it(open_sockets: ExitStack) -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        seen: list[str] = []
        for name in ["crowd"] * CROWD + ["other"] * CROWD:
            ours, theirs = pair(open_sockets)
            if name == "crowd":
                add_to_crowd(ours)
            loop.add_reader(ours, seen.append, name)
            theirs.send(b"x")

        await turns(2)

        assert seen.count("other") >= CROWD
        assert seen.count("crowd") <= 2 * CROWD_EVENTS_MAX

    run(test)


def test_a_closed_socket_leaves_the_crowd_and_its_number_to_others(open_sockets: ExitStack) -> None:
    selector = FairSelector()
    first, _ = pair(open_sockets)
    selector.add_member(first)
    number = first.fileno()
    assert selector.register(first, selectors.EVENT_READ).fd == number
    selector.unregister(first)
    first.close()

    second, theirs = pair(open_sockets)
    assert number in (second.fileno(), theirs.fileno())
    selector.register(number, selectors.EVENT_READ)

    assert number not in selector._crowd_keys
    selector.close()


@pytest.mark.parametrize("is_crowd", [False, True])
def test_streams_work_in_the_crowd_as_elsewhere(open_sockets: ExitStack, is_crowd: bool) -> None:
    """Reading, writing more than the kernel takes, and noticing that the other end has hung up."""

    async def test() -> None:
        ours, theirs = pair(open_sockets)
        if is_crowd:
            add_to_crowd(ours)
        reader, writer = await asyncio.open_connection(sock=ours)
        other_reader, other_writer = await asyncio.open_connection(sock=theirs)

        writer.write(b"x" * 4_000_000)
        other_writer.write(b"hello\n")
        assert await reader.readline() == b"hello\n"
        assert len(await other_reader.readexactly(4_000_000)) == 4_000_000
        await writer.drain()
        other_writer.close()
        assert await reader.read() == b""
        writer.close()

    run(test)


def test_a_plain_loop_has_no_crowd(open_sockets: ExitStack) -> None:
    async def test() -> None:
        ours, _ = pair(open_sockets)
        add_to_crowd(ours)

    asyncio.run(test())


def test_the_map_of_a_selector_has_everybody_and_is_no_copy(open_sockets: ExitStack) -> None:
    """Python 3.13 asks for it whenever somebody comes or goes."""
    selector = FairSelector()
    try:
        one, other = pair(open_sockets)
        selector.add_member(one)
        seen = selector.get_map()
        for sock in (one, other):
            selector.register(sock, selectors.EVENT_READ, sock)

        assert [seen[sock.fileno()].data for sock in (one, other)] == [one, other]
        assert seen.get(other.fileno() + 1000) is None
    finally:
        selector.close()
