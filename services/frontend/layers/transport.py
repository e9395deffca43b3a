"""Carries one request on the session that Route has chosen."""

import asyncio
from functools import partial

from services.core.call import Call, Cause
from services.core.generation.kept import Kept
from services.core.interface import Finish, Sink
from services.core.request import Request
from services.frontend.session.session import WorkerSession
from services.frontend.session.stream import Stream


class Transport:
    """Innermost: below it there is only the network. Raises CANNOT_CONNECT if the session is lost."""

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        session = call.attempt.session
        assert isinstance(session, WorkerSession), "Route sets the session"
        stream = (session.adopt if call.attempt.adopts else session.open)(request, call, sink)
        try:
            return await stream.ended
        finally:
            if call.kept is None:
                session.close(stream)
            else:
                _settle(session, stream, call, call.kept)


def _settle(session: WorkerSession, stream: Stream, call: Call, kept: Kept) -> None:
    """Decide what becomes of a stream that the request leaves, and whose answer is kept.

    | the stream | the request | what happens |
    | --- | --- | --- |
    | has ended well | – | its record is held until the whole answer is over |
    | has failed | – | nothing: the worker has dropped it |
    | runs | has its answer from another attempt | it is cancelled |
    | runs | is cancelled by its id, has failed, or is past its deadline | it is cancelled |
    | runs | has an id that its client was never told | it is cancelled |
    | runs | was ended by a stop string | its engine stops, and its record is held |
    | runs | has lost its client, or this process ends | it is let go of |
    """
    if stream.ended.done() and not stream.ended.cancelled():  # A request that is cancelled cancels what it waits for.
        if stream.ended.exception() is None:
            kept.generation.hold(partial(session.let_go, stream))
        return
    is_stopped = kept.is_stopped is not None and kept.is_stopped()
    if call.attempt.is_needed and is_stopped:
        session.stop(stream)
        kept.generation.hold(partial(session.let_go, stream))
    elif call.attempt.is_needed and kept.generation.is_told and not _is_over(call, kept):
        session.let_go(stream)
    else:
        session.close(stream)


def _is_over(call: Call, kept: Kept) -> bool:
    """Whether nobody needs the answer any more."""
    has_passed = call.deadline is not None and call.deadline - kept.early_s <= asyncio.get_running_loop().time()
    return has_passed or kept.generation.has_failed or call.ending.cause is Cause.EXPLICIT
