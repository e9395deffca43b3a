"""Turns what is not a Failure into one: the client gets INTERNAL and a request id, the log gets the traceback."""

import structlog

from services.errors import Failure, Reason
from services.request import Call, Finish, Layer, Request, Sink

log = structlog.get_logger()


class CatchBugs:
    """Outermost of all: a layer raises Failure and nothing else, and if one does, that is a bug of ours."""

    def __init__(self, inner: Layer) -> None:
        self._inner = inner

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        try:
            return await self._inner(request, call, sink)
        except Failure:
            raise
        except Exception as error:
            raise bug(error, call.request_id) from error


def bug(error: Exception, request_id: str) -> Failure:
    """Log the traceback of an error that nobody foresaw, and give the failure that the client sees."""
    log.error("bug", request_id=request_id, exc_info=error)
    return Failure(Reason.INTERNAL, "an internal error ended the request")
