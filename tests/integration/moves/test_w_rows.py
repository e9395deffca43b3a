"""Each weakness of migration, streams and load that another system of this kind is known to have has a test here.

W1: a death after the finish reason starts the answer anew
    integration/moves/test_rogue_worker.py test_an_answer_that_is_whole_ends_well
W2: usage of a moved answer counts its first part as prompt
    integration/moves/test_moves.py test_a_killed_worker_changes_nothing_at_any_position
W3: stop strings, penalties and the seed are lost at a move
    integration/moves/test_moves.py test_a_killed_worker_changes_nothing_at_any_position
W4: half a character is lost at a move
    integration/moves/test_moves.py test_a_killed_worker_changes_nothing_at_any_position
W5, W6: what cannot be carried over is moved all the same
    integration/requests/test_bad_input.py test_chat_refuses
W7: all tries are spent in the milliseconds without a worker
    integration/moves/test_kill.py test_w7_the_only_worker_is_killed_and_another_comes_3_s_later_and_nothing_is_lost
W8: a request that can't go on is a bare 500
    test_w8_a_request_that_cannot_go_on_says_why_and_that_it_may_be_sent_again
W9: moves are counted that never were
    test_w9_what_may_not_move_is_not_counted_as_moved
W10: a refusal for capacity sticks to a worker
    integration/admission/test_full_marks.py test_after_a_burst_the_next_request_is_soon_answered
W11: a worker that falls silent while busy stays busy
    integration/admission/test_busy_threshold.py test_a_worker_that_falls_silent_is_not_busy_for_ever
W12: any news of discovery ends a quarantine
    test_w12_a_quarantine_outlives_news_of_other_workers
W13: a request to a worker that left waits without end
    integration/moves/test_drain.py test_a_worker_that_leaves_takes_no_new_request_while_its_streams_finish
W14: a frozen worker hangs its clients
    integration/operators/test_stop.py test_every_stream_of_a_frozen_worker_goes_on_elsewhere
W15: at the deadline a stream just ends
    test_w15_a_deadline_within_a_stream_is_told
W16: every error within a stream is a 500, and [DONE] follows
    test_w16_an_error_within_a_stream_has_its_own_reason_and_no_done
W17: an end without a finish reason passes for success
    integration/moves/test_rogue_worker.py test_an_engine_that_ends_without_a_reason_after_tokens_fails_the_request
W18: the request that finds the engine dead fails
    test_w18_no_stream_of_a_dead_engine_under_a_live_server_fails
W19: a failure before the first token is not tried elsewhere
    test_w19_an_engine_that_fails_before_the_first_token_costs_nothing
W20: a poison request takes all workers with it
    integration/moves/test_poison.py test_w20_a_poison_request_is_refused_after_two_deaths_and_harms_nobody
W29: control calls need a slot, too
    integration/admission/test_full_worker.py test_w29_a_full_worker_answers_whoever_asks_no_slot_of_it
W30: a request whose client has left keeps its place in the queue
    integration/disconnects/test_disconnects.py test_one_that_waits_never_reaches_the_engine
W31: no limit on the time in the queue
    integration/admission/test_admission.py test_one_that_has_waited_too_long_never_reaches_the_engine
W32: a second way to the engine without limits
    integration/admission/test_full_worker.py test_w32_whoever_calls_the_worker_itself_meets_the_same_limits
W33: a refusal does not say when to come back, nor how full it was
    integration/admission/test_admission.py test_of_a_burst_exactly_n_and_q_are_in
W34: the status of a refusal is of no standard
    integration/admission/test_busy_threshold.py test_the_status_of_a_refusal_is_as_configured
W35: a refusal that comes as the first item of a stream is not counted
    integration/admission/test_admission_order.py test_whoever_comes_and_goes_the_worker_does_what_the_rules_say
W36: of several answers to one request only the first stops when the client leaves
    integration/disconnects/test_disconnects.py test_the_engine_makes_two_more_steps_at_most
W37: a cancelled answer looks like one that is complete
    test_w37_a_cancelled_stream_does_not_look_complete
W47: tests of moves compare no text, and leave kinds out
    integration/moves/test_moves.py test_a_killed_worker_changes_nothing_at_any_position
"""

