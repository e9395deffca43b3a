"""Cork: what is written while it is in leaves together, in order, and nobody's failure is another's."""

from typing import Any

from structlog.testing import capture_logs

from services.http.server.cork import Cork
from tests.support.raw_session import RecordingTransport


class Faulty(RecordingTransport):
    """A transport with a bug."""

    def write(self, data: Any) -> None:
        raise RuntimeError("a bug")


class Broken(RecordingTransport):
    """A transport that is closed by the first write, as by a client that has reset its connection."""

    def write(self, data: Any) -> None:
        assert not self.is_closing(), "to uvloop a write is then an error"
        super().write(data)
        self.close()


def test_out_of_the_bottle_it_keeps_nothing() -> None:
    wire = RecordingTransport()

    Cork().write(wire, b"a")

    assert wire.written == b"a"


def test_in_it_what_is_written_waits_for_the_pull_and_leaves_in_order() -> None:
    cork, wire, other = Cork(), RecordingTransport(), RecordingTransport()

    cork.put_in()
    cork.write(wire, b"a")
    cork.write(other, b"c")
    cork.write(wire, b"b")
    assert (wire.written, other.written) == (b"", b"")
    cork.pull()

    assert (wire.written, other.written) == (b"ab", b"c")


def test_what_goes_to_one_client_leaves_in_one_piece() -> None:
    cork, wire = Cork(), RecordingTransport()

    cork.put_in()
    assert [cork.write(wire, data) for data in (b"a", b"b")] == [True, True]
    cork.pull()

    assert cork.write(wire, b"c") is False
    assert wire.pieces == [b"ab", b"c"]


def test_it_is_in_until_the_last_who_holds_it_pulls() -> None:
    cork, wire = Cork(), RecordingTransport()

    cork.put_in()
    cork.put_in()
    cork.write(wire, b"a")
    cork.pull()
    assert wire.written == b""
    cork.pull()

    assert wire.written == b"a"


def test_who_cannot_wait_has_its_own_written_though_it_be_held_and_the_others_wait_on() -> None:
    cork, wire, other = Cork(), RecordingTransport(), RecordingTransport()

    cork.put_in()
    cork.write(other, b"c")
    cork.write(wire, b"a")
    cork.release(wire)
    assert (wire.written, other.written) == (b"a", b"")
    cork.write(wire, b"b")
    cork.write(other, b"d")
    cork.pull()
    cork.release(wire)

    assert (wire.pieces, other.pieces) == ([b"a", b"b"], [b"cd"])


def test_once_pulled_it_is_out_and_has_nothing_to_write_again() -> None:
    cork, wire = Cork(), RecordingTransport()

    for data in (b"a", b"b"):
        cork.put_in()
        cork.write(wire, data)
        cork.pull()
    cork.write(wire, b"c")

    assert wire.written == b"abc"


def test_a_client_that_is_found_gone_harms_no_other() -> None:
    cork, gone, wire = Cork(), Broken(), RecordingTransport()

    cork.put_in()
    for data in (b"a", b"b"):
        cork.write(gone, data)
        cork.write(wire, data)
        cork.release(gone)
    cork.pull()

    assert (gone.written, wire.written) == (b"a", b"ab")


def test_a_write_with_a_bug_costs_its_own_client_alone() -> None:
    cork, faulty, wire = Cork(), Faulty(), RecordingTransport()

    cork.put_in()
    for data in (b"a", b"b"):
        cork.write(faulty, data)
        cork.write(wire, data)
    with capture_logs() as logs:
        cork.pull()

    assert (faulty.end, wire.written) == ("aborted", b"ab")
    assert [one["log_level"] for one in logs] == ["error"]
