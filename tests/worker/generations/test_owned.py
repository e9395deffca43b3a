"""The generations of a session: a frontend adopts them, reads all of their tokens, stops them and lets go of them."""

from typing import Any

import pytest

from services.core.call import Cause, Phase
from services.core.errors import Failure, Reason
from services.core.generation.presentation import PRESENTATION_BYTES_MAX
from services.core.interface import TokenLogprobs
from services.core.request import FinishReason
from services.rpc.codec import error_to_wire
from services.stubs import worker_pb2
from services.worker import session as session_module
from services.worker.engine import Output
from services.worker.generations import owned as module
from services.worker.generations.store import DetachConfig
from services.worker.metrics import WorkerMetrics
from tests.support.clock import pass_time, settle
from tests.worker.generations.sessions import Frontend, Worker, adopt, kept_submit, play
from tests.worker.generations.support import ID, OTHER_ID

STOP = "FINISH_REASON_STOP"


async def detached(worker: Worker, *token_ids: int) -> Frontend:
    """A generation that has lost its frontend after these tokens. Returns another frontend."""
    first = await worker.attach()
    await first.send(submits=[kept_submit(1)])
    if token_ids:
        worker.engine.give(worker.key, token_ids)
    await first.leave()
    return await worker.attach()


# The first owner


def test_first_owner_gets_what_it_would_get_without_a_generation() -> None:
    async def scenario(worker: Worker) -> None:
        frontend = await worker.attach()
        await frontend.send(submits=[kept_submit(1)])
        worker.engine.give(worker.key, [7, 8])
        worker.engine.give(worker.key, [9], FinishReason.STOP)
        await settle()
        assert (frontend.begun(1), frontend.token_ids(1), frontend.end(1)) == (1, [7, 8, 9], STOP)
        assert worker.busy == 0
        assert worker.cancelled == {}

    play(scenario)


def test_generation_outlives_its_session_and_another_frontend_gets_all_of_it() -> None:
    async def scenario(worker: Worker) -> None:
        frontend = await detached(worker, 7, 8)
        worker.engine.give(worker.key, [9])
        await frontend.send(adopts=[adopt(5)])
        worker.engine.give(worker.key, [10], FinishReason.STOP)
        await settle()
        assert (frontend.begun(5), frontend.token_ids(5), frontend.end(5)) == (1, [7, 8, 9, 10], STOP)
        assert worker.cancelled == {}

    play(scenario)


def test_request_without_a_generation_ends_with_its_session() -> None:
    async def scenario(worker: Worker) -> dict[Any, int]:
        frontend = await worker.attach()
        plain = kept_submit(1)
        plain.ClearField("generation")
        await frontend.send(submits=[plain, kept_submit(2, 20)])
        await frontend.leave()
        await settle()
        assert [request.token_ids for request in worker.engine.requests.values()] == [(20,)]
        return worker.cancelled

    assert play(scenario) == {(Cause.SESSION_LOST, Phase.PREFILL): 1}


def test_session_that_ends_lets_go_of_all_its_generations() -> None:
    async def scenario(worker: Worker) -> None:
        frontend = await worker.attach()
        await frontend.send(submits=[kept_submit(1, choices=3), kept_submit(4, 20, generation={"index": 3})])
        await frontend.leave()
        assert (worker.store.detached_count, worker.store.detached_running_count, worker.busy) == (4, 4, 4)

    play(scenario)


def test_stream_ids_of_generations_are_used_once() -> None:
    async def scenario(worker: Worker) -> list[bool]:
        over = []
        for second in (
            {"submits": [kept_submit(1, 20)]},
            {"adopts": [adopt(1, generation_id=OTHER_ID)]},
            {"submits": [kept_submit(7, 20)], "detaches": [7], "adopts": [adopt(7)]},
        ):
            frontend = await worker.attach()
            await frontend.send(submits=[kept_submit(1)])
            await frontend.send(**second)
            over.append(frontend.is_over)
        return over

    assert play(scenario) == [True, True, True]


