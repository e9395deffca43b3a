"""The id of a request: the client's `X-Request-Id`, or a new one."""

from services.core.call import new_request_id
from services.core.validation import NAME_FORM
from services.http.server.messages import HttpRequest

REQUEST_ID = "X-Request-Id"


def request_id_of(request: HttpRequest) -> str:
    """The client's `X-Request-Id` if it matches NAME_FORM, otherwise a new id.

    An invalid id is replaced, not refused: requests of a proxy with unusual ids should still be answered. The header of
    the response has the id that counts.
    """
    given = request.headers.get("x-request-id")
    return given if given and NAME_FORM.fullmatch(given) else new_request_id()
