"""A tenant: a customer, and what it may have of the plane."""

from collections.abc import Callable, Mapping

from msgspec import Struct

WEIGHT_MIN, WEIGHT_MAX = 1e-6, 1e6
"""Weights are compared by dividing by them."""
TENANT_NAME_CHARACTERS_MAX = 256


class Tenant(Struct, frozen=True, kw_only=True):
    """A customer of the operator. All its keys share what it may have.

    `weight`: its share of a worker that others want, too, relative to theirs; in these limits. `queue_timeout_s`: how
    long a request of it waits for a slot at most, if that is less than the worker's own limit. `models`: those that it
    may use. None: no limit.
    """

    name: str
    weight: float = 1.0
    queue_timeout_s: float | None = None
    models: frozenset[str] | None = None

    def may_use(self, model: str) -> bool:
        """Whether the tenant may use the model. One that it may not use does not exist for it."""
        return self.models is None or model in self.models


EVERYBODY = Tenant(name="")
"""The tenant of all requests where no keys file is set."""

TenantOf = Callable[[Mapping[str, str]], Tenant]
"""Finds the tenant whose key is among headers or metadata, by lower-case names. Raises Failure(UNAUTHENTICATED)."""