def test_parts_of_a_message_are_processed_in_the_order_of_the_protocol() -> None:
    """Each part is about what the part before it leaves."""

    async def scenario(worker: Worker) -> None:
        frontend = await worker.attach()
        await frontend.send(
            adopts=[adopt(5)],
            locates=[worker_pb2.Locate(query=1, generation_id=ID)],
            detaches=[1],
            stops=[1],
            cancels=[1],
            submits=[kept_submit(1)],
        )
        assert frontend.end(5) == "STREAM_NOT_FOUND", "submitted, then cancelled"
        await frontend.send(
            adopts=[adopt(6)],
            locates=[worker_pb2.Locate(query=2, generation_id=ID)],
            detaches=[2],
            stops=[2],
            submits=[kept_submit(2)],
        )
        assert frontend.end(2) is None, "let go of before it was adopted, or it would end with TAKEN_OVER"
        assert frontend.end(6) == STOP
        assert worker.store.detached_count == 0

    play(scenario)


# Adoption


def test_former_owner_is_told_that_the_answer_was_taken_over() -> None:
    async def scenario(worker: Worker) -> None:
        former, new = await worker.attach(), await worker.attach()
        await former.send(submits=[kept_submit(1)])
        worker.engine.give(worker.key, [7])
        await new.send(adopts=[adopt(5)])
        worker.engine.give(worker.key, [8])
        await settle()
        assert (former.token_ids(1), former.end(1)) == ([7], "TAKEN_OVER")
        assert (new.token_ids(5), new.end(5)) == ([7, 8], None)

    play(scenario)


def test_former_owner_that_has_the_end_is_told_nothing_more() -> None:
    """A bug: its stream ended a second time, so the frontend took the worker for a broken one, and lost all streams."""

    async def scenario(worker: Worker) -> None:
        former, new = await worker.attach(), await worker.attach()
        await former.send(submits=[kept_submit(1)])
        worker.engine.give(worker.key, [7], FinishReason.STOP)
        await settle()
        await new.send(adopts=[adopt(5)])
        await former.send(detaches=[1])
        assert (former.token_ids(1), former.end(1)) == ([7], STOP)
        assert (new.token_ids(5), new.end(5)) == ([7], STOP)
        assert worker.store.detached_count == 0

    play(scenario)


def test_former_owner_can_neither_stop_nor_cancel_nor_let_go_any_more() -> None:
    async def scenario(worker: Worker) -> None:
        former, new = await worker.attach(), await worker.attach()
        await former.send(submits=[kept_submit(1)])
        await new.send(adopts=[adopt(5)])
        await former.send(cancels=[1], stops=[1], detaches=[1])
        worker.engine.give(worker.key, [8], FinishReason.STOP)
        await settle()
        assert (new.token_ids(5), new.end(5)) == ([8], STOP)
        assert worker.cancelled == {(Cause.SIGNAL, Phase.ENDED): 1}, "the cancel crossed the end of its stream"

    play(scenario)


def test_frontend_can_adopt_from_itself() -> None:
    async def scenario(worker: Worker) -> None:
        frontend = await worker.attach()
        await frontend.send(submits=[kept_submit(1)])
        worker.engine.give(worker.key, [7])
        await frontend.send(adopts=[adopt(2)])
        worker.engine.give(worker.key, [8])
        await settle()
        assert frontend.end(1) == "TAKEN_OVER"
        assert frontend.token_ids(2) == [7, 8]

    play(scenario)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (adopt(5, epoch=1), "TAKEN_OVER"),
        (adopt(5, index=1), "STREAM_NOT_FOUND"),
        (adopt(5, generation_id=OTHER_ID), "STREAM_NOT_FOUND"),
    ],
)
def test_refused_adoption_ends_its_stream_alone(asked: worker_pb2.Adopt, reason: str) -> None:
    async def scenario(worker: Worker) -> None:
        frontend = await detached(worker, 7)
        await frontend.send(adopts=[asked])
        assert frontend.end(5) == reason
        assert frontend.token_ids(5) == []
        assert worker.store.detached_count == 1
        assert not frontend.is_over

    play(scenario)


