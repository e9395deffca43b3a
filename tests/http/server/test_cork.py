"""While a cork is held, writes are buffered and leave together, in order. A broken client costs the others nothing."""

from typing import Any

from structlog.testing import capture_logs

from services.http.server.cork import Cork
from tests.support.raw_session import RecordingTransport


class Faulty(RecordingTransport):
    """A transport with a bug."""

    def write(self, data: Any) -> None:
        raise RuntimeError("a bug")


class Broken(RecordingTransport):
    """A transport that its first write closes, as when the client has reset the connection."""

    def write(self, data: Any) -> None:
        assert not self.is_closing(), "uvloop raises on a write to a closing transport"
        super().write(data)
        self.close()


def test_cork_that_is_not_held_writes_at_once() -> None:
    wire = RecordingTransport()

    Cork().write(wire, b"a")

    assert wire.written == b"a"


def test_held_cork_writes_in_order_on_release() -> None:
    cork, wire, other = Cork(), RecordingTransport(), RecordingTransport()

    cork.hold()
    cork.write(wire, b"a")
    cork.write(other, b"c")
    cork.write(wire, b"b")
    assert (wire.written, other.written) == (b"", b"")
    cork.release()

    assert (wire.written, other.written) == (b"ab", b"c")


def test_release_makes_one_write_for_each_client() -> None:
    cork, wire = Cork(), RecordingTransport()

    cork.hold()
    assert [cork.write(wire, data) for data in (b"a", b"b")] == [True, True]
    cork.release()

    assert cork.write(wire, b"c") is False
    assert wire.pieces == [b"ab", b"c"]


def test_only_the_last_release_writes() -> None:
    cork, wire = Cork(), RecordingTransport()

    cork.hold()
    cork.hold()
    cork.write(wire, b"a")
    cork.release()
    assert wire.written == b""
    cork.release()

    assert wire.written == b"a"


def test_flush_writes_the_data_of_one_client_and_no_other() -> None:
    cork, wire, other = Cork(), RecordingTransport(), RecordingTransport()

    cork.hold()
    cork.write(other, b"c")
    cork.write(wire, b"a")
    cork.flush(wire)
    assert (wire.written, other.written) == (b"a", b"")
    cork.write(wire, b"b")
    cork.write(other, b"d")
    cork.release()
    cork.flush(wire)

    assert (wire.pieces, other.pieces) == ([b"a", b"b"], [b"cd"])


def test_released_cork_writes_nothing_twice() -> None:
    cork, wire = Cork(), RecordingTransport()

    for data in (b"a", b"b"):
        cork.hold()
        cork.write(wire, data)
        cork.release()
    cork.write(wire, b"c")

    assert wire.written == b"abc"


def test_disconnected_client_costs_the_others_nothing() -> None:
    cork, gone, wire = Cork(), Broken(), RecordingTransport()

    cork.hold()
    for data in (b"a", b"b"):
        cork.write(gone, data)
        cork.write(wire, data)
        cork.flush(gone)
    cork.release()

    assert (gone.written, wire.written) == (b"a", b"ab")


class Buffered:
    """A connection with a buffer of its own; None: to flush it is a bug."""

    def __init__(self, data: bytes | None) -> None:
        self.wire = RecordingTransport()
        self._data = data

    def flush(self) -> None:
        if self._data is None:
            raise RuntimeError("a bug")
        self.wire.write(self._data)

    def abort(self) -> None:
        self.wire.abort()


def test_flush_that_raises_disconnects_its_own_client_alone() -> None:
    """Bug: those after it were not called."""
    cork, faulty, other = Cork(), Buffered(None), Buffered(b"a")

    cork.hold()
    assert [cork.defer(one) for one in (faulty, other)] == [True, True]
    with capture_logs() as logs:
        cork.release()

    assert (faulty.wire.end, other.wire.end, other.wire.written) == ("aborted", None, b"a")
    assert [one["log_level"] for one in logs] == ["error"]


def test_write_that_raises_disconnects_its_own_client_alone() -> None:
    cork, faulty, wire = Cork(), Faulty(), RecordingTransport()

    cork.hold()
    for data in (b"a", b"b"):
        cork.write(faulty, data)
        cork.write(wire, data)
    with capture_logs() as logs:
        cork.release()

    assert (faulty.end, wire.written) == ("aborted", b"ab")
    assert [one["log_level"] for one in logs] == ["error"]
