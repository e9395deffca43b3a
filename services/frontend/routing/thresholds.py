"""When a worker counts as busy: thresholds over what it reports of its load."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from services.core.errors import invalid

TOKENS_MAX = 2**64 - 1
"""As admin.proto has them."""
THRESHOLDS = {
    "active_decode_blocks_threshold": "active_decode_blocks",
    "active_prefill_tokens_threshold": "active_prefill_tokens",
}
"""What clients call them → the fields of Thresholds."""


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
    """What is strictly exceeded where a rank is busy; None: not looked at.

    active_decode_blocks: fraction of key-value cache blocks in use, from 0 to 1. active_prefill_tokens: prompt tokens
    still to be computed, at least 0. Raises INVALID_ARGUMENT for others, with the field as clients spell it.
    """

    active_decode_blocks: float | None = None
    active_prefill_tokens: int | None = None

    def __post_init__(self) -> None:
        blocks, tokens = self.active_decode_blocks, self.active_prefill_tokens
        if blocks is not None and not 0 <= blocks <= 1:  # Not a number is neither.
            detail = f"active_decode_blocks_threshold is {blocks}: it must be a fraction from 0 to 1"
            raise invalid("active_decode_blocks_threshold", detail)
        if tokens is not None and not 0 <= tokens <= TOKENS_MAX:
            detail = f"active_prefill_tokens_threshold must be a number of tokens from 0 to {TOKENS_MAX}"
            raise invalid("active_prefill_tokens_threshold", detail)

    def changed(self, changes: Mapping[str, Any]) -> "Thresholds":
        """With these, by the names that clients know; None: not looked at any more. Raises INVALID_ARGUMENT."""
        return replace(self, **{THRESHOLDS[name]: value for name, value in changes.items()})

    def named(self) -> dict[str, str]:
        """Those that are looked at, under the names that clients know."""
        values = ((name, getattr(self, field)) for name, field in THRESHOLDS.items())
        return {name: str(value) for name, value in values if value is not None}


def is_busy(ranks: Sequence[Rank], thresholds: Thresholds) -> bool:
    """Whether a worker is busy: all its ranks that are known. Where none is known, it is not."""
    return bool(ranks) and all(any(_exceeded(rank, thresholds)) for rank in ranks)


def excess(ranks: Sequence[Rank], thresholds: Thresholds) -> str:
    """What the least loaded of ranks that are busy is over, for people. ranks: at least one."""
    least = min(ranks, key=lambda one: (_part_used(one), one.active_prefill_tokens))
    are_blocks_over, are_tokens_over = _exceeded(least, thresholds)
    parts = []
    if are_blocks_over:
        counts = f"{least.kv_blocks_used} of {least.kv_blocks_total}"
        parts.append(
            f"active_decode_blocks {_part_used(least):.4g} ({counts}) of at most {thresholds.active_decode_blocks}"
        )
    if are_tokens_over:
        tokens = least.active_prefill_tokens
        parts.append(f"active_prefill_tokens {tokens} of at most {thresholds.active_prefill_tokens}")
    return ", ".join(parts)


def _part_used(rank: Rank) -> float:
    """Of its blocks. Divides, for a product can come out above what it is equal to: 29 > 0.29 * 100."""
    return rank.kv_blocks_used / rank.kv_blocks_total if rank.kv_blocks_total else 0.0


def _exceeded(rank: Rank, thresholds: Thresholds) -> tuple[bool, bool]:
    """Whether it is strictly over the threshold of blocks, and over that of tokens. Either suffices."""
    blocks, tokens = thresholds.active_decode_blocks, thresholds.active_prefill_tokens
    return (
        blocks is not None and _part_used(rank) > blocks,
        tokens is not None and rank.active_prefill_tokens > tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """is_on: whether thresholds act. thresholds: of models for which none were set at run time."""

    is_on: bool = False
    thresholds: Thresholds = field(default_factory=Thresholds)


class BusyThresholds:
    """The thresholds of each model, as they are now: routing asks for each request, so what is set counts at once."""

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self._set: dict[str, Thresholds] = {}  # By model; whoever sets lets only known names through.

    @property
    def is_on(self) -> bool:
        """Whether thresholds act. They can be read and set even where they do not."""
        return self._config.is_on

    def of(self, model: str) -> Thresholds:
        """What was last set for the model, or else is configured for all."""
        return self._set.get(model, self._config.thresholds)

    def change(self, model: str, changes: Mapping[str, Any]) -> None:
        """Count these instead of what they replace, by the names that clients know. Raises INVALID_ARGUMENT."""
        self.set(model, self.of(model).changed(changes))

    def set(self, model: str, thresholds: Thresholds) -> None:
        """Count these from now on. The caller knows that there is such a model."""
        self._set[model] = thresholds

    def acting(self, model: str) -> Thresholds | None:
        """What routing has to look at; None where nothing can be busy."""
        if not self._config.is_on:
            return None
        thresholds = self.of(model)
        return None if thresholds == Thresholds() else thresholds
