"""Finds the handler of a request by its path and method."""

import re
from collections.abc import Awaitable, Callable

from services.core.errors import QUOTED_CHARACTERS_MAX
from services.http.server.exchange import Exchange
from services.http.server.messages import HttpRequest, Response

_SLASHES = re.compile("/{2,}")
_NAME = re.compile(r"\{(\w+)\}")

Handler = Callable[[HttpRequest, Exchange], Awaitable[Response | None]]
"""Returns the response; None: the handler has sent it itself. Raises Failure."""

Guard = Callable[[HttpRequest], None]
"""Raises Failure if the client may not send the request."""


class NoRoute(Exception):
    """No route takes the request. `hint`: lists the routes. `allowed`: the methods of its path, if there is one."""

    def __init__(self, detail: str, hint: str, allowed: tuple[str, ...] = ()) -> None:
        super().__init__(detail)
        self.hint = hint
        self.allowed = allowed


class Router:
    """Handlers by path and method. A variable part `{name}` of a path is in the request's `arguments[name]`."""

    def __init__(self) -> None:
        self._exact: dict[str, dict[str, Handler]] = {}
        self._patterns: dict[str, tuple[re.Pattern[str], dict[str, Handler]]] = {}
        self._guards: dict[str, Guard] = {}
        self._private: set[str] = set()
        self._reporting: set[str] = set()
        self._open: set[str] = set()
        self._unlisted: set[str] = set()
        self._notes: list[str] = []

    def get(self, path: str, handler: Handler, *, takes_head: bool = True) -> None:
        """Register a handler of GET. HEAD uses it as well, without the body, unless to answer changes something."""
        self._methods(path).update({"GET": handler} | ({"HEAD": handler} if takes_head else {}))

    def post(self, path: str, handler: Handler, *, is_listed: bool = True) -> None:
        """Register a handler of POST. `is_listed`: see `listed`."""
        self._methods(path)["POST"] = handler
        if not is_listed:
            self._unlisted.add(path)

    def open(self, path: str) -> None:
        """Let clients without a key use `path`, where clients need keys."""
        self._open.add(path)

    def is_open(self, path: str) -> bool:
        """Whether clients without a key may use `path`."""
        return path in self._open

    def needs_key(self, path: str) -> bool:
        """Whether a client needs a key for `path`, where clients need keys. A guard replaces the key."""
        return path not in self._open and path not in self._guards

    def guard(self, path: str, guard: Guard, *, is_private: bool = True, reports_refusals: bool = False) -> None:
        """Call `guard` with the head of every request to `path`, whatever its method.

        `is_private`: no page of another origin may read the answers. `reports_refusals`: the handler is
        called for refused requests, too, because it reports refusals in another form.
        """
        self._guards[path] = guard
        if is_private:
            self._private.add(path)
        if reports_refusals:
            self._reporting.add(path)

    def check(self, request: HttpRequest) -> None:
        """Raises what the guard of the path raises."""
        if guard := self._guards.get(request.path):
            guard(request)

    def reports_refusals(self, path: str) -> bool:
        """Whether the handler of `path` reports refusals itself."""
        return path in self._reporting

    def note(self, text: str) -> None:
        """Tell people what else is served here, in the hint of NoRoute."""
        self._notes.append(text)

    def find(self, request: HttpRequest) -> Handler:
        """The handler of a request, whose `arguments` are set. Raises NoRoute."""
        methods = self._exact.get(request.path) or self._match(request)
        if not methods:
            raise NoRoute(f"there is no {request.method} {request.path[:QUOTED_CHARACTERS_MAX]} here", self._all())
        if request.method not in methods:
            uses = " or ".join(sorted(methods))
            detail = f"{request.path[:QUOTED_CHARACTERS_MAX]} does not take {request.method[:20]}: use {uses}"
            raise NoRoute(detail, self._all(), tuple(sorted(methods)))
        return methods[request.method]

    def _methods(self, path: str) -> dict[str, Handler]:
        if not _NAME.search(path):
            return self._exact.setdefault(path, {})
        pattern = re.compile(_NAME.sub(r"(?P<\1>.+)", path), re.DOTALL)  # DOTALL: a decoded path may have line ends.
        return self._patterns.setdefault(path, (pattern, {}))[1]

    def _match(self, request: HttpRequest) -> dict[str, Handler]:
        for pattern, methods in self._patterns.values():
            if match := pattern.fullmatch(request.path):
                request.arguments = match.groupdict()
                return methods
        return {}

    def meant(self, path: str) -> str:
        """The path of the route that `path` means; `path` itself if there is none.

        Clients put base URLs and paths together in their own ways: with a slash too many, or without `/v1`.
        """
        if path in self._exact:
            return path
        single = _SLASHES.sub("/", path)
        for candidate in (single.rstrip("/"), f"/v1{single.rstrip('/')}"):
            if candidate in self._exact or any(one.fullmatch(candidate) for one, _ in self._patterns.values()):
                return candidate
        return single

    def is_private(self, path: str) -> bool:
        """Whether no page of another origin may read what `path` answers."""
        return path in self._private

    def methods_of(self, request: HttpRequest) -> tuple[str, ...]:
        """The methods of the request's path, whatever its own method is."""
        return tuple(sorted(self._exact.get(request.path) or self._match(request)))

    def listed(self) -> list[tuple[str, str]]:
        """The paths of the HTTP API with each of their methods, except HEAD."""
        paths = self._exact | {path: methods for path, (_, methods) in self._patterns.items()}
        paths = {path: methods for path, methods in paths.items() if path not in self._unlisted}
        return sorted((path, method) for path, methods in paths.items() for method in methods if method != "HEAD")

    def _all(self) -> str:
        listed = ", ".join(f"{method} {path}" for path, method in self.listed())
        return " ".join(([f"There are {listed}."] if listed else []) + self._notes)
