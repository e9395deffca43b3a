"""When a worker counts as busy: thresholds over what it reports of its load."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """What is strictly exceeded where a rank is busy; None: not looked at.

    active_decode_blocks: fraction of key-value cache blocks in use, from 0 to 1. active_prefill_tokens: prompt tokens
    still to be computed, at least 0.
    """

    active_decode_blocks: float | None = None
    active_prefill_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """is_on: whether thresholds act. thresholds: of models for which none were set at run time."""

    is_on: bool = False
    thresholds: Thresholds = field(default_factory=Thresholds)
