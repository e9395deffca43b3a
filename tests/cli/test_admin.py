"""Admin options: the token comes from exactly one place and is never shown, and contradictions are refused."""

from pathlib import Path

import click
import pytest

from services.cli.admin import TOKEN_VARIABLES, admin_config, admin_token
from services.cli.frontend import command


def config(*options: str) -> object:
    with command.make_context("unbroken frontend", [*options]) as context:
        return admin_config(context.params)


@pytest.mark.parametrize("content", ["secret", "secret\n", "  secret \r\n"])
def test_token_is_read_from_a_file_without_surrounding_whitespace(tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    file.write_text(content)

    assert admin_token(None, file) == "secret"


def test_token_is_none_if_it_is_not_given() -> None:
    assert admin_token(None, None) is None


@pytest.mark.parametrize("variable", TOKEN_VARIABLES)
def test_empty_token_variable_is_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compose file sets it to empty if a secret is missing, which would leave the admin API open to all."""
    monkeypatch.setenv(variable, "")

    with pytest.raises(click.UsageError, match=f"{variable} is empty"):
        admin_token(None, None)


def test_token_and_token_file_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(click.UsageError, match="give one of them"):
        admin_token("secret", tmp_path / "token")


@pytest.mark.parametrize("token", ["", "two words", "größe", "x" * 513, "tab\t"])
def test_token_that_fits_no_header_is_refused_without_showing_it(token: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(token)

    for given, path in ((token, None), (None, file)):
        if path is not None and token == "tab\t":
            continue  # Whitespace around a token in a file is removed.
        with pytest.raises(click.UsageError) as caught:
            admin_token(given, path)
        assert "visible ASCII" in caught.value.message
        assert not token or token not in caught.value.message


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_unreadable_token_file_is_named_in_the_error(tmp_path: Path, content: bytes | None) -> None:
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
def test_disabled_admin_api_with_an_address_or_a_token_is_refused(
    option: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug: the admin API, its address and its metrics were disabled without a message."""
    monkeypatch.chdir(tmp_path)
    Path("token").write_text("secret")
    config(option, value)

    with pytest.raises(click.UsageError, match=f"--disable-admin-api contradicts {option}: ") as caught:
        config("--disable-admin-api", option, value)

    assert "secret" not in caught.value.message


def test_admin_api_can_be_disabled() -> None:
    config("--disable-admin-api")