def test_adopter_of_a_request_that_waits_is_told_when_it_begins() -> None:
    async def scenario(worker: Worker) -> None:
        first = await worker.attach()
        await first.send(submits=[kept_submit(1, 20, generation={"id": OTHER_ID}), kept_submit(2)])
        await first.leave()
        frontend = await worker.attach()
        await frontend.send(adopts=[adopt(5)])
        assert frontend.begun(5) == 0
        worker.engine.give(worker.key, [], FinishReason.STOP)
        await settle()
        assert frontend.begun(5) == 1

    play(scenario, slots=1)


def test_adopter_of_one_that_has_ended_gets_its_tokens_and_its_end_in_that_order() -> None:
    async def scenario(worker: Worker) -> None:
        frontend = await detached(worker)
        worker.engine.give(worker.key, [7, 8], FinishReason.STOP)
        await settle()
        await frontend.send(adopts=[adopt(5)])
        assert (frontend.begun(5), frontend.token_ids(5), frontend.end(5)) == (1, [7, 8], STOP)
        await frontend.send(detaches=[5])
        assert worker.store.detached_count == 1, "a third frontend could still have it"

    play(scenario)


def test_adopter_of_one_that_has_failed_gets_the_failure_and_the_record_is_gone() -> None:
    async def scenario(worker: Worker) -> None:
        frontend = await detached(worker, 7)
        worker.engine.step(Output(worker.key, [], failure=Failure(Reason.ENGINE_ERROR, "poison")))
        await settle()
        assert worker.store.detached_count == 1
        await frontend.send(adopts=[adopt(5)])
        assert frontend.end(5) == "ENGINE_ERROR"
        assert worker.store.locate(ID) == []
        assert worker.store.detached_bytes == 0

    play(scenario)


# The record on its way to its new owner


