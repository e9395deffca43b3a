"""The id of a request is the client's if it is valid, otherwise a new and unguessable one."""

import re

import pytest

from services.http.request_id import request_id_of
from services.http.server.messages import HttpRequest


def id_of(given: str | None) -> str:
    headers = {} if given is None else {"x-request-id": given}
    return request_id_of(HttpRequest(method="GET", path="/", headers=headers))


@pytest.mark.parametrize("given", ["a", "A-b_c.d:9", "x" * 128])
def test_valid_request_id_of_the_client_is_kept(given: str) -> None:
    assert id_of(given) == given


@pytest.mark.parametrize("given", [None, "", "x" * 129, "a b", "a/b", "é"])
def test_missing_or_invalid_request_id_is_replaced(given: str | None) -> None:
    assert re.fullmatch("[0-9a-f]{32}", id_of(given))
