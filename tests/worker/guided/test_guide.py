"""Guide: the engine's thread gets what may follow, and the event loop gets the tokens, in order."""

import asyncio
import threading

import pytest

from services.core.errors import Failure, Reason
from services.worker.guided.guide import Guide
from services.worker.guided.guide_jobs import Step
from tests.support.doubles import run_async


def test_thread_and_event_loop_take_turns_for_each_token() -> None:
    masks: list[bytes] = []

    def work(guide: Guide) -> None:
        for token in (7, 8):
            assert guide.wait_ready(10)
            masks.append(guide.token_mask())
            guide.accept_token(token)

    async def scenario() -> None:
        guide = Guide(asyncio.get_running_loop().call_soon_threadsafe)
        thread = threading.Thread(target=work, args=(guide,))
        thread.start()
        tokens = []
        for mask in (b"a", b"b"):
            guide.put(Step(mask, is_complete=False))
            tokens.append(await guide.accepted_token())
        thread.join()
        assert tokens == [7, 8]
        assert not guide.wait_ready(0)

    run_async(scenario())

    assert masks == [b"a", b"b"]


def test_failure_is_raised_where_the_next_token_is_asked_for() -> None:
    async def scenario() -> None:
        guide = Guide(asyncio.get_running_loop().call_soon_threadsafe)
        guide.put(Step(b"a", is_complete=True))
        assert guide.is_complete
        guide.accept_token(1)

        guide.fail(Failure(Reason.INVALID_ARGUMENT, "no"))

        assert guide.wait_ready(0)
        with pytest.raises(Failure, match="no"):
            guide.token_mask()

    run_async(scenario())