@pytest.mark.parametrize("count", [0, 1, 3, 4, 9])
def test_record_is_sent_in_pieces_and_live_tokens_follow_without_gap(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REPLAY_WEIGHT_MAX", 3)

    async def scenario(worker: Worker) -> None:
        frontend = await detached(worker, *range(count))
        frontend.post(adopts=[adopt(5)])
        for token in range(count, count + 20):  # One in each turn, between the pieces.
            worker.engine.give(worker.key, [token])
            await settle()
        worker.engine.give(worker.key, [99], FinishReason.STOP)
        await settle()
        await settle()
        assert frontend.token_ids(5) == [*range(count + 20), 99]
        assert frontend.end(5) == STOP
        assert max(len(message.step.token_ids) for message in frontend.messages) <= 3 + 1

    play(scenario)


def test_end_waits_for_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPLAY_WEIGHT_MAX", 2)

    async def scenario(worker: Worker) -> None:
        frontend = await detached(worker, *range(9))
        frontend.post(adopts=[adopt(5)])
        worker.engine.give(worker.key, [9], FinishReason.STOP)
        for _ in range(5):
            await settle()
        (last,) = [message for message in frontend.messages if message.ends]
        assert list(last.step.token_ids)[-1:] == [9]
        assert frontend.token_ids(5) == list(range(10))

    play(scenario)


def test_log_probabilities_are_replayed_with_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPLAY_WEIGHT_MAX", 6)

    async def scenario(worker: Worker) -> list[tuple[int, list[float]]]:
        first = await worker.attach()
        await first.send(submits=[kept_submit(1, logprobs=1)])
        for token in range(4):
            logprobs = [TokenLogprobs(-float(token), ((1, -0.5),))]
            worker.engine.step(Output(worker.key, [token], logprobs=logprobs))
        await first.leave()
        frontend = await worker.attach()
        await frontend.send(adopts=[adopt(5)])
        await settle()
        assert frontend.token_ids(5) == [0, 1, 2, 3]
        return [
            (message.step.positions[0], [-token.logprob for token in message.step.logprobs[0].tokens])
            for message in frontend.messages
            if message.step.positions
        ]

    assert play(scenario) == [(0, [0, 1]), (2, [2, 3])]


def test_record_begins_after_the_tokens_that_the_client_brought_itself() -> None:
    async def scenario(worker: Worker) -> None:
        first = await worker.attach()
        await first.send(submits=[kept_submit(1, generation={"base": 1}, generated_token_ids=[5, 6])])
        worker.engine.give(worker.key, [7])
        await first.leave()
        frontend = await worker.attach()
        await frontend.send(adopts=[adopt(5)])
        positions = [position for message in frontend.messages for position in message.step.positions]
        assert (frontend.token_ids(5), positions) == ([6, 7], [1])

    play(scenario)


def test_frontend_that_reads_slowly_gets_large_records_one_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug: a piece was added to what was unread, so that an adoption could end the whole session."""
    monkeypatch.setattr(module, "REPLAY_WEIGHT_MAX", 60)

    async def scenario(worker: Worker) -> None:
        first = await worker.attach()
        await first.send(submits=[kept_submit(1), kept_submit(2, 20, generation={"id": OTHER_ID})])
        recorded = worker.engine.key_of((10,))
        for start in range(0, 500, 50):
            worker.engine.give(recorded, range(start, start + 50))
            await settle()
        frontend = await worker.attach()
        await frontend.send(adopts=[adopt(1, generation_id=OTHER_ID)])
        frontend.connection.pause_writing()
        await frontend.send(adopts=[adopt(5)])
        worker.engine.give(worker.engine.key_of((20,)), range(80))
        await settle()
        before = len(frontend.messages)
        frontend.connection.resume_writing()
        for _ in range(20):
            await settle()
        assert not frontend.is_over
        assert frontend.token_ids(1) == list(range(80))
        assert frontend.token_ids(5) == list(range(500))
        assert len(frontend.messages) - before >= 500 / 60

    play(scenario, outbox_tokens_max=100)


def test_frontend_that_reads_nothing_gets_nothing_replayed_into_memory() -> None:
    async def scenario(worker: Worker) -> None:
        frontend = await detached(worker, *range(50))
        frontend.connection.pause_writing()
        await frontend.send(adopts=[adopt(5)])
        for _ in range(10):
            worker.engine.give(worker.key, range(50))
            await settle()
        assert not frontend.is_over, "the record keeps them, not the outbox"

    play(scenario, outbox_tokens_max=40)


@pytest.mark.parametrize("how", ["cancels", "stops", "detaches"])
def test_replay_ends_when_the_frontend_needs_it_no_more(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug: a record was sent to its end although its answer had been stopped."""
    monkeypatch.setattr(module, "REPLAY_WEIGHT_MAX", 3)

    async def scenario(worker: Worker) -> None:
        frontend = await detached(worker, *range(50))
        await frontend.send(adopts=[adopt(5)])
        frontend.post(**{how: [5]})
        sent = len(frontend.token_ids(5))
        for _ in range(20):
            await settle()
        assert len(frontend.token_ids(5)) <= sent + 3, "what was in the outbox already"
        assert frontend.end(5) is None

    play(scenario)


# Stop, cancel and let go


def test_stop_ends_the_engine_and_keeps_the_record_and_its_owner() -> None:
    async def scenario(worker: Worker) -> None:
        frontend, other = await worker.attach(), await worker.attach()
        await frontend.send(submits=[kept_submit(1)])
        worker.engine.give(worker.key, [7, 8])
        await frontend.send(stops=[1])
        assert (worker.engine.requests, worker.busy) == ({}, 0)
        assert worker.store.detached_count == 0, "it has its owner"
        await frontend.send(detaches=[1])
        await other.send(adopts=[adopt(5)])
        assert (other.token_ids(5), other.end(5)) == ([7, 8], STOP)
        assert worker.cancelled == {(Cause.SIGNAL, Phase.RUNNING): 1}

    play(scenario)


def test_cancel_ends_the_engine_and_drops_the_record() -> None:
    async def scenario(worker: Worker) -> None:
        frontend = await worker.attach()
        await frontend.send(submits=[kept_submit(1)])
        await frontend.send(cancels=[1])
        assert (worker.engine.requests, worker.busy, worker.store.locate(ID)) == ({}, 0, [])
        assert not worker.store.is_expired(ID)
        assert frontend.end(1) is None

    play(scenario)


def signals(*phases: Phase) -> dict[tuple[Cause, Phase], int]:
    return {(Cause.SIGNAL, phase): phases.count(phase) for phase in phases}


@pytest.mark.parametrize("how", ["cancels", "stops"])
def test_each_signal_counts_once_under_the_phase_of_its_generation(how: str) -> None:
    """A bug: a second cancel or stop of the same stream was counted as well."""

    async def scenario(worker: Worker) -> dict[Any, int]:
        frontend = await worker.attach()
        about = [{"index": index} for index in range(4)]
        await frontend.send(submits=[kept_submit(1 + one["index"], 10 + one["index"], generation=one) for one in about])
        worker.engine.give(worker.engine.key_of((10,)), [7])
        worker.engine.give(worker.engine.key_of((11,)), [7], FinishReason.STOP)
        await settle()  # The third runs without a token, the fourth waits.
        await frontend.send(**{how: [1, 2, 3, 4]})
        await frontend.send(**{how: [1, 2, 3, 4, 99]})
        assert worker.busy == 0
        return worker.cancelled

    assert play(scenario) == signals(Phase.RUNNING, Phase.ENDED, Phase.PREFILL, Phase.QUEUED)


def test_stop_and_then_cancel_count_as_one_signal() -> None:
    async def scenario(worker: Worker) -> dict[Any, int]:
        frontend = await worker.attach()
        await frontend.send(submits=[kept_submit(1)])
        await frontend.send(stops=[1])
        await frontend.send(cancels=[1])
        assert worker.store.locate(ID) == []
        return worker.cancelled

    assert play(scenario) == signals(Phase.PREFILL)


@pytest.mark.parametrize("has_tokens", [True, False])
def test_grace_and_cancel_by_id_count_under_their_causes(has_tokens: bool) -> None:
    async def scenario(worker: Worker) -> dict[Any, int]:
        first = await worker.attach()
        await first.send(submits=[kept_submit(1), kept_submit(2, 20, generation={"id": OTHER_ID})])
        if has_tokens:
            for key in list(worker.engine.requests):
                worker.engine.give(key, [7])
        await first.leave()
        asking = await worker.attach()
        await asking.send(locates=[worker_pb2.Locate(query=1, generation_id=OTHER_ID, cancels=True)])
        assert [one.cancelled for one in asking.located] == [1]
        pass_time(30)
        await settle()
        assert worker.busy == 0
        return worker.cancelled

    phase = Phase.RUNNING if has_tokens else Phase.PREFILL
    assert play(scenario) == {(Cause.EXPLICIT, phase): 1, (Cause.GRACE_OVER, phase): 1}


def test_submit_that_replaces_a_record_counts_the_former_one_as_replaced() -> None:
    async def scenario(worker: Worker) -> dict[Any, int]:
        frontend = await worker.attach()
        await frontend.send(submits=[kept_submit(1)])
        await frontend.send(submits=[kept_submit(2)])
        assert frontend.end(1) == "TAKEN_OVER"
        assert worker.busy == 1
        return worker.cancelled

    assert play(scenario) == {(Cause.REPLACED, Phase.PREFILL): 1}


def test_nothing_more_is_sent_of_what_the_frontend_has_let_go_of() -> None:
    async def scenario(worker: Worker) -> None:
        frontend = await worker.attach()
        await frontend.send(submits=[kept_submit(1)])
        await frontend.send(detaches=[1, 1, 99])
        worker.engine.give(worker.key, [7], FinishReason.STOP)
        await settle()
        assert (frontend.token_ids(1), frontend.end(1)) == ([], None)
        assert worker.store.detached_count == 1
        assert worker.cancelled == {}

    play(scenario)


# Several choices


def test_choices_have_consecutive_streams_and_indices() -> None:
    async def scenario(worker: Worker) -> None:
        first = await worker.attach()
        await first.send(submits=[kept_submit(5, choices=2, choice=1, generation={"index": 11})])
        for key, request in list(worker.engine.requests.items()):
            worker.engine.give(key, [request.choice], FinishReason.STOP)
        await settle()
        assert (first.token_ids(5), first.token_ids(6)) == ([1], [2])
        assert [one.index for one in worker.store.locate(ID)] == [11, 12]

    play(scenario)


def test_choices_are_all_refused_if_there_is_no_room_for_all() -> None:
    async def scenario(worker: Worker) -> None:
        frontend = await worker.attach()
        await frontend.send(submits=[kept_submit(1, 20, generation={"id": OTHER_ID})])
        await frontend.send(submits=[kept_submit(2, choices=5)])
        assert {frontend.end(stream_id) for stream_id in range(2, 7)} == {"WORKER_AT_CAPACITY"}
        assert worker.store.locate(ID) == []
        assert worker.busy == 1

    play(scenario)


def test_choice_that_was_taken_over_leaves_its_place_to_others() -> None:
    async def scenario(worker: Worker) -> None:
        other, frontend = await worker.attach(), await worker.attach()
        await other.send(submits=[kept_submit(1, generation={"epoch": 9})])
        await frontend.send(submits=[kept_submit(1, choices=2)])
        assert (frontend.end(1), frontend.end(2)) == ("TAKEN_OVER", None)
        assert worker.busy == 2

    play(scenario)


@pytest.mark.parametrize("gone", [[5], [6], [5, 6, 7]])
def test_choice_that_is_cancelled_at_once_frees_its_place(gone: list[int]) -> None:
    async def scenario(worker: Worker) -> int:
        frontend = await worker.attach()
        await frontend.send(submits=[kept_submit(5, choices=3)], cancels=gone)
        assert worker.cancelled == {(Cause.SIGNAL, Phase.QUEUED): len(gone)}
        return worker.busy

    assert play(scenario) == 3 - len(gone)


def test_request_that_is_refused_before_admission_ends_every_choice() -> None:
    async def scenario(worker: Worker) -> None:
        frontend = await worker.attach()
        await frontend.send(submits=[kept_submit(5, choices=3, priority=1)])
        assert [frontend.end(stream_id) for stream_id in (5, 6, 7)] == ["INVALID_ARGUMENT"] * 3
        assert worker.store.locate(ID) == []

    play(scenario)


BAD_GENERATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "no id": ("generation.id", {"id": b""}),
    "short id": ("generation.id", {"id": bytes(15)}),
    "long id": ("generation.id", {"id": bytes(2**20)}),
    "base beyond the tokens": ("generation.base", {"base": 3}),
    "index without room": ("generation.index", {"index": 2**32 - 2}),
    "last epoch": ("epoch", {"epoch": 2**64 - 1}),
    "negative grace": ("generation.grace", {"grace": {"seconds": -1}}),
    "large presentation": ("generation.presentation", {"presentation": bytes(PRESENTATION_BYTES_MAX + 1)}),
    "too few prior log probabilities": ("generation.prior_logprobs", {"prior_logprobs": [{}]}),
    "too many prior log probabilities": ("generation.prior_logprobs", {"prior_logprobs": [{}] * 3}),
}


