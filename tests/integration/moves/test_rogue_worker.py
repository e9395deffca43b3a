"""A worker that breaks the protocol harms no request: the client gets the right answer, and the log names the
violation.

| workload | nemesis | checker |
| --- | --- | --- |
| one request that the rogue receives, gRPC and SSE | each act below | `Answer`; the reason in the log; moved or not |

An act is what the rogue worker does in a session. Most acts begin with three tokens of the right answer, so that a move
has tokens to carry over.
"""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import count

import pytest

from services.rpc.status import MESSAGE_BYTES_MAX
from services.stubs import worker_pb2
from services.stubs.inference_pb2 import FINISH_REASON_LENGTH
from tests.integration.conftest import Start
from tests.integration.harness.clients.answers import Answer, Refused
from tests.integration.harness.clients.requests import Request
from tests.integration.harness.clients.send import answer, background_stream
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.rogue_worker import Act, RogueSession, honest_welcome, rogue_worker
from tests.integration.harness.waiting import until

NUMBERS = count()
GARBAGE = b"\xff\xff\xff\xffgarbage"
HEARTBEAT_S = 0.25
BEGUN = 3
"""Tokens of the right answer that come first."""


async def begin(session: RogueSession) -> int:
    """Behave well for the first tokens; return the stream id."""
    await session.send_welcome()
    stream_id = await session.receive_request()
    await session.send_tokens(stream_id, 0, session.answer[:BEGUN])
    return stream_id


async def answer_all(session: RogueSession) -> int:
    """Send the complete answer without an end; return the stream id."""
    stream_id = await begin(session)
    await session.send_tokens(stream_id, BEGUN, session.answer[BEGUN:])
    return stream_id


async def close_the_connection(session: RogueSession) -> None:
    await begin(session)


async def drop_the_connection(session: RogueSession) -> None:
    await begin(session)
    session.abort()


async def leave_a_gap(session: RogueSession) -> None:
    stream_id = await begin(session)
    await session.send_tokens(stream_id, BEGUN + 1, session.answer[BEGUN + 1 :])
    await session.wait_forever()


async def repeat_a_token(session: RogueSession) -> None:
    stream_id = await begin(session)
    await session.send_tokens(stream_id, BEGUN - 1, session.answer[BEGUN - 1 :])
    await session.wait_forever()


async def send_an_empty_item(session: RogueSession) -> None:
    stream_id = await begin(session)
    await session.send_tokens(stream_id, BEGUN, [])
    await session.wait_forever()


async def end_without_reason_or_marker(session: RogueSession) -> None:
    await session.end(await begin(session))
    await session.wait_forever()


async def invent_a_finish_reason(session: RogueSession) -> None:
    await session.end(await begin(session), finish_reason=99, complete_final=True)
    await session.wait_forever()


async def send_garbage(session: RogueSession) -> None:
    await begin(session)
    await session.send(GARBAGE)
    await session.wait_forever()


async def send_too_much(session: RogueSession) -> None:
    await begin(session)
    await session.send(bytes(MESSAGE_BYTES_MAX + 1))
    await session.wait_forever()


async def fall_silent(session: RogueSession) -> None:
    await session.send_welcome()
    await session.wait_forever()


async def complete_without_a_finish_reason(session: RogueSession) -> None:
    await session.send_welcome()
    await session.end(await session.receive_request(), complete_final=True)
    await session.wait_forever()


async def complete_without_a_finish_reason_after_tokens(session: RogueSession) -> None:
    await session.end(await begin(session), complete_final=True)
    await session.wait_forever()


async def send_after_the_end(session: RogueSession) -> None:
    stream_id = await answer_all(session)
    await session.end(stream_id, finish_reason=FINISH_REASON_LENGTH, complete_final=True)
    await session.send_tokens(stream_id, len(session.answer), [32])
    await session.wait_forever()


async def end_twice(session: RogueSession) -> None:
    stream_id = await answer_all(session)
    await session.end(stream_id, finish_reason=FINISH_REASON_LENGTH, complete_final=True)
    await session.end(stream_id, finish_reason=FINISH_REASON_LENGTH, complete_final=True)
    await session.wait_forever()


