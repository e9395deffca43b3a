"""Every behaviour that comparable systems test in their refusals under load has a test here.

Each entry is a behaviour and its tests, by file and name.

Requests are refused while the cache blocks or the prompt tokens in use exceed a threshold:
    integration/admission/test_busy_threshold.py test_requests_are_refused_while_the_load_exceeds_a_threshold
Nothing is refused without thresholds:
    integration/admission/test_busy_threshold.py test_nothing_is_refused_without_thresholds_or_without_admission_control
Thresholds are listed, read, and set one by one:
    integration/operators/test_admin_api.py test_thresholds_are_listed_read_and_set_one_by_one
A frontend without the admin API has no such path:
    integration/operators/test_admin_api.py test_disabled_admin_api_is_not_found
Thresholds out of range are refused; 0 and 1 are in range:
    integration/operators/test_admin_api.py test_bad_thresholds_are_refused_and_change_nothing
    frontend/routing/test_thresholds.py test_a_threshold_out_of_range_is_an_invalid_argument_under_its_client_name
    frontend/routing/test_thresholds.py test_the_ends_of_the_range_are_valid_thresholds
Each threshold applies to its own signal; a worker is busy only if all of its known ranks are:
    integration/admission/test_busy_threshold.py test_worker_is_busy_strictly_above_any_threshold
    integration/admission/test_busy_threshold.py test_worker_is_busy_only_if_every_known_rank_is
A report below the threshold, or silence, clears a busy worker:
    integration/admission/test_busy_threshold.py test_requests_are_refused_while_the_load_exceeds_a_threshold
    integration/admission/test_busy_threshold.py test_silent_worker_does_not_stay_busy
A report that has not changed clears the mark that a refusal set:
    integration/admission/test_full_marks.py test_next_request_is_soon_answered_after_a_burst
A lost worker is forgotten, a new one is free, and a quarantined one keeps its load:
    integration/admission/test_busy_threshold.py test_busy_workers_and_no_workers_are_different_reasons
Busy workers are not candidates; having no workers differs from having no free ones:
    integration/admission/test_busy_threshold.py test_busy_workers_and_no_workers_are_different_reasons
    frontend/layers/test_route.py test_a_call_without_any_worker_fails_with_no_workers
    frontend/layers/test_route.py test_a_call_is_overloaded_with_a_retry_after_if_all_workers_are_full_or_busy
Only a refusal by the worker counts as one:
    integration/admission/test_admission.py test_burst_fills_exactly_the_slots_and_the_queue
    frontend/layers/test_route.py test_a_worker_that_is_not_to_blame_is_not_quarantined
A worker's limits hold, are reported and are measured:
    integration/admission/test_admission.py test_random_load_never_exceeds_the_limits
    integration/admission/test_admission_order.py test_worker_admits_and_starts_requests_like_the_model
The status is the configured one, and the body says what it is about:
    integration/admission/test_busy_threshold.py test_refusal_has_the_configured_status
    integration/admission/test_busy_threshold.py test_each_rejection_is_reported_and_counted_once

Not covered, because it does not apply: pools of workers for prefill alone (one pool does both here), and refusals by an
engine itself (here the dispatcher in front of the engine refuses, which the entries above cover).
"""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_the_table_of_rejections_names_existing_tests() -> None:
    assert __doc__ is not None
    behaviours = re.findall(r"^\w.*:$", __doc__, re.MULTILINE)
    named = re.findall(r"^    ([\w/]+\.py) (test_\w+)$", __doc__, re.MULTILINE)

    assert len(behaviours) == 13
    assert len(named) == sum(line.startswith("    ") for line in __doc__.splitlines())
    for file, name in named:
        assert f"def {name}(" in (TESTS / file).read_text(), name
