"""The simulated network behaves as TCP between processes that can be frozen, killed and cut off."""

import asyncio

import pytest

from simulation.runtime.network import RETRANSMIT_S
from tests.simulation.support import PORT, Pair, Recorder, world


def test_bytes_arrive_in_order_after_the_latency() -> None:
    pair = Pair()
    pair.world.network.latency_default_s, pair.world.network.jitter_s_max = 0.1, 0.05

    def send() -> None:
        for number in range(50):
            pair.mine.transport.write(b"%d," % number)

    pair.within(pair.client, send)
    pair.run(0.09)
    assert pair.theirs.received == b""

    pair.run(0.5)

    assert pair.theirs.received == b"".join(b"%d," % number for number in range(50))


def test_bytes_may_come_in_pieces() -> None:
    sizes = set()
    for seed in range(200):
        pair = Pair(str(seed))
        pair.within(pair.client, lambda pair=pair: pair.mine.transport.write(b"x" * 100))
        pair.run(0.1)
        sizes.add(len([one for one in pair.theirs.events if isinstance(one, bytes)]))

    assert sizes == {1, 2}


def test_connection_to_nobody_is_refused() -> None:
    made, errors = world(), list[OSError]()

    async def connect() -> None:
        try:
            await asyncio.get_running_loop().create_connection(Recorder, "127.0.0.1", PORT)
        except OSError as error:
            errors.append(error)

    made.spawn("client", connect)
    made.run(1.0)

    assert [type(error) for error in errors] == [ConnectionRefusedError]


def test_sender_is_held_up_by_a_receiver_that_does_not_read() -> None:
    pair = Pair()
    pair.world.network.buffer_bytes = 1000
    pair.within(pair.server, lambda: pair.theirs.transport.pause_reading())

    pair.within(pair.client, lambda: pair.mine.transport.write(b"x" * 100_000))
    pair.run(1.0)
    assert pair.mine.events == ["made", "full"]
    assert pair.mine.transport.get_write_buffer_size() == 99_000

    pair.within(pair.server, lambda: pair.theirs.transport.resume_reading())
    pair.run(10.0)

    assert pair.mine.events == ["made", "full", "room"]
    assert pair.theirs.received == b"x" * 100_000


def test_closed_connection_delivers_what_was_sent_before() -> None:
    pair = Pair()

    def leave() -> None:
        pair.mine.transport.write(b"last words")
        pair.mine.transport.close()

    pair.within(pair.client, leave)
    pair.run(0.1)

    assert pair.mine.events == ["made", "lost"]
    assert (pair.theirs.received, pair.theirs.events[-2:]) == (b"last words", ["eof", "lost"])


def test_aborted_connection_is_reset() -> None:
    pair = Pair()

    pair.within(pair.client, lambda: pair.mine.transport.abort())
    pair.run(0.1)

    assert pair.theirs.events == ["made", "ConnectionResetError"]


def test_connection_is_reset_if_its_end_closes_with_unread_bytes() -> None:
    pair = Pair()
    pair.within(pair.server, lambda: pair.theirs.transport.pause_reading())
    pair.within(pair.client, lambda: pair.mine.transport.write(b"unread"))
    pair.run(0.1)

    pair.within(pair.server, lambda: pair.theirs.transport.close())
    pair.run(0.1)

    assert pair.mine.events == ["made", "ConnectionResetError"]


def test_connection_may_be_half_closed() -> None:
    pair = Pair()
    pair.theirs.eof_received = lambda: True  # type: ignore[method-assign,assignment]  # Keeps its side open.

    pair.within(pair.client, lambda: pair.mine.transport.write_eof())
    pair.run(0.1)
    pair.within(pair.server, lambda: pair.theirs.transport.write(b"still here"))
    pair.run(0.1)

    assert pair.mine.events == ["made", b"still here"]


def test_process_that_is_killed_hangs_up() -> None:
    pair = Pair()

    pair.world.kill(pair.server)
    pair.run(0.1)

    assert pair.mine.events == ["made", "eof", "lost"]
    assert pair.theirs.events == ["made"], "a dead process sees nothing"


def test_frozen_process_receives_when_it_thaws() -> None:
    pair = Pair()
    pair.world.freeze(pair.server)
    pair.within(pair.client, lambda: pair.mine.transport.write(b"hello"))
    pair.run(5.0)
    assert pair.theirs.events == ["made"]

    pair.world.thaw(pair.server)
    pair.run(0.1)

    assert pair.theirs.received == b"hello"


def test_timers_of_a_frozen_process_fire_late() -> None:
    made, fired = world(), list[float]()

    async def sleep() -> None:
        await asyncio.sleep(1.0)
        fired.append(made.now)

    process = made.spawn("sleeper", sleep)
    made.run(0.5)
    made.freeze(process)
    made.run(3.0)
    assert fired == []

    made.thaw(process)
    made.run(4.0)

    assert fired == [3.0]


@pytest.mark.parametrize("is_one_way", [True, False])
def test_partition_holds_bytes_back_until_it_is_healed(is_one_way: bool) -> None:
    pair = Pair()
    pair.world.network.partition("client", "server")
    if not is_one_way:
        pair.world.network.partition("server", "client")
    pair.within(pair.client, lambda: pair.mine.transport.write(b"to the server"))
    pair.within(pair.server, lambda: pair.theirs.transport.write(b"to the client"))
    pair.run(5.0)
    assert pair.theirs.received == b""
    assert pair.mine.received == (b"to the client" if is_one_way else b"")

    for way in (("client", "server"), ("server", "client")):
        pair.world.network.heal(*way)
    pair.run(2 * RETRANSMIT_S)

    assert (pair.theirs.received, pair.mine.received) == (b"to the server", b"to the client")


def test_death_behind_a_partition_is_noticed_when_it_is_healed() -> None:
    pair = Pair()
    pair.world.network.partition("server", "client")
    pair.world.kill(pair.server)
    pair.run(5.0)
    assert pair.mine.events == ["made"]

    pair.world.network.heal("server", "client")
    pair.run(2 * RETRANSMIT_S)

    assert pair.mine.events == ["made", "eof", "lost"]
