"""Where a request is to run."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class SchedulingParams:
    """attention_dp_rank: the rank that is wanted; attention_dp_relax: another will do when that one is full."""

    attention_dp_rank: int | None = None
    attention_dp_relax: bool | None = None
