"""Quantiles of measured times."""

from collections.abc import Sequence


def quantile(values: Sequence[float], share: float) -> float | None:
    """The least value that so large a share does not exceed, so p99 of fewer than 100 is the largest.

    None of too few: p99 needs 20 of them, p99.9 200.
    """
    if len(values) * (1 - share) < 0.2 - 1e-9:
        return None
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def milliseconds(
    values_s: Sequence[float], name: str, shares: Sequence[float] = (0.5, 0.99, 0.999)
) -> dict[str, float | None]:
    """By `name_p50` and the like: quantiles of seconds, in ms."""
    quantiles = {share: quantile(values_s, share) for share in shares}
    return {f"{name}_p{share * 100:g}": None if value is None else value * 1e3 for share, value in quantiles.items()}


def quantiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p99 and the most."""
    ordered = sorted(seconds) or [0.0]
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[min(int(q * len(ordered)), len(ordered) - 1)] * 1e3, 1) for name, q in shares.items()}