@pytest.mark.parametrize(("param", "generation"), BAD_GENERATIONS.values(), ids=BAD_GENERATIONS)
def test_generation_that_cannot_be_kept_is_refused_and_harms_no_other(param: str, generation: dict[str, Any]) -> None:
    prior = {"prior_logprobs": [worker_pb2.Generation().prior_logprobs.add() for _ in range(2)]}
    given: dict[str, Any] = prior | generation

    async def scenario(worker: Worker) -> None:
        frontend = await worker.attach()
        await frontend.send(submits=[kept_submit(1)])
        continued: dict[str, Any] = {"generated_token_ids": [7, 8], "logprobs": 1}
        await frontend.send(submits=[kept_submit(5, choices=3, generation=given, **continued)])
        ends = [end for message in frontend.messages for end in message.ends]
        assert [(end.stream_id, end.error.reason, end.error.param) for end in ends] == [
            (stream_id, "INVALID_ARGUMENT", param) for stream_id in (5, 6, 7)
        ]
        assert worker.busy == 1
        assert len(worker.store.locate(ID)) == 1
        assert not frontend.is_over

    play(scenario)


def test_log_probabilities_that_nobody_asked_for_are_refused() -> None:
    async def scenario(worker: Worker) -> None:
        frontend = await worker.attach()
        await frontend.send(submits=[kept_submit(5, generation={"prior_logprobs": [{}]}, generated_token_ids=[7])])
        assert frontend.end(5) == "INVALID_ARGUMENT"

    play(scenario)


