"""Carries one request on the session that Route has chosen."""

from services.core.call import Call
from services.core.interface import Finish, Sink
from services.core.request import Request
from services.frontend.session.session import WorkerSession


class Transport:
    """Innermost: below it there is only the network. Raises CANNOT_CONNECT if the session is lost."""

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        session = call.attempt.session
        assert isinstance(session, WorkerSession), "Route sets the session"
        stream = session.open(request, call, sink)
        try:
            return await stream.ended
        finally:
            session.close(stream)
