"""The keys that are valid now, and whose they are."""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime

from services.access.bearer import bearer_of
from services.access.key import hash_of, id_of, is_whole
from services.core.errors import Failure, Reason
from services.core.tenant import Tenant

AUTHORIZATION, API_KEY = "authorization", "x-api-key"


@dataclass(frozen=True, slots=True)
class Key:
    """A valid key. `sha256`: of its text. `expires`: the first day, in UTC, on which it is not valid any more."""

    id: str
    tenant: Tenant
    sha256: str = field(repr=False)
    expires: date | None = None


class Keyring:
    """Finds the tenant of a request by the key that it carries."""

    def __init__(self, keys: Mapping[str, Key]) -> None:
        """`keys`: by id."""
        self._keys = keys

    def tenant_of(self, headers: Mapping[str, str]) -> Tenant:
        """The tenant whose key these headers or metadata carry, by lower-case names.

        Raises UNAUTHENTICATED, whose detail has no part of a key but its id.
        """
        text = _given(headers)
        key = self._keys.get(id_of(text) or "")
        if key is None or not hmac.compare_digest(hash_of(text), key.sha256):
            raise _unknown(text)
        if key.expires is not None and today() >= key.expires:
            raise _refused(f"the API key {key.id} expired on {key.expires}")
        return key.tenant


def today() -> date:
    """The day in UTC, so that all machines agree on it."""
    return datetime.now(UTC).date()


def _given(headers: Mapping[str, str]) -> str:
    """The key that a request carries. Raises UNAUTHENTICATED if there is none."""
    authorization = headers.get(AUTHORIZATION)
    if (text := bearer_of(authorization)) is not None:
        return text
    if (given := headers.get(API_KEY)) is not None:
        return given.strip()
    what = "another scheme than Bearer" if authorization is not None else "no API key"
    raise _refused(f"this server needs an API key, and the request has {what}")


def _unknown(text: str) -> Failure:
    if id_of(text) is None:
        return _refused("the given API key is not one of this server: its keys begin with ub_")
    if not is_whole(text):
        return _refused(f"the API key {id_of(text)} is damaged: its checksum does not fit, so a part of it was lost")
    return _refused(f"the API key {id_of(text)} is not known here: it was revoked, or it is of another server")


def _refused(detail: str) -> Failure:
    return Failure(Reason.UNAUTHENTICATED, detail)
