"""Each way in which another system of this kind tests its refusals for load has a test here, by its number.

R49: under load by blocks or prompt tokens requests are refused
    integration/admission/test_busy_threshold.py test_under_load_requests_are_refused_until_it_is_gone
R51: without thresholds nothing is refused
    integration/admission/test_busy_threshold.py test_without_thresholds_or_without_admission_control_nobody_is_refused
R52: thresholds are listed, read, and set one by one
    integration/operators/test_admin_api.py test_thresholds_are_listed_read_and_set_one_by_one
R53: no admin API, no such path
    integration/operators/test_admin_api.py test_without_the_admin_api_there_is_nothing_to_set
R54: thresholds out of range are refused, 0 and 1 are in it
    integration/operators/test_admin_api.py test_bad_thresholds_are_refused_and_change_nothing
    frontend/routing/test_thresholds.py test_a_threshold_out_of_range_is_refused_by_its_name
    frontend/routing/test_thresholds.py test_the_ends_of_the_range_are_in_it
R55: each threshold looks at its own signal; every rank that is known must be busy
    integration/admission/test_busy_threshold.py test_a_worker_is_busy_strictly_above_any_threshold
    integration/admission/test_busy_threshold.py test_all_ranks_that_are_known_must_be_busy
R56: what clears a busy worker: any report below the line, and silence
    integration/admission/test_busy_threshold.py test_under_load_requests_are_refused_until_it_is_gone
    integration/admission/test_busy_threshold.py test_a_worker_that_falls_silent_is_not_busy_for_ever
R57: a report that has not changed ends a mark that a refusal made
    integration/admission/test_full_marks.py test_after_a_burst_the_next_request_is_soon_answered
R59: a worker that is gone is forgotten, a new one is free, a quarantine keeps the load
    integration/admission/test_busy_threshold.py test_all_workers_busy_and_no_worker_at_all_are_different_reasons
R60: busy workers are no candidates; none at all is not the same as none that is free
    integration/admission/test_busy_threshold.py test_all_workers_busy_and_no_worker_at_all_are_different_reasons
    frontend/layers/test_route.py test_no_worker_at_all_is_no_workers
    frontend/layers/test_route.py test_all_full_or_busy_is_overloaded_and_says_when_to_come_back
R61: a refusal by the worker is one, and nothing else is
    integration/admission/test_admission.py test_of_a_burst_exactly_n_and_q_are_in
    frontend/layers/test_route.py test_leaves_a_worker_alone_that_is_not_to_blame
R62: a worker's limits hold, are told and are measured
    integration/admission/test_admission.py test_in_no_moment_of_a_random_rush_are_the_limits_passed
    integration/admission/test_admission_order.py test_whoever_comes_and_goes_the_worker_does_what_the_rules_say
R63: the status is as configured, and the body says what it is about
    integration/admission/test_busy_threshold.py test_the_status_of_a_refusal_is_as_configured
    integration/admission/test_busy_threshold.py test_each_rejection_is_told_and_counted_once

R50, R58 are about a pool for prefill alone: here one pool does both. R64 plays back a log of one engine's refusals:
here engines refuse nothing by themselves, the dispatcher before them does, and that is R61 and R62.
"""

import re
from pathlib import Path

TESTS = Path(__file__).parents[2]
NOT_HERE = {50, 58, 64}


def test_the_table_names_tests_that_there_are() -> None:
    assert __doc__ is not None
    named = re.findall(r"^    ([\w./]+\.py) (test_\w+)$", __doc__, re.MULTILINE)
    rows = {int(number) for number in re.findall(r"^R(\d+):", __doc__, re.MULTILINE)}

    assert rows | NOT_HERE == set(range(49, 65))
    assert len(named) == sum(line.startswith("    ") for line in __doc__.splitlines())
    for file, name in named:
        assert f"def {name}(" in (TESTS / file).read_text(), name
