"""bearer_of: the token of an `authorization`, by the scheme Bearer alone."""

import pytest

from services.access.bearer import bearer_of


@pytest.mark.parametrize(
    ("given", "token"),
    [
        ("Bearer abc", "abc"),
        ("bearer   abc ", "abc"),
        ("BEARER a b", "a b"),
        ("Bearer", ""),
        ("Basic abc", None),
        ("abc", None),
        ("", None),
        (None, None),
    ],
)
def test_token_is_what_follows_the_scheme(given: str | None, token: str | None) -> None:
    assert bearer_of(given) == token
