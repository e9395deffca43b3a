"""LogThrottle logs a condition when it begins and periodically while it lasts. LineQuota limits lines per second."""

from services.runtime import log_throttle
from services.runtime.log_throttle import LineQuota, LogThrottle
from tests.support.doubles import run_async


def test_throttle_allows_the_first_line_and_another_after_the_reminder_interval() -> None:
    async def scenario() -> list[bool]:
        throttle = LogThrottle()
        allowed = [throttle.should_log(), throttle.should_log()]
        throttle._logged_at = (throttle._logged_at or 0) - log_throttle.REMIND_S  # As if the interval had passed.
        return [*allowed, throttle.should_log(), throttle.should_log()]

    assert run_async(scenario()) == [True, False, True, False]


def test_throttle_allows_a_line_after_a_reset() -> None:
    async def scenario() -> tuple[bool, bool, bool]:
        throttle = LogThrottle()
        throttle.should_log()
        was_quiet = throttle.is_quiet
        throttle.reset()
        return was_quiet, throttle.is_quiet, throttle.should_log()

    assert run_async(scenario()) == (False, True, True)


def test_quota_leaves_out_excess_lines_and_reports_their_number_in_the_next_second() -> None:
    async def scenario() -> list[int | None]:
        quota = LineQuota(2)
        claims = [quota.claim() for _ in range(5)]
        quota._since -= 1  # As if a second had passed.
        return [*claims, quota.claim(), quota.claim(), quota.claim()]

    assert run_async(scenario()) == [0, 0, None, None, None, 3, 0, None]
