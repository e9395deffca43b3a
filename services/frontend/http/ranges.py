"""Types of fields with the ranges that the OpenAPI document tells; validate.py checks them, for gRPC as well."""

import math
from typing import Annotated, Any

from msgspec import Meta

from services.validate import ABOVE_ZERO, CHOICES_MAX, LOGPROBS_MAX, RANGES, SEED_MAX


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
Seed = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": SEED_MAX})]
ChoiceCount = Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": CHOICES_MAX})]
RivalCount = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": LOGPROBS_MAX})]
MaxTokens = Annotated[int, Meta(extra_json_schema={"minimum": 1})]
MinTokens = Annotated[int, Meta(extra_json_schema={"minimum": 0})]
TopK = Annotated[int, Meta(extra_json_schema={"minimum": -1})]
"""-1 and 0: all."""
