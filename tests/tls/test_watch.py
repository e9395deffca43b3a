"""New files are taken over whole; files that cannot be used leave the last ones in use, and the log says why once."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.tls.certificate import CertificateError, PairFiles
from services.tls.watch import EXPIRY_REMINDER_S, EXPIRY_WARNING_S, ServerPair, WatchedCertificate, watched_pair
from tests.tls.support import Certificates, serial_of


class Watched:
    """A pair that is watched, and a clock that the test sets."""

    def __init__(self, made: Certificates, files: PairFiles) -> None:
        self.made = made
        self.now = 0.0
        self.pair: WatchedCertificate[ServerPair] = watched_pair(files, lambda: self.now)
        self.now = self.pair.loaded.certificate.expires_at - EXPIRY_WARNING_S - 1

    @property
    def serial(self) -> str:
        return serial_of(self.pair.context, self.made.client_context())

    def look(self, times: int = 2) -> list[Any]:
        with capture_logs() as lines:
            for _ in range(times):
                self.pair.look()
        return [line["event"] for line in lines]


@pytest.fixture
def made(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


def test_new_pair_counts_from_the_second_look_at_it(made: Certificates) -> None:
    watched = Watched(made, made.pair())
    before = watched.serial
    made.pair(days=30)

    assert watched.look(1) == []
    assert watched.serial == before
    assert watched.look(1) == ["a new certificate is in use"]
    assert watched.serial != before
    assert watched.look(3) == []


def test_pair_of_which_one_half_is_new_leaves_the_last_one_in_use(made: Certificates) -> None:
    files = made.pair()
    watched = Watched(made, files)
    before = watched.serial
    old_key = files.key.read_bytes()
    made.pair(days=30)
    new_key = files.key.read_bytes()
    files.key.write_bytes(old_key)

    assert watched.look(4) == ["the new certificate cannot be used: the one before it stays in use"]
    assert watched.serial == before
    files.key.write_bytes(new_key)
    assert watched.look() == ["a new certificate is in use"]
    assert watched.serial != before


@pytest.mark.parametrize("change", ["expired", "garbage", "gone"])
def test_pair_that_cannot_be_used_leaves_the_last_one_in_use(made: Certificates, change: str) -> None:
    files = made.pair()
    watched = Watched(made, files)
    before = watched.serial
    if change == "expired":
        made.pair(ago=timedelta(days=5))
    elif change == "garbage":
        files.cert.write_text("garbage")
    else:
        files.cert.unlink()

    assert watched.look(3) == ["the new certificate cannot be used: the one before it stays in use"]
    assert watched.serial == before


def test_pair_that_cannot_be_used_yet_is_in_use_later(made: Certificates) -> None:
    """The reasons may pass without a change of the files: clocks go on, and network drives come back."""
    files = made.pair()
    why = ""

    def load() -> ServerPair:
        if why:
            raise CertificateError(why)
        return before

    before = watched_pair(files, lambda: 0.0).loaded
    watched = Watched(made, files)
    watched.pair = WatchedCertificate((files.cert, files.key), load, lambda: 0.0)
    made.pair(days=30)

    why = "it is not valid yet"
    assert watched.look(4) == ["the new certificate cannot be used: the one before it stays in use"]
    why = "it cannot be read"
    assert watched.look(4) == ["the new certificate cannot be used: the one before it stays in use"]
    why = ""
    assert watched.look(4) == ["a new certificate is in use"]


def test_link_that_refers_to_another_folder_is_a_change(tmp_path: Path) -> None:
    """Kubernetes replaces a secret so: the files keep their names, and the size may be the same."""
    made = [Certificates(tmp_path / name) for name in ("old", "new")]
    for one in made:
        one.pair()
    link = tmp_path / "current"
    link.symlink_to(made[0].folder)
    watched = Watched(made[0], PairFiles(link / "edge.pem", link / "edge.key"))
    (tmp_path / "next").symlink_to(made[1].folder)
    os.replace(tmp_path / "next", link)

    assert watched.look() == ["a new certificate is in use"]


def test_certificate_that_ends_soon_is_warned_of_once_a_day(made: Certificates) -> None:
    watched = Watched(made, made.pair(days=30))

    assert watched.look() == []
    watched.now += 2
    assert watched.look(5) == ["the certificate expires soon"]
    watched.now += EXPIRY_REMINDER_S
    assert watched.look(5) == ["the certificate expires soon"]
    watched.now += EXPIRY_WARNING_S
    assert watched.look(5) == ["the certificate has expired: peers refuse it"]
    assert watched.pair.expires_in_s < 0


def test_files_that_cannot_be_used_at_the_start_are_an_error(made: Certificates) -> None:
    files = made.pair(ago=timedelta(days=5))

    with pytest.raises(CertificateError, match="has expired"):
        watched_pair(files, lambda: 0.0)