def test_adoption_that_leaves_no_room_for_a_later_one_is_refused() -> None:
    async def scenario(worker: Worker) -> None:
        frontend = await detached(worker, 7)
        await frontend.send(adopts=[adopt(5, epoch=2**63), adopt(6, epoch=2**63 - 1)])
        assert (frontend.end(5), frontend.end(6)) == ("INVALID_ARGUMENT", None)

    play(scenario)


# Questions


def test_question_is_answered_with_all_that_the_worker_has() -> None:
    async def scenario(worker: Worker) -> None:
        first = await worker.attach()
        about = [{"index": index, "epoch": 3, "continuation": index} for index in (2, 0, 1)]
        await first.send(submits=[kept_submit(1 + one["index"], 10 + one["index"], generation=one) for one in about])
        worker.engine.give(worker.engine.key_of((12,)), [7, 8], FinishReason.STOP)
        await first.leave()
        worker.engine.step(
            Output(worker.engine.key_of((10,)), [7], failure=Failure(Reason.ENGINE_ERROR, "poison")),
        )
        await settle()
        asking = await worker.attach()
        await asking.send(locates=[worker_pb2.Locate(query=4, generation_id=ID)])
        (located,) = asking.located
        assert (located.query, located.presentation, located.is_expired) == (4, b"how", False)
        assert [(one.index, one.token_count, one.epoch) for one in located.holdings] == [
            (0, 1, 3),
            (1, 0, 3),
            (2, 2, 3),
        ]
        assert [one.continuation for one in located.holdings] == [0, 1, 2], "as it was given"
        assert [one.has_failed for one in located.holdings] == [True, False, False]
        assert [one.is_finished for one in located.holdings] == [False, False, True]

    play(scenario)


