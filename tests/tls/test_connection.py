"""A protocol over TLS notices nothing of it: data, ends, bounds and pauses are those of the TCP connection."""

import asyncio
import fcntl
import gc
import shutil
import socket
import ssl
import subprocess
import sys
import termios
import weakref
from collections.abc import Awaitable, Callable

import pytest

from services.runtime.loop import run_on_loop
from services.tls import connection as connection_module
from services.tls import handshakes as handshakes_module
from services.tls import records as records_module
from services.tls.connection import PlainPeer, Refused
from tests.support.clock import WAIT_S
from tests.tls.support import (
    Recorder,
    connected,
    serving,
    shared_certificates,
    shared_context,
    until,
)

BIG = bytes(range(256)) * 4096  # 1 MiB: many records, many reads.


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await test()

    run_on_loop(bounded())


def waiting_in(sock: socket.socket, queue: int) -> int:
    """Bytes that wait in a queue of the kernel: FIONREAD, to be read; TIOCOUTQ, to be acknowledged by the other end."""
    return int.from_bytes(fcntl.ioctl(sock.fileno(), queue, bytes(4)), sys.byteorder)


def unread_size(inner: Recorder) -> int:
    """Bytes that wait in the kernel for the server to read them."""
    return waiting_in(inner.transport.get_extra_info("socket"), termios.FIONREAD)


def trusting() -> ssl.SSLContext:
    return shared_certificates().client_context()


def test_data_arrives_whole_in_both_directions() -> None:
    async def test() -> None:
        async with serving(shared_context()) as server, connected(server.port, trusting()) as client:
            client.send(BIG)
            inner = await server.first()
            await until(lambda: len(inner.received) == len(BIG))
            inner.transport.write(inner.received)

            assert await client.read(len(BIG)) == BIG

    run(test)


def test_records_that_come_in_one_read_are_delivered_in_one_call() -> None:
    async def test() -> None:
        async with serving(shared_context()) as server, connected(server.port, trusting()) as client:
            inner = await server.first()
            for part in (b"one", b"two", b"three"):
                client.tls.write(part)
            client.flush()

            await until(lambda: bool(inner.reads))
            assert inner.reads == [b"onetwothree"]

    run(test)


@pytest.mark.parametrize("goes_on", [True, False])
def test_end_of_the_clients_direction_is_told_once_and_the_protocol_decides(goes_on: bool) -> None:
    async def test() -> None:
        async with (
            serving(shared_context(), make_inner=lambda _: Recorder(goes_on=goes_on)) as server,
            connected(server.port, trusting()) as client,
        ):
            inner = await server.first()
            client.send(b"last words")
            client.end()
            client.writer.write_eof()
            await until(lambda: inner.has_end)
            if goes_on:
                inner.transport.write(b"still here")

            assert inner.received == b"last words"
            assert await client.read(10) == (b"still here" if goes_on else b"")
            assert goes_on or await client.reader.read() == b""

    run(test)


def test_end_of_the_tcp_connection_without_that_of_tls_is_an_end_too() -> None:
    async def test() -> None:
        async with serving(shared_context()) as server, connected(server.port, trusting()) as client:
            inner = await server.first()
            client.writer.write_eof()

            await until(lambda: inner.has_end and inner.is_lost)

    run(test)


def test_close_sends_what_was_written_and_says_that_it_is_all() -> None:
    async def test() -> None:
        async with serving(shared_context()) as server, connected(server.port, trusting()) as client:
            inner = await server.first()
            inner.transport.write(BIG * 8)
            inner.transport.close()

            assert inner.transport.is_closing()
            assert await client.read(len(BIG) * 8 + 1) == BIG * 8, "an end without close_notify raises SSLEOFError"
            await until(lambda: inner.is_lost)
            assert inner.error is None

    run(test)


def test_after_write_eof_the_client_sees_the_end_and_is_still_read() -> None:
    async def test() -> None:
        async with serving(shared_context()) as server, connected(server.port, trusting()) as client:
            inner = await server.first()
            inner.transport.write(b"bye")
            inner.transport.write_eof()
            inner.transport.write(b"too late")

            assert await client.read(100) == b"bye"
            client.send(b"and this?")
            await until(lambda: inner.received == b"and this?")
            assert not inner.is_lost

    run(test)


def test_buffer_of_a_client_that_does_not_read_is_bounded_as_over_tcp() -> None:
    async def test() -> None:
        async with serving(shared_context()) as server, connected(server.port, trusting()) as client:
            inner = await server.first()
            inner.transport.set_write_buffer_limits(high=64 * 1024)
            size = 0
            while not inner.is_full:
                inner.transport.write(BIG)
                size += len(BIG)
            assert inner.transport.get_write_buffer_size() > 64 * 1024

            assert len(await client.read(size)) == size
            await until(lambda: not inner.is_full)
            assert inner.transport.get_write_buffer_size() == 0

    run(test)


