"""Every weakness in migration, streaming and load shedding that comparable systems are known for has a test here.

Each entry is a weakness and the tests that show that this system does not have it, by file and name.

A worker that dies after the finish reason makes the answer start anew:
    integration/moves/test_rogue_worker.py test_complete_answer_ends_well_whatever_the_worker_does_next
The usage of a moved answer counts its first part as prompt:
    integration/moves/test_every_position.py test_killed_worker_changes_no_answer_at_any_position
A move loses stop strings, penalties and the seed:
    integration/moves/test_every_position.py test_killed_worker_changes_no_answer_at_any_position
A move loses half of a character:
    integration/moves/test_every_position.py test_killed_worker_changes_no_answer_at_any_position
A request is moved although some of its fields cannot be carried over:
    integration/requests/test_bad_input.py test_chat_refuses_bad_input
All retries are spent in the first milliseconds without a worker:
    integration/moves/test_kill.py test_streams_of_a_killed_only_worker_continue_on_one_that_starts_3_s_later
A request that cannot continue ends in a bare 500:
    integration/requests/test_stream_errors.py test_request_that_cannot_continue_fails_with_a_reason_and_is_retryable
Moves are counted that never took place:
    integration/moves/test_kill.py test_request_that_may_not_move_is_not_counted_as_moved
A worker that refused for capacity counts as full for too long:
    integration/admission/test_full_marks.py test_next_request_is_soon_answered_after_a_burst
A worker that falls silent while it is busy stays busy:
    integration/admission/test_busy_threshold.py test_silent_worker_does_not_stay_busy
Any change in the registry ends a quarantine:
    integration/moves/test_quarantine.py test_quarantine_does_not_end_when_other_workers_register
A request to a worker that left waits forever:
    integration/moves/test_drain.py test_draining_worker_takes_no_new_request_while_its_streams_finish
A frozen worker hangs its clients:
    integration/moves/test_frozen_worker.py test_every_stream_of_a_frozen_worker_moves
A stream just ends at its deadline:
    integration/requests/test_stream_errors.py test_deadline_that_passes_mid_stream_is_reported
Every error in mid-stream is a 500, followed by [DONE]:
    integration/requests/test_stream_errors.py test_error_mid_stream_has_its_own_reason_and_is_not_followed_by_done
An end without a finish reason counts as success:
    integration/moves/test_rogue_worker.py test_end_without_a_finish_reason_after_tokens_fails_the_request
The request that finds the engine dead fails:
    integration/moves/test_failing_engine.py test_streams_leave_a_worker_whose_engine_hangs_while_its_server_responds
A failure before the first token is not retried on another worker:
    integration/moves/test_failing_engine.py test_request_moves_when_the_engine_fails_before_the_first_token
A poison request takes all workers with it:
    integration/moves/test_poison.py test_poison_request_is_refused_after_two_deaths_and_harms_no_other
Control calls need a slot, too:
    integration/admission/test_full_worker.py test_full_worker_still_answers_calls_that_need_no_slot
A request whose client has left keeps its place in the queue:
    integration/disconnects/test_disconnects.py test_request_cancelled_in_the_queue_never_reaches_the_engine
Nothing limits the time in the queue:
    integration/admission/test_admission.py test_request_that_waits_too_long_never_reaches_the_engine
A second path to the engine bypasses the limits:
    integration/admission/test_full_worker.py test_direct_calls_to_a_worker_meet_the_same_limits
A refusal says neither when to retry nor how full the worker was:
    integration/admission/test_admission.py test_burst_fills_exactly_the_slots_and_the_queue
A refusal has a non-standard status:
    integration/admission/test_busy_threshold.py test_refusal_has_the_configured_status
A refusal that comes as the first item of a stream is not counted:
    integration/admission/test_admission_order.py test_worker_admits_and_starts_requests_like_the_model
When the client leaves, only the first of several choices stops:
    integration/disconnects/test_disconnects.py test_engine_makes_at_most_two_more_steps
A cancelled answer looks complete:
    integration/requests/test_stream_errors.py test_cancelled_stream_does_not_look_complete
Tests of moves do not compare the text, and leave out some kinds of requests:
    integration/moves/test_every_position.py test_killed_worker_changes_no_answer_at_any_position
"""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_the_table_of_weaknesses_names_existing_tests() -> None:
    assert __doc__ is not None
    named = re.findall(r"^    ([\w/]+\.py) (test_\w+)$", __doc__, re.MULTILINE)

    assert len(named) == 29
    for file, name in named:
        assert f"def {name}(" in (TESTS / file).read_text(), name
