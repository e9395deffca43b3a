"""What is asked of a frontend as a whole, which may be several processes that share their ports.

A call of a client or an operator ends in one of them. What it asks may be in another (a request that is to be
cancelled), in all (counters), or is to be alike in all (thresholds): then it goes by way of these.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from services.core.gate import Gate
from services.frontend.routing.thresholds import BusyThresholds

Changes = Mapping[str, Any]
"""Thresholds by the names that clients have for them; None: not looked at any more."""


class FrontendControl(Protocol):
    """All raise Failure where a process does not answer."""

    async def exposition(self) -> bytes:
        """All metrics, as Prometheus reads them."""
        ...

    async def cancel(self, request_id: str) -> int:
        """End every request of that name that is under way. Returns how many those are. Idempotent."""
        ...

    async def set_thresholds(self, model: str, changes: Changes) -> None:
        """Change some of a model's thresholds. Values are in their ranges."""
        ...


class LocalControl:
    """This process alone: a frontend as most are, or what one of several answers the others."""

    def __init__(self, metrics: CollectorRegistry, gate: Gate, thresholds: BusyThresholds) -> None:
        self._metrics = metrics
        self._gate = gate
        self._thresholds = thresholds

    async def exposition(self) -> bytes:
        return generate_latest(self._metrics)

    async def cancel(self, request_id: str) -> int:
        return self._gate.cancel(request_id)

    async def set_thresholds(self, model: str, changes: Changes) -> None:
        self._thresholds.change(model, changes)
