"""Response headers of the OpenAI endpoints: the file to edit when a header of successful answers is added.

A header that is added here is also put into `HEADERS`, which is a part of the OpenAPI document.
"""

from collections.abc import Mapping
from typing import Any

from services.core.call import Told
from services.core.generation.wish import GENERATION_ID
from services.core.validation import SEED_MAX, SEED_USED

HEADERS: Mapping[str, Mapping[str, Any]] = {
    SEED_USED: {"type": "integer", "minimum": 0, "maximum": SEED_MAX},
    GENERATION_ID: {"type": "string", "pattern": "^[0-9a-f]{32}$"},
}
"""Header → its JSON schema."""
_NONE: Mapping[str, str] = {}


def told_headers(told: Told) -> Mapping[str, str]:
    """The headers that an answer has because of what its request was told."""
    if told.seed is None and told.generation_id is None:
        return _NONE
    headers = {} if told.seed is None else {SEED_USED: str(told.seed)}
    return headers if told.generation_id is None else {**headers, GENERATION_ID: told.generation_id}
