"""The OpenAI-compatible HTTP side of a frontend."""

from services.frontend.http.admin_app import build_admin_app
from services.frontend.http.app import Served, build_app
from services.frontend.http.config import HttpConfig
from services.frontend.http.respond import HttpApp
from services.frontend.http.server import http_server

__all__ = ["HttpApp", "HttpConfig", "Served", "build_admin_app", "build_app", "http_server"]
