"""Quantiles of measured times."""

from collections.abc import Sequence


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that this share of the values does not exceed. p99 of fewer than 100 values is the
    largest.

    None for too few values: p99 needs 20 of them, p99.9 needs 200.
    """
    if len(values) * (1 - share) < 0.2 - 1e-9:
        return None
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def milliseconds(
    values_s: Sequence[float], name: str, shares: Sequence[float] = (0.5, 0.99, 0.999)
) -> dict[str, float | None]:
    """Return quantiles of times in seconds, in ms, under names such as `name_p50`."""
    quantiles = {share: quantile(values_s, share) for share in shares}
    return {f"{name}_p{share * 100:g}": None if value is None else value * 1e3 for share, value in quantiles.items()}


def quantiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Return p50, p99 and the maximum, in ms."""
    ordered = sorted(seconds) or [0.0]
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[min(int(q * len(ordered)), len(ordered) - 1)] * 1e3, 1) for name, q in shares.items()}
