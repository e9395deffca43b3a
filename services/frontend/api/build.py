"""Builds the HTTP applications of a frontend: every route that it has is registered here."""

from functools import partial

from services.core.errors import Failure
from services.core.interface import Layer
from services.core.tenant import TenantOf
from services.frontend.api.admin.admin import Admin
from services.frontend.api.admin.http_routes import BODY_BYTES_MAX, AdminRoutes
from services.frontend.api.health import FrontendState, HealthRoutes
from services.frontend.api.openai.endpoints import OnRefused, OpenAiEndpoints, ServedModels
from services.frontend.api.openai.parse import parse_chat, parse_completion
from services.frontend.api.openai.responses import ChatAnswer, CompletionAnswer
from services.frontend.api.openapi.document import OpenApiRoute
from services.frontend.control import Canceller, FrontendControl
from services.frontend.resume.finder import GenerationFinder
from services.http.app import HttpApp, Shortage
from services.http.host_rule import HostRule
from services.http.server.config import HttpConfig
from services.http.server.messages import HttpRequest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_COUNTED = {COMPLETIONS: "completions", CHAT: "chat_completions"}
"""Path → the endpoint by which metrics know its requests."""


def build_app(
    pipeline: Layer,
    served: ServedModels,
    control: FrontendControl,
    config: HttpConfig,
    on_refused: OnRefused,
    finder: GenerationFinder,
    admin: Admin | None = None,
    shortage: Shortage | None = None,
    tenant_of: TenantOf | None = None,
    host_rule: HostRule = HostRule(),  # noqa: B008
) -> HttpApp:
    """The application for clients.

    `on_refused`: called for requests that are refused before they reach the pipeline. `admin`: None if admin calls are
    disabled, or served on an address of their own. `shortage`: counts connections that cannot be accepted.
    `tenant_of`: finds whose key a request carries; None: clients need no keys. `host_rule`: which names requests may
    have in `Host` and `Origin`.
    """
    endpoints = OpenAiEndpoints(pipeline, served, Canceller(control, finder), config, on_refused, finder)
    on_unauthenticated = partial(_count_unauthenticated, on_refused)
    app = HttpApp(
        config, config.body_bytes_max, lambda: served.is_draining, shortage, tenant_of, on_unauthenticated, host_rule
    )
    routes = app.routes
    completion = partial(parse_completion, unknown_fields=config.unknown_fields)
    chat = partial(parse_chat, unknown_fields=config.unknown_fields)
    routes.get("/v1/models", endpoints.models)
    routes.get("/v1/models/{model}", endpoints.model)
    routes.post(COMPLETIONS, partial(endpoints.serve, _COUNTED[COMPLETIONS], completion, CompletionAnswer))
    routes.post(CHAT, partial(endpoints.serve, _COUNTED[CHAT], chat, ChatAnswer))
    routes.get("/v1/streams/{generation_id}", endpoints.resume, takes_head=False)  # It would take the answer over.
    routes.post("/v1/requests/{request_id}/cancel", endpoints.cancel)
    HealthRoutes(served, control, names_models=tenant_of is None).add_to(routes)
    if admin is not None:
        AdminRoutes(admin).add_to(routes)
    OpenApiRoute(routes, config).add()
    return app


def _count_unauthenticated(on_refused: OnRefused, request: HttpRequest, failure: Failure) -> None:
    """A request without a valid key counts as an outcome, as over gRPC."""
    if (endpoint := _COUNTED.get(request.path)) is not None:
        on_refused(endpoint, request.id, failure)


def build_admin_app(admin: Admin, state: FrontendState, control: FrontendControl, config: HttpConfig) -> HttpApp:
    """The application of an address for admin calls alone, with health, metrics and an OpenAPI document of its own."""
    app = HttpApp(config, BODY_BYTES_MAX, lambda: state.is_draining)
    HealthRoutes(state, control).add_to(app.routes)
    AdminRoutes(admin).add_to(app.routes)
    OpenApiRoute(app.routes, config).add()
    return app