def test_nothing_is_delivered_while_reading_is_paused() -> None:
    async def test() -> None:
        async with serving(shared_context()) as server, connected(server.port, trusting()) as client:
            inner = await server.first()
            inner.transport.pause_reading()
            client.send(BIG)
            await until(lambda: unread_size(inner) > 0)
            await asyncio.sleep(0)
            assert inner.reads == []
            inner.transport.resume_reading()

            await until(lambda: len(inner.received) == len(BIG))

    run(test)


@pytest.mark.parametrize("goes_on", [True, False])
def test_request_and_end_may_come_with_the_end_of_the_handshake(goes_on: bool) -> None:
    async def test() -> None:
        async with (
            serving(shared_context(), make_inner=lambda _: Recorder(goes_on=goes_on)) as server,
            connected(server.port, trusting(), shakes=False) as client,
        ):
            await client.shake(flushes_last=False)
            client.tls.write(b"all that I want")
            client.flush()
            client.writer.write_eof()
            inner = await server.first()
            await until(lambda: inner.has_end)

            assert inner.received == b"all that I want"
            assert server.failures == []
            if goes_on:
                inner.transport.write(b"here it is")
                assert await client.read(10) == b"here it is"
            else:
                await until(lambda: inner.is_lost)

    run(test)


def test_broken_record_ends_the_connection_as_a_reset_does() -> None:
    async def test() -> None:
        async with serving(shared_context()) as server, connected(server.port, trusting()) as client:
            inner = await server.first()
            client.writer.write(b"\x17\x03\x03\x00\x20" + bytes(32))

            await until(lambda: inner.is_lost)
            assert isinstance(inner.error, ssl.SSLError)
            assert not inner.has_end

    run(test)


class Answering(Recorder):
    """Answers what it receives at once, and hangs up, as HTTP/1.1 does with a request that it cannot read."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.transport.write(b"no")
        self.transport.write_eof()
        self.transport.close()


@pytest.mark.parametrize("comes_with_handshake", [True, False])
def test_answer_to_data_before_a_broken_record_is_dropped(comes_with_handshake: bool) -> None:
    """OpenSSL refuses to encrypt after a broken record. The data came before it, so it is delivered."""

    async def test() -> None:
        faults: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        async with (
            serving(shared_context(), make_inner=lambda _: Answering()) as server,
            connected(server.port, trusting(), shakes=False) as client,
        ):
            await client.shake(flushes_last=not comes_with_handshake)
            client.tls.write(b"hello")
            client.flush(b"\x17\x03\x03\x00\x20" + bytes(32))
            inner = await server.first()
            await until(lambda: inner.is_lost)

            assert inner.received == b"hello"
            assert isinstance(inner.error, ssl.SSLError)
            assert faults == []

    run(test)


def test_protocol_that_raises_at_the_end_of_the_handshake_is_cut_off() -> None:
    class Faulty(Recorder):
        def data_received(self, data: bytes) -> None:
            raise ZeroDivisionError

    async def test() -> None:
        faults: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context.get("exception")))
        async with (
            serving(shared_context(), make_inner=lambda _: Faulty()) as server,
            connected(server.port, trusting(), shakes=False) as client,
        ):
            await client.shake(flushes_last=False)
            client.send(b"hello")
            inner = await server.first()

            await until(lambda: inner.is_lost)
            assert [type(fault) for fault in faults] == [ZeroDivisionError]

    run(test)


def test_what_comes_after_the_end_of_the_clients_direction_is_not_kept() -> None:
    async def test() -> None:
        async with (
            serving(shared_context(), make_inner=lambda _: Recorder(goes_on=True)) as server,
            connected(server.port, trusting()) as client,
        ):
            inner = await server.first()
            client.end()
            await until(lambda: inner.has_end)
            client.writer.write(BIG)
            sock = client.writer.get_extra_info("socket")
            await until(lambda: not client.writer.transport.get_write_buffer_size())
            await until(lambda: not waiting_in(sock, termios.TIOCOUTQ) and not unread_size(inner))

            assert server.connections[0]._records._incoming.pending == 0
            assert inner.received == b""
            inner.transport.write(b"still here")
            assert await client.read(10) == b"still here"

    run(test)


def test_peer_that_does_not_speak_tls_gets_the_reply_and_no_connection() -> None:
    async def test() -> None:
        async with (
            serving(shared_context(), reply=b"speak TLS") as server,
            connected(server.port, trusting(), shakes=False) as client,
        ):
            client.writer.write(b"GET / HTTP/1.1\r\n\r\n")

            assert await client.reader.read() == b"speak TLS"
            assert [type(error) for error in server.failures] == [PlainPeer]
            assert server.inner == []
            assert len(server.handshakes) == 0

    run(test)


def test_peer_that_may_not_come_in_gets_the_parting_words() -> None:
    def refuse(_: ssl.SSLObject) -> Recorder:
        raise Refused("not you", b"go away")

    async def test() -> None:
        async with (
            serving(shared_context(), make_inner=refuse) as server,
            connected(server.port, trusting()) as client,
        ):
            assert await client.read(100) == b"go away"
            assert [str(error) for error in server.failures] == ["not you"]

    run(test)


def test_handshake_that_takes_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes_module, "HANDSHAKE_S_MAX", 0.01)

    async def test() -> None:
        async with serving(shared_context()) as server, connected(server.port, trusting(), shakes=False) as client:
            client.writer.write(b"\x16")

            assert await client.reader.read() == b""
            assert [type(error) for error in server.failures] == [TimeoutError]

    run(test)


@pytest.mark.parametrize(("sent", "kind"), [(b"", ConnectionResetError), (b"\x16", ssl.SSLError)])
def test_handshake_of_a_client_that_leaves_ends(sent: bytes, kind: type[Exception]) -> None:
    """One that has sent nothing is a port scanner, or a health check over TCP."""

    async def test() -> None:
        async with serving(shared_context()) as server:
            async with connected(server.port, trusting(), shakes=False) as client:
                client.writer.write(sent)
            await until(lambda: bool(server.failures))

            assert [type(error) for error in server.failures] == [kind]
            assert len(server.handshakes) == 0

    run(test)


def test_handshake_that_is_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record says its length first, and OpenSSL waits for a message of any number of records."""
    monkeypatch.setattr(connection_module, "FLIGHT_BYTES_MAX", 100)

    async def test() -> None:
        async with serving(shared_context()) as server, connected(server.port, trusting(), shakes=False) as client:
            client.writer.write(b"\x16\x03\x01\x3f\xff\x01\x00\x3f\xf0" + bytes(200))
            await until(lambda: bool(server.failures))

            assert "longer than 100 bytes" in str(server.failures[0])

    run(test)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="Debian's openssl sends new keys at will")
