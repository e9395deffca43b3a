"""The options of a frontend: the admin token is given in one way only, and is never said again."""

from pathlib import Path

import click
import pytest

from services.cli.frontend import TOKEN_VARIABLES, admin_token


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
