"""The clients' application has all routes of clients, and those of operators only if it is given an `Admin`."""

import pytest

from services.frontend.api.build import build_admin_app, build_app
from services.http.router import NoRoute
from services.http.server.config import PROBE_PATHS, HttpConfig
from services.http.server.messages import HttpRequest
from tests.frontend.support import alone, finder_of
from tests.http.support import Script, StubFrontend, admin_of

OPERATORS = {("/busy_threshold", "GET"), ("/busy_threshold", "POST")}
EVERYWHERE = {("/live", "GET"), ("/health", "GET"), ("/metrics", "GET"), ("/openapi.json", "GET")}
CLIENTS = {
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{model}", "GET"),
    ("/v1/requests/{request_id}/cancel", "POST"),
    ("/v1/streams/{generation_id}", "GET"),
}


def routes_of_clients(*, with_admin: bool) -> set[tuple[str, str]]:
    admin = admin_of() if with_admin else None
    app = build_app(Script(), StubFrontend(), alone(), HttpConfig(), lambda *_: None, finder_of(), admin)
    return set(app.routes.listed())


def routes_of_operators() -> set[tuple[str, str]]:
    return set(build_admin_app(admin_of(), StubFrontend(), alone(), HttpConfig()).routes.listed())


def test_application_for_clients_has_their_routes_alone() -> None:
    assert routes_of_clients(with_admin=False) == CLIENTS | EVERYWHERE


def test_application_for_clients_has_admin_routes_if_it_serves_operators_too() -> None:
    assert routes_of_clients(with_admin=True) == CLIENTS | EVERYWHERE | OPERATORS


def test_head_does_not_take_an_answer_over() -> None:
    """A bug: a probe with HEAD ended the stream of the client that was reading the answer."""
    routes = build_app(Script(), StubFrontend(), alone(), HttpConfig(), lambda *_: None, finder_of()).routes

    with pytest.raises(NoRoute, match="does not take HEAD"):
        routes.find(HttpRequest(method="HEAD", path=f"/v1/streams/{'0' * 32}", headers={}))


def test_application_for_operators_has_no_routes_of_clients() -> None:
    assert routes_of_operators() == OPERATORS | EVERYWHERE


def test_every_application_serves_the_paths_that_the_server_prefers_as_health_checks() -> None:
    for routes in (routes_of_clients(with_admin=False), routes_of_operators()):
        assert {(path, "GET") for path in PROBE_PATHS} <= routes
