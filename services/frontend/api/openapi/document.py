"""The OpenAPI document at /openapi.json, made from the types of bodies and the table of reasons."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, get_args

import msgspec

from services import __version__
from services.core.errors import Reason
from services.frontend.api.openapi.operations import (
    GENERATION_ID_SCHEMA,
    NAME_SCHEMA,
    OPERATIONS,
    Document,
    Operation,
)
from services.frontend.api.openapi.other_fields import add_other_fields
from services.http.errors import RETRY_LATER_STATUSES, SHOULD_RETRY, Error, json_response, status_of
from services.http.request_id import REQUEST_ID
from services.http.router import Router
from services.http.server.config import HttpConfig
from services.http.server.exchange import Exchange
from services.http.server.messages import HttpRequest, Response

PATH = "/openapi.json"
_REFERENCE = "#/components/schemas/{name}"
_ARGUMENT = re.compile(r"\{(\w+)\}")
_ARGUMENT_SCHEMAS: dict[str, dict[str, Any]] = {
    "request_id": NAME_SCHEMA,
    "generation_id": GENERATION_ID_SCHEMA,
    "model": {"type": "string", "minLength": 1},
}
_NO_REQUEST = {
    400: "not an HTTP request",
    408: "the head did not arrive in time",
    431: "the head is too large",
    501: "an unknown Transfer-Encoding",
    505: "an unknown version of HTTP",
}
"""Statuses of what cannot be read as a request, on any path. Source: where BrokenHead is raised."""
_NO_HEADERS: Mapping[str, Mapping[str, Any]] = {}
_ABOUT = (
    "An LLM request plane whose token streams do not break. A field that asks for something that this version does not"
    " do is refused by name, and so is a misspelt one. HEAD is answered as GET, without the body; where GET takes an"
    " answer over, it is refused. Bodies may use Content-Encoding gzip or deflate."
)


class OpenApiRoute:
    """Serves the document of an application, which describes the routes that it has."""

    def __init__(self, routes: Router, config: HttpConfig) -> None:
        self._routes = routes
        self._config = config

    def add(self) -> None:
        """Register the route. Call this after all other routes are registered."""
        self._routes.get(PATH, self._answer)

    @cached_property
    def _document(self) -> bytes:
        return msgspec.json.encode(describe(self._routes.listed(), self._config))

    async def _answer(self, request: HttpRequest, exchange: Exchange) -> Response:
        return json_response(self._document)


_SCHEMES = {
    "key": {"type": "http", "scheme": "bearer", "description": "An API key of a tenant. `x-api-key` has it as well."},
    "admin": {"type": "http", "scheme": "bearer", "description": "The operators' token."},
}


def describe(listed: Iterable[tuple[str, str]], config: HttpConfig) -> Document:
    """The document. `listed`: paths and methods."""
    operations = {(path, method): OPERATIONS[method, path] for path, method in listed}
    paths: dict[str, dict[str, Any]] = defaultdict(dict)
    for (path, method), operation in operations.items():
        paths[path][method.lower()] = _described(path, operation, config.overload_status)
    components: dict[str, Any] = {"schemas": _schemas(operations.values())}
    add_other_fields(components["schemas"], config.unknown_fields)
    schemes = {_scheme_of(operation) for operation in operations.values()}
    components["securitySchemes"] = {name: scheme for name, scheme in _SCHEMES.items() if name in schemes}
    info = {"title": "Unbroken", "version": __version__, "description": _ABOUT}
    return Document(openapi="3.1.0", info=info, paths=paths, components=components)


def _schemas(operations: Iterable[Operation]) -> dict[str, Any]:
    unions = [union for one in operations for union in (one.body, one.answer, one.event) if union is not None]
    shapes = {shape for union in unions for shape in _members(union)}
    ordered = sorted(shapes | {Error}, key=lambda shape: shape.__name__)
    return msgspec.json.schema_components(ordered, ref_template=_REFERENCE)[1]


def _described(path: str, operation: Operation, overload_status: int) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "parameters": _parameters(path, operation),
        "responses": {"200": _answered(operation)} | _failures(operation, overload_status),
    }
    if operation.nothing is not None:
        described["responses"]["204"] = _response(operation.nothing, {})
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": _schema(operation.body)}}
    if (scheme := _scheme_of(operation)) is not None:
        described["security"] = [{}, {scheme: []}]  # {}: not every frontend has keys, or a token.
    return described


def _scheme_of(operation: Operation) -> str | None:
    """How a client shows that it may call the operation; None: everybody may."""
    return None if operation.is_open else "admin" if operation.is_guarded else "key"


def _parameters(path: str, operation: Operation) -> list[dict[str, Any]]:
    headers = {REQUEST_ID: {"type": "string"}, **(operation.headers or {})}
    arguments = [
        {"name": name, "in": "path", "required": True, "schema": _ARGUMENT_SCHEMAS[name]}
        for name in _ARGUMENT.findall(path)
    ]
    return arguments + [{"name": name, "in": "header", "schema": schema} for name, schema in headers.items()]


def _answered(operation: Operation) -> dict[str, Any]:
    if operation.answer is None:
        content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    else:
        content = {"application/json": _schema(operation.answer)}
    headers = operation.answer_headers or {}
    if operation.event is None:
        return _response("Done.", content, headers=headers)
    content["text/event-stream"] = {}  # OpenAPI can describe the data of events since 3.2.
    names = " or a ".join(shape.__name__ for shape in _members(operation.event))
    description = f"With `stream`: events, each with a {names}; the last is [DONE], or an event `error`."
    return _response(description, content, headers=headers)


def _failures(operation: Operation, overload_status: int) -> dict[str, Any]:
    causes: dict[int, list[str]] = defaultdict(list)
    for reason in sorted(operation.reasons | {Reason.INTERNAL}):
        causes[status_of(reason, overload_status)].append(reason)
    for status, cause in _NO_REQUEST.items():
        causes[status].append(cause)
    content = {"application/json": _schema(Error)}
    return {str(status): _response(", ".join(causes[status]), content, status) for status in sorted(causes)}


def _response(
    description: str, content: dict[str, Any], status: int = 200, headers: Mapping[str, Mapping[str, Any]] = _NO_HEADERS
) -> dict[str, Any]:
    described: dict[str, Any] = {name: {"schema": schema} for name, schema in headers.items()}
    described[REQUEST_ID] = {"schema": NAME_SCHEMA}
    if status != 200:
        described[SHOULD_RETRY] = {"schema": {"type": "string", "enum": ["true", "false"]}}
    if status in RETRY_LATER_STATUSES:
        described["Retry-After"] = {"schema": {"type": "integer", "minimum": 1}}
    return {"description": description, "headers": described, "content": content}


def _members(union: Any) -> Sequence[type[msgspec.Struct]]:
    return get_args(union) or (union,)


def _schema(union: Any) -> dict[str, Any]:
    references = [{"$ref": _REFERENCE.format(name=shape.__name__)} for shape in _members(union)]
    return {"schema": references[0] if len(references) == 1 else {"anyOf": references}}
