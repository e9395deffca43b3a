"""Carries one request on the session that the call names."""

from services.errors import Failure, Reason
from services.frontend.pool import Pool
from services.request import Call, Finish, Request, Sink


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
