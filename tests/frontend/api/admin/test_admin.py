"""Calls with the token read and set the thresholds of any known model; all others are refused."""

from contextlib import nullcontext

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from services.core.errors import Failure, Reason
from services.core.gate import Gate
from services.frontend.api.admin.admin import Admin, AdminConfig
from services.frontend.control import Changes, LocalControl
from services.frontend.routing.thresholds import AdmissionConfig, BusyThresholds, Thresholds
from tests.frontend.support import alone
from tests.support.doubles import CARD, models_of, run_async

DECODE, PREFILL = "active_decode_blocks_threshold", "active_prefill_tokens_threshold"
CONFIGURED = Thresholds(active_decode_blocks=0.9)


def make_admin(*, token: str | None = None, is_on: bool = True) -> tuple[Admin, BusyThresholds]:
    thresholds = BusyThresholds(AdmissionConfig(is_on=is_on, thresholds=CONFIGURED))
    return Admin(AdminConfig(token=token), models_of(CARD), thresholds, alone(thresholds)), thresholds


# Authorization


@pytest.mark.parametrize("given", ["Bearer secret", "bearer secret", "BEARER  secret "])
def test_call_with_the_token_is_authorized(given: str) -> None:
    make_admin(token="secret")[0].authorize(given)


@pytest.mark.parametrize(
    "given", [None, "", "secret", "Bearer", "Bearer ", "Bearer other", "Basic secret", "Bearer sécret", "Bearer \udcff"]
)
def test_other_calls_are_refused_without_the_token_in_the_message(given: str | None) -> None:
    with pytest.raises(Failure) as caught:
        make_admin(token="secret")[0].authorize(given)

    assert caught.value.reason is Reason.UNAUTHENTICATED
    assert "secret" not in caught.value.detail


@pytest.mark.parametrize(("given", "expected"), [(None, "no token"), ("Bearer other", "another token")])
def test_refusal_says_whether_the_call_has_no_token_or_another(given: str | None, expected: str) -> None:
    with pytest.raises(Failure, match=f"this call has {expected}$"):
        make_admin(token="secret")[0].authorize(given)


@pytest.mark.parametrize("given", [None, "Bearer anything"])
def test_every_call_is_authorized_if_no_token_is_configured(given: str | None) -> None:
    make_admin()[0].authorize(given)


@pytest.mark.parametrize(
    ("config", "is_refused"),
    [
        (AdminConfig(), True),
        (AdminConfig(listen="127.0.0.1:0"), False),
        (AdminConfig(token="secret"), False),
    ],
    ids=["with clients, no token", "apart, no token", "with clients, a token"],
)
def test_call_where_clients_need_keys_is_refused_unless_there_is_a_token(config: AdminConfig, is_refused: bool) -> None:
    """A bug: whoever reached a frontend with keys but without a token was an operator."""
    thresholds = BusyThresholds(AdmissionConfig(thresholds=CONFIGURED))
    admin = Admin(config, models_of(CARD), thresholds, alone(thresholds), clients_need_keys=True)

    with pytest.raises(Failure, match="has no admin token") if is_refused else nullcontext():
        admin.authorize("Bearer secret")


def test_token_is_not_in_the_logged_configuration() -> None:
    assert "secret" not in repr(AdminConfig(token="secret"))


# Thresholds


def test_all_known_models_are_listed_with_their_thresholds() -> None:
    admin, _ = make_admin()

    assert admin.thresholds() == [(CARD.model, CONFIGURED)]


def test_unnamed_thresholds_stay_and_none_disables() -> None:
    admin, thresholds = make_admin()

    after = [
        run_async(admin.set_thresholds("m", {PREFILL: 10})),
        run_async(admin.set_thresholds("m", {DECODE: 0.5})),
        run_async(admin.set_thresholds("m", {PREFILL: None})),
        run_async(admin.set_thresholds("m", {})),
    ]

    assert after == [
        Thresholds(active_decode_blocks=0.9, active_prefill_tokens=10),
        Thresholds(active_decode_blocks=0.5, active_prefill_tokens=10),
        Thresholds(active_decode_blocks=0.5),
        Thresholds(active_decode_blocks=0.5),
    ]
    assert thresholds.of("m") == after[-1]


def test_changes_are_logged_and_reads_are_not() -> None:
    admin, _ = make_admin()

    with capture_logs() as logs:
        run_async(admin.set_thresholds("m", {}))
        run_async(admin.set_thresholds("m", {DECODE: 0.5}))

    assert [(line["event"], line["model"]) for line in logs] == [("busy thresholds set", "m")]


@pytest.mark.parametrize("changes", [{}, {DECODE: 0.5}])
def test_model_that_no_worker_has_served_is_unknown(changes: dict[str, float]) -> None:
    admin, _ = make_admin()

    with pytest.raises(Failure) as caught:
        run_async(admin.set_thresholds("made up", changes))

    assert (caught.value.reason, caught.value.param) == (Reason.MODEL_NOT_FOUND, "model")


@pytest.mark.parametrize(
    ("name", "value"),
    [(DECODE, -0.1), (DECODE, 1.1), (DECODE, float("nan")), (DECODE, float("inf")), (PREFILL, -1), (PREFILL, 2**64)],
)
def test_value_out_of_range_is_refused_and_changes_nothing(name: str, value: float) -> None:
    admin, thresholds = make_admin()

    with pytest.raises(Failure) as caught:
        run_async(admin.set_thresholds("m", {name: value}))

    assert (caught.value.reason, caught.value.param) == (Reason.INVALID_ARGUMENT, name)
    assert name in caught.value.detail
    assert thresholds.of("m") == CONFIGURED


class Recording(LocalControl):
    """Records what is to be set."""

    def __init__(self, thresholds: BusyThresholds) -> None:
        super().__init__(CollectorRegistry(), Gate(), thresholds)
        self.set: list[tuple[str, Changes]] = []

    async def set_thresholds(self, model: str, changes: Changes) -> None:
        self.set.append((model, changes))
        await super().set_thresholds(model, changes)


def test_refused_change_reaches_no_process() -> None:
    thresholds = BusyThresholds(AdmissionConfig(thresholds=CONFIGURED))
    whole = Recording(thresholds)
    admin = Admin(AdminConfig(), models_of(CARD), thresholds, whole)
    for model, value in (("m", 2.0), ("made up", 0.5)):
        with pytest.raises(Failure):
            run_async(admin.set_thresholds(model, {DECODE: value}))
    run_async(admin.set_thresholds("m", {DECODE: 0.5}))

    assert whole.set == [("m", {DECODE: 0.5})]


@pytest.mark.parametrize(("name", "value"), [(DECODE, 0), (DECODE, 1), (PREFILL, 0), (PREFILL, 2**64 - 1)])
def test_ends_of_a_range_are_accepted(name: str, value: int) -> None:
    run_async(make_admin()[0].set_thresholds("m", {name: value}))


@pytest.mark.parametrize("is_on", [True, False])
def test_is_acting_says_whether_admission_control_is_on(is_on: bool) -> None:
    assert make_admin(is_on=is_on)[0].is_acting is is_on
