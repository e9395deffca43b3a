"""Carries one request on the session that the call names."""

from services.core.call import Call
from services.core.errors import Failure, Reason
from services.core.interface import Finish, Sink
from services.core.request import Request
from services.frontend.session.pool import Pool


class Transport:
    """Innermost: below it there is only the wire."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        assert call.worker is not None, "route names the worker"
        session = self._pool.session(call.worker)
        if session is None:
            raise Failure(Reason.CANNOT_CONNECT, "the worker was lost before the request was sent")
        stream = session.open(request, call, sink)
        try:
            return await stream.ended
        finally:
            session.close(stream)
