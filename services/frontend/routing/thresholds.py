"""Thresholds over a worker's load reports: a worker that exceeds one on every rank counts as busy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from services.core.errors import invalid

TOKENS_MAX = 2**64 - 1
"""The largest value of the field in admin.proto."""
THRESHOLDS = {
    "active_decode_blocks_threshold": "active_decode_blocks",
    "active_prefill_tokens_threshold": "active_prefill_tokens",
}
"""The names that clients use → the fields of `Thresholds`."""


class Rank(Protocol):
    """The load of one data-parallel rank, as last reported."""

    @property
    def kv_blocks_used(self) -> int: ...

    @property
    def kv_blocks_total(self) -> int: ...

    @property
    def active_prefill_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """A rank is busy if it strictly exceeds one of these. None: no threshold.

    `active_decode_blocks`: fraction of key-value cache blocks in use, from 0 to 1. `active_prefill_tokens`: prompt
    tokens still to be computed, at least 0. Raises INVALID_ARGUMENT for other values, with the client's field name.
    """

    active_decode_blocks: float | None = None
    active_prefill_tokens: int | None = None

    def __post_init__(self) -> None:
        blocks, tokens = self.active_decode_blocks, self.active_prefill_tokens
        if blocks is not None and not 0 <= blocks <= 1:  # NaN fails this too.
            detail = f"active_decode_blocks_threshold is {blocks}: it must be a fraction from 0 to 1"
            raise invalid("active_decode_blocks_threshold", detail)
        if tokens is not None and not 0 <= tokens <= TOKENS_MAX:
            detail = f"active_prefill_tokens_threshold must be a number of tokens from 0 to {TOKENS_MAX}"
            raise invalid("active_prefill_tokens_threshold", detail)

    def changed(self, changes: Mapping[str, Any]) -> "Thresholds":
        """A copy with these changes, by the names that clients use; None removes one. Raises INVALID_ARGUMENT."""
        return replace(self, **{THRESHOLDS[name]: value for name, value in changes.items()})

    def named(self) -> dict[str, str]:
        """The thresholds that are set, under the names that clients use."""
        values = ((name, getattr(self, field)) for name, field in THRESHOLDS.items())
        return {name: str(value) for name, value in values if value is not None}


def is_busy(ranks: Sequence[Rank], thresholds: Thresholds) -> bool:
    """Whether a worker is busy: every known rank is. A worker without a known rank is not busy."""
    return bool(ranks) and all(any(_exceeded(rank, thresholds)) for rank in ranks)


def excess(ranks: Sequence[Rank], thresholds: Thresholds) -> str:
    """The thresholds that the least loaded rank exceeds, for people. `ranks`: at least one, all of them busy."""
    least = min(ranks, key=lambda one: (_part_used(one), one.active_prefill_tokens))
    are_blocks_over, are_tokens_over = _exceeded(least, thresholds)
    parts = []
    if are_blocks_over:
        used = f"{_part_used(least):.4g} ({least.kv_blocks_used} of {least.kv_blocks_total})"
        parts.append(f"active_decode_blocks {used}, above the threshold of {thresholds.active_decode_blocks}")
    if are_tokens_over:
        tokens = least.active_prefill_tokens
        parts.append(f"active_prefill_tokens {tokens}, above the threshold of {thresholds.active_prefill_tokens}")
    return ", ".join(parts)


def _part_used(rank: Rank) -> float:
    """The fraction of blocks in use. A division, because a rounded product can be too small: 0.29 * 100 < 29."""
    return rank.kv_blocks_used / rank.kv_blocks_total if rank.kv_blocks_total else 0.0


def _exceeded(rank: Rank, thresholds: Thresholds) -> tuple[bool, bool]:
    """Whether the rank exceeds the threshold of blocks, and whether it exceeds that of tokens."""
    blocks, tokens = thresholds.active_decode_blocks, thresholds.active_prefill_tokens
    return (
        blocks is not None and _part_used(rank) > blocks,
        tokens is not None and rank.active_prefill_tokens > tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """`is_on`: whether thresholds act. `thresholds`: of models that have none of their own."""

    is_on: bool = False
    thresholds: Thresholds = field(default_factory=Thresholds)


class BusyThresholds:
    """The current thresholds of each model. Each request reads them, so a change counts at once."""

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self._set: dict[
            str, Thresholds
        ] = {}  # By model. The callers of `set` check that the model exists, so this is bounded.

    @property
    def is_on(self) -> bool:
        """Whether thresholds act. They can be read and set even if they do not."""
        return self._config.is_on

    def of(self, model: str) -> Thresholds:
        """The thresholds last set for the model, or those configured for all models."""
        return self._set.get(model, self._config.thresholds)

    def change(self, model: str, changes: Mapping[str, Any]) -> None:
        """Change some thresholds of a model, by the names that clients use. Raises INVALID_ARGUMENT."""
        self.set(model, self.of(model).changed(changes))

    def set(self, model: str, thresholds: Thresholds) -> None:
        """Set all thresholds of a model, which must exist."""
        self._set[model] = thresholds

    def acting(self, model: str) -> Thresholds | None:
        """The thresholds that routing applies; None if no worker can be busy."""
        if not self._config.is_on:
            return None
        thresholds = self.of(model)
        return None if thresholds == Thresholds() else thresholds
