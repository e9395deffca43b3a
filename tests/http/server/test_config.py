"""Health checks have a fixed list of paths, and every wait and buffer of the server has a bound by default."""

from dataclasses import fields

from services.http.server.config import PROBE_PATHS, HttpConfig

NO_BOUNDS = {
    "request_timeout_s",
    "overload_status",
    "cors_origins",
    "unknown_fields",
    "takes_reserve",
    "sse_keepalive_s",
    "client",
    "keep",
}


def test_paths_of_health_checks_are_those_of_kubernetes_probes() -> None:
    assert PROBE_PATHS == ("/live", "/health")


def test_every_bound_is_set_by_default() -> None:
    config = HttpConfig()

    for one in fields(HttpConfig):
        assert one.name in NO_BOUNDS or getattr(config, one.name) > 0, one.name


def test_requests_have_no_deadline_by_default() -> None:
    assert HttpConfig().request_timeout_s is None
