"""The grammar compiler: compiles off the event loop, in bounded time, with a bounded number of threads."""

import asyncio

import pytest

from services.core.errors import Failure, Reason
from services.core.request import Guided, GuidedKind, Request
from services.models.tokenizers.byte_level import EOS, ByteTokenizer
from services.worker.engines.llamacpp import grammar_compiler as module
from services.worker.engines.llamacpp.grammar import Grammar, GrammarBuilder
from services.worker.engines.llamacpp.grammar_compiler import Compilation, GrammarCompiler
from tests.support.doubles import run_async

# In 2 kB, a third of a second or more of work that cannot be interrupted: the root expands to 2^100 characters.
HOSTILE = "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(100)), 'r100 ::= "a"'])


class Bench:
    """A compiler, and the results it has delivered."""

    def __init__(self) -> None:
        self.results: list[Grammar | Failure] = []
        self._compiler = GrammarCompiler(asyncio.get_running_loop(), GrammarBuilder(ByteTokenizer.token_bytes, [EOS]))
        self._changed = asyncio.Event()

    def compile(self, kind: GuidedKind, *texts: str, generated: bytes = b"") -> Compilation:
        request = Request(model="m", guided=Guided(kind, texts), generated_token_ids=tuple(generated))
        return self._compiler.compile(request, self._on_done)

    def cancel(self, compilation: Compilation) -> None:
        self._compiler.cancel(compilation)

    def _on_done(self, result: Grammar | Failure) -> None:
        self.results.append(result)
        self._changed.set()

    async def wait_results(self, count: int) -> None:
        while len(self.results) < count:
            self._changed.clear()
            await self._changed.wait()


def reason(result: Grammar | Failure) -> Reason:
    assert isinstance(result, Failure)
    return result.reason


def test_result_is_the_grammar_after_the_generated_tokens() -> None:
    async def scenario() -> None:
        bench = Bench()

        bench.compile(GuidedKind.CHOICE, "yes", "no", generated=b"ye")
        await bench.wait_results(1)

        [grammar] = bench.results
        assert isinstance(grammar, Grammar)
        grammar.accept_token(ord("s"))
        assert grammar.is_complete

    run_async(scenario())


def test_grammar_that_cannot_be_compiled_gives_its_failure() -> None:
    async def scenario() -> None:
        bench = Bench()

        bench.compile(GuidedKind.REGEX, "(")
        bench.compile(GuidedKind.CHOICE, "yes", generated=b"no")
        await bench.wait_results(2)

        assert set(map(reason, bench.results)) == {Reason.INVALID_ARGUMENT, Reason.GRAMMAR_REPLAY_MISMATCH}

    run_async(scenario())


def test_more_grammars_than_threads_are_compiled_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "THREADS_MAX", 2)

    async def scenario() -> None:
        bench = Bench()

        for _ in range(9):
            bench.compile(GuidedKind.CHOICE, "yes")
        await bench.wait_results(9)

        assert all(isinstance(result, Grammar) for result in bench.results)

    run_async(scenario())


def test_slow_compilation_fails_once_in_time_and_those_waiting_are_refused_for_capacity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "COMPILE_S_MAX", 0.02)
    monkeypatch.setattr(module, "THREADS_MAX", 1)

    async def scenario() -> None:
        bench = Bench()

        bench.compile(GuidedKind.GRAMMAR, HOSTILE)
        bench.compile(GuidedKind.CHOICE, "yes")
        await bench.wait_results(2)
        assert list(map(reason, bench.results)) == [Reason.INVALID_ARGUMENT, Reason.WORKER_AT_CAPACITY]

        monkeypatch.setattr(module, "COMPILE_S_MAX", 5.0)  # A valid grammar may take longer than 0.02 s.
        while not isinstance(bench.results[-1], Grammar):  # Refused until the thread of the slow grammar ends.
            count = len(bench.results)
            bench.compile(GuidedKind.CHOICE, "yes")
            await bench.wait_results(count + 1)
        assert {reason(result) for result in bench.results[2:-1]} <= {Reason.WORKER_AT_CAPACITY}

    run_async(scenario())


def test_compilations_beyond_the_waiting_bound_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "THREADS_MAX", 1)
    monkeypatch.setattr(module, "WAITING_MAX", 1)

    async def scenario() -> None:
        bench = Bench()
        bench.compile(GuidedKind.CHOICE, "yes")
        bench.compile(GuidedKind.CHOICE, "yes")

        with pytest.raises(Failure) as raised:
            bench.compile(GuidedKind.CHOICE, "yes")

        assert raised.value.reason is Reason.WORKER_AT_CAPACITY
        await bench.wait_results(2)

    run_async(scenario())


def test_cancelled_compilation_delivers_nothing_and_frees_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "THREADS_MAX", 1)
    monkeypatch.setattr(module, "WAITING_MAX", 1)

    async def scenario() -> None:
        bench = Bench()
        under_way = bench.compile(GuidedKind.CHOICE, "yes")
        for _ in range(3):
            waits = bench.compile(GuidedKind.CHOICE, "no")
            bench.cancel(waits)
            bench.cancel(waits)
        bench.cancel(under_way)
        bench.compile(GuidedKind.CHOICE, "ja")
        await bench.wait_results(1)

        [grammar] = bench.results
        assert isinstance(grammar, Grammar)
        grammar.accept_token(ord("j"))

    run_async(scenario())
