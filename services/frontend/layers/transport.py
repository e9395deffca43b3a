"""Carries one request on the session that Route has chosen."""

import asyncio
from functools import partial

from services.core.call import Call, Cause
from services.core.generation.kept import Generation, Kept
from services.core.interface import Finish, Sink
from services.core.request import Request
from services.frontend.session.session import WorkerSession
from services.frontend.session.stream import Stream


class Transport:
    """Innermost: below it there is only the network. Raises CANNOT_CONNECT if the session is lost."""

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        session = call.attempt.session
        assert isinstance(session, WorkerSession), "Route sets the session"
        kept = call.kept
        if kept is None:
            stream = session.open(request, call, sink)
            try:
                return await stream.ended
            finally:
                session.close(stream)
        index = kept.index_of(request.choice)
        kept.generation.return_to(index, session.record.instance_id)
        stream = (session.open if call.attempt.adopts is None else session.adopt)(request, call, sink)
        try:
            return await stream.ended
        finally:
            _settle(session, stream, call, kept, index)


def _settle(session: WorkerSession, stream: Stream, call: Call, kept: Kept, index: int) -> None:
    """Decide what becomes of a stream that the request leaves, and whose answer is kept.

    | the stream | the request | what happens |
    | --- | --- | --- |
    | has ended well | – | its record is held until the whole answer is over |
    | has failed at the worker | – | nothing: the worker has dropped it |
    | has failed at this end | – | it is cancelled |
    | was lost with its session | goes on elsewhere | its record is discarded, once there is a session |
    | runs | has its answer from another attempt | it is cancelled |
    | runs | is cancelled by its id, has failed, or is past its deadline | it is cancelled |
    | runs | has an id that its client was never told | it is cancelled |
    | runs | was ended by a stop string | its engine stops, and its record is held |
    | runs | has lost its client, or this process ends | it is let go of |

    A stream that ends in the same turn of the event loop in which its request is cancelled counts as one that runs.
    """
    if stream.ended.done() and not stream.ended.cancelled():  # A request that is cancelled cancels what it waits for.
        if stream.ended.exception() is None:
            kept.generation.hold(partial(session.let_go, stream))
        elif session.is_lost:
            _leave(session, call, kept.generation, index)
        else:
            session.close(stream)
        return
    is_stopped = kept.is_stopped is not None and kept.is_stopped()
    if call.attempt.is_needed and is_stopped:
        session.stop(stream)
        kept.generation.hold(partial(session.let_go, stream))
    elif call.attempt.is_needed and kept.generation.is_told and not _is_over(call, kept):
        session.let_go(stream)
    else:
        session.close(stream, has_record=True)


def _leave(session: WorkerSession, call: Call, generation: Generation, index: int) -> None:
    """Discard the record that a lost worker may have, once the answer goes on elsewhere.

    Until then it is all that there is of the choice, and its client may come back for it.
    """
    instance_id, epoch = session.record.instance_id, generation.epoch + 1  # It is this frontend's own until then.
    discard = partial(session.leftovers.discard, instance_id, generation.id, index, epoch)
    if call.attempt.is_needed:
        generation.leave(index, instance_id, discard)
    else:
        discard()


def _is_over(call: Call, kept: Kept) -> bool:
    """Whether nobody needs the answer any more."""
    has_passed = call.deadline is not None and call.deadline - kept.early_s <= asyncio.get_running_loop().time()
    return has_passed or kept.generation.has_failed or call.ending.cause is Cause.EXPLICIT