import asyncio
import re
import time
from pathlib import Path

import aiohttp
import grpc
import pytest

from services.frontend.session.pool import PoolConfig
from services.stubs import inference_pb2, inference_pb2_grpc
from tests.integration.conftest import Start
from tests.integration.harness.answers import Answer, Refused
from tests.integration.harness.asks import PROTOCOLS, Ask, body, headers, path
from tests.integration.harness.clients import answer, ballast, gathered, move_reasons, outcome, under_streams
from tests.integration.harness.endings import deadline_s
from tests.integration.harness.plane import Frontend, Plane, until
from tests.integration.harness.rogue import Line, rogue
from tests.integration.harness.visits import ENDLESS

ITL = "--mocker-itl-ms=5"
TESTS = Path(__file__).parents[2]


def test_the_table_names_tests_that_there_are() -> None:
    assert __doc__ is not None
    named = re.findall(r"^    (?:([\w/]+\.py) )?(test_\w+)$", __doc__, re.MULTILINE)

    assert len(named) == 29
    for file, name in named:
        assert f"def {name}(" in (TESTS / file if file else Path(__file__)).read_text(), name


async def refused(plane: Plane, ask: Ask) -> Refused:
    got = await outcome(plane.frontend, ask)
    assert isinstance(got, Refused), got
    return got


@pytest.mark.parametrize(("protocol", "code"), [("unary", 502), ("stream", 200), ("grpc", "UNAVAILABLE")])
def test_w8_a_request_that_cannot_go_on_says_why_and_that_it_may_be_sent_again(
    start_plane: Start, protocol: str, code: int | str
) -> None:
    plane = start_plane(frontend=("--replacement-wait=0.2",))

    async def scenario() -> None:
        await plane.worker(ITL, "--mocker-fault=die_after=5")
        got = await refused(plane, Ask(protocol))

        assert (got.code, got.reason) == (code, "DISCONNECTED")
        assert got.error["retryable"] in (True, "true")

    asyncio.run(scenario())


@pytest.mark.parametrize(("option", "limit"), [("--migration-limit=0", None), ("--migration-limit=3", "0")])
def test_w9_what_may_not_move_is_not_counted_as_moved(start_plane: Start, option: str, limit: str | None) -> None:
    plane = start_plane(frontend=(option,))
    given = {} if limit is None else {"X-Migration-Limit": limit}

    async def scenario() -> None:
        victim = await plane.worker(ITL, "--mocker-fault=die_after=5")
        await plane.worker(ITL)
        outcomes = await gathered(outcome(plane.frontend, Ask("unary", headers=given)) for _ in range(8))

        assert {one.reason for one in outcomes if isinstance(one, Refused)} == {"DISCONNECTED"}
        assert victim.status() == -9
        assert await plane.frontend.metric("dynamo_frontend_model_migration_total") == 0
        assert not plane.frontend.events("request moved")

    asyncio.run(scenario())


def test_w12_a_quarantine_outlives_news_of_other_workers(start_plane: Start) -> None:
    plane = start_plane()
    taken_at: list[float] = []

    async def take_and_leave(line: Line) -> None:
        await line.welcome()
        await line.take_request()
        taken_at.append(time.time())

    async def scenario() -> None:
        await plane.worker(ITL)
        undisturbed = await answer(plane.frontend, Ask("grpc"))
        assert undisturbed.token_ids is not None
        async with ballast(plane.frontend), rogue(plane.registry_address, take_and_leave, undisturbed.token_ids) as bad:
            await until(lambda: plane.frontend.events("worker found", instance=bad))
            assert await answer(plane.frontend, Ask("grpc")) == undisturbed
            await until(lambda: len(plane.frontend.events("worker found", instance=bad)) == 2)
            await plane.worker(ITL)
            for _ in range(10):
                assert await answer(plane.frontend, Ask("grpc", max_tokens=1))
            lost_at, *_ = plane.frontend.times("worker lost", instance=bad)
            assert all(later > lost_at + PoolConfig().quarantine_s for later in taken_at[1:])

    asyncio.run(scenario())
    assert taken_at


