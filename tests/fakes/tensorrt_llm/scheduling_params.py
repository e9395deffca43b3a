"""The placement of a request."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class SchedulingParams:
    """`attention_dp_rank`: the requested rank. `attention_dp_relax`: another rank may be used if that one is full."""

    attention_dp_rank: int | None = None
    attention_dp_relax: bool | None = None