def test_peer_that_sends_nothing_but_new_keys_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "IDLE_BYTES_MAX", 100)

    async def test() -> None:
        async with serving(shared_context()) as server:
            client = await asyncio.create_subprocess_exec(
                *("openssl", "s_client", "-connect", f"127.0.0.1:{server.port}", "-tls1_3"),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            assert client.stdin is not None
            inner = await server.first()
            [connection] = server.connections
            while not inner.is_lost:
                seen = connection._records._idle_size
                client.stdin.write(b"K\n")
                while connection._records._idle_size == seen and not inner.is_lost:
                    await asyncio.sleep(0.001)

            assert "much that is no data" in str(inner.error)
            client.stdin.close()
            await client.wait()

    run(test)


def test_connection_that_is_lost_leaves_nothing_for_the_garbage_collector() -> None:
    async def test() -> None:
        async with serving(shared_context()) as server:
            async with connected(server.port, trusting()) as client:
                inner = weakref.ref(await server.first())
                client.send(b"hello")
            await until(lambda: server.inner[0].is_lost)
            connection = weakref.ref(server.connections.pop())
            server.inner.clear()
            gc.disable()
            try:
                await until(lambda: connection() is None and inner() is None)
            finally:
                gc.enable()

    run(test)


def test_swapped_protocol_gets_what_follows() -> None:
    async def test() -> None:
        async with serving(shared_context()) as server, connected(server.port, trusting()) as client:
            first, second = await server.first(), Recorder()
            first.transport.set_protocol(second)
            client.send(b"to the second")
            await until(lambda: second.received == b"to the second")

            assert first.reads == []
            assert first.transport.get_protocol() is second

    run(test)


def test_client_end_connects_and_talks() -> None:
    """The same class serves the end that opens a connection."""

    async def test() -> None:
        from services.tls.connection import TlsConnection

        async with serving(shared_context()) as server:
            recorder = Recorder()
            failures: list[Exception] = []
            context = trusting()
            context.check_hostname = False
            await asyncio.get_running_loop().create_connection(
                lambda: TlsConnection(
                    lambda _: recorder,
                    context,
                    server.handshakes,
                    on_failed=lambda _, error: failures.append(error),
                    is_server=False,
                ),
                "127.0.0.1",
                server.port,
            )
            await until(lambda: recorder.transport is not None)
            recorder.transport.write(b"hello")
            inner = await server.first()
            await until(lambda: inner.received == b"hello")
            inner.transport.write(b"you too")
            await until(lambda: recorder.received == b"you too")
            recorder.transport.close()
            await until(lambda: inner.has_end)

            assert failures == []

    run(test)
