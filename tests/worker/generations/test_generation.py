"""A generation: a record of one choice that outlives its session, with one owner at a time, as its table says."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from services.core.call import Attempt, Cause, Phase
from services.core.errors import Failure, Reason
from services.core.flow.delta_buffer import size_of
from services.core.interface import Delta, TokenLogprobs
from services.core.request import FinishReason
from services.worker.generations import generation as module
from services.worker.generations.generation import Generation
from tests.support.clock import pass_time, settle
from tests.support.doubles import make_request
from tests.support.tables import rows_of
from tests.worker.generations.support import ID, Bench, RecordingOwner, Running, make_spec, play

STATES = ("owned, runs", "owned, ended", "detached, runs", "detached, ended")


def make(owner: RecordingOwner | None = None, *, logprobs: int | None = None, **spec: Any) -> Generation:
    """A generation without a store. Its request brings the tokens 5, 6 and 7."""
    request = make_request(generated_token_ids=(5, 6, 7), logprobs=logprobs)
    return Generation(make_spec(**spec), request, 0, None, owner or RecordingOwner())


# The state table


def table() -> dict[tuple[str, str], str]:
    """The docstring's table: (event, state) → the state that follows."""
    return {
        (event, state): cell for event, *cells in rows_of(module) for state, cell in zip(STATES, cells, strict=True)
    }


async def the_engine_ends_it(bench: Bench, generation: Generation, running: Running) -> None:
    await running.finish()


async def the_owner_lets_go(bench: Bench, generation: Generation, running: Running) -> None:
    bench.store.let_go(generation, generation.owner)


async def a_frontend_adopts_it(bench: Bench, generation: Generation, running: Running) -> None:
    bench.store.adopt(ID, 0, generation.epoch + 1, RecordingOwner())


async def the_owner_stops_it(bench: Bench, generation: Generation, running: Running) -> None:
    generation.stop()


async def the_engine_fails(bench: Bench, generation: Generation, running: Running) -> None:
    await running.fail(Failure(Reason.ENGINE_ERROR, "poison"))


async def the_owner_cancels_it(bench: Bench, generation: Generation, running: Running) -> None:
    bench.store.drop(generation, Cause.SIGNAL)


async def it_is_cancelled_by_id(bench: Bench, generation: Generation, running: Running) -> None:
    bench.store.cancel(ID)


async def its_grace_is_over(bench: Bench, generation: Generation, running: Running) -> None:
    pass_time(30.0)


EVENTS: dict[str, Callable[[Bench, Generation, Running], Awaitable[None]]] = {
    "the engine ends it": the_engine_ends_it,
    "the owner lets go, or its session ends": the_owner_lets_go,
    "a frontend adopts it": a_frontend_adopts_it,
    "the owner stops it": the_owner_stops_it,
    "the engine fails": the_engine_fails,
    "the owner cancels it": the_owner_cancels_it,
    "it is cancelled by the id of its answer": it_is_cancelled_by_id,
    "its grace is over": its_grace_is_over,
}


@pytest.mark.parametrize(
    ("event", "before", "after"),
    [(event, before, after) for (event, before), after in table().items() if after != "–"],
)
def test_each_row_of_the_table_is_what_happens(event: str, before: str, after: str) -> None:
    async def scenario(bench: Bench) -> str:
        generation, running = await bench.start()
        if before.endswith("ended"):
            await running.finish()
        if before.startswith("detached"):
            bench.store.let_go(generation, generation.owner)
        await EVENTS[event](bench, generation, running)
        await settle()
        if not bench.is_known(generation):
            assert running.is_cancelled or running.ended.done(), "the engine goes on with nothing to record it"
            return "dropped"
        has_ended = generation.outcome is not None
        assert has_ended == (running.is_cancelled or running.ended.done())
        return f"{'detached' if bench.store.detached_count else 'owned'}, {'ended' if has_ended else 'runs'}"

    assert play(scenario) == after


def test_the_table_has_a_row_for_each_event() -> None:
    assert {event for event, _ in table()} == set(EVENTS)
    assert f"| event | {' | '.join(STATES)} |" in (module.__doc__ or "")


# The record


def pieces_of(generation: Generation, position: int, weight_max: int) -> list[Delta]:
    """The record from `position` on, piece by piece."""
    pieces = []
    while (piece := generation.piece(position, weight_max)).token_ids:
        pieces.append(piece)
        position += len(piece.token_ids)
    return pieces


def test_the_record_begins_after_the_tokens_that_the_client_itself_brought() -> None:
    generation = make(base=2)
    generation.deliver(Delta(3, [8, 9]))

    (piece,) = pieces_of(generation, 2, 100)

    assert (piece.position, list(piece.token_ids)) == (2, [7, 8, 9])
    assert (generation.token_count, generation.end) == (3, 5)


def test_index_of_a_later_choice_follows_that_of_its_submit() -> None:
    request = make_request(choice=2)

    generation = Generation(make_spec(index=10), request, 4, None, RecordingOwner())

    assert (generation.index, generation.choice) == (12, 4)


