"""Trials: a form that a library cannot bear is found out in a helper process, and a good one is tried once."""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.core.errors import Failure, Reason
from services.core.request import GuidedKind
from services.models.hf_checkpoint import read_model_folder
from services.worker.guided import trials as module
from services.worker.guided.trials import Trials
from tests.isolation import works
from tests.support.doubles import run_async
from tests.support.model_folder import make_model_folder

FAKES = Path(__file__).parents[2] / "fakes"
GOOD = {"regex": "a+"}
KIND = GuidedKind.REGEX
"""As the client knows the forms. It only names them."""


@pytest.fixture(autouse=True)
def fake_xgrammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKES))


def with_trials(tmp_path: Path, scenario: Callable[[Trials], Awaitable[None]], backend: str = "xgrammar") -> None:
    folder = read_model_folder(make_model_folder(tmp_path, context_length=64))

    async def run() -> None:
        trials = Trials(backend, folder.tokenizer_content, folder.vocab_size, folder.end_ids)
        try:
            await scenario(trials)
        finally:
            await trials.close()

    run_async(run())


async def refusal(trials: Trials, given: Mapping[str, object]) -> Failure:
    with pytest.raises(Failure) as caught:
        await trials.check(KIND, given)
    return caught.value


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
def test_good_forms_pass_and_bad_ones_are_refused(tmp_path: Path, backend: str) -> None:
    async def scenario(trials: Trials) -> None:
        for good in (GOOD, {"json": '{"type": "object"}'}, {"json_object": True}):
            await trials.check(KIND, good)
        for bad in ({"regex": "("}, {"json": '{"type": "nope"}'}, {"json": "nope"}):
            failure = await refusal(trials, bad)
            assert (failure.reason, failure.param) == (Reason.INVALID_ARGUMENT, "guided")
            assert failure.detail.startswith(f"guided.regex cannot be used: {backend} cannot compile it, and says: ")

    with_trials(tmp_path, scenario, backend)


def test_crash_is_a_refusal_and_the_next_form_is_tried(tmp_path: Path) -> None:
    async def scenario(trials: Trials) -> None:
        failure = await refusal(trials, {"grammar": 'root ::= "crash the compiler"'})
        assert failure.reason is Reason.INVALID_ARGUMENT
        assert "SIGABRT" in failure.detail
        await trials.check(KIND, {"grammar": 'root ::= "a"'})

    with_trials(tmp_path, scenario)


def test_bug_in_a_trial_fails_its_request_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the exception of the helper ended the engine's tasks, and so all requests of the worker."""
    monkeypatch.setattr(module, "LOADER", works.LOADER)  # Its work raises LookupError for what it does not know.

    async def scenario(trials: Trials) -> None:
        with capture_logs() as logs:
            failure = await refusal(trials, GOOD)
        assert failure.reason is Reason.INTERNAL
        assert [line["event"] for line in logs] == ["trying a guided form failed"]

    with_trials(tmp_path, scenario)


def test_good_form_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GOOD_KEPT", 1)

    async def scenario(trials: Trials) -> None:
        await trials.check(KIND, GOOD)
        await trials.close()  # From here on, nothing can be tried.

        await trials.check(KIND, GOOD)
        failure = await refusal(trials, {"regex": "b+"})
        assert failure.reason is Reason.WORKER_AT_CAPACITY

    with_trials(tmp_path, scenario)


def test_forms_kept_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GOOD_KEPT", 1)

    async def scenario(trials: Trials) -> None:
        await trials.check(KIND, GOOD)
        await trials.check(KIND, {"regex": "b+"})
        await trials.close()

        assert (await refusal(trials, GOOD)).reason is Reason.WORKER_AT_CAPACITY

    with_trials(tmp_path, scenario)
