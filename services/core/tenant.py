"""A tenant: a customer, and what it may have of the plane."""

from collections.abc import Callable, Mapping

from msgspec import Struct

WEIGHT_MIN, WEIGHT_MAX = 1e-6, 1e6
"""Weights are compared by dividing by them."""
TENANT_NAME_CHARACTERS_MAX = 256
LABELS_MAX = 100
"""How many tenants have a name in metrics: the first ones. The others share one."""
OTHERS = "(other)"
"""Their label, which can be no tenant's name."""


class Tenant(Struct, frozen=True, kw_only=True):
    """A customer of the operator. All its keys share what it may have.

    `weight`: its share of a worker that others want, too, relative to theirs; in these limits. `queue_timeout_s`: how
    long a request of it waits for a slot at most, if that is less than the worker's own limit. `models`: those that it
    may use. `requests_per_minute`, `tokens_per_minute`, `requests_at_once`: what it may send to all frontends together,
    see frontend/limits. None: no limit.
    """

    name: str
    weight: float = 1.0
    queue_timeout_s: float | None = None
    models: frozenset[str] | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    requests_at_once: int | None = None

    @property
    def is_limited(self) -> bool:
        """Whether frontends count what it sends."""
        return not (self.requests_per_minute is self.tokens_per_minute is self.requests_at_once is None)

    def may_use(self, model: str) -> bool:
        """Whether the tenant may use the model. One that it may not use does not exist for it."""
        return self.models is None or model in self.models


RATES = ("requests", "tokens")
"""What tenants have rates of."""
RATE_COUNTS = tuple(f"x-ratelimit-{what}-{name}" for name in RATES for what in ("limit", "remaining"))
RATE_RESETS = tuple(f"x-ratelimit-reset-{name}" for name in RATES)
RATE_POLICY, RATE_LEFT = "RateLimit-Policy", "RateLimit"
"""The headers that tell clients what their tenant has left: those of OpenAI, and those of
draft-ietf-httpapi-ratelimit-headers-10."""


class Allowance(Struct, frozen=True):
    """What a tenant has left of a rate. `name`: one of RATES. `limit`: how much comes in a minute.

    `reset_s`: until all of it is there again, if nothing is taken.
    """

    name: str
    limit: float
    remaining: int
    reset_s: float


EVERYBODY = Tenant(name="")
"""The tenant of all requests where no keys file is set."""

TenantOf = Callable[[Mapping[str, str]], Tenant]
"""Finds the tenant whose key is among headers or metadata, by lower-case names. Raises Failure(UNAUTHENTICATED)."""


class TenantLabels:
    """The labels of tenants in the metrics of one process."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def of(self, name: str) -> str:
        """The tenant's own name, or OTHERS."""
        if len(self._named) < LABELS_MAX:
            self._named.add(name)
        return name if name in self._named else OTHERS
