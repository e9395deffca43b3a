"""Keyring: a request with a valid key is its tenant's, and any other is told why it is refused, without its secret."""

from collections.abc import Mapping
from datetime import date, timedelta

import pytest

from services.access.key import NewKey, make_key
from services.access.keyring import Key, Keyring
from services.core.errors import Failure, Reason
from services.core.tenant import Tenant

ACME, OTHER = Tenant(name="acme"), Tenant(name="other")
KEY, SECOND, UNKNOWN = make_key(), make_key(), make_key()


def ring(*keys: tuple[NewKey, Tenant], expires: date | None = None) -> Keyring:
    return Keyring({key.id: Key(key.id, tenant, key.sha256, expires) for key, tenant in keys})


RING = ring((KEY, ACME), (SECOND, OTHER))


def bearer(text: str) -> Mapping[str, str]:
    return {"authorization": f"Bearer {text}"}


@pytest.mark.parametrize(
    "headers",
    [
        bearer(KEY.text),
        {"authorization": f"bearer  {KEY.text} "},
        {"x-api-key": KEY.text},
        {"authorization": "Basic dXNlcjpwYXNz", "x-api-key": KEY.text},
    ],
    ids=["bearer", "spaces", "x-api-key", "x-api-key beside another scheme"],
)
def test_key_is_found_where_clients_send_it(headers: Mapping[str, str]) -> None:
    assert RING.tenant_of(headers) is ACME


def test_each_key_is_of_its_tenant() -> None:
    assert RING.tenant_of(bearer(SECOND.text)) is OTHER


def test_several_keys_of_one_tenant_are_valid_at_once() -> None:
    both = ring((KEY, ACME), (SECOND, ACME))

    assert both.tenant_of(bearer(KEY.text)) is both.tenant_of(bearer(SECOND.text)) is ACME


REFUSED: Mapping[str, tuple[Mapping[str, str], str]] = {
    "no key": ({}, "needs an API key, and the request has no API key"),
    "another scheme": ({"authorization": "Basic dXNlcjpwYXNz"}, "has another scheme than Bearer"),
    "a key of another server": (bearer("sk-proj-1234"), "not one of this server"),
    "an empty key": (bearer(""), "not one of this server"),
    "bytes that are no text": (bearer("\udcff"), "not one of this server"),
    "an unknown key": (bearer(UNKNOWN.text), f"the API key {UNKNOWN.id} is not known here"),
    "a damaged key": (bearer(KEY.text[:-1] + ("0" if KEY.text[-1] != "0" else "1")), f"{KEY.id} is damaged"),
    "a known id with another secret": (
        bearer(UNKNOWN.text.replace(UNKNOWN.id, KEY.id)),
        f"the API key {KEY.id} is damaged",
    ),
}


@pytest.mark.parametrize(("headers", "detail"), REFUSED.values(), ids=REFUSED)
def test_other_requests_are_refused_with_the_reason(headers: Mapping[str, str], detail: str) -> None:
    with pytest.raises(Failure, match=detail) as caught:
        RING.tenant_of(headers)

    assert caught.value.reason is Reason.UNAUTHENTICATED
    for text in headers.values():
        secret = text.split("_")[2] if text.count("_") == 3 else text
        assert not secret or secret not in str(caught.value)


def test_key_is_valid_until_the_day_before_it_expires() -> None:
    today = date.today()
    assert ring((KEY, ACME), expires=today + timedelta(days=1)).tenant_of(bearer(KEY.text)) is ACME

    with pytest.raises(Failure, match=f"the API key {KEY.id} expired on {today}"):
        ring((KEY, ACME), expires=today).tenant_of(bearer(KEY.text))