async def events(frontend: Frontend, ask: Ask, begun: asyncio.Event | None = None) -> str:
    """The body of a streamed answer, as it comes; `begun` is set when the first of it is there."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{frontend.http}{path(ask)}", json=body(ask), headers=headers(ask)) as response,
    ):
        assert response.status == 200
        first = await response.content.readany()
        if begun is not None:
            begun.set()
        return (first + await response.content.read()).decode()


def test_w15_a_deadline_within_a_stream_is_told(start_plane: Start) -> None:
    plane = start_plane()

    async def scenario() -> None:
        await plane.worker(ITL)
        began = time.monotonic()
        await answer(plane.frontend, Ask("stream", max_tokens=1))
        timeout_s = deadline_s(time.monotonic() - began, least_s=0.3)
        ask = Ask("stream", max_tokens=100_000, timeout_s=timeout_s)

        assert (await refused(plane, ask)).reason == "DEADLINE_EXCEEDED"
        assert "[DONE]" not in await events(plane.frontend, ask)

    asyncio.run(scenario())


@pytest.mark.parametrize(("fault", "reason"), [("raise_after", "ENGINE_ERROR"), ("die_after", "DISCONNECTED")])
def test_w16_an_error_within_a_stream_has_its_own_reason_and_no_done(
    start_plane: Start, fault: str, reason: str
) -> None:
    plane = start_plane(frontend=("--migration-limit=0",))

    async def scenario() -> None:
        await plane.worker(ITL, f"--mocker-fault={fault}=5", "--mocker-fault=linger_ms=100")
        text = await events(plane.frontend, Ask("stream"))

        assert text.count("event: error\n") == 1
        assert f'"code":"{reason}"' in text
        assert '"retryable":true' in text
        assert "[DONE]" not in text

    asyncio.run(scenario())


def test_w18_no_stream_of_a_dead_engine_under_a_live_server_fails(start_plane: Start) -> None:
    """Its server goes on with its heartbeats; what stands still is the count of its steps."""
    plane = start_plane(frontend=("--engine-stall-ms=1500",))
    asks = [
        Ask(PROTOCOLS[number % 3], is_chat=number % 2 == 0, temperature=0.8, seed=number, max_tokens=100)
        for number in range(6)
    ]

    async def scenario() -> None:
        dead = await plane.worker(ITL, "--mocker-fault=hang_after=50")

        async def help_out() -> None:
            await plane.worker(ITL)

        answers = await under_streams(plane.frontend, asks, help_out)
        assert move_reasons(plane.frontend, asks) == [["STALLED"]] * len(asks)
        assert dead.status() is None
        assert answers == await gathered(answer(plane.frontend, ask) for ask in asks)

    asyncio.run(scenario())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_w19_an_engine_that_fails_before_the_first_token_costs_nothing(start_plane: Start, protocol: str) -> None:
    plane = start_plane()

    async def scenario() -> list[Answer]:
        await plane.worker(ITL)
        undisturbed = await answer(plane.frontend, Ask(protocol))
        await plane.worker(ITL, "--mocker-fault=raise_after=0")
        async with ballast(plane.frontend):
            assert await answer(plane.frontend, Ask(protocol, request_id="tried")) == undisturbed
        return [undisturbed]

    asyncio.run(scenario())
    assert [move["reason"] for move in plane.frontend.moves("tried")] == ["ENGINE_ERROR"]
    assert not plane.frontend.events("worker lost"), "no worker is to blame"


@pytest.mark.parametrize("is_chat", [False, True])
def test_w37_a_cancelled_stream_does_not_look_complete(start_plane: Start, is_chat: bool) -> None:
    plane = start_plane()

    async def scenario() -> str:
        await plane.worker(ITL)
        ask = Ask("stream", is_chat=is_chat, max_tokens=ENDLESS, request_id="unwanted")
        async with asyncio.TaskGroup() as group:
            begun = asyncio.Event()
            reading = group.create_task(events(plane.frontend, ask, begun))
            await begun.wait()
            async with grpc.aio.insecure_channel(plane.frontend.grpc) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                await stub.Cancel(inference_pb2.CancelRequest(request_id="unwanted"), timeout=5)
        return reading.result()

    text = asyncio.run(scenario())
    assert '"code":"CANCELLED"' in text
    assert "[DONE]" not in text
    assert not re.search(r'"finish_reason":"', text)
