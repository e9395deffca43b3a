"""A request finds its handler by path and method, or gets an error that lists the routes."""

import pytest

from services.core.errors import QUOTED_CHARACTERS_MAX, Failure, Reason
from services.http.router import NoRoute, Router
from services.http.server.exchange import Exchange
from services.http.server.messages import HttpRequest, Response


async def one(request: HttpRequest, exchange: Exchange) -> Response | None:
    return None


async def other(request: HttpRequest, exchange: Exchange) -> Response | None:
    return None


def request(method: str, path: str) -> HttpRequest:
    return HttpRequest(method=method, path=path, headers={})


@pytest.fixture
def routes() -> Router:
    routes = Router()
    routes.get("/models", one)
    routes.get("/models/{model}", other)
    routes.post("/requests/{name}/cancel", one)
    routes.post("/answers", one)
    routes.get("/answers", other)
    return routes


@pytest.mark.parametrize(
    ("method", "path", "handler"),
    [
        ("GET", "/models", one),
        ("HEAD", "/models", one),
        ("GET", "/models/a", other),
        ("POST", "/answers", one),
        ("GET", "/answers", other),
    ],
)
def test_handler_is_found_by_path_and_method(routes: Router, method: str, path: str, handler: object) -> None:
    assert routes.find(request(method, path)) is handler


@pytest.mark.parametrize(
    ("method", "path", "arguments"),
    [
        ("GET", "/models/org/tiny", {"model": "org/tiny"}),
        ("POST", "/requests/a b/cancel", {"name": "a b"}),
        ("GET", "/models/two\nlines", {"model": "two\nlines"}),
        ("GET", "/models", {}),
    ],
)
def test_variable_part_of_a_path_is_an_argument(routes: Router, method: str, path: str, arguments: object) -> None:
    found = request(method, path)
    routes.find(found)

    assert found.arguments == arguments


def test_error_of_a_wrong_method_lists_the_methods_of_the_path(routes: Router) -> None:
    with pytest.raises(NoRoute, match="/answers does not take PUT: use GET or HEAD or POST") as caught:
        routes.find(request("PUT", "/answers"))

    assert caught.value.allowed == ("GET", "HEAD", "POST")


def test_head_is_refused_where_an_answer_changes_something(routes: Router) -> None:
    routes.get("/streams", one, takes_head=False)

    assert routes.find(request("GET", "/streams")) is one
    with pytest.raises(NoRoute, match="/streams does not take HEAD: use GET"):
        routes.find(request("HEAD", "/streams"))


@pytest.mark.parametrize("path", ["/", "/models/", "/requests//cancel", "/nowhere"])
def test_error_of_an_unknown_path_lists_all_routes(routes: Router, path: str) -> None:
    with pytest.raises(NoRoute, match=f"there is no GET {path} here") as caught:
        routes.find(request("GET", path))

    assert caught.value.allowed == ()
    assert caught.value.hint == (
        "There are GET /answers, POST /answers, GET /models, GET /models/{model}, POST /requests/{name}/cancel."
    )


def test_long_path_is_shortened_in_the_error(routes: Router) -> None:
    with pytest.raises(NoRoute) as caught:
        routes.find(request("GET", "/" + "x" * 10_000))

    assert len(str(caught.value)) < QUOTED_CHARACTERS_MAX + 50


def test_guard_is_called_whatever_the_method(routes: Router) -> None:
    def refuse(_: HttpRequest) -> None:
        raise Failure(Reason.UNAUTHENTICATED, "no")

    routes.guard("/models", refuse)

    for method in ("GET", "DELETE"):
        with pytest.raises(Failure):
            routes.check(request(method, "/models"))
    routes.check(request("POST", "/answers"))


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/things", "/v1/things"),
        ("/v1/things/", "/v1/things"),
        ("//v1//things", "/v1/things"),
        ("/things", "/v1/things"),
        ("/things//", "/v1/things"),
        ("/things/a%2Fb", "/v1/things/a%2Fb"),
        ("/things/a/end", "/v1/things/a/end"),
        ("/v1//things/a/end/", "/v1/things/a/end"),
        ("/models/", "/models"),
        ("/v1/v1/things", "/v1/v1/things"),
        ("/v1//nothing/", "/v1/nothing/"),
        ("/", "/"),
        ("//", "/"),
        ("", ""),
    ],
)
def test_path_with_a_slash_too_many_or_without_v1_means_its_route(routes: Router, path: str, meant: str) -> None:
    """A base URL that ends with a slash gives //, and one without /v1 lacks it."""
    routes.get("/v1/things", one)
    routes.get("/v1/things/{name}", one)
    routes.get("/v1/things/{name}/end", one)

    assert routes.meant(path) == meant
