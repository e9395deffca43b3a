"""Reminder: a line when something begins, and now and then while it lasts. Quota: so many lines a second."""

from services.runtime import log_throttle
from services.runtime.log_throttle import LogThrottle, Quota
from tests.support.doubles import run_async


def test_a_line_is_due_at_first_and_again_after_its_time() -> None:
    async def scenario() -> list[bool]:
        one = LogThrottle()
        due = [one.take(), one.take()]
        one._said_at = (one._said_at or 0) - log_throttle.REMIND_S  # As if so much time had passed.
        return [*due, one.take(), one.take()]

    assert run_async(scenario()) == [True, False, True, False]


def test_the_next_outage_is_a_first_one() -> None:
    async def scenario() -> tuple[bool, bool, bool]:
        one = LogThrottle()
        one.take()
        was_quiet = one.is_quiet
        one.reset()
        return was_quiet, one.is_quiet, one.take()

    assert run_async(scenario()) == (False, True, True)


def test_a_quota_leaves_out_what_is_too_much_and_tells_in_the_next_second() -> None:
    async def scenario() -> list[int | None]:
        one = Quota(2)
        taken = [one.take() for _ in range(5)]
        one._since -= 1  # As if a second had passed.
        return [*taken, one.take(), one.take(), one.take()]

    assert run_async(scenario()) == [0, 0, None, None, None, 3, 0, None]