def test_question_about_an_answer_that_was_dropped_tells_whether_it_expired() -> None:
    async def scenario(worker: Worker) -> list[bool]:
        frontend = await detached(worker)
        pass_time(30)
        await settle()
        await frontend.send(
            locates=[
                worker_pb2.Locate(query=1, generation_id=ID),
                worker_pb2.Locate(query=2, generation_id=OTHER_ID),
            ]
        )
        assert not any(one.holdings or one.presentation for one in frontend.located)
        return [one.is_expired for one in frontend.located]

    assert play(scenario) == [True, False]


def test_question_after_an_adoption_in_an_earlier_message_sees_the_new_epoch() -> None:
    async def scenario(worker: Worker) -> int:
        frontend = await detached(worker)
        frontend.post(adopts=[adopt(5, epoch=77)])
        await frontend.send(locates=[worker_pb2.Locate(query=1, generation_id=ID)])
        return int(frontend.located[0].holdings[0].epoch)

    assert play(scenario) == 77


def test_answers_with_large_presentations_do_not_end_the_session() -> None:
    """A bug: they counted as tokens that the frontend had left unread."""

    async def scenario(worker: Worker) -> None:
        first = await worker.attach()
        await first.send(submits=[kept_submit(1, generation={"presentation": b"x" * PRESENTATION_BYTES_MAX})])
        await first.leave()
        frontend = await worker.attach()
        await frontend.send(locates=[worker_pb2.Locate(query=number, generation_id=ID) for number in range(5)])
        for _ in range(5):
            await settle()
        assert not frontend.is_over
        assert [one.query for one in frontend.located] == list(range(5))
        assert max(len(message.located) for message in frontend.messages) == 1, "no message becomes too large to send"

    play(scenario)


