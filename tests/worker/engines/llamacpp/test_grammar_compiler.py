"""Making forms: beside the engine, in bounded time, by a bounded number of threads."""

import asyncio

import pytest

from services.core.errors import Failure, Reason
from services.core.request import Guided, GuidedKind, Request
from services.models.tokenizers.byte_level import EOS, ByteTokenizer
from services.worker.engines.llamacpp import grammar_compiler as module
from services.worker.engines.llamacpp.grammar import Form, Forms
from services.worker.engines.llamacpp.grammar_compiler import GrammarCompiler, Making
from tests.support.doubles import run_async

# A third of a second or more of work that cannot be interrupted, in 2 kB: the root has 2^100 characters.
HOSTILE = "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(100)), 'r100 ::= "a"'])


class Maker:
    """A maker, and what it has made."""

    def __init__(self) -> None:
        self.made: list[Form | Failure] = []
        self._maker = GrammarCompiler(asyncio.get_running_loop(), Forms(ByteTokenizer.token_bytes, [EOS]))
        self._changed = asyncio.Event()

    def start(self, kind: GuidedKind, *texts: str, generated: bytes = b"") -> Making:
        request = Request(model="m", guided=Guided(kind, texts), generated_token_ids=tuple(generated))
        return self._maker.start(request, self._take)

    def cancel(self, making: Making) -> None:
        self._maker.cancel(making)

    def _take(self, result: Form | Failure) -> None:
        self.made.append(result)
        self._changed.set()

    async def wait_made(self, count: int) -> None:
        while len(self.made) < count:
            self._changed.clear()
            await self._changed.wait()


def reason(made: Form | Failure) -> Reason:
    assert isinstance(made, Failure)
    return made.reason


def test_gives_the_form_after_what_was_generated() -> None:
    async def scenario() -> None:
        maker = Maker()

        maker.start(GuidedKind.CHOICE, "yes", "no", generated=b"ye")
        await maker.wait_made(1)

        [form] = maker.made
        assert isinstance(form, Form)
        form.take(ord("s"))
        assert form.is_complete

    run_async(scenario())


def test_gives_the_failure_of_a_form_that_cannot_be_made() -> None:
    async def scenario() -> None:
        maker = Maker()

        maker.start(GuidedKind.REGEX, "(")
        maker.start(GuidedKind.CHOICE, "yes", generated=b"no")
        await maker.wait_made(2)

        assert set(map(reason, maker.made)) == {Reason.INVALID_ARGUMENT, Reason.GRAMMAR_REPLAY_MISMATCH}

    run_async(scenario())


def test_more_forms_than_threads_are_made_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "THREADS_MAX", 2)

    async def scenario() -> None:
        maker = Maker()

        for _ in range(9):
            maker.start(GuidedKind.CHOICE, "yes")
        await maker.wait_made(9)

        assert all(isinstance(made, Form) for made in maker.made)

    run_async(scenario())


def test_what_takes_too_long_fails_once_and_in_time_and_what_waits_for_it_may_go_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "FORM_S_MAX", 0.02)
    monkeypatch.setattr(module, "THREADS_MAX", 1)

    async def scenario() -> None:
        maker = Maker()

        maker.start(GuidedKind.GRAMMAR, HOSTILE)
        maker.start(GuidedKind.CHOICE, "yes")
        await maker.wait_made(2)
        assert list(map(reason, maker.made)) == [Reason.INVALID_ARGUMENT, Reason.WORKER_AT_CAPACITY]

        monkeypatch.setattr(module, "FORM_S_MAX", 5.0)  # On a busy machine a good form takes its time, too.
        while not isinstance(maker.made[-1], Form):  # Until the thread ends.
            count = len(maker.made)
            maker.start(GuidedKind.CHOICE, "yes")
            await maker.wait_made(count + 1)
        assert {reason(made) for made in maker.made[2:-1]} <= {Reason.WORKER_AT_CAPACITY}

    run_async(scenario())


def test_no_more_wait_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "THREADS_MAX", 1)
    monkeypatch.setattr(module, "WAITING_MAX", 1)

    async def scenario() -> None:
        maker = Maker()
        maker.start(GuidedKind.CHOICE, "yes")
        maker.start(GuidedKind.CHOICE, "yes")

        with pytest.raises(Failure) as raised:
            maker.start(GuidedKind.CHOICE, "yes")

        assert raised.value.reason is Reason.WORKER_AT_CAPACITY
        await maker.wait_made(2)

    run_async(scenario())


def test_what_is_cancelled_is_not_told_and_leaves_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "THREADS_MAX", 1)
    monkeypatch.setattr(module, "WAITING_MAX", 1)

    async def scenario() -> None:
        maker = Maker()
        under_way = maker.start(GuidedKind.CHOICE, "yes")
        for _ in range(3):
            waits = maker.start(GuidedKind.CHOICE, "no")
            maker.cancel(waits)
            maker.cancel(waits)
        maker.cancel(under_way)
        maker.start(GuidedKind.CHOICE, "ja")
        await maker.wait_made(1)

        [form] = maker.made
        assert isinstance(form, Form)
        form.take(ord("j"))

    run_async(scenario())
