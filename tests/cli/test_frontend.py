"""`unbroken frontend`: options that have no effect cause a warning, and malformed origins are refused."""

from typing import Any

import click
import pytest
from structlog.testing import capture_logs

from services.cli.frontend import command, frontend_config, warn_of_unused_thresholds
from services.core.generation.wish import KeepConfig
from services.frontend.routing.thresholds import AdmissionConfig, Thresholds
from services.http.server.config import HttpConfig


def parsed(*options: str) -> dict[str, Any]:
    with command.make_context("unbroken frontend", [*options]) as context:
        return context.params


@pytest.mark.parametrize(
    ("thresholds", "is_on", "warnings"),
    [
        (Thresholds(active_decode_blocks=0.0), False, 1),
        (Thresholds(active_prefill_tokens=0), False, 1),
        (Thresholds(active_prefill_tokens=0), True, 0),
        (Thresholds(), False, 0),
    ],
)
def test_thresholds_without_admission_control_cause_a_warning(
    thresholds: Thresholds, is_on: bool, warnings: int
) -> None:
    with capture_logs() as logs:
        warn_of_unused_thresholds(AdmissionConfig(is_on=is_on, thresholds=thresholds))

    assert [line["log_level"] for line in logs] == ["warning"] * warnings
    assert all("--admission-control" in line["why"] for line in logs)


@pytest.mark.parametrize(
    ("given", "origins"),
    [("*", ["*"]), ("https://a.example, http://localhost:3000", ["https://a.example", "http://localhost:3000"])],
)
def test_cors_origins_are_parsed_as_a_list(given: str, origins: list[str]) -> None:
    assert parsed("--cors-allow-origin", given)["cors_allow_origin"] == origins


def test_unknown_fields_reach_the_http_api() -> None:
    assert frontend_config(parsed()).http.unknown_fields == "refuse-misspelt"
    assert frontend_config(parsed("--unknown-fields", "refuse")).http.unknown_fields == "refuse"


def test_what_becomes_of_sampled_answers_reaches_the_layer_that_moves_them() -> None:
    assert frontend_config(parsed()).pipeline.migrate.resume_sampling == "prefix"
    assert frontend_config(parsed("--resume-sampling", "exact")).pipeline.migrate.resume_sampling == "exact"


def test_keepalive_of_idle_connections_reaches_the_http_server() -> None:
    assert frontend_config(parsed()).http.keepalive_s == HttpConfig().keepalive_s
    assert frontend_config(parsed("--http-keepalive", "620")).http.keepalive_s == 620


def test_keepalive_too_short_for_a_connections_first_request_is_refused() -> None:
    with pytest.raises(click.BadParameter, match="from 1 to"):
        parsed("--http-keepalive", "0")


def test_what_becomes_of_a_request_whose_client_leaves_reaches_both_apis() -> None:
    given = parsed("--on-disconnect", "continue", "--detach-grace", "90")

    assert frontend_config(parsed()).http.keep == KeepConfig(on_disconnect="cancel", grace_s=30)
    assert frontend_config(given).http.keep == KeepConfig(on_disconnect="continue", grace_s=90)


@pytest.mark.parametrize("given", ["", "a.example", "https://a.example/", "https://a.example,", "https://A.example"])
def test_malformed_cors_origin_is_refused(given: str) -> None:
    """Origins are compared literally: one in another form than a browser's would never match."""
    with pytest.raises(click.BadParameter, match="is not an origin"):
        parsed("--cors-allow-origin", given)


@pytest.mark.parametrize(("given", "is_parsed"), [([], False), (["text"], False), (["parse"], True)])
def test_contents_are_parsed_for_control_tokens_on_request_only(given: list[str], is_parsed: bool) -> None:
    options = [f"--content-control-tokens={one}" for one in given]

    assert frontend_config(parsed(*options)).pipeline.parses_contents == is_parsed


@pytest.mark.parametrize("listen", ["--http-listen=0.0.0.0:0", "--grpc-listen=[::]:0", "--http-listen=frontend-1:8000"])
def test_frontend_that_others_can_reach_needs_keys_or_a_word(listen: str) -> None:
    with pytest.raises(click.UsageError, match="can be reached from other machines, and clients need no keys"):
        frontend_config(parsed(listen))

    assert frontend_config(parsed(listen, "--allow-anonymous")).access.allows_anonymous
    assert frontend_config(parsed(listen, "--keys-file=keys.toml")).access.keys_file is not None


def test_empty_variable_of_the_keys_file_lets_nobody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_KEYS_FILE", "")

    with pytest.raises(click.UsageError, match="DYN_KEYS_FILE is empty: give it a value, or unset it"):
        frontend_config(parsed())


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0", "localhost:0", "127.8.8.8:1"])
def test_frontend_on_loopback_needs_neither(listen: str) -> None:
    config = frontend_config(parsed(f"--http-listen={listen}", f"--grpc-listen={listen}"))

    assert not config.access.allows_anonymous