@pytest.mark.parametrize("count", [2, 3])
def test_number_of_streams_and_questions_of_a_session_is_bounded(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "STREAMS_MAX", -3)  # 2 beside the 5 requests of the limits.

    async def scenario(worker: Worker) -> list[bool]:
        adopting, asking = await worker.attach(), await worker.attach()
        await adopting.send(submits=[kept_submit(1, choices=2)])
        await adopting.send(adopts=[adopt(8, index=0)] if count == 3 else [])
        await asking.send(locates=[worker_pb2.Locate(query=number, generation_id=ID) for number in range(count)])
        return [adopting.is_over, asking.is_over]

    assert play(scenario) == [count == 3] * 2


# Metrics, and the end of the worker


def test_metrics_tell_what_waits_without_a_frontend() -> None:
    async def scenario(worker: Worker) -> dict[str, float]:
        first = await worker.attach()
        await first.send(submits=[kept_submit(1, choices=2)])
        worker.engine.give(next(iter(worker.engine.requests)), [7], FinishReason.STOP)
        await first.leave()
        metrics = WorkerMetrics(worker.execute, worker.engine, worker.store).collect()
        samples = [sample for metric in metrics for sample in metric.samples]
        return {sample.name: sample.value for sample in samples if "detached" in sample.name}

    assert play(scenario) == {
        "unbroken_detached_requests": 1,
        "unbroken_detached_records": 2,
        "unbroken_detached_bytes": 2 * (len(b"how") + 4) + 4,
    }


def test_what_is_detached_beyond_a_bound_leaves_the_engine() -> None:
    async def scenario(worker: Worker) -> dict[Any, int]:
        await detached(worker, 7)
        assert worker.busy == 1
        first = await worker.attach()
        await first.send(submits=[kept_submit(1, 20, generation={"id": OTHER_ID})])
        await first.leave()
        await settle()
        assert [request.token_ids for request in worker.engine.requests.values()] == [(20,)]
        return worker.cancelled

    assert play(scenario, detach=DetachConfig(records_max=1)) == {(Cause.GRACE_OVER, Phase.RUNNING): 1}


def test_worker_that_leaves_hands_detached_requests_over_as_failed() -> None:
    async def scenario(worker: Worker) -> None:
        frontend = await detached(worker, 7)
        left = Failure(Reason.DRAINING, "left")
        worker.execute.fail_all(left, Cause.DRAIN)
        await settle()
        await frontend.send(locates=[worker_pb2.Locate(query=1, generation_id=ID)], adopts=[adopt(5)])
        assert frontend.end(5) == error_to_wire(left).reason
        assert worker.cancelled == {(Cause.DRAIN, Phase.RUNNING): 1}

    play(scenario)


def test_session_that_the_worker_ends_gets_the_whole_record_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPLAY_WEIGHT_MAX", 3)

    async def scenario(worker: Worker) -> list[int]:
        frontend = await detached(worker, *range(20))
        frontend.post(adopts=[adopt(5)])
        frontend.session.end()
        for _ in range(20):
            await settle()
        assert frontend.is_over
        return frontend.token_ids(5)

    assert play(scenario) == list(range(20))
