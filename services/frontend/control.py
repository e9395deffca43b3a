"""Control of a frontend as a whole, which may consist of several processes that share its ports.

The kernel gives each connection to one of these processes. What a client or an operator asks for there may concern
another process (a request to cancel) or all of them (metrics, thresholds), so it goes through a FrontendControl.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from services.core.gate import Gate
from services.core.generation.wish import generation_id_of
from services.core.tenant import Tenant
from services.frontend.routing.thresholds import BusyThresholds

Changes = Mapping[str, Any]
"""New thresholds by their names in the API. None unsets a threshold."""


class FrontendControl(Protocol):
    """Acts on all processes of a frontend. Every method raises Failure if a process does not answer."""

    async def exposition(self) -> bytes:
        """All metrics in the Prometheus text format."""
        ...

    async def cancel(self, request_id: str, tenant: Tenant) -> int:
        """End every running request of the tenant with that id. Returns their number. Idempotent."""
        ...

    async def set_thresholds(self, model: str, changes: Changes) -> None:
        """Change some thresholds of a model. The values have been validated."""
        ...


class KeptAnswers(Protocol):
    """The answers that are kept at workers, of any frontend or of none."""

    async def cancel(self, generation_id: bytes, tenant: Tenant) -> bool:
        """End the request of the tenant whose answer has this id. Returns whether it ran."""
        ...


class Canceller:
    """Cancels requests by id, wherever they run."""

    def __init__(self, control: FrontendControl, kept: KeptAnswers) -> None:
        self._control = control
        self._kept = kept

    async def cancel(self, request_id: str, tenant: Tenant) -> int:
        """End every request of the tenant here with that id; if there is none, that of its kept answer with this id.

        Returns their number. Raises Failure if a process does not answer.
        """
        cancelled = await self._control.cancel(request_id, tenant)
        generation_id = None if cancelled else generation_id_of(request_id)
        return cancelled if generation_id is None else int(await self._kept.cancel(generation_id, tenant))


class LocalControl:
    """Controls this process only: the frontend's control if it is the only process, or one process of a group."""

    def __init__(self, metrics: CollectorRegistry, gate: Gate, thresholds: BusyThresholds) -> None:
        self._metrics = metrics
        self._gate = gate
        self._thresholds = thresholds

    async def exposition(self) -> bytes:
        return generate_latest(self._metrics)

    async def cancel(self, request_id: str, tenant: Tenant) -> int:
        return self._gate.cancel(request_id, tenant)

    async def set_thresholds(self, model: str, changes: Changes) -> None:
        self._thresholds.change(model, changes)