async def send_after_the_finish_reason(session: RogueSession) -> None:
    stream_id = await answer_all(session)
    await session.end(stream_id, finish_reason=FINISH_REASON_LENGTH)
    await session.send_tokens(stream_id, len(session.answer), [32])
    await session.wait_forever()


async def finish_twice(session: RogueSession) -> None:
    stream_id = await answer_all(session)
    await session.end(stream_id, finish_reason=FINISH_REASON_LENGTH)
    await session.end(stream_id, finish_reason=FINISH_REASON_LENGTH)
    await session.wait_forever()


async def forget_the_marker(session: RogueSession) -> None:
    await session.end(await answer_all(session), finish_reason=FINISH_REASON_LENGTH)
    while True:  # It lives: only its stream lacks something.
        await session.send(worker_pb2.WorkerMessage(load=worker_pb2.Load()))
        await asyncio.sleep(HEARTBEAT_S)


async def die_between_finish_and_marker(session: RogueSession) -> None:
    await session.end(await answer_all(session), finish_reason=FINISH_REASON_LENGTH)
    session.abort()


async def die_after_the_last_token(session: RogueSession) -> None:
    await answer_all(session)
    session.abort()


async def name_an_unknown_stream(session: RogueSession) -> None:
    stream_id = await begin(session)
    await session.send_tokens(stream_id + 1000, 0, [32])
    await session.end(stream_id + 1000, complete_final=True)
    await session.send_tokens(stream_id, BEGUN, session.answer[BEGUN:])
    await session.end(stream_id, finish_reason=FINISH_REASON_LENGTH, complete_final=True)
    await session.wait_forever()


async def send_no_welcome(session: RogueSession) -> None:
    await session.wait_forever()


async def begin_with_garbage(session: RogueSession) -> None:
    await session.send(GARBAGE)
    await session.wait_forever()


async def begin_with_tokens(session: RogueSession) -> None:
    await session.send_tokens(1, 0, [32])
    await session.wait_forever()


async def announce_another_card(session: RogueSession) -> None:
    message = honest_welcome(session.instance_id)
    message.welcome.card.context_length += 1
    await session.send(message)
    await session.wait_forever()


MOVES = {
    close_the_connection: "DISCONNECTED",
    drop_the_connection: "DISCONNECTED",
    leave_a_gap: "PROTOCOL_VIOLATION",
    repeat_a_token: "PROTOCOL_VIOLATION",
    send_an_empty_item: "PROTOCOL_VIOLATION",
    end_without_reason_or_marker: "PROTOCOL_VIOLATION",
    invent_a_finish_reason: "PROTOCOL_VIOLATION",
    send_garbage: "PROTOCOL_VIOLATION",
    send_too_much: "PROTOCOL_VIOLATION",
    fall_silent: "STALLED",
    complete_without_a_finish_reason: "ENGINE_ERROR",
}
"""The request continues on another worker, for this reason."""
COMPLETED = {
    send_after_the_end: "PROTOCOL_VIOLATION",
    end_twice: "PROTOCOL_VIOLATION",
    send_after_the_finish_reason: "PROTOCOL_VIOLATION",
    finish_twice: "PROTOCOL_VIOLATION",
    forget_the_marker: None,
    die_between_finish_and_marker: "DISCONNECTED",
    die_after_the_last_token: "DISCONNECTED",
    name_an_unknown_stream: None,
}
"""The client gets the complete answer from the rogue; what follows is logged with this reason."""
UNUSED = {
    send_no_welcome: "CANNOT_CONNECT",
    begin_with_garbage: "CANNOT_CONNECT",
    begin_with_tokens: "CANNOT_CONNECT",
    announce_another_card: "CANNOT_CONNECT",
}
"""The rogue never gets a request, for this reason."""


