"""The mailbox: each entry reaches the thread once, and a request that is cancelled in the mailbox never does."""

import threading

import pytest

from services.core.request import Request
from services.worker.engines.llamacpp import mailbox as module
from services.worker.engines.llamacpp.mailbox import Mailbox
from services.worker.engines.llamacpp.sequence import LlamaSequence
from tests.support.clock import WAIT_S


def sequence(key: int) -> LlamaSequence:
    return LlamaSequence(key, Request(model="m", token_ids=(1,)), frozenset())


def test_each_entry_is_collected_once() -> None:
    mailbox = Mailbox()
    mailbox.submit(sequence(1))
    mailbox.cancel(2)

    first, second = mailbox.collect(wait=False), mailbox.collect(wait=False)

    assert (list(first.submitted), first.cancelled, first.is_closed) == ([1], {2}, False)
    assert (second.submitted, second.cancelled) == ({}, set())


def test_request_that_is_cancelled_in_the_mailbox_is_not_collected() -> None:
    mailbox = Mailbox()
    mailbox.submit(sequence(1))

    mailbox.cancel(1)

    mail = mailbox.collect(wait=False)
    assert (mail.submitted, mail.cancelled) == ({}, set())


def test_cancel_is_visible_until_it_is_collected() -> None:
    mailbox = Mailbox()
    mailbox.cancel(1)
    assert mailbox.is_cancelled(1)

    mailbox.collect(wait=False)

    assert not mailbox.is_cancelled(1)


def test_closed_mailbox_stays_closed() -> None:
    mailbox = Mailbox()

    mailbox.close()

    assert [mailbox.collect(wait=True).is_closed for _ in range(2)] == [True, True]


def test_waiting_collect_returns_as_soon_as_something_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_IDLE_WAIT_S", 10 * WAIT_S)
    mailbox, arrived = Mailbox(), threading.Event()

    def thread() -> None:
        assert list(mailbox.collect(wait=True).submitted) == [1]
        arrived.set()

    threading.Thread(target=thread, daemon=True).start()
    mailbox.submit(sequence(1))

    assert arrived.wait(WAIT_S)
