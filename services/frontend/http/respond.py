"""Every HTTP request gets an id, and every failure its response: the one place where failures become responses."""

from collections.abc import Awaitable, Callable

from aiohttp import web

from services.errors import Failure
from services.frontend.http.config import HttpConfig
from services.frontend.http.errors import error_response, routing_response
from services.frontend.http.headers import REQUEST_ID, request_id_of
from services.frontend.http.seat import seat_of
from services.frontend.http.sending import finish_sending
from services.layers import bug_failure

ID = web.RequestKey("request_id", str)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Respond:
    """Outermost of an application's middlewares."""

    def __init__(self, config: HttpConfig, is_draining: Callable[[], bool]) -> None:
        self._config = config
        self._is_draining = is_draining

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Streams send themselves; the rest is sent here."""
        request_id = request[ID] = request_id_of(request)
        try:
            response = await handler(request)
        except Failure as failure:
            response = error_response(failure, request_id, overload_status=self._config.overload_status)
            failure.forget_way()
        except web.HTTPException as error:
            response = routing_response(request, error, request_id)
        except Exception as error:
            response = error_response(bug_failure(error, request_id), request_id)
        if not response.prepared:
            response.headers[REQUEST_ID] = request_id
            if self._is_draining():
                response.force_close()
            await finish_sending(request, response, self._config, request_id)
            if request.transport is not None:
                seat_of(request).answered(request.content_length)
        return response
