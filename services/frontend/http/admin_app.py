"""The application of admin calls alone, for an address of its own."""

from services.frontend.admin import Admin
from services.frontend.http.admin import BODY_BYTES_MAX, AdminRoutes
from services.frontend.http.config import HttpConfig
from services.frontend.http.openapi import OpenApi
from services.frontend.http.ops import Ops, State
from services.frontend.http.respond import HttpApp
from services.frontend.whole import Whole


def build_admin_app(admin: Admin, state: State, whole: Whole, config: HttpConfig) -> HttpApp:
    """With health and metrics, and its own OpenAPI document."""
    app = HttpApp(config, BODY_BYTES_MAX, lambda: state.is_draining)
    Ops(state, whole).add_to(app.routes)
    AdminRoutes(admin).add_to(app.routes)
    OpenApi(app.routes, config.overload_status).add()
    return app
