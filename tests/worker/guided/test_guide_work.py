"""The work of a helper that guides an answer: a panic is a refusal, and the memory of all jobs is bounded together."""

import resource
from collections.abc import Sequence

import pytest

from services.core.errors import Failure, Reason
from services.core.request import Guided, GuidedKind
from services.worker.guided.grammar import Grammar
from services.worker.guided.guide_jobs import encode_compilation
from services.worker.guided.guide_work import GuideWork

JOB = encode_compilation(Guided(GuidedKind.CHOICE, ("yes",)), [])


class Panic(BaseException):
    """What a panic in Rust becomes: it does not derive from Exception."""


class Builder:
    """Raises `error` in place of building, and notes the limit of the memory."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def build(self, guided: Guided, generated: Sequence[int]) -> Grammar:
        raise self._error


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The limits that are set. None is in effect: this process is not a helper."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10, 20))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: found.append(pair))
    return found


def test_panic_of_the_library_is_a_refusal() -> None:
    with pytest.raises(Failure) as caught:
        GuideWork(Builder(Panic("index out of bounds")))(JOB)  # type: ignore[arg-type]

    assert caught.value.reason is Reason.INVALID_ARGUMENT
    assert "index out of bounds" in caught.value.detail


def test_bug_of_ours_stays_one() -> None:
    with pytest.raises(LookupError):
        GuideWork(Builder(LookupError("a bug")))(JOB)  # type: ignore[arg-type]


def test_limit_of_the_first_job_holds_for_all(limits: list[tuple[int, int]]) -> None:
    with pytest.raises(LookupError):
        GuideWork(Builder(LookupError("a bug")))(JOB)  # type: ignore[arg-type]

    assert limits == [(10, 10)]
