"""Keep: workers get what another frontend needs for the whole answer, and their records are let go of at its end."""

import asyncio

import pytest
from msgspec.structs import replace

from services.core.call import Call, Told
from services.core.errors import Failure, Reason
from services.core.generation.kept import Kept
from services.core.generation.presentation import PRESENTATION_BYTES_MAX, decode_presentation, encode_presentation
from services.core.interface import Finish, Sink
from services.core.request import FinishReason, Request
from services.frontend.layers.keep import Keep
from tests.support.clock import run_clocked, settle
from tests.support.doubles import HANG, Script, Step, call_layer, make_kept, make_request, run_async


def test_answer_that_is_not_kept_passes_through_unchanged() -> None:
    script, told = Script([7]), Told()

    result = run_async(call_layer(Keep(script), make_request(), told=told))

    assert result.token_ids == [7]
    assert script.calls[0].kept is None
    assert told.generation_id is None


def test_workers_get_the_request_as_it_is_here_and_the_client_is_told_the_id() -> None:
    script, told, kept = Script([7]), Told(), make_kept(form=b"form")
    request = make_request(n=2)

    run_async(call_layer(Keep(script), request, told=told, kept=kept, endpoint="chat_completions"))

    presentation = decode_presentation(kept.generation.presentation)
    assert (presentation.request, presentation.form) == (request, b"form")
    assert presentation.endpoint == "chat_completions"
    assert told.generation_id == kept.generation.name
    assert script.requests == [request]


def test_presentation_of_a_resumed_answer_stays_as_it_was_found() -> None:
    kept, told = make_kept(), Told()
    kept.generation.presentation, kept.generation.is_resumed = b"as found", True

    run_async(call_layer(Keep(Script([7])), make_request(), kept=kept, told=told))

    assert kept.generation.presentation == b"as found"
    assert told.generation_id == kept.generation.name


def of_size(size: int, parts: int) -> tuple[Request, Kept]:
    """A request with so many prompts, whose presentation has so many bytes."""
    request = make_request(token_ids=None, parts=(make_request(),) * parts) if parts else make_request()
    kept = make_kept(form=b"x" * 70_000)  # Its length takes as many bytes as that of the final one.
    length = len(encode_presentation(request, Call(request_id="r", kept=kept), kept.form))
    return request, replace(kept, form=b"x" * (70_000 + size - length))


@pytest.mark.parametrize("parts", [0, 1, 4])
@pytest.mark.parametrize("excess", [0, 1])
def test_size_of_what_all_prompts_carry_together_is_bounded(parts: int, excess: int) -> None:
    script = Script([7])
    request, kept = of_size(PRESENTATION_BYTES_MAX // max(parts, 1) + excess, parts)

    if not excess:
        run_async(call_layer(Keep(script), request, kept=kept))
        return
    with pytest.raises(Failure) as caught:
        run_async(call_layer(Keep(script), request, kept=kept))

    assert (caught.value.reason, caught.value.param) == (Reason.INVALID_ARGUMENT, "X-On-Disconnect")
    assert script.requests == []


@pytest.mark.parametrize("end", [FinishReason.STOP, Reason.ENGINE_ERROR, ValueError("bug"), HANG])
def test_records_are_let_go_of_however_the_answer_ends_and_not_before(end: Step) -> None:
    let_go: list[str] = []

    async def holds(request: Request, call: Call, sink: Sink) -> Finish:
        assert call.kept is not None
        call.kept.generation.hold(lambda: let_go.append("first choice"))
        try:
            return await Script([7, end])(request, call, sink)
        finally:
            assert let_go == []

    async def scenario() -> None:
        running = asyncio.ensure_future(call_layer(Keep(holds), make_request(), kept=make_kept()))
        await settle()
        running.cancel()
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()

    run_clocked(scenario())

    assert let_go == ["first choice"]