@pytest.mark.parametrize("weight_max", [1, 2, 3, 1000])
def test_pieces_join_to_the_record_without_gap_or_repeat(weight_max: int) -> None:
    generation = make()
    generation.deliver(Delta(3, [8, 9, 10, 11]))

    pieces = pieces_of(generation, 0, weight_max)

    assert [token for piece in pieces for token in piece.token_ids] == [5, 6, 7, 8, 9, 10, 11]
    assert all(piece.weight <= weight_max for piece in pieces)
    ends = [piece.position + len(piece.token_ids) for piece in pieces]
    assert [piece.position for piece in pieces] == [0, *ends[:-1]]


def test_pieces_have_the_log_probabilities_of_their_tokens() -> None:
    prior = tuple(TokenLogprobs(-float(token), ((1, -0.5),)) for token in (5, 6, 7))
    generation = make(logprobs=1, prior_logprobs=prior)
    generation.deliver(Delta(3, [8], logprobs=[TokenLogprobs(-8.0, ((1, -0.5),))]))

    pieces = pieces_of(generation, 0, 6)

    assert [list(piece.token_ids) for piece in pieces] == [[5, 6], [7, 8]]
    for piece in pieces:
        assert piece.logprobs is not None
        assert [-one.logprob for one in piece.logprobs] == list(piece.token_ids)


def test_a_token_with_more_alternatives_than_a_piece_may_weigh_is_a_piece_of_its_own() -> None:
    heavy = TokenLogprobs(-1.0, tuple((token, -1.0) for token in range(20)))
    generation = make(logprobs=20, prior_logprobs=(heavy,) * 3)

    assert [list(piece.token_ids) for piece in pieces_of(generation, 0, 1)] == [[5], [6], [7]]


def test_size_counts_presentation_prompt_tokens_and_log_probabilities() -> None:
    """A bug: log probabilities of tokens that another worker had drawn were not counted."""
    prior = tuple(TokenLogprobs(-1.0, ((1, -0.5),)) for _ in range(3))
    moved = make(logprobs=1, prior_logprobs=prior, presentation=b"x" * 10)
    at_once = Generation(make_spec(presentation=b"x" * 10), make_request(logprobs=1), 0, None, RecordingOwner())
    at_once.deliver(Delta(0, [5, 6, 7], logprobs=prior))

    assert moved.size == at_once.size
    assert at_once.size == 10 + 4 * 2 + size_of(Delta(0, [5, 6, 7], logprobs=prior))


# Owners


def test_its_owner_gets_what_the_engine_does() -> None:
    owner = RecordingOwner()
    generation = make(owner)

    generation.begin()
    generation.deliver(Delta(3, [8]))
    generation.end_with(FinishReason.STOP)

    assert (owner.begun_count, owner.token_ids, owner.outcomes) == (1, [8], [FinishReason.STOP])


def test_adoption_ends_the_stream_of_the_former_owner_and_gives_the_rest_to_the_new_one() -> None:
    former, new = RecordingOwner(), RecordingOwner()
    generation = make(former)

    generation.adopt(new, 2)
    generation.deliver(Delta(3, [8]))
    generation.end_with(FinishReason.STOP)

    assert (former.reasons, former.token_ids) == ([Reason.TAKEN_OVER], [])
    assert (new.reasons, new.token_ids) == ([FinishReason.STOP], [8])


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_adoption_needs_a_later_epoch(epoch: int) -> None:
    former, late = RecordingOwner(), RecordingOwner()
    generation = make(former, epoch=3)

    with pytest.raises(Failure) as caught:
        generation.adopt(late, epoch)

    assert caught.value.reason is Reason.TAKEN_OVER
    assert (generation.owner, generation.epoch, former.outcomes) == (former, 3, [])


def test_owner_that_stops_it_gets_no_end_and_the_record_counts_as_finished() -> None:
    async def scenario(bench: Bench) -> None:
        owner = RecordingOwner()
        generation, running = await bench.start(owner)
        running.give(8)
        assert generation.stop()
        assert not generation.stop(), "it has ended"
        await settle()
        assert running.is_cancelled
        assert generation.ending.cause is Cause.SIGNAL
        assert (generation.outcome, owner.outcomes) == (FinishReason.STOP, [])
        assert [list(piece.token_ids) for piece in pieces_of(generation, 0, 9)] == [[8]]

    play(scenario)


def test_first_cause_of_an_early_end_counts() -> None:
    async def scenario(bench: Bench) -> Cause | None:
        generation, _ = await bench.start()
        assert generation.cancel(Cause.GRACE_OVER)
        assert not generation.cancel(Cause.SIGNAL)
        return generation.ending.cause

    assert play(scenario) is Cause.GRACE_OVER


def test_generation_that_has_ended_cannot_be_cancelled() -> None:
    async def scenario(bench: Bench) -> bool:
        generation, running = await bench.start()
        await running.finish()
        return generation.cancel(Cause.SIGNAL)

    assert play(scenario) is False


def test_is_the_attempt_of_its_call() -> None:
    generation = make()

    assert isinstance(generation, Attempt)
    assert (generation.phase, generation.has_begun) == (Phase.QUEUED, False)
    generation.begin()
    assert (generation.phase, generation.has_begun) == (Phase.PREFILL, True)