@dataclass(frozen=True)
class Setup:
    """A plane with one good worker, and that worker's answer."""

    plane: Plane
    undisturbed: Answer

    def logged(self, instance: str) -> list[str]:
        """Return all failures of an instance in the frontend's log."""
        events = self.plane.frontend.events_until_now(instance=instance)
        return [event["why"] for event in events if "why" in event]


@pytest.fixture(scope="module")
def prepared(start_plane: Start) -> Setup:
    plane = start_plane(frontend=("--stall-ms=3000",))

    async def fill() -> Answer:
        await plane.worker("--mocker-itl-ms=1")
        return await answer(plane.frontend, Request("grpc"))

    return Setup(plane, asyncio.run(fill()))


def named(value: object) -> str:
    """Return an act's part of a test's id. The reason is left out."""
    return getattr(value, "__name__", "")


protocols = pytest.mark.parametrize("protocol", ["grpc", "stream"])


async def send_to_rogue(
    prepared: Setup, act: Act, protocol: str, *, is_used: bool = True, loss: str | None = None
) -> tuple[str, str]:
    """Send a request, to the rogue if it is usable, and check the answer. Returns the ids of request and rogue.

    `loss`: why the rogue's session ends. It may do so after the answer: what the rogue sends then is on its way.
    """
    frontend, request_id = prepared.plane.frontend, f"rogue-{next(NUMBERS)}"
    token_ids = prepared.undisturbed.token_ids
    assert token_ids is not None
    async with AsyncExitStack() as exits:
        await exits.enter_async_context(background_stream(frontend))
        instance = await exits.enter_async_context(rogue_worker(prepared.plane.registry_address, act, token_ids))
        if is_used:
            await until(lambda: frontend.events("worker found", instance=instance))
        else:
            await until(lambda: prepared.logged(instance))

        got = await answer(frontend, Request(protocol, request_id=request_id))

        assert got.text == prepared.undisturbed.text
        assert (got.finish, got.completion_tokens) == (prepared.undisturbed.finish, len(token_ids))
        assert got.token_ids == (token_ids if protocol == "grpc" else None)
        if loss is not None:
            await until(lambda: any(why.startswith(loss) for why in prepared.logged(instance)))
    return request_id, instance


@protocols
@pytest.mark.parametrize(("act", "reason"), MOVES.items(), ids=named)
def test_request_continues_on_another_worker(prepared: Setup, act: Act, reason: str, protocol: str) -> None:
    request_id, instance = asyncio.run(send_to_rogue(prepared, act, protocol))

    (move,) = prepared.plane.frontend.moves(request_id)
    assert move["reason"] == reason
    assert move["away_from"].startswith(instance)


@protocols
@pytest.mark.parametrize(("act", "reason"), COMPLETED.items(), ids=named)
def test_complete_answer_ends_well_whatever_the_worker_does_next(
    prepared: Setup, act: Act, reason: str | None, protocol: str
) -> None:
    request_id, _ = asyncio.run(send_to_rogue(prepared, act, protocol, loss=reason))

    assert not prepared.plane.frontend.moves(request_id)


@pytest.mark.parametrize(("act", "reason"), UNUSED.items(), ids=named)
def test_worker_with_a_bad_handshake_gets_no_request(prepared: Setup, act: Act, reason: str) -> None:
    request_id, instance = asyncio.run(send_to_rogue(prepared, act, "stream", is_used=False))

    assert not prepared.plane.frontend.moves(request_id)
    assert prepared.logged(instance)[0].startswith(reason)


@pytest.mark.parametrize(("protocol", "code"), [("grpc", "INTERNAL"), ("stream", 200)])
def test_end_without_a_finish_reason_after_tokens_fails_the_request(
    prepared: Setup, protocol: str, code: int | str
) -> None:
    """The request itself may be at fault, so it is not retried; the client gets a typed error and no marker."""
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(send_to_rogue(prepared, complete_without_a_finish_reason_after_tokens, protocol))

    error: BaseException = caught.value
    while isinstance(error, ExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, Refused)
    assert (error.code, error.reason) == (code, "ENGINE_ERROR")
    assert prepared.undisturbed.text.startswith(error.received)
