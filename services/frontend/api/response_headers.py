"""Response headers of the OpenAI endpoints: the file to edit when a header of successful answers is added.

A header that is added here is also put into `HEADERS`, which is a part of the OpenAPI document.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from services.core.call import Told
from services.core.generation.wish import GENERATION_ID
from services.core.tenant import RATE_COUNTS, RATE_LEFT, RATE_POLICY, RATE_RESETS, Allowance
from services.core.validation import SEED_MAX, SEED_USED

HEADERS: Mapping[str, Mapping[str, Any]] = {
    SEED_USED: {"type": "integer", "minimum": 0, "maximum": SEED_MAX},
    GENERATION_ID: {"type": "string", "pattern": "^[0-9a-f]{32}$"},
    **{name: {"type": "integer", "minimum": 0} for name in RATE_COUNTS},
    **{name: {"type": "string"} for name in (*RATE_RESETS, RATE_POLICY, RATE_LEFT)},
}
"""Header → its JSON schema."""
_NONE: Mapping[str, str] = {}


def told_headers(told: Told) -> Mapping[str, str]:
    """The headers that an answer has because of what its request was told."""
    if told.seed is None and told.generation_id is None and not told.allowances:
        return _NONE
    headers = {} if told.seed is None else {SEED_USED: str(told.seed)}
    if told.generation_id is not None:
        headers[GENERATION_ID] = told.generation_id
    return {**headers, **allowance_headers(told.allowances)}


def allowance_headers(allowances: Sequence[Allowance]) -> Mapping[str, str]:
    """What the client's tenant has left, in the headers of OpenAI and in those of the draft."""
    headers: dict[str, str] = {}
    for one in allowances:
        headers[f"x-ratelimit-limit-{one.name}"] = str(math.floor(one.limit))
        headers[f"x-ratelimit-remaining-{one.name}"] = str(one.remaining)
        headers[f"x-ratelimit-reset-{one.name}"] = f"{one.reset_s:.3f}s"
    if allowances:
        headers[RATE_POLICY] = ", ".join(f'"{one.name}";q={math.floor(one.limit)};w=60' for one in allowances)
        headers[RATE_LEFT] = ", ".join(
            f'"{one.name}";r={one.remaining};t={math.ceil(one.reset_s)}' for one in allowances
        )
    return headers
