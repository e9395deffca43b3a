"""Routes: a request finds its handler, or is told what there is."""

import pytest

from services.core.errors import QUOTED_CHARACTERS_MAX, Failure, Reason
from services.http.router import NoRoute, Router
from services.http.server.connection import Connection
from services.http.server.messages import HttpRequest, Response


async def one(request: HttpRequest, connection: Connection) -> Response | None:
    return None


async def other(request: HttpRequest, connection: Connection) -> Response | None:
    return None


def asked(method: str, path: str) -> HttpRequest:
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
def test_path_and_method_say_which(routes: Router, method: str, path: str, handler: object) -> None:
    assert routes.find(asked(method, path)) is handler


@pytest.mark.parametrize(
    ("method", "path", "arguments"),
    [
        ("GET", "/models/org/tiny", {"model": "org/tiny"}),
        ("POST", "/requests/a b/cancel", {"name": "a b"}),
        ("GET", "/models/two\nlines", {"model": "two\nlines"}),
        ("GET", "/models", {}),
    ],
)
def test_what_a_path_leaves_open_is_an_argument(routes: Router, method: str, path: str, arguments: object) -> None:
    request = asked(method, path)
    routes.find(request)

    assert request.arguments == arguments


def test_a_method_that_is_not_taken_is_told_which_are(routes: Router) -> None:
    with pytest.raises(NoRoute, match="/answers does not take PUT: use GET or HEAD or POST") as caught:
        routes.find(asked("PUT", "/answers"))

    assert caught.value.allowed == ("GET", "HEAD", "POST")


@pytest.mark.parametrize("path", ["/", "/models/", "/requests//cancel", "/nowhere"])
def test_an_unknown_path_is_told_all_there_are(routes: Router, path: str) -> None:
    with pytest.raises(NoRoute, match=f"there is no GET {path} here") as caught:
        routes.find(asked("GET", path))

    assert caught.value.allowed == ()
    assert caught.value.hint == (
        "There are GET /answers, POST /answers, GET /models, GET /models/{model}, POST /requests/{name}/cancel."
    )


def test_a_long_path_is_not_told_whole(routes: Router) -> None:
    with pytest.raises(NoRoute) as caught:
        routes.find(asked("GET", "/" + "x" * 10_000))

    assert len(str(caught.value)) < QUOTED_CHARACTERS_MAX + 50


def test_a_guard_is_asked_before_the_method_is_looked_at(routes: Router) -> None:
    def refuse(request: HttpRequest) -> None:
        raise Failure(Reason.UNAUTHENTICATED, "no")

    routes.guard("/models", refuse)

    for method in ("GET", "DELETE"):
        with pytest.raises(Failure):
            routes.find(asked(method, "/models"))
    assert routes.find(asked("POST", "/answers")) is one
