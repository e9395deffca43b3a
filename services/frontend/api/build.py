"""The application of admin calls alone, for an address of its own."""

from functools import partial

from services.core.interface import Layer
from services.frontend.api.admin.admin import Admin
from services.frontend.api.admin.http_routes import BODY_BYTES_MAX, AdminRoutes
from services.frontend.api.health import Ops, State
from services.frontend.api.openai.endpoints import Gateway, OnRefused, Served
from services.frontend.api.openai.parse import parse_chat, parse_completion
from services.frontend.api.openai.responses import ChatAnswer, CompletionAnswer
from services.frontend.api.openapi.document import OpenApi
from services.frontend.control import FrontendControl
from services.http.app import HttpApp
from services.http.server.config import HttpConfig


def build_admin_app(admin: Admin, state: State, whole: FrontendControl, config: HttpConfig) -> HttpApp:
    """With health and metrics, and its own OpenAPI document."""
    app = HttpApp(config, BODY_BYTES_MAX, lambda: state.is_draining)
    Ops(state, whole).add_to(app.routes)
    AdminRoutes(admin).add_to(app.routes)
    OpenApi(app.routes, config.overload_status).add()
    return app


def build_app(
    pipeline: Layer,
    served: Served,
    whole: FrontendControl,
    config: HttpConfig,
    on_refused: OnRefused,
    admin: Admin | None = None,
) -> HttpApp:
    """The application; `http_server` serves it.

    on_refused: told of requests that are too broken for the pipeline. admin: None where admin calls are answered
    elsewhere, or nowhere.
    """
    gateway = Gateway(pipeline, served, whole, config, on_refused)
    app = HttpApp(config, config.body_bytes_max, lambda: served.is_draining)
    routes = app.routes
    routes.get("/v1/models", gateway.models)
    routes.get("/v1/models/{model}", gateway.model)
    routes.post("/v1/completions", partial(gateway.serve, "completions", parse_completion, CompletionAnswer))
    routes.post("/v1/chat/completions", partial(gateway.serve, "chat_completions", parse_chat, ChatAnswer))
    routes.post("/v1/requests/{request_id}/cancel", gateway.cancel)
    Ops(served, whole).add_to(routes)
    if admin is not None:
        AdminRoutes(admin).add_to(routes)
    OpenApi(routes, config.overload_status).add()
    return app
