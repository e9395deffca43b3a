"""The options of a frontend: the admin token is given in one way only, and is never said again; what would do nothing
is told, not passed over."""

from pathlib import Path
from typing import Any

import click
import pytest
from structlog.testing import capture_logs

from services.cli.frontend import (
    TOKEN_VARIABLES,
    _warn_of_idle_thresholds,
    admin_token,
    check_options,
    command,
)
from services.frontend.routing.thresholds import AdmissionConfig, Thresholds


def parsed(*options: str) -> dict[str, Any]:
    with command.make_context("unbroken frontend", [*options]) as context:
        return context.params


@pytest.mark.parametrize("content", ["secret", "secret\n", "  secret \r\n"])
def test_a_file_has_the_token_and_perhaps_a_line_end(tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    file.write_text(content)

    assert admin_token(None, file) == "secret"


def test_none_is_none() -> None:
    assert admin_token(None, None) is None


@pytest.mark.parametrize("variable", TOKEN_VARIABLES)
def test_an_empty_variable_is_an_error(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what a compose file makes of a secret that is missing, and would have left admin calls open to all."""
    monkeypatch.setenv(variable, "")

    with pytest.raises(click.UsageError, match=f"{variable} is empty"):
        admin_token(None, None)


def test_two_of_them_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(click.UsageError, match="give one of them"):
        admin_token("secret", tmp_path / "token")


@pytest.mark.parametrize("token", ["", "two words", "größe", "x" * 513, "tab\t"])
def test_one_that_fits_no_header_is_an_error_that_does_not_say_it(token: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(token)

    for given, path in ((token, None), (None, file)):
        if path is not None and token == "tab\t":
            continue  # In a file, space around it is no part of it.
        with pytest.raises(click.UsageError) as caught:
            admin_token(given, path)
        assert "visible ASCII" in caught.value.message
        assert not token or token not in caught.value.message


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(click.UsageError, match=f"{file} cannot be read"):
        admin_token(None, file)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--admin-listen", "127.0.0.1:0"),
        ("--admin-grpc-listen", "127.0.0.1:0"),
        ("--admin-token", "secret"),
        ("--admin-token-file", "token"),
    ],
)
def test_an_admin_api_that_is_off_has_no_address_and_no_token(
    option: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to be off without a word, and its address and metrics with it."""
    monkeypatch.chdir(tmp_path)
    Path("token").write_text("secret")
    check_options(parsed(option, value))

    with pytest.raises(click.UsageError, match=f"--disable-admin-api leaves no admin calls for {option}: ") as caught:
        check_options(parsed("--disable-admin-api", option, value))

    assert "secret" not in caught.value.message


def test_an_admin_api_may_be_off_alone() -> None:
    check_options(parsed("--disable-admin-api"))


@pytest.mark.parametrize(
    ("thresholds", "is_on", "warnings"),
    [
        (Thresholds(active_decode_blocks=0.0), False, 1),
        (Thresholds(active_prefill_tokens=0), False, 1),
        (Thresholds(active_prefill_tokens=0), True, 0),
        (Thresholds(), False, 0),
    ],
)
def test_thresholds_that_do_nothing_are_warned_of(thresholds: Thresholds, is_on: bool, warnings: int) -> None:
    with capture_logs() as logs:
        _warn_of_idle_thresholds(AdmissionConfig(is_on=is_on, thresholds=thresholds))

    assert [line["log_level"] for line in logs] == ["warning"] * warnings
    assert all("--admission-control" in line["why"] for line in logs)


@pytest.mark.parametrize(
    ("given", "origins"),
    [("*", ["*"]), ("https://a.example, http://localhost:3000", ["https://a.example", "http://localhost:3000"])],
)
def test_origins_are_a_list(given: str, origins: list[str]) -> None:
    assert parsed("--cors-allow-origin", given)["cors_allow_origin"] == origins


@pytest.mark.parametrize("given", ["", "a.example", "https://a.example/", "https://a.example,", "https://A.example"])
def test_what_no_browser_would_call_an_origin_is_an_error(given: str) -> None:
    """A page's origin is compared as it is: one that is written otherwise would never match."""
    with pytest.raises(click.BadParameter, match="is no origin"):
        parsed("--cors-allow-origin", given)
