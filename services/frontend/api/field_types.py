"""Types of request fields. Their ranges are for the OpenAPI document; core/validation.py checks them, for gRPC too."""

import math
import re
from typing import Annotated, Any

from msgspec import Meta

from services.core.request import ROLES
from services.core.validation import (
    ABOVE_ZERO,
    CHOICES_MAX,
    LOGIT_BIAS_MAX,
    LOGIT_BIASES_MAX,
    LOGPROBS_MAX,
    NAME_CHARACTERS_MAX,
    RANGES,
    SEED_MAX,
    SPEAKER_FORM,
    STOP_STRING_CHARACTERS_MAX,
    STOP_STRINGS_MAX,
    STOP_TOKENS_MAX,
)
from services.frontend.routing.thresholds import TOKENS_MAX


def _range_of(name: str) -> dict[str, Any]:
    least, most = RANGES[name]
    bounds: dict[str, Any] = {"exclusiveMinimum" if name in ABOVE_ZERO else "minimum": least}
    return bounds | ({"maximum": most} if math.isfinite(most) else {})


Temperature = Annotated[float, Meta(extra_json_schema=_range_of("temperature"))]
TopP = Annotated[float, Meta(extra_json_schema=_range_of("top_p"))]
MinP = Annotated[float, Meta(extra_json_schema=_range_of("min_p"))]
PresencePenalty = Annotated[float, Meta(extra_json_schema=_range_of("presence_penalty"))]
FrequencyPenalty = Annotated[float, Meta(extra_json_schema=_range_of("frequency_penalty"))]
RepetitionPenalty = Annotated[float, Meta(extra_json_schema=_range_of("repetition_penalty"))]
SEED_RANDOM = -1
SEED_MIN = -(2**63)
"""OpenAI's seeds are signed."""
Seed = Annotated[int, Meta(extra_json_schema={"minimum": SEED_MIN, "maximum": SEED_MAX})]
"""SEED_RANDOM: the frontend chooses one."""
ChoiceCount = Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": CHOICES_MAX})]
LogprobsCount = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": LOGPROBS_MAX})]
NO_LIMIT = -1
MaxTokens = Annotated[int, Meta(extra_json_schema={"minimum": NO_LIMIT, "not": {"const": 0}})]
"""NO_LIMIT: as many as the context has room for."""
MinTokens = Annotated[int, Meta(extra_json_schema={"minimum": 0})]
TOP_K_ALL = -1
TopK = Annotated[int, Meta(extra_json_schema={"minimum": TOP_K_ALL})]
"""-1 and 0: all tokens."""

TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
"""msgspec checks this range when it decodes a body."""
TokenIds = Annotated[list[TokenId], Meta(extra_json_schema={"minItems": 1})]
GeneratedTokenIds = Annotated[list[TokenId | list[TokenId] | None], Meta()]
"""The token ids of one choice, or a list for each choice; null for a choice that the client has complete."""
NotEmpty = Annotated[str, Meta(extra_json_schema={"minLength": 1})]
Prompts = Annotated[list[NotEmpty | TokenId | TokenIds], Meta(extra_json_schema={"minItems": 1})]
StopString = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": STOP_STRING_CHARACTERS_MAX})]
StopStrings = Annotated[list[StopString], Meta(extra_json_schema={"maxItems": STOP_STRINGS_MAX})]
StopTokenIds = Annotated[list[TokenId], Meta(extra_json_schema={"maxItems": STOP_TOKENS_MAX})]
TOKEN_ID = re.compile("[0-9]{1,10}")
_TokenIdText = Annotated[str, Meta(extra_json_schema={"pattern": f"^{TOKEN_ID.pattern}$"})]
_Bias = Annotated[float, Meta(extra_json_schema={"minimum": -LOGIT_BIAS_MAX, "maximum": LOGIT_BIAS_MAX})]
LogitBias = Annotated[dict[_TokenIdText, _Bias], Meta(extra_json_schema={"maxProperties": LOGIT_BIASES_MAX})]
BlocksThreshold = Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": 1})]
TokensThreshold = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": TOKENS_MAX})]
Role = Annotated[str, Meta(extra_json_schema={"enum": list(ROLES)})]
SpeakerName = Annotated[
    str, Meta(extra_json_schema={"maxLength": NAME_CHARACTERS_MAX, "pattern": f"^{SPEAKER_FORM.pattern}$"})
]
PartKind = Annotated[str, Meta(extra_json_schema={"enum": ["text"]})]
